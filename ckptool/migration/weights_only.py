"""
Entries of weights that plain ``torch.load(path)`` would refuse in a state dict: objects of other code than torch's.

One of them would keep it from every tensor in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ckptool.cancellation import each
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import Weights
from ckptool.errors import MigrationRefused
from ckptool.messages import counted, some
from ckptool.migration.tree_rewriter import TreeRewriter
from ckptool.pickles.nodes import Inert
from ckptool.pickles.reader import read_pickle
from ckptool.pickles.writer import write_pickle
from ckptool.sources.source import BytesSource
from ckptool.tensors.rebuild import Rebuilder

_ARRAYS: Final = frozenset(
    (f"numpy.{module}", name)
    for module, name in (
        ("core.multiarray", "_reconstruct"),
        ("_core.multiarray", "_reconstruct"),
        ("core.numeric", "_frombuffer"),
        ("_core.numeric", "_frombuffer"),
    )
)
"""What pickles call for numpy's arrays."""


def without_refused(checkpoint: Checkpoint, weights: Weights, *, drop: bool) -> Weights:
    """
    Return weights that ``torch.load`` opens, whatever lies in their entries that are no tensors.

    Raises:
        MigrationRefused: There are entries that it refuses, and they were not to be dropped.
    """
    refused = dict(_refused(checkpoint, weights.others)) if weights.others else {}
    if refused and not drop:
        from ckptool.pickles.describe import kind_of

        entries = {name: weights.others[name] for name in refused}
        named = [f"{name!r} ({kind_of(entry)}: {refused[name]})" for name, entry in entries.items()]
        ways = [
            "Leave them out with `drop_unsupported=True`.",
            "Keep them with `keep_calls=True`, for torch.load(weights_only=False).",
        ]
        if any(holds_data(checkpoint, entry) for entry in entries.values()):
            ways.reverse()
        raise MigrationRefused(
            f"{counted(len(refused), 'entry')} that torch.load() refuses by default: {some(named)}",
            kind="unsupported-entries",
            hint=" ".join(ways),
        )
    return weights.without(refused) if refused else weights


def holds_data(checkpoint: Checkpoint, entry: Inert) -> bool:
    """Say whether there are tensors or numpy's arrays in an entry."""
    found = read_pickle(BytesSource(_pickle_of(checkpoint, entry)))
    return bool(found.persistent_ids) or any((one.module, one.name) in _ARRAYS for one in found.globals)


def _refused(checkpoint: Checkpoint, entries: Mapping[str, Inert]) -> Iterator[tuple[str, str]]:
    """Yield the names of entries that ``torch.load`` refuses, and the name or opcode for which it does."""
    from ckptool.pickles.weights_only import why_refused

    if why_refused(_pickle_of(checkpoint, list(entries.values()))) is None:
        return  # all at once: most files have many that are alike
    for name, entry in each(entries.items(), checkpoint.source.cancellation):
        why = why_refused(_pickle_of(checkpoint, entry))
        if why is not None:
            yield name, why


def _pickle_of(checkpoint: Checkpoint, entry: Inert) -> bytes:
    """Return the pickle of one entry alone, as it would be written."""
    return write_pickle(entry, TreeRewriter(checkpoint.rebuilder or Rebuilder(), None))
