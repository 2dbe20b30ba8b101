"""What is in a checkpoint, for people and for programs."""
