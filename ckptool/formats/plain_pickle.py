"""
``pickle.dump`` of something with tensors in it: one pickle, each storage a complete legacy stream in its bytes.

    pickle    … torch.storage._load_from_bytes(b"legacy stream") …

Protocols 0 and 1 have no mark of their own, so those are taken for pickles only if they parse from end to end.
"""

from __future__ import annotations

from functools import partial

from ckptool.checkpoints.contents import collect
from ckptool.checkpoints.parsed import Parsed, Stream, Traits
from ckptool.errors import Cancelled, CkptoolError
from ckptool.formats import torch_legacy
from ckptool.formats.probe import Probe
from ckptool.pickles.nodes import is_container
from ckptool.pickles.reader import read_pickle
from ckptool.tensors.rebuild import Rebuilder

NAME = "pickle"
TRAITS = Traits(has_tree=True, refusal="it was written by pickle.dump() and not by torch.save()")

_MAX_UNMARKED_NBYTES = 1 << 26
_FIRST_OPCODES = frozenset(bytes([op]) for op in b"(]})cldVSTUXILFNKMJGBC\x88\x89\x8c")
"""What a pickle without PROTO may begin with: containers, names, strings, numbers."""


def sniff(probe: Probe) -> bool:
    """Say whether this is a pickle of protocol 2 to 5, or of protocol 0 or 1 with nothing after it."""
    head = probe.head
    if len(head) > 2 and head[0] == 0x80:
        return head[1] <= 5
    if head[:1] not in _FIRST_OPCODES or probe.source.nbytes > _MAX_UNMARKED_NBYTES:
        return False
    try:
        pickled = read_pickle(probe.source)
    except Cancelled:
        raise
    except CkptoolError:
        return False
    return pickled.end == probe.source.nbytes and (is_container(pickled.root) or bool(pickled.left and pickled.globals))


def read(probe: Probe) -> Parsed:
    """Read a plain pickle. Its tensors lie inside it, so it is read whole."""
    pickled = read_pickle(probe.source)
    if torch_legacy.has_computed_magic(probe.source, pickled):
        return torch_legacy.read(probe)
    rebuilder = Rebuilder(nested=partial(torch_legacy.nested_storage, limits=probe.limits))
    contents = collect(pickled.root, rebuilder, probe.limits)
    notes = [*pickled.notes]
    if pickled.end < probe.source.nbytes:
        notes.append(f"{probe.source.nbytes - pickled.end:,} bytes after the pickle")
    return Parsed(
        probe.source,
        NAME,
        TRAITS,
        contents,
        root=pickled.root,
        rebuilder=rebuilder,
        streams=(Stream("", probe.source, 0, pickled.end, pickled.globals),),
        notes=tuple(notes),
        rest=pickled.end if pickled.end < probe.source.nbytes else None,
    )
