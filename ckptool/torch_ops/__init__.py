"""What only torch computes. It is imported by the functions that need it, when they are called."""
