"""Checkpoints as torch tensors, in models, and under running servers. Made of torch."""

from ckptool.torch_ops.needed import needed

needed()  # every module here imports torch: where it is missing, this says so, and not the first of them
