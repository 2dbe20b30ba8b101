"""
The edit of a legacy stream: other pickles of the same length in front of the storages, which stay where they are.

Its tree is padded. Where one byte is missing, or three, which no padding has, the keys behind it are written shorter:
without the memo that nothing in them uses.
"""

from __future__ import annotations

from struct import pack

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.messages import counted
from ckptool.migration.output.editing import FileEdit, no_room, not_in_place, too_long
from ckptool.migration.torch_plan import TorchPlan
from ckptool.sources.journal import Run

_GUARD_NBYTES = 4


def tree_room(checkpoint: Checkpoint, *, whole: bool) -> int:
    """Return how long the pickle of the tree may be; with ``whole``, where the keys behind it are written shorter."""
    *_, tree, keys = checkpoint.pickles
    return keys.end - tree.start - len(_keys(checkpoint)) if whole else tree.end - tree.start


def plan_stream(checkpoint: Checkpoint, plan: TorchPlan) -> FileEdit:
    """
    Return the edit that gives a stream another tree.

    Raises:
        MigrationRefused: The tree is too long, or does not refer to all storages any more.
    """
    *_, tree, keys = checkpoint.pickles
    stored = {payload.storage.key for payload in plan.storages}
    listed = [str(key) for key in keys.root] if isinstance(keys.root, list) else []
    if stored != set(listed):
        left = len(set(listed) - stored)
        raise not_in_place(
            f"{left:,} of its {len(listed):,} storages would be in the file and be nobody's, which torch refuses"
        )
    new = plan.pickled
    if len(new) != tree.end - tree.start:
        new += _keys(checkpoint)
    room = (keys.end if len(new) > len(plan.pickled) else tree.end) - tree.start
    if len(new) < room:
        few = f"its pickles would have {counted(room - len(new), 'byte')} too few, and no padding is so short"
        raise no_room(few, room, len(new), "A name that is longer or shorter by one character fits.")
    if len(new) > room:
        raise too_long("its pickles", len(new), room)
    guard = Run(0, checkpoint.source.read(0, _GUARD_NBYTES))
    return FileEdit(checkpoint.source.nbytes, (Run(tree.start, new),), guard, guard)


def _keys(checkpoint: Checkpoint) -> bytes:
    """Return the pickle of the list of keys, as short as it can be."""
    keys = checkpoint.pickles[-1]
    texts = keys.root if isinstance(keys.root, list) else []
    encoded = [one.encode() for one in texts if isinstance(one, str)]
    if len(encoded) != len(texts):
        return checkpoint.source.read(keys.start, keys.end - keys.start)
    return b"\x80\x02](" + b"".join(pack("<cI", b"X", len(one)) + one for one in encoded) + b"e."
