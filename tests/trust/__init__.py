"""Programs as users write them, one file for each promise that they would lose trust by."""
