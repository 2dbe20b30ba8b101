"""
Which ``ckptool migrate`` helps with a checkpoint: asked of the planner, so that nothing is advised that would not work.

A command is given only if that migration is possible, and if plain ``torch.load(path)`` opens what it writes. Where
that takes it, the command takes the weights alone, without those of their entries that ``torch.load`` refuses, unless
there are tensors or arrays in them. Nothing is written, and no tensor read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptool.checking.finding import Advice, run
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.embedded import find_embedded
from ckptool.errors import Failure
from ckptool.limits import DEFAULT_LIMITS, refuse_repeated
from ckptool.messages import counted, some
from ckptool.pickles.gc_pause import gc_paused
from ckptool.pickles.nodes import Global
from ckptool.pickles.weights_only import is_allowed, why_refused

if TYPE_CHECKING:
    from ckptool.migration.plan import Plan
    from ckptool.names.matching import Renames

Options: TypeAlias = "dict[str, Any]"

_SIMPLE: Final = {"to", "strip_module"}
_OF_STORAGES: Final = "torch.storage._load_from_bytes"
"""What plain pickles call for each tensor; no file that is written asks for it."""
_STRIPPING: Final = ("strip_module", "strip_wrappers")
_NONE_HELPS: Final = (
    "No migration of it opens with torch.load(path): read what it holds with ckptool.open_checkpoint()."
)
_NO_STATE_DICT: Final = "It holds no state dict to migrate: read what it holds with ckptool.open_checkpoint()."
_MAYBE_INSIDE: Final = "It holds no state dict itself: look at the file inside."


def migration(
    checkpoint: Checkpoint, why: str | None = None, *, renames: Renames = (), **options: str | bool | Sequence[str]
) -> Advice | None:
    """
    Return the command line of a migration that helps, and in ``why`` what it is good for; None if none does.

    ``options`` are fields of ``Changes``, but for ``renames``. Others may be added to them.
    """
    given: Options = {name: value for name, value in options.items() if value}
    is_simple = _is_simple(checkpoint, given, renames) or _is_all_plain(checkpoint, given, renames)
    works = is_simple or _opens(_plan(checkpoint, given, renames))
    if not works and "form" not in given:
        given = {"form": "state_dict", **given}
        why = _and(why, "Write the weights alone, which plain torch.load() opens.")
        works = _opens(_plan(checkpoint, given, renames))
    if not works and given.get("form") == "state_dict":
        given["drop_unsupported"] = True
        refused = _without_data(checkpoint, _plan(checkpoint, given, renames))
        why = _and(why, f"Leave out what torch.load() refuses: {some(refused)}.")
        works = bool(refused)
    if not works:
        return None
    words = [word for change in renames for word in change.arguments]
    return run(checkpoint, "migrate", *words, why=why, **given)


def state_dict(checkpoint: Checkpoint, why: str | None = None) -> Advice | None:
    """Return the command line that takes the weights out of a checkpoint, where it is known which they are."""
    best = checkpoint.weights
    models = [one for one in checkpoint.state_dicts if one.role in ("model", "ema")]
    if best is not None:
        return migration(checkpoint, why, form="state_dict")
    if len(models) != 1 or not models[0].key:
        return None  # the others would be left out
    return migration(checkpoint, why, form="state_dict", key=models[0].key)


def instead(checkpoint: Checkpoint) -> Advice:
    """Return what helps where no migration does: the file inside one that has no weights, or our reader."""
    if checkpoint.weights:
        return Advice(_NONE_HELPS)
    if keys := [one.key for one in checkpoint.state_dicts if one.key]:
        return Advice(f"It holds {counted(len(keys), 'state dict')}: take one with `key=`, as {some(keys)}.")
    for path in find_embedded(checkpoint.extras):
        member = f"{checkpoint.member}::{path}" if checkpoint.member else path
        return run(checkpoint, "inspect", why=_MAYBE_INSIDE, member=member)
    return Advice(_NO_STATE_DICT)


def literal(name: str) -> str:
    """Return the glob that only this name matches."""
    return "".join(f"[{char}]" if char in "*?[" or (not at and char == ".") else char for at, char in enumerate(name))


def _and(why: str | None, more: str) -> str:
    return f"{why} {more}" if why else more


def _is_simple(checkpoint: Checkpoint, options: Options, renames: Renames) -> bool:
    """Say whether no planner is needed: new tags, or a prefix less, for weights in a file that ``torch.load`` takes."""
    return (
        not renames
        and options.keys() <= _SIMPLE
        and checkpoint.form in ("state_dict", "checkpoint")
        and checkpoint.weights is not None
        and checkpoint.traits.has_tree
        and not (checkpoint.clashes or checkpoint.shards)
        and _are_allowed(checkpoint.globals)
    )


def _is_all_plain(checkpoint: Checkpoint, options: Options, renames: Renames) -> bool:
    """Say whether no planner is needed: the weights, which are to be taken, are all that a file holds, and plain."""
    weights, form = checkpoint.weights, checkpoint.form
    if renames or options != {"form": "state_dict"} or weights is None or form not in ("state_dict", "model"):
        return False
    odd = (
        checkpoint.clashes,
        checkpoint.shards,
        checkpoint.attributes,
        checkpoint.unreadable,
        checkpoint.absent,
        checkpoint.lost,
        checkpoint.unopened,
        checkpoint.part_of,
        checkpoint.traits.program,
        checkpoint.is_folder,
    )
    in_code = any(walk.hooks or walk.unlisted or walk.foreign_classes for _, walk in checkpoint.walks)
    is_all = len(weights) == len(checkpoint.tensors)
    return is_all and not in_code and not any(odd) and _has_plain_rest(checkpoint) and _are_plain(checkpoint)


def _has_plain_rest(checkpoint: Checkpoint) -> bool:
    """Say whether nothing is beside the tensors but what every state dict has, and that in a file that makes data."""
    names = [path for path, _ in checkpoint.extras]
    asked = [one for one in checkpoint.globals if str(one) != _OF_STORAGES]
    return not names or (names == ["_metadata"] and _are_allowed(asked))


def _are_plain(checkpoint: Checkpoint) -> bool:
    """Say whether tensors are whole, and strided memory of which the file holds each byte."""
    storages = {}
    for tensor in checkpoint.tensors.values():
        info = tensor.info
        is_odd = info.layout != "strided" or info.parts or info.subclass or info.details or info.conj or info.neg
        if is_odd or info.storage is None or not info.numel:
            return False
        storages[id(info.storage.source), info.storage.offset, info.storage.nbytes] = info.storage.nbytes
    return sum(storages.values()) <= (checkpoint.file_nbytes or 0)


def _plan(checkpoint: Checkpoint, options: Options, renames: Renames) -> Plan | None:
    """Return what a migration would write; None if it is not possible, or would not open."""
    from ckptool.migration.plan import make_plan
    from ckptool.migration.selection import refuse_nothing

    changes = _changes(options, renames)
    if not (changes.form or checkpoint.shards or _are_allowed(checkpoint.globals)):
        return None  # for everything is written again
    try:
        with gc_paused():
            plan = make_plan(checkpoint, None, changes, sketch=True)
            refuse_nothing(checkpoint, plan, changes)
            refuse_repeated(plan.file.nbytes, checkpoint.file_nbytes, DEFAULT_LIMITS)
    except Failure:
        return None
    return plan


def _opens(plan: Plan | None) -> bool:
    """Say whether ``torch.load`` takes the names and opcodes of what is planned; a sketch may have none."""
    return plan is not None and all(why_refused(pickled) is None for pickled in plan.file.pickles if pickled)


def _without_data(checkpoint: Checkpoint, plan: Plan | None) -> list[str]:
    """Return the entries that a plan leaves out, by their old names; none if there are tensors or arrays in them."""
    if plan is None or plan.weights is None:
        return []
    from ckptool.migration.selection import holds_data

    unsupported = plan.weights.unsupported
    if any(holds_data(checkpoint, entry) for entry in unsupported.values()):
        return []
    return list(unsupported)


def _changes(options: Options, renames: Renames) -> Any:
    from ckptool.migration.changes import Changes

    stripping = {change.option: True for change in renames if change.option in _STRIPPING}
    rules = tuple(change.rule for change in renames if change.option not in _STRIPPING)
    return Changes(**options, **stripping, rename=rules)  # type: ignore[arg-type]


def _are_allowed(names: Sequence[Global]) -> bool:
    return all(is_allowed(one.module, one.name) for one in names)
