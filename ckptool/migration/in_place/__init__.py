"""Migrate a file in place, or a clone of it: its index is edited, and no tensor is read or moved."""
