"""The programs of users by which weft lost trust, one file for each way."""
