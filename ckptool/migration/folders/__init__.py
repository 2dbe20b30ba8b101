"""Checkpoints that are folders: several files that are one."""
