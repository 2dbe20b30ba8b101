"""
The plan of a load: which tensor of a checkpoint goes into which tensor of a model, before a byte is copied.

The model's own ``state_dict(keep_vars=True)`` is compared with the names and shapes in the file. Names that differ by
wrappers are paired. Names that differ by a prefix are paired if that explains all names of the model, or, where names
may be left over, most of them. Nothing else is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from ckptool.checkpoints.weights import names_matching
from ckptool.errors import KeyMismatch, ShapeMismatch, UnsupportedFeature, WeightsMismatch
from ckptool.loading.memory.placement import CPU, MapLocation, Placement, placement, torch_dtype
from ckptool.loading.memory.threads import castable
from ckptool.messages import some
from ckptool.names import matching
from ckptool.names.matching import KeyMatch, Rename, Renames, Shape, Shapes, as_options, is_benign
from ckptool.names.renaming import Filter
from ckptool.names.suggestions import guess_renames, nearest
from ckptool.tensors.dtypes import spelled
from ckptool.tensors.reading import LazyTensor
from ckptool.torch_ops.models import shapes_of, why_unlike

PARTLY: Final = "Load what fits with ckptool.load_into(model, path, strict=False)."
"""The hint where names are left over; a ``LiveModel`` never loads partially."""
ANOTHER: Final = "Take the file that goes with this model, or build the model as the file's was."
_LISTED: Final = 8


class Target(NamedTuple):
    """One tensor of the model, and the one in the file that goes into it."""

    name: str
    tensor: torch.Tensor
    """The model's own parameter or buffer."""
    source: LazyTensor


class FillPlan(NamedTuple):
    """Which tensor of the file goes into which of the model. Making a plan changes nothing."""

    targets: tuple[Target, ...]
    match: KeyMatch
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    tied: dict[str, str]
    """Names of the model that the file does not have, to another name of the same tensor that it has."""
    cast: tuple[tuple[str, str, str], ...]
    """Name, type in the file, type in the model."""
    left_out: tuple[str, ...] = ()
    """Names of the file that are left out on purpose: dropped with a wrapper, or not matched by ``include``."""

    @property
    def taken(self) -> dict[str, LazyTensor]:
        """The file's tensors, by their names in the model."""
        return {one.name: one.source for one in self.targets}


def check_model(model: object) -> None:
    """Raise TypeError unless this is a module, and not a class."""
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise TypeError(f"model is the class {model.__name__}: make one, as {model.__name__}()")
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise TypeError(f"model is a torch.nn.Module, not a {kind}: the checkpoint is the second argument")


def check_placing(
    model: torch.nn.Module, map_location: MapLocation, device: str | torch.device | None, dtype: object
) -> tuple[Placement, torch.dtype | None]:
    """Return device and type for tensors on meta; raise ValueError for ones that no tensor of the model would get."""
    place, cast_to = placement(map_location, device), castable(dtype)
    where, found = place.everywhere, (place, cast_to)
    tensors = (*model.parameters(), *model.buffers())
    if (cast_to is None and where in (None, CPU)) or any(tensor.is_meta for tensor in tensors):
        return found
    what = "is for tensors on the meta device, and the model has none: those that it has keep theirs"
    if any(cast_to not in (None, one.dtype) for one in tensors if one.dtype.is_floating_point):
        raise ValueError(f"dtype={cast_to} {what}. Cast the model, as model.to({cast_to})")
    if where not in (None, CPU) and tensors and all(one.device != where for one in tensors):
        raise ValueError(f"map_location='{where}' {what}. Move the model, as model.to('{where}')")
    return found


def plan(
    model: torch.nn.Module,
    found: Mapping[str, LazyTensor],
    *,
    strict: bool = True,
    others: Collection[str] = (),
    include: Sequence[str] = (),
) -> FillPlan:
    """
    Return where each tensor of the file goes; ``others`` are the names of its entries that are not tensors.

    Without ``strict``, names may be left over on both sides, but not all of the model's weights. With ``include``, only
    names of the model that match a glob count, and unexpected names of the file that do.

    Raises:
        KeyMismatch: Names are missing or left over; the nearest are named.
        ShapeMismatch: Shapes differ, whatever ``strict`` says.
        UnsupportedFeature: A tensor of the file is of a kind that the model's cannot take.
    """
    tensors = model_tensors(model)
    expected: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes: dict[str, Shape] = {name: tensor.info.shape for name, tensor in found.items()}
    best = matching.match(expected, shapes)
    is_meant = _is_certain(best, tensors) or not (strict or _is_doubtful(best, shapes))
    matched = best if is_meant else matching.by_name(expected, shapes)
    _refuse_others(others, expected, matched.changes)
    matched = matched._replace(unexpected=(*matched.unexpected, *others))
    matched = _restricted(matched, include, list(expected)) if include else matched
    tied = _tied(matched, tensors)
    missing = tuple(name for name in matched.missing if name not in tied)
    hint = partial(_hint, model, matched, best, expected, shapes)
    _refuse(matched, missing, expected, shapes, strict=strict, hint=hint)
    targets = tuple(Target(name, tensors[name], found[old]) for name, old in matched.pairs.items())
    for target in targets:  # torch would refuse the copy halfway, or lose something in it
        if not target.tensor.is_meta and (reason := why_unlike(target.source.info, target.tensor)):
            raise UnsupportedFeature(
                f"tensor {target.source.name!r} {reason}",
                kind="cannot-copy",
                hint="Build the model with tensors of the file's kind, or on the meta device.",
            )
    cast = [(one.name, one.source.info.dtype.name, spelled(one.tensor.dtype)) for one in targets]
    known = {*matched.pairs.values(), *matched.unexpected, *(one.found_name for one in matched.reshaped)}
    return FillPlan(
        targets,
        matched,
        missing,
        matched.unexpected,
        tied,
        tuple(row for row, one in zip(cast, targets, strict=True) if row[1] != row[2] and not one.tensor.is_meta),
        tuple(name for name in found if name not in known) if matched.changes or include else (),
    )


def _restricted(matched: KeyMatch, include: Sequence[str], expected: list[str]) -> KeyMatch:
    """
    Return a match without the names that no glob of ``include`` matches; ``expected`` are the model's names.

    Raises:
        WeightsNotFound: A glob matches no name of the model.
    """
    names_matching("include", include, expected)
    takes = Filter((include,) if isinstance(include, str) else tuple(include)).takes
    return matched._replace(
        pairs={name: old for name, old in matched.pairs.items() if takes(name)},
        missing=tuple(filter(takes, matched.missing)),
        unexpected=tuple(filter(takes, matched.unexpected)),
        reshaped=tuple(one for one in matched.reshaped if takes(one.name)),
    )


def _refuse_others(others: Collection[str], expected: Collection[str], changes: Renames) -> None:
    """Raise UnsupportedFeature if an entry that is not a tensor has the name of a tensor of the model."""
    renamed = matching.renamed(list(others), changes) or others
    for old, name in zip(others, renamed, strict=True):
        if name in expected:
            raise UnsupportedFeature(
                f"entry {old!r} is not a tensor, the model's is", kind="cannot-copy", hint="Check that it is its file."
            )


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's own parameters and buffers by the names of its ``state_dict()``."""
    return {name: value for name, value in entries_of(model).items() if isinstance(value, torch.Tensor)}


def entries_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the entries of the model's ``state_dict()``; if an override of that fails, all its named tensors."""
    try:
        return dict(model.state_dict(keep_vars=True))
    except Exception:  # noqa: BLE001 - whatever the model's own code raises
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        return dict(named)


def name_changes(
    model: torch.nn.Module, found: Mapping[str, LazyTensor], *, strict: bool = True
) -> tuple[Renames, bool]:
    """Return how to rename the file's names for a model that loads through its own code, and whether they then fit."""
    tensors = model_tensors(model)
    shapes = {name: tensor.info.shape for name, tensor in found.items()}
    best = matching.match(shapes_of(tensors), shapes)
    wrapper = _wrapper_around(list(tensors)) if best.target_wrapped else ()
    is_meant = _is_certain(best, tensors) or not (strict or _is_doubtful(best, shapes))
    if best.pairs and wrapper is not None and is_meant:
        return (*best.changes, *wrapper), best.loads
    # Only the model's own code knows these names, and it does not know what wrappers put before them.
    wrappers = (Rename("strip_wrappers"),)
    return wrappers if matching.renamed(list(found), wrappers) not in (None, list(found)) else (), False


def _wrapper_around(names: list[str]) -> Renames | None:
    """Return the change that adds the wrapper that is a prefix of all names; None if there is no such prefix."""
    bare = matching.renamed(names, (Rename("strip_wrappers"),)) or names
    heads = {name.removesuffix(f".{rest}") for name, rest in zip(names, bare, strict=True)}
    return (Rename("add_prefix", heads.pop()),) if len(heads) == 1 else None


def _is_certain(matched: KeyMatch, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a match is the only possible one: it only strips wrappers, or alone pairs all names."""
    if all(change.option in ("strip_module", "strip_wrappers") for change in matched.changes):
        return True
    tied = _tied(matched, tensors)
    lacking = any(name not in tied and not is_benign(name) for name in matched.missing)
    return not (lacking or matched.reshaped or matched.alternatives)


def _is_doubtful(matched: KeyMatch, found: Shapes) -> bool:
    """Return whether a match renames more than prefixes, others are as good, or it pairs at most half of the names."""
    met = len(matched.pairs) + len(matched.reshaped)
    is_few = 2 * met <= min(met + len(matched.missing), len(found))
    return is_few or bool(matched.alternatives) or any(change.option == "rename" for change in matched.changes)


def _tied(matched: KeyMatch, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    for name in matched.pairs:
        first.setdefault(id(tensors[name]), name)
    return {name: first[id(tensors[name])] for name in matched.missing if id(tensors[name]) in first}


def _refuse(
    matched: KeyMatch,
    missing: tuple[str, ...],
    expected: Mapping[str, Shape],
    found: Mapping[str, Shape],
    *,
    strict: bool,
    hint: Callable[[list[str]], str],
) -> None:
    lacking = [name for name in missing if not is_benign(name)]
    left = [name for name in matched.unexpected if not is_benign(name)]
    error: WeightsMismatch
    wanted = [name for name in (*matched.pairs, *matched.missing) if not is_benign(name) and 0 not in expected[name]]
    is_nothing = (
        bool(wanted or (left and not expected)) and not matched.reshaped and matched.pairs.keys().isdisjoint(wanted)
    )
    if (strict and (lacking or left)) or is_nothing:
        near = nearest(lacking, expected, [name for name in matched.unexpected if name in found], found)
        named = [f"{name} (nearest: {near[name]})" if name in near else name for name in lacking]
        parts = [
            _listed(f"{len(lacking):,} of {len(expected):,} names are missing", named),
            _listed(f"{len(left):,} {'is' if len(left) == 1 else 'are'} unexpected", left),
            _listed(f"{len(matched.reshaped):,} have another shape", [_reshaped(one) for one in matched.reshaped]),
        ]
        fact = f"the weights do not fit the model: {'; '.join(part for part in parts if part)}"
        error = KeyMismatch(fact, hint=hint(lacking))
    elif matched.reshaped:
        listed = _listed("shapes differ", [_reshaped(one) for one in matched.reshaped])
        error = ShapeMismatch(listed, hint=other_sizes([one.found_name for one in matched.reshaped]))
    else:
        return
    error.missing, error.unexpected = tuple(lacking), tuple(left)
    error.reshaped = tuple((one.name, one.expected, one.found) for one in matched.reshaped)
    raise error


def _hint(
    model: torch.nn.Module, matched: KeyMatch, best: KeyMatch, expected: Shapes, found: Shapes, lacking: list[str]
) -> str:
    tensors = model_tensors(model)
    short = any(name not in _tied(best, tensors) and not is_benign(name) for name in best.missing)
    if len(best.pairs) > len(matched.pairs) and not short:
        ways = " or ".join(map(as_options, (best.changes, *best.alternatives)))
        return f"If it is the model's file, let 'ckptool migrate' rename: {len(best.pairs):,} names meet after {ways}."
    firsts = set({id(tensors[name]): name for name in reversed(list(expected))}.values())
    guesses = guess_renames({name: expected[name] for name in expected if name in firsts}, found) if lacking else ()
    if guesses:
        return f"If these are the same tensors, let 'ckptool migrate' rename: all meet after {as_options(guesses)}."
    if callable(getattr(type(model), "from_pretrained", None)):
        own = f"{type(model).__name__}.from_pretrained(folder)"
        return f"Here names are taken as they are. {own} also knows those under which its library saves."
    return partly(lacking) if matched.pairs else "Check that this is the model's file."


def partly(missing: Sequence[str]) -> str:
    """Return the hint where names do not fit; it does not suggest ``strict=False`` if the file lacks names."""
    return ANOTHER if missing else PARTLY


def other_sizes(names: Sequence[str] = ()) -> str:
    """Return the hint where shapes differ from the model's; ``names`` are the names of these tensors in the file."""
    globs = repr(list(names)) if 0 < len(names) <= _LISTED else ""
    return (
        f"Build the model with the sizes that it was saved with, or migrate it without these, `exclude={globs}`, and "
        "load the result with ckptool.load_into(model, path, strict=False)."
    )


def _reshaped(one: matching.Reshaped) -> str:
    return f"{one.name} {list(one.found)}, the model has {list(one.expected)}"


def _listed(what: str, names: list[str]) -> str:
    return f"{what}: {some(names, _LISTED)}" if names else ""


def has_same_bytes(target: torch.Tensor, source: LazyTensor) -> bool:
    """Return whether the memory of ``target`` holds the same bytes as the file once it has the values of ``source``."""
    info = source.info
    return (
        target.layout == torch.strided
        and type(target) in (torch.Tensor, torch.nn.Parameter)  # the elements of others may be anywhere
        and target.is_contiguous()
        and not (target.is_neg() or target.is_conj())
        and info.layout == "strided"
        and info.storage is not None
        and not info.storage.big_endian
        and not (info.conj or info.neg or info.dtype.packed > 1)
        and info.is_contiguous
        and torch_dtype(info) == target.dtype
    )
