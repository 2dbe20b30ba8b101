"""Bytes, read at a position: files, memory, slices of either."""
