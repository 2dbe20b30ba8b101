"""Exchange the weights of a model while it serves."""
