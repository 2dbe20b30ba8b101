"""``ckptool diff``: where two checkpoints differ."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress

import click

from ckptool.cli.json_output import error_object, print_json
from ckptool.cli.options import pager_option, refuse_idle
from ckptool.cli.targets import AnyPath, far_options
from ckptool.cli.text import ProgressLine, error_text, say, terminal_width, with_options, wrapped
from ckptool.cli.text import pager as paged
from ckptool.cli.verbs import Command
from ckptool.diffing.diff import diff as diff_files
from ckptool.diffing.report import DiffReport
from ckptool.diffing.values import ValueDiff
from ckptool.errors import CkptoolError, Failure
from ckptool.formats import open_checkpoint
from ckptool.messages import show
from ckptool.sources.naming import shown_path

SCHEMA = "ckptool.diff/2"


@click.command(cls=Command)
@click.argument("a", metavar="A", type=AnyPath())
@click.argument("b", metavar="B", type=AnyPath())
@click.option("--key-a", metavar="PATH", help="Which state dict of A to compare.")
@click.option("--key-b", metavar="PATH", help="Which state dict of B to compare.")
@click.option("--ignore-wrappers", is_flag=True, help="Compare names without what training wrappers added to them.")
@click.option("--ignore-order", is_flag=True, help="Allow another order of names.")
@click.option("--ignore-device", is_flag=True, help="Allow other devices.")
@click.option("--ignore-dtype", is_flag=True, help="Allow other types, if the values are the same.")
@click.option("--rtol", type=click.FloatRange(min=0), help="Allow floating values to differ by this share of B's.")
@click.option("--atol", type=click.FloatRange(min=0), help="Allow floating values to differ by this much.")
@click.option("--no-values", is_flag=True, help="Compare all but the values: only the indexes are read.")
@click.option(
    "--stat", is_flag=True, help="For tensors that differ, also say how alike they are: cosine, norms. Needs numpy."
)
@pager_option
@click.option("-q", "--quiet", is_flag=True, help="Print only the verdict.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@far_options
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
    stat: bool,
    pager: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """
    Say where two checkpoints differ, in whatever forms they are.

    A and B are checkpoints of any kind; FILE::MEMBER picks one out of an archive. If both hold more than weights and
    are of one kind, everything is compared; otherwise the weights are. Values are the same if their bits are. With
    --rtol or --atol, they are the same if |a - b| <= atol + rtol * |b|, and NaN is the same as NaN. What a format
    cannot hold (safetensors: devices, ties) is no difference. Exit code 0: the same; 1: different; 2: could not be
    compared.
    """
    refuse_idle()
    line = ProgressLine(shown=not (quiet or as_json))
    line.next(b)
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
            stat=stat,
            progress=line,
        )
    except ValueError as error:  # of a tolerance
        raise click.UsageError(str(error)) from error
    except CkptoolError as error:
        line.clear()
        if as_json:
            print_json(_error_object(a, b, error))
        else:
            say(error_text(error), err=True)
        sys.exit(2)
    line.clear()
    if as_json:
        print_json(_object(report))
    else:
        _print(report, quiet=quiet, pager=pager)
        others = any(count for kind, count in report.counts.items() if kind not in ("names", "order"))
        if not (quiet or others) and report.only_a and len(report.only_a) == len(report.only_b):
            _say_how_to_align(a, b, key_a, key_b)
    sys.exit(0 if report.same else 1)


def _say_how_to_align(a: str, b: str, key_a: str | None, key_b: str | None) -> None:
    """Print the command that gives B the names of A, if they may be the same tensors."""
    from ckptool.checking.model_fit import examine, shapes_of  # most have the same names

    with suppress(Failure), open_checkpoint(a) as one, open_checkpoint(b) as other:
        found = examine(other, shapes_of(one, key_a), one.path, key_b)
        command = next((each.command for each in found if each.code in ("CK602", "CK603") and each.command), None)
        if command is not None:
            say(f"Hint: To compare them, give a copy of B the names of A.\nRun: {show(command)}", err=True)


def _print(report: DiffReport, *, quiet: bool, pager: bool) -> None:
    with paged(asked=pager):
        width = terminal_width()
        if quiet:
            say(with_options(report.verdict))
            return
        text = str(report._replace(likeness=()))
        lines = (with_options(line) for line in text.split("\n"))
        say("\n".join((*wrapped(lines, width), *report.likeness_lines(width))))


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
        "likeness": _objects(report.likeness),
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
    paths = {side: {"path": shown_path(path)} for side, path in (("a", a), ("b", b))}
    return {"schema": SCHEMA, **paths, "error": error_object(error)}
