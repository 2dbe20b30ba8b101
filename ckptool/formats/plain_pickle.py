"""
``pickle.dump`` of something with tensors in it: one pickle, each storage a complete legacy stream in its bytes.

    pickle    … torch.storage._load_from_bytes(b"legacy stream") …

Protocols 0 and 1 have no mark of their own, so those are taken for pickles only if they parse from end to end.
"""

from __future__ import annotations

from ckptool.checkpoints.contents import collect
from ckptool.checkpoints.parsed import Parsed, Stream, Traits
from ckptool.errors import Cancelled, CkptoolError
from ckptool.formats import torch_legacy
from ckptool.formats.probe import Probe
from ckptool.limits import Limits
from ckptool.pickles.nodes import Inert, is_container
from ckptool.pickles.reader import read_pickle
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.storage_ids import TypedStorage

NAME = "pickle"
TRAITS = Traits(has_tree=True, refusal="it was written by pickle.dump() and not by torch.save()")

_MAX_UNMARKED_NBYTES = 1 << 26


def sniff(probe: Probe) -> bool:
    """Say whether this is a pickle of protocol 2 to 5, or of protocol 0 or 1 with nothing behind it."""
    head = probe.head
    if len(head) > 2 and head[0] == 0x80:
        return head[1] <= 5
    if head[:1] not in (b"(", b"]", b"}", b"c", b"l", b"d") or probe.source.nbytes > _MAX_UNMARKED_NBYTES:
        return False
    try:
        pickled = read_pickle(probe.source)
    except Cancelled:
        raise
    except CkptoolError:
        return False
    return pickled.end == probe.source.nbytes and is_container(pickled.root)


def read(probe: Probe) -> Parsed:
    """Read a plain pickle. Its tensors lie inside it, so it is read whole."""
    pickled = read_pickle(probe.source)
    rebuilder = Rebuilder(InlineStorages(probe.limits))
    contents = collect(pickled.root, rebuilder, probe.limits)
    notes = []
    if pickled.end < probe.source.nbytes:
        notes.append(f"{probe.source.nbytes - pickled.end:,} bytes behind the pickle")
    return Parsed(
        probe.source,
        NAME,
        TRAITS,
        contents,
        root=pickled.root,
        rebuilder=rebuilder,
        streams=(Stream("", probe.source, 0, pickled.end, pickled.globals),),
        notes=tuple(notes),
    )


class InlineStorages:
    """A pickle without persistent ids: every storage is a stream inside it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def resolve(self, pid: Inert) -> None:  # noqa: ARG002 - nothing outside the pickle has a meaning here
        """Return None: there is nothing outside the pickle."""
        return

    def nested(self, stream: bytes) -> TypedStorage | None:
        """Return the storage of a stream inside the pickle."""
        return torch_legacy.nested_storage(stream, self._limits)
