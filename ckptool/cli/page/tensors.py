"""The tensors of a checkpoint, and what their values are like, as columns of a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ckptool.checking.value_statistics import ValueRow
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.cli.page.packing import Distinct, front_coded, rounded
from ckptool.cli.tables import COLUMNS, Related
from ckptool.messages import cut, show
from ckptool.tensors.tensor import TensorInfo, identity

LONGEST: Final = 1 << 10
"""Characters of a name or a text from a file that a page shows."""


def shown(text: str) -> str:
    """Return text from a file as it is on a page: bounded, and what is not printable as an escape."""
    return show(cut(text, LONGEST))


def names_column(names: Iterable[str]) -> dict[str, list[object]]:
    """Return the names of tensors."""
    return front_coded(shown(name) or "(root)" for name in names)


def kinds_columns(infos: Sequence[TensorInfo | None], kinds: Distinct) -> list[int]:
    """Return which of ``kinds`` each tensor is; -1 where there is none."""
    return [-1 if info is None else kinds.place(_kind(info)) for info in infos]


def kind_rows(kinds: Distinct) -> list[object]:
    """Return for each kind its shape, type, device, sizes in bytes and elements, whether a parameter, and its parts."""
    return list(kinds.values())


def ties_column(infos: Sequence[TensorInfo | None]) -> list[list[int]]:
    """Return the rows whose tensor another row has, too: each with the first of them."""
    first: dict[object, int] = {}
    found = []
    for row, info in enumerate(infos):
        if info is not None and info.storage is not None and info.numel:
            at = first.setdefault(identity(info), row)
            if at != row:
                found.append([row, at])
    return found


def parts_of(checkpoint: Checkpoint) -> dict[str, Checkpoint]:
    """Return what a page is about, by what stands before names: the checkpoint; of a folder of several, these."""
    if checkpoint.tensors or not checkpoint.inside:
        return {"": checkpoint}
    found: dict[str, Checkpoint] = {}
    todo = list(checkpoint.inside.values())
    for one in todo:
        found[f"{one.member}."] = one
        todo += one.inside.values()
    return found


def _roles(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the role of the state dict that each tensor is in: the innermost of those that have it."""
    roles: dict[str, str] = {}
    for found in sorted(checkpoint.state_dicts, key=lambda one: len(one.key)):
        head = f"{found.key}." if found.key else ""
        roles.update((head + name, found.role) for name in found)
    return (roles.get(name, "other") for name in checkpoint.tensors)


def statistics_columns(rows: Sequence[ValueRow | None]) -> dict[str, object]:
    """Return what values are like, a column for each of the statistics; the histograms one behind the other."""
    found = [row.values if row is not None else None for row in rows]
    fields = ("mean", "std", "min", "max", "norm", "zeros", "nan", "infinite", "total")
    numbers = [one and one._asdict() for one in found]
    columns: dict[str, object] = {
        name: [None if one is None else rounded(one[name]) for one in numbers] for name in fields
    }
    columns["histogram"] = [count for one in found if one is not None for count in one.histogram]
    columns["why"] = [[at, shown(row.why)] for at, row in enumerate(rows) if row is not None and row.why]
    return columns


def tensor_columns(parts: Mapping[str, Checkpoint]) -> dict[str, object]:
    """Return the columns of one checkpoint, or of several together."""
    infos = [tensor.info for one in parts.values() for tensor in one.tensors.values()]
    kinds, roles = Distinct(), Distinct()
    of: list[object] = [roles.place(role) for one in parts.values() for role in _roles(one)]
    return {
        "names": names_column(f"{head}{name}" for head, one in parts.items() for name in one.tensors),
        "kind": [kinds_columns(infos, kinds)],
        "kinds": kind_rows(kinds),
        "ties": ties_column(infos) if all(one.traits.keeps_ties for one in parts.values()) else [],
        "role": {"of": of, "roles": list(roles.values())},
    }


def _kind(info: TensorInfo) -> tuple[object, ...]:
    dtype = COLUMNS["dtype"].value("", info, Related())
    parts = ", ".join(f"{name}: {part.dtype.name} {list(part.shape)}" for name, part in info.parts)
    numel = info.numel
    return (info.shape, dtype, shown(info.location), info.total_nbytes, numel, info.kind, shown(parts))
