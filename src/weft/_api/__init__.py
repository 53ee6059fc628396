"""What you call."""
