"""The framework that wrote a checkpoint, from its version in the file, or from the names of classes."""

from __future__ import annotations

from typing import Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.names.wrappers import ADDED_BY, prefixes_of
from ckptool.pickles import nodes
from ckptool.pickles.describe import scalar_of

_VERSIONS: Final = (
    (("pytorch-lightning_version",), "pytorch-lightning"),
    (("ds_version",), "deepspeed"),
    (("meta", "mmengine_version"), "mmengine"),
    (("meta", "mmcv_version"), "mmcv"),
    (("fairseq_version",), "fairseq"),
    (("speechbrain_version",), "speechbrain"),
    (("checkpoint_version",), "megatron"),
)
"""The keys of frameworks' versions in what they save."""
_BEGINNINGS: Final = frozenset(keys[0] for keys, _ in _VERSIONS)
_LONGEST: Final = 64
_MOST: Final = 1e9
"""Numbers above this are not versions; Python refuses to print integers with thousands of digits."""
_NO_FRAMEWORKS: Final = frozenset({"", "torch", "__main__", "__torch__", "collections", "builtins"})


class Writer(NamedTuple):
    """A framework, and its version if the file has it."""

    name: str
    version: str | None


def lightning_attribute(checkpoint: Checkpoint) -> str:
    """Return the attribute of Lightning's module that contains all weights, in modules of its own; or empty text."""
    weights, writer = checkpoint.weights or (), writer_of(checkpoint)
    if writer is None or writer.name != _VERSIONS[0][1] or all(name.count(".") == 1 for name in weights):
        return ""
    attribute = "".join(prefixes_of(weights)[:1])[:-1]
    return "" if attribute in ADDED_BY else attribute


def writer_of(checkpoint: Checkpoint) -> Writer | None:
    """Return the framework that wrote a checkpoint; None if the file does not show it."""
    pairs = nodes.mapping_pairs(checkpoint.root) or []
    there = {key for key, _ in pairs if type(key) is str and key in _BEGINNINGS}
    for keys, name in _VERSIONS if there else ():
        node = nodes.lookup(pairs, keys[0])
        for key in keys[1:]:
            node = nodes.item(node, key)
        version = scalar_of(node)
        is_number = type(version) in (int, float) and abs(version) < _MOST  # type: ignore[arg-type]
        if is_number or isinstance(version, str):
            return Writer(name, str(version)[:_LONGEST])
    for one in checkpoint.state_dicts:
        package = (one.class_name or "").partition(".")[0]
        if package not in _NO_FRAMEWORKS:
            return Writer(package[:_LONGEST], None)
    return None
