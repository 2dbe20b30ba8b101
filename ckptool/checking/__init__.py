"""What is wrong with a checkpoint, or will be in somebody's way."""
