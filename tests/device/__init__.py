"""A device of our own for torch: memory that the host cannot touch, streams that work late, a limit, and two of it."""
