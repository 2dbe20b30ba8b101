"""What one file holds: tensors by name, state dicts, and everything else."""
