"""Nodes to tensors: the facts about each, and how its bytes are read."""
