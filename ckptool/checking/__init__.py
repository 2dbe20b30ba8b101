"""What is wrong with a checkpoint, or will be in the way."""
