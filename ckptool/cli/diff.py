"""``ckptool diff``: where two checkpoints differ."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import click

from ckptool.cli.json_output import error_object, print_json
from ckptool.cli.text import LISTED, error_text, grouped, head_of, labelled, listed
from ckptool.diffing.diff import diff as diff_files
from ckptool.diffing.report import DiffedFile, DiffReport
from ckptool.diffing.trees import Change
from ckptool.diffing.values import ValueDiff
from ckptool.errors import CkptoolError
from ckptool.messages import show, some
from ckptool.torch_ops.differences import Number

SCHEMA = "ckptool.diff/2"


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--key-a", metavar="PATH", help="Which state dict of A to compare.")
@click.option("--key-b", metavar="PATH", help="Which state dict of B to compare.")
@click.option("--ignore-wrappers", is_flag=True, help="Compare names without what training wrappers added to them.")
@click.option("--ignore-order", is_flag=True, help="Allow another order of names.")
@click.option("--ignore-device", is_flag=True, help="Allow other devices.")
@click.option("--ignore-dtype", is_flag=True, help="Allow other types, if the values are the same.")
@click.option("--rtol", type=click.FloatRange(min=0), help="Allow floating values to differ by this share of B's.")
@click.option("--atol", type=click.FloatRange(min=0), help="Allow floating values to differ by this much.")
@click.option("--no-values", is_flag=True, help="Compare all but the values; this takes milliseconds.")
@click.option("-q", "--quiet", is_flag=True, help="Print the verdict alone.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def diff(
    a: str,
    b: str,
    *,
    key_a: str | None,
    key_b: str | None,
    ignore_wrappers: bool,
    ignore_order: bool,
    ignore_device: bool,
    ignore_dtype: bool,
    rtol: float | None,
    atol: float | None,
    no_values: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """
    Say where two checkpoints differ, in whatever forms they are.

    A and B are checkpoints of any kind; FILE::MEMBER picks one out of an archive. Two of one kind that hold more than
    weights are compared in everything; otherwise the weights are. Values are the same if their bits are; with --rtol
    or --atol, where |a - b| <= atol + rtol * |b|, and NaN is the same as NaN. What a format cannot hold (safetensors:
    devices, ties) is no difference. Exit code 0: the same; 1: different; 2: could not be compared.
    """
    try:
        report = diff_files(
            a,
            b,
            key_a=key_a,
            key_b=key_b,
            ignore_wrappers=ignore_wrappers,
            ignore_order=ignore_order,
            ignore_device=ignore_device,
            ignore_dtype=ignore_dtype,
            rtol=rtol,
            atol=atol,
            values=not no_values,
        )
    except CkptoolError as error:
        if as_json:
            print_json(_error_object(a, b, error))
        else:
            click.echo(error_text(error), err=True)
        sys.exit(2)
    if as_json:
        print_json(_object(report))
    else:
        click.echo("\n".join([_verdict(report)] if quiet else _lines(report)))
    sys.exit(0 if report.same else 1)


def _lines(report: DiffReport) -> Iterator[str]:
    yield f"A  {_file(report.a)}"
    yield f"B  {_file(report.b)}"
    yield from listed("only in A", _grouped(report.only_a))
    yield from listed("only in B", _grouped(report.only_b))
    if report.wrapped:
        yield labelled("", "More names are the same without what wrappers added: compare with --ignore-wrappers.")
    if report.order is not None:
        at = report.order
        yield labelled("order", f"from the name at position {at.position:,} on: {show(at.a)} -> {show(at.b)}")
    shapes = (f"{show(change.name)}: {list(change.a)} -> {list(change.b)}" for change in report.shapes)
    yield from listed("shape", list(shapes))
    for label, changes in (("dtype", report.dtypes), ("device", report.devices), ("layout", report.layouts)):
        yield from listed(label, _by_change(changes))
    for label, ties in (("tied in A", report.ties_a), ("tied in B", report.ties_b)):
        yield from listed(label, [show(" = ".join(names)) for names in ties])
    yield from listed("metadata", _by_change(report.metadata))
    yield from listed("other values", [_change(change) for change in report.others])
    yield from listed("values", _largest_first(report.values))
    yield from listed("close", _largest_first(report.close))
    yield from listed("not compared", [show(what) for what in report.not_compared])
    yield _verdict(report)


def _verdict(report: DiffReport) -> str:
    counts = ", ".join(_count(number, kind) for kind, number in report.counts.items() if number)
    if counts:
        return f"different: {counts}{'' if report.values_compared else '; values were not compared'}"
    what = f"{_count(report.tensors, 'tensors')}{', and everything else' if report.scope == 'everything' else ''}"
    if not report.values_compared:
        return f"the same but for values, which were not compared: {what}"
    if report.close:
        largest = max((found.max_abs or 0 for found in report.close), default=0)
        return f"the same within the tolerance: {what}; {len(report.close):,} differ, by at most {largest:.3g}"
    return f"the same: {what}"


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
    return show(f"{file.path} ({file.format}, {file.form}): {compared}")


def _grouped(names: Sequence[str]) -> list[str]:
    depth = 1
    while depth < LISTED and len({head_of(name, depth) for name in names}) == 1:  # what all begin with says nothing
        depth += 1
    return grouped(names, "tensors", depth)


def _by_change(changes: Sequence[Change]) -> list[str]:
    """Return a line for each pair of old and new: the first that has it, and how many more."""
    found: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        found.setdefault((change.a, change.b), []).append(change.name)
    return [f"{some([show(name) for name in names], 1)}: {show(a)} -> {show(b)}" for (a, b), names in found.items()]


def _change(change: Change) -> str:
    return f"{show(change.name) or '(root)'}: {show(change.a)} -> {show(change.b)}"


def _largest_first(found: Sequence[ValueDiff]) -> list[str]:
    return [_valuelabelled(one) for one in sorted(found, key=lambda one: (not one.nan, -(one.max_abs or 0)))]


def _valuelabelled(found: ValueDiff) -> str:
    differing = f"{found.differing:,} of {found.numel:,}" if found.differing else "within the tolerance"
    place = f"at {list(found.at)}"
    values = f"({_number(found.a)} -> {_number(found.b)})"
    nan = f", {found.nan:,} NaN in one alone" if found.nan else ""
    if found.max_abs is None:
        facts = f"first {place}"
    elif found.max_abs == 0:
        facts = f"{'first' if found.nan else 'in their bits alone, first'} {place} {values}"
    else:
        facts = f"max abs {_number(found.max_abs)} {place} {values}, max rel {_number(found.max_rel)}"
    return f"{show(found.name)}: {differing}{nan}; {facts}"


def _number(value: Number | None) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _object(report: DiffReport) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "same": report.same,
        **report._asdict(),
        "a": report.a._asdict(),
        "b": report.b._asdict(),
        "order": report.order._asdict() if report.order is not None else None,
        **{
            name: _objects(changes)
            for name, changes in (
                ("shapes", report.shapes),
                ("dtypes", report.dtypes),
                ("devices", report.devices),
                ("layouts", report.layouts),
                ("metadata", report.metadata),
                ("others", report.others),
            )
        },
        "values": [_value_object(found) for found in report.values],
        "close": [_value_object(found) for found in report.close],
        "counts": report.counts,
    }


def _objects(changes: Iterable[tuple[object, ...]]) -> list[dict[str, object]]:
    return [change._asdict() for change in changes]  # type: ignore[attr-defined]


def _value_object(found: ValueDiff) -> dict[str, object]:
    return {name: _plain(value) for name, value in found._asdict().items()}


def _plain(value: object) -> object:
    """Return what JSON can hold: it has no infinity, no NaN and no complex numbers, so these are text."""
    if isinstance(value, complex) or (isinstance(value, float) and not abs(value) < float("inf")):
        return str(value)
    return value


def _error_object(a: str, b: str, error: CkptoolError) -> dict[str, object]:
    return {"schema": SCHEMA, "a": {"path": a}, "b": {"path": b}, "error": error_object(error)}
