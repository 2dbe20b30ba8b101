"""
Which command line of ``ckptool migrate`` helps with a checkpoint, judged by its content, without making a plan.

A command is given only if that migration is possible, and if plain ``torch.load(path)`` opens what it writes. If
needed, it writes only the weights, without those of their entries that ``torch.load`` refuses, unless these hold
tensors or arrays. A test runs the commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ckptool.checking.finding import Advice, run
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.completeness import refuse_broken, refuse_incomplete, refuse_slice, refuse_stubs
from ckptool.errors import Failure
from ckptool.limits import DEFAULT_LIMITS, refuse_repeated
from ckptool.messages import counted, some
from ckptool.names.renaming import Filter
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Global, Inert, PersistentId
from ckptool.pickles.numpy_values import is_array
from ckptool.pickles.weights_only import is_allowed
from ckptool.sources.paths import is_remote
from ckptool.tensors.tensor import TensorInfo, identity

if TYPE_CHECKING:
    from ckptool.names.matching import Renames

_MAKE_ARRAYS: Final = ("_reconstruct", "_frombuffer")
"""Functions of numpy that pickles call to make arrays."""
_NONE_HELPS: Final = (
    "No migration of it opens with torch.load(path): read what it holds with ckptool.open_checkpoint()."
)
_NO_STATE_DICT: Final = "It holds no state dict to migrate: read what it holds with ckptool.open_checkpoint()."
_MAYBE_INSIDE: Final = "It holds no state dict itself: look at the file inside."


def migration(
    checkpoint: Checkpoint, why: str | None = None, *, renames: Renames = (), **options: str | bool | Sequence[str]
) -> Advice:
    """
    Return the command line of a migration that helps, with ``why`` as its hint; only ``why`` if none helps.

    ``options`` are fields of ``Changes``, as is ``renames``. Options that are needed are added.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value}
    hints = [why] if why else []
    if "form" not in given and checkpoint.traits.is_plain:
        given = {"form": "safetensors", **given}
    elif "form" not in given and not _may_be_kept(checkpoint):
        given = {"form": "state_dict", **given}
        hints.append("Write the weights alone, which plain torch.load() opens.")
    if "form" in given:
        refused = _refused(checkpoint, given)
        if refused is None:
            return Advice(why)
        if refused:
            given["drop_unsupported"] = True
            hints.append(f"Leave out what torch.load() refuses: {some(refused)}.")
    if given.get("form") in (None, "state_dict") and "to" not in given:
        alone = checkpoint.weights if "form" in given else None
        taken = (alone if alone is not None else checkpoint.tensors).values()
        tags = {one.info.location for one in taken if one.info.storage is not None}
        if not tags <= {"cpu", "meta"}:
            given["to"] = "cpu"  # else plain torch.load() opens it only where that device is
    words = [word for change in renames for word in change.arguments]
    return run(checkpoint, "migrate", *words, why=" ".join(hints) or None, **given)


def state_dict(checkpoint: Checkpoint, why: str | None = None) -> Advice:
    """Return the command line that takes the weights out of a checkpoint, if it is clear which they are."""
    models = [one for one in checkpoint.state_dicts if one.role in ("model", "ema")]
    if checkpoint.weights is not None:
        return migration(checkpoint, why, form="state_dict")
    if len(models) != 1 or not models[0].key:
        return Advice(why)  # the others would be left out
    return migration(checkpoint, why, form="state_dict", key=models[0].key)


def dense(checkpoint: Checkpoint) -> Advice:
    """Return the command line that makes plain weights of quantised ones, if the layouts of all of them are known."""
    from ckptool.checkpoints.weights import NameChanges, prepare  # few files hold any
    from ckptool.dense.weights import make_dense

    if checkpoint.weights is None or is_remote(checkpoint.path):
        return Advice(None)
    try:
        make_dense(checkpoint, prepare(checkpoint, checkpoint.weights, NameChanges()))
    except Failure:
        return Advice(None)
    form = "safetensors" if checkpoint.traits.is_plain else "state_dict"
    return migration(checkpoint, "Plain weights, which load anywhere (needs torch).", form=form, dequantize=True)


def instead(checkpoint: Checkpoint) -> Advice:
    """Return advice if no migration helps: to take one state dict, to open a file inside, or to use our reader."""
    from ckptool.checkpoints.embedded import find_embedded  # few files hold others

    if checkpoint.weights:
        return Advice(_NONE_HELPS)
    if keys := [one.key for one in checkpoint.state_dicts if one.key]:
        return Advice(f"It holds {counted(len(keys), 'state dict')}: take one with `key=`, as {some(keys)}.")
    for path in find_embedded(checkpoint.extras):
        member = f"{checkpoint.member}::{path}" if checkpoint.member else path
        return run(checkpoint, "inspect", why=_MAYBE_INSIDE, member=member)
    return Advice(_NO_STATE_DICT)


def literal(name: str) -> str:
    """Return a glob that matches only this name."""
    return "".join(f"[{char}]" if char in "*?[" or (not at and char == ".") else char for at, char in enumerate(name))


def _may_be_kept(checkpoint: Checkpoint) -> bool:
    """Return whether everything in a file can be written again, in a file that ``torch.load`` opens."""
    return (
        checkpoint.form in ("state_dict", "checkpoint", "tensors", "training")
        and checkpoint.traits.has_tree
        and not (checkpoint.contents.clashes or checkpoint.shards or checkpoint.lost)
        and all(is_allowed(one.module, one.name) for one in checkpoint.globals)
    )


def _refused(checkpoint: Checkpoint, options: Mapping[str, Any]) -> list[str] | None:
    """
    Return the names of entries that have to be left out of the weights, because ``torch.load`` refuses them.

    Return None if such an entry holds tensors or arrays, if the weights cannot be written, or nothing would remain.
    """
    from ckptool.checkpoints.weights import choose, entries_of  # most files need no advice

    taken = Filter(tuple(options.get("include", ())), tuple(options.get("exclude", ())))
    is_plain = options["form"] == "safetensors"
    try:
        refuse_slice(checkpoint)
        chosen = choose(checkpoint, options.get("key"), "auto")
        refuse_incomplete(checkpoint, chosen, taken)
        refuse_stubs(checkpoint, chosen, taken)
        takes_all = taken.takes_all
        tensors = [one for name, one in chosen.items() if takes_all or taken.takes(name, chosen.key)]
        refuse_broken(tensors)
        if is_plain:  # it stores each view of the same bytes anew
            stored = {identity(one.info): one.info.total_nbytes for one in tensors}
            refuse_repeated(sum(stored.values()), checkpoint.file_nbytes, DEFAULT_LIMITS)
    except Failure:
        return None
    fitting = [_is_plain(one.info) if is_plain else _is_written(one.info) for one in tensors]
    fits = any(fitting) if "drop_unsupported" in options else all(fitting)
    others = [(name, value) for name, value in entries_of(checkpoint, chosen) if name not in chosen]
    if not fits or checkpoint.contents.clashes or not any(one.info.numel for one in tensors):
        return None
    if is_plain:
        return [] if not others or "drop_unsupported" in options else None
    refused = []
    for name, entry in others:
        is_taken, has_data = _taken(checkpoint, entry) if taken.takes(name, chosen.key) else (True, False)
        if not is_taken and has_data:
            return None
        if not is_taken:
            refused.append(name)
    return refused


def _taken(checkpoint: Checkpoint, entry: Inert) -> tuple[bool, bool]:
    """Return whether ``torch.load`` takes an entry that is written again, and whether it holds tensors or arrays."""
    is_taken, has_data = True, False
    todo, seen = [entry], set[int]()
    while todo:
        node = todo.pop()
        if type(node) is Global:
            is_taken = is_taken and is_allowed(node.module, node.name)
            has_data = has_data or (node.module.startswith("numpy.") and node.name in _MAKE_ARRAYS)
        if not nodes.is_container(node) or id(node) in seen:
            continue
        seen.add(id(node))
        info = checkpoint.rebuilder.tensor(node) if checkpoint.rebuilder is not None else None
        if info is not None and not info.is_array:
            is_taken, has_data = is_taken and _is_written(info), True
        else:
            has_data = has_data or type(node) is PersistentId or is_array(node)
            todo += (*nodes.held(node), *([node.func] if type(node) is Call else ()))
    return is_taken, has_data


def _is_plain(info: TensorInfo) -> bool:
    """Return whether safetensors can store a tensor."""
    return info.layout == "strided" and info.storage is not None and info.dtype.safetensors is not None


def _is_written(info: TensorInfo) -> bool:
    """Return whether a tensor can be written as ``torch.save`` does, without its class."""
    if info.storage is not None:
        return info.layout == "strided" or info.layout.startswith("per_")
    return info.layout.startswith("sparse_") or (info.layout, info.location) == ("strided", "meta")
