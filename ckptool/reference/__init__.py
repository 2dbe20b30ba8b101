"""Small nets that really train, and the checkpoints they leave behind, in every way that people save them."""

from ckptool.torch_ops.needed import needed

needed(requirement="'ckptool[train]'")  # every module here imports torch, and what trains needs more than torch
