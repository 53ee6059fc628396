"""What nobody has imported."""

SHIFT = 1000
