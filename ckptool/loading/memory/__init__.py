"""Memory for tensors: how much there is, on the host and on devices, and filling it."""
