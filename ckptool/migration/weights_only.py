"""
Entries of weights that plain ``torch.load(path)`` would refuse in a state dict: objects of other code than torch's.

One of them would keep it from every tensor in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptool.cancellation import each
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import Weights
from ckptool.errors import MigrationRefused
from ckptool.messages import counted, some
from ckptool.migration.tree_rewriter import TreeRewriter
from ckptool.pickles.nodes import Inert
from ckptool.pickles.writer import write_pickle
from ckptool.tensors.rebuild import Rebuilder


def without_refused(checkpoint: Checkpoint, weights: Weights, *, drop: bool) -> Weights:
    """
    Return weights that ``torch.load`` opens, whatever lies in their entries that are no tensors.

    Raises:
        MigrationRefused: There are entries that it refuses, and they were not to be dropped.
    """
    refused = dict(_refused(checkpoint, weights.others)) if weights.others else {}
    if refused and not drop:
        from ckptool.pickles.describe import kind_of

        named = [f"{name!r} ({kind_of(weights.others[name])}: {why})" for name, why in refused.items()]
        raise MigrationRefused(
            f"{counted(len(refused), 'entry')} that torch.load() refuses by default: {some(named)}",
            kind="unsupported-entries",
            hint="Leave them out with `drop_unsupported=True`, or keep everything with `form='same'`.",
        )
    return weights.without(refused) if refused else weights


def pickle_of(checkpoint: Checkpoint, entry: Inert) -> bytes:
    """Return the pickle of one entry alone, as it would be written."""
    return write_pickle(entry, TreeRewriter(checkpoint.rebuilder or Rebuilder(), None))


def _refused(checkpoint: Checkpoint, entries: Mapping[str, Inert]) -> Iterator[tuple[str, str]]:
    """Yield the names of entries that ``torch.load`` refuses, and the name or opcode for which it does."""
    from ckptool.pickles.weights_only import why_refused

    for name, entry in each(entries.items(), checkpoint.source.cancellation):
        if entry is None or type(entry) in (bool, float, str):
            continue
        why = why_refused(pickle_of(checkpoint, entry))
        if why is not None:
            yield name, why
