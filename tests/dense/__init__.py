"""Quantised checkpoints: what is said of them, and what is refused."""
