"""``DiffReport``: where two checkpoints differ, as ``diff`` returns it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from ckptool.diffing.sides import Scope
from ckptool.diffing.trees import Change
from ckptool.diffing.values import ValueDiff
from ckptool.messages import LISTED, first_components, grouped, show, some
from ckptool.sections import Fact, Section, Table, as_json, completed, html_of, text_of
from ckptool.torch_ops.differences import Likeness, Number

SCHEMA: Final = "ckptool.diff/2"


class ShapeChange(NamedTuple):
    """A tensor of another shape."""

    name: str
    a: tuple[int, ...]
    b: tuple[int, ...]


class OrderChange(NamedTuple):
    """The first position, among the names that both have, where the order differs, and the names there."""

    position: int
    a: str
    b: str


class DiffedFile(NamedTuple):
    """One of the two files."""

    path: str
    format: str
    form: str
    key: str | None
    """The path of the weights that were compared; None if everything was."""
    also_under: tuple[str, ...] = ()
    """Other keys under which the file has the same weights."""


UNREAD: Final = ("of kinds that cannot be read", "without bytes")
"""Why the values of tensors are not compared."""


class DiffReport(NamedTuple):
    """Where two checkpoints differ; without differences to ignore, and facts that a format does not record."""

    a: DiffedFile
    b: DiffedFile
    scope: Scope
    tensors: int
    """Number of names that both have; a tied tensor counts under each."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    order: OrderChange | None
    shapes: tuple[ShapeChange, ...]
    dtypes: tuple[Change, ...]
    devices: tuple[Change, ...]
    layouts: tuple[Change, ...]
    """Tensors that are sparse or quantised in another way, of another class, or without bytes."""
    ties_a: tuple[tuple[str, ...], ...]
    """Groups of names that share one tensor in A, and are not the same group in B."""
    ties_b: tuple[tuple[str, ...], ...]
    metadata: tuple[Change, ...]
    """Facts of modules (``_metadata``), classes of models, and safetensors' ``__metadata__``."""
    others: tuple[Change, ...]
    """Values that are not tensors; a thousand at most."""
    values: tuple[ValueDiff, ...]
    close: tuple[ValueDiff, ...]
    """Tensors whose values differ within the tolerance: no difference."""
    values_compared: bool
    not_compared: tuple[str, ...]
    """Texts about what could not be compared, though it was not to be left out."""
    wrapped: bool
    """Whether more names would be the same without what training wrappers added to them."""
    likeness: tuple[Likeness, ...] = ()
    """How alike the tensors are whose values differ, if requested."""
    unwrapped: str | None = None
    """The verdict without what training wrappers added to names, if more of them are the same then."""

    def __dir__(self) -> list[str]:
        return completed(self)

    def __str__(self) -> str:
        return "\n".join(text_of(sections_of(self)))

    def __repr__(self) -> str:
        return f"<DiffReport {self.a.path!r}, {self.b.path!r}: {self.verdict}>"

    def _repr_html_(self) -> str:
        return html_of(f"{self.a.path}, {self.b.path}: {self.verdict}", facts_of(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON, as the command line prints it."""
        fields = as_json(self)
        del fields["unwrapped"]  # a text for people: `wrapped` says whether it is worth comparing again
        return {"schema": SCHEMA, "same": self.same, **fields, "counts": self.counts}

    @property
    def verdict(self) -> str:
        """The text on one line: whether they are the same, and else what differs."""
        counts = ", ".join(_count(number, kind) for kind, number in self.counts.items() if number)
        if counts:
            values = "values were not compared" if not self.values_compared else self._same_values()
            return f"different: {counts}{f'; {values}' if values else ''}"
        what = f"{_count(self.tensors, 'tensors')}{', and everything else' if self.scope == 'everything' else ''}"
        if not self.values_compared:
            return f"the same but for values, which were not compared: {what}"
        if self.close:
            largest = max((found.max_abs or 0 for found in self.close), default=0)
            return f"the same within the tolerance: {what}; {len(self.close):,} differ, by at most {largest:.3g}"
        unread = [one for one in self.not_compared if any(f" {why}: " in one for why in UNREAD)]
        return f"the same but for what was not compared, {'; '.join(unread)}: {what}" if unread else f"the same: {what}"

    def _same_values(self) -> str:
        """Return the text that the tensors are the same, if only other things differ, and all values were compared."""
        is_known = not any(f" {why}: " in one for one in self.not_compared for why in UNREAD)
        differ = self.only_a or self.only_b or self.shapes or self.dtypes or self.layouts or self.values or self.close
        return f"the values of {_count(self.tensors, 'tensors')} are the same" if is_known and not differ else ""

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not any(self.counts.values())

    @property
    def counts(self) -> dict[str, int]:
        """How many differences there are of each kind."""
        return {
            "names": len(self.only_a) + len(self.only_b),
            "order": int(self.order is not None),
            "shapes": len(self.shapes),
            "dtypes": len(self.dtypes),
            "devices": len(self.devices),
            "layouts": len(self.layouts),
            "ties": len(self.ties_a) + len(self.ties_b),
            "metadata": len(self.metadata),
            "others": len(self.others),
            "values": len(self.values),
        }


def sections_of(report: DiffReport) -> Iterator[Section]:
    """Yield the two files, the differences, the verdict and, if requested, how alike tensors are."""
    yield f"A  {_file(report.a)}"
    yield f"B  {_file(report.b)}"
    yield from facts_of(report)
    yield report.verdict
    if report.likeness:
        rows = [
            (show(one.name), *(f"{value:.6g}" if isinstance(value, float) else "-" for value in one[1:5]))
            for one in report.likeness
        ]
        headers = ("name", "cosine", "|A - B| / |B|", "|A|", "|B|")
        yield from ("", Table(headers, rows, (False, True, True, True, True)))


def facts_of(report: DiffReport) -> Iterator[Fact]:
    """Yield the differences by kind, with an item for each."""
    if report.unwrapped is not None:
        yield Fact("wrappers", [f"without what they added to names (`ignore_wrappers=True`) {report.unwrapped}"])
    if report.unwrapped is None or not report.unwrapped.startswith("the same"):
        yield Fact("only in A", _grouped(report.only_a))
        yield Fact("only in B", _grouped(report.only_b))
    if report.order is not None:
        at = report.order
        yield Fact("order", [f"from the name at position {at.position:,} on: {show(at.a)} -> {show(at.b)}"])
    yield Fact("shape", [f"{show(change.name)}: {list(change.a)} -> {list(change.b)}" for change in report.shapes])
    for label, changes in (("dtype", report.dtypes), ("device", report.devices), ("layout", report.layouts)):
        yield Fact(label, _by_change(changes))
    for label, ties in (("tied in A", report.ties_a), ("tied in B", report.ties_b)):
        yield Fact(label, [show(" = ".join(names)) for names in ties])
    yield Fact("metadata", _by_change(report.metadata))
    yield Fact(
        "other values", [f"{show(one.name) or '(root)'}: {show(one.a)} -> {show(one.b)}" for one in report.others]
    )
    yield Fact("values", _largest_first(report.values))
    yield Fact("close", _largest_first(report.close))
    yield Fact("not compared", [show(what) for what in report.not_compared])


_NOUNS = {
    "tensors": ("tensor", "tensors"),
    "names": ("name in one alone", "names in one alone"),
    "order": ("the order", ""),
    "shapes": ("tensor's shape", "tensors' shapes"),
    "dtypes": ("tensor's dtype", "tensors' dtypes"),
    "devices": ("tensor's device", "tensors' devices"),
    "layouts": ("tensor's layout", "tensors' layouts"),
    "ties": ("tie", "ties"),
    "metadata": ("fact of metadata", "facts of metadata"),
    "others": ("other value", "other values"),
    "values": ("tensor's values", "tensors' values"),
}


def _count(number: int, kind: str) -> str:
    one, many = _NOUNS[kind]
    return one if kind == "order" else f"{number:,} {one if number == 1 else many}"


def _file(file: DiffedFile) -> str:
    compared = "everything" if file.key is None else f"the weights under {file.key}" if file.key else "the weights"
    also = f", the same as under {some(file.also_under)}" if file.also_under else ""
    return show(f"{file.path} ({file.format}, {file.form}): {compared}{also}")


def _grouped(names: Sequence[str]) -> list[str]:
    for depth in range(1, LISTED + 1):
        if len({first_components(name, depth) for name in names}) != 1:  # components that all share say nothing
            break
    return grouped(names, "tensors", depth)


def _by_change(changes: Sequence[Change]) -> list[str]:
    """Return a line for each pair of old and new: the first name that has it, and how many more do."""
    found: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        found.setdefault((change.a, change.b), []).append(change.name)
    return [
        f"{show(names[0])}{f' and {len(names) - 1:,} more' if len(names) > 1 else ''}: {show(a)} -> {show(b)}"
        for (a, b), names in found.items()
    ]


def _largest_first(found: Sequence[ValueDiff]) -> list[str]:
    lines = []
    for one in sorted(found, key=lambda one: (not one.nan, -(one.max_abs or 0))):
        differing = f"{one.differing:,} of {one.numel:,}" if one.differing else "within the tolerance"
        nan = f", {one.nan:,} NaN in one alone" if one.nan else ""
        place, values = f"at {list(one.at)}", f"({_rounded(one.a)} -> {_rounded(one.b)})"
        if one.max_abs is None:
            facts = f"first {place}"
        elif one.max_abs == 0:
            facts = f"{'first' if one.nan else 'in their bits alone, first'} {place} {values}"
        else:
            facts = f"max abs {_rounded(one.max_abs)} {place} {values}, max rel {_rounded(one.max_rel)}"
        lines.append(f"{show(one.name)}: {differing}{nan}; {facts}")
    return lines


def _rounded(value: Number | None) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
