"""
``pickle.dump`` of something with tensors in it.

    pickle    … torch.storage._load_from_bytes(b"legacy stream") …

``joblib.dump`` writes the same, but for arrays of numpy, whose elements are between the opcodes (see ``numpy_values``).
Protocols 0 and 1 have no mark of their own, so those are taken for pickles only if they parse from end to end.
"""

from __future__ import annotations

from functools import partial

from ckptool.checkpoints.parsed import Parsed, Stream, Traits
from ckptool.checkpoints.roles import collect_weights
from ckptool.errors import Failure, MalformedFile
from ckptool.formats import torch_legacy
from ckptool.formats.probe import Probe
from ckptool.messages import counted
from ckptool.pickles.nodes import is_container
from ckptool.pickles.numpy_values import take_elements
from ckptool.pickles.reader import read_pickle
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import storage_id

NAME = "pickle"
TRAITS = Traits(
    has_tree=True,
    refusal="it was written by pickle.dump() and not by torch.save()",
    unpickled_by=("torch.load(weights_only=False)", "pickle.load()", "joblib.load()"),
)

_MAX_UNMARKED_NBYTES = 1 << 26
_FIRST_OPCODES = frozenset(bytes([op]) for op in b"(]})cldVSTUXILFNKMJGBC\x88\x89\x8c")
"""What a pickle without PROTO may begin with: containers, names, strings, numbers."""


def sniff(probe: Probe) -> bool:
    """Return whether this is a pickle of protocol 2 to 5, or of protocol 0 or 1 with nothing after it."""
    head = probe.head
    if len(head) > 2 and head[0] == 0x80:
        return head[1] <= 5
    if head[:1] not in _FIRST_OPCODES or probe.source.nbytes > _MAX_UNMARKED_NBYTES:
        return False
    try:
        pickled = read_pickle(probe.source, on_build=take_elements)
    except Failure:
        return False
    return pickled.end == probe.source.nbytes and (is_container(pickled.root) or bool(pickled.left and pickled.globals))


def read(probe: Probe) -> Parsed:
    """Read a plain pickle. Its tensors are inside it, so all of it is read."""
    pickled = read_pickle(probe.source, on_build=take_elements)
    if torch_legacy.has_computed_magic(probe.source, pickled):
        return torch_legacy.read(probe)
    rebuilder = Rebuilder(nested=partial(torch_legacy.nested_storage, limits=probe.limits))
    try:
        contents = collect_weights(pickled.root, rebuilder, probe.limits)
    except MalformedFile as error:
        # Only a whole file of torch.save() has the storages that a pickle refers to by ids.
        bare = {named.key for node in pickled.persistent_ids if (named := storage_id(node.pid)) is not None}
        if not bare:
            raise
        what = f"{counted(len(bare), 'storage')} that it refers to would be in other records of its zip"
        raise MalformedFile(
            f"a data.pkl alone: {what}",
            kind="bare-pickle",
            hint="Open the whole file that torch.save() wrote, as it was before it was unpacked.",
        ) from error
    behind = probe.source.nbytes - pickled.end
    notes = [*pickled.notes, *([f"{behind:,} bytes after the pickle"] if behind else ())]
    stream = Stream(
        *("", probe.source, 0, pickled.end, pickled.globals, tuple(pickled.blocks)),
        has_arrays=True,
        rest=pickled.end if behind else None,
        opcodes=pickled.opcodes,
    )
    return Parsed(
        probe.source,
        NAME,
        TRAITS,
        contents,
        root=pickled.root,
        pickles=(pickled,),
        rebuilder=rebuilder,
        streams=(stream,),
        notes=tuple(notes),
    )
