"""The fixture set: checkpoints of every kind with what must be found in each, and the code that writes them."""
