"""What only torch computes. It is imported inside the functions that need it."""
