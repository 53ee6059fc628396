"""Programs as users write them, one file for each number of the issue about trust."""
