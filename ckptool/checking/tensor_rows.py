"""The tensors of a checkpoint as rows of a table, each with what joins it to the row of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.cancellation import each
from ckptool.checking.asked import TENSORS, Row
from ckptool.checkpoints.checkpoint import Checkpoint


def tensor_rows(checkpoint: Checkpoint, whole: Row) -> Iterator[Row]:
    """Yield a dict for JSON for each tensor, in the order of the file. ``whole`` is the row of the checkpoint."""
    same = {name: whole[name] for name in ("path", "version", "scanned_ns")}
    roles = {
        f"{one.key}.{name}" if one.key else name: one.role for one in reversed(checkpoint.state_dicts) for name in one
    }
    for name, tensor in each(checkpoint.tensors.items(), checkpoint.source.cancellation):
        info = tensor.info
        yield {
            "schema": TENSORS,
            **same,
            "member": checkpoint.member,
            "name": name,
            "role": roles.get(name),
            "dtype": info.dtype.name,
            "shape": list(info.shape),
            "numel": info.numel,
            "nbytes": info.total_nbytes,
            "device": info.location,
            "layout": info.layout,
        }
