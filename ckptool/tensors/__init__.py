"""Nodes to tensors: what the file says of each, and how its bytes are read."""
