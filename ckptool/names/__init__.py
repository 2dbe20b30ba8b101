"""Names of tensors: wrappers, renaming, matching. Pure functions that open no file."""
