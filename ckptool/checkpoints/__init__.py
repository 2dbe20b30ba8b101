"""The contents of one checkpoint: tensors by name, state dicts, and everything else."""
