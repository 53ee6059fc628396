"""What a call passes through; pure wherever it can be."""
