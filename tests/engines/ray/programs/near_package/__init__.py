"""A package of which the program imports the top only."""

DETAIL = "from the package"
