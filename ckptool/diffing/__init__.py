"""Where two checkpoints differ."""
