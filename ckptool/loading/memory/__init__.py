"""Memory for tensors, on the host and on devices: how much is free, and how it is filled."""
