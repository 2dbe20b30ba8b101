"""``ckptool diff``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import click

from ckptool.cli.options import AnyPath, pager_option, recipe_options, remote_options
from ckptool.cli.printing import Failed, Result, output_for
from ckptool.cli.text import ProgressLine, advised, in_options, pager, say
from ckptool.cli.verbs import Command, flag, takes
from ckptool.diffing.diff import diff as diff_files
from ckptool.diffing.report import SCHEMA, DiffReport, sections_of
from ckptool.errors import CkptoolError, Failure
from ckptool.formats import open_checkpoint
from ckptool.sections import Section
from ckptool.sources.paths import shown_path


@click.command(cls=Command)
@click.argument("a", metavar="A", type=AnyPath())
@click.argument("b", metavar="B", type=AnyPath())
@takes("--key-a", "PATH", "Which state dict of A to compare.")
@takes("--key-b", "PATH", "Which state dict of B to compare.")
@recipe_options
@flag("--ignore-wrappers", says="Compare names without what training wrappers added to them.")
@flag("--ignore-order", says="Allow another order of names.")
@flag("--ignore-device", says="Allow other devices.")
@flag("--ignore-dtype", says="Allow other types, if the values are the same.")
@click.option("--rtol", type=click.FloatRange(min=0), help="Allow floating values to differ by this share of B's.")
@click.option("--atol", type=click.FloatRange(min=0), help="Allow floating values to differ by this much.")
@flag("--no-values", says="Compare all but the values: only the indexes are read.")
@flag("--stat", says="For tensors that differ, also say how alike they are: cosine, norms. Needs numpy.")
@pager_option
@flag("-q", "--quiet", says="Print only the verdict.")
@flag("--json", "as_json", says="Print the report as one JSON object.")
@remote_options
def diff(a: str, b: str, **options: Any) -> None:
    """
    Say where two checkpoints differ, in whatever forms they are.

    A and B are checkpoints of any kind; FILE::MEMBER picks one out of an archive. If both hold more than weights and
    are of one kind, everything is compared; otherwise the weights are. Values are the same if their bits are. With
    --rtol or --atol, they are the same if |a - b| <= atol + rtol * |b|, and NaN is the same as NaN. What a format
    cannot hold (safetensors: devices, ties) is no difference. --recipe puts the weights of A into another layout first.
    Exit code 0: the same; 1: different; 2: could not be compared.
    """
    as_json, quiet = options["as_json"], options["quiet"]
    output = output_for(options, [a], is_list=False, has_totals=False)
    line = ProgressLine(shown=not quiet and output.shows_progress)
    line.next(b)
    report, result = None, Result(a)
    try:
        asked = {name: options[name] for name in _ASKED}
        report = diff_files(a, b, values=not options["no_values"], progress=line, **asked)
        result = _Compared(report, quiet=quiet)
    except ValueError as error:  # about a tolerance
        raise click.UsageError(str(error)) from error
    except CkptoolError as error:
        paths = {side: {"path": shown_path(path)} for side, path in (("a", a), ("b", b))}
        result = Failed(a, error, schema=SCHEMA, **paths)
    line.clear()
    with pager(asked=options["pager"]):
        output.add(result)
        output.end()
    if report is not None and not (quiet or as_json):
        _say_what_to_do(a, b, report, options)
    sys.exit(result.exit_code)


_ASKED: Final = (
    *("key_a", "key_b", "ignore_wrappers", "ignore_order", "ignore_device", "ignore_dtype"),
    *("rtol", "atol", "stat", "recipe", "reverse", "recipe_arguments"),
)
"""Options that are arguments of ``ckptool.diff``."""


def _say_what_to_do(a: str, b: str, report: DiffReport, options: Mapping[str, Any]) -> None:
    """Print the command that gives B the names of A, or makes a quantised file plain, if that may make them alike."""
    others = any(count for kind, count in report.counts.items() if kind not in ("names", "order"))
    is_renamed = not others and report.only_a and len(report.only_a) == len(report.only_b)
    is_retyped = report.dtypes and (report.shapes or report.only_a or report.only_b)
    if not (is_renamed or is_retyped):
        return

    from ckptool.checking.finding import dense  # most have the same names
    from ckptool.checking.model_fit import examine, shapes_of
    from ckptool.formats.json_beside import quantization_of

    hint = command = None
    with suppress(Failure), open_checkpoint(a) as one, open_checkpoint(b) as other:
        if is_renamed:
            hint = "To compare them, give a copy of B the names of A."
            found = examine(other, shapes_of(one, options["key_a"]), one.path, options["key_b"])
            command = next((each.command for each in found if each.code in ("CK602", "CK603") and each.command), None)
        elif len(quantised := [each for each in (one, other) if quantization_of(each) is not None]) == 1:
            hint = f"{quantised[0].path} is quantised: to compare what its values stand for, make it plain first."
            command = dense(quantised[0]).command
    if command is not None:
        say(advised(hint=hint, command=command), err=True)


class _Compared(Result):
    """The differences between two files."""

    def __init__(self, report: DiffReport, *, quiet: bool) -> None:
        super().__init__(report.a.path)
        self._report = report
        self._quiet = quiet
        self.exit_code = int(not report.same)

    def sections(self) -> Iterator[Section]:
        return in_options([self._report.verdict] if self._quiet else sections_of(self._report))

    def object(self) -> dict[str, object]:
        return self._report.as_dict()
