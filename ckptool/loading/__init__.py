"""Checkpoints as torch tensors, in models, and under running servers. Made of torch."""
