"""``ckptool check``: whether files are whole and safe, will load here, and fit into a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import click

from ckptool.checking.check import CONDITIONS, QUESTIONS, CheckReport, fails, is_condition, narrowed
from ckptool.checking.check import check as check_file
from ckptool.checking.finding import CODES
from ckptool.cli.brief import Totals, left_out
from ckptool.cli.completion import choices
from ckptool.cli.options import brief_option, many_files, pager_option, refuse_idle
from ckptool.cli.targets import AnyPath, far_options, is_many, refuse_none, targets
from ckptool.cli.text import ProgressLine, error_text, pager, say, terminal_width, with_options, wrapped
from ckptool.cli.verbs import Command
from ckptool.errors import CkptoolError

CODES_SCHEMA = "ckptool.codes/1"


@click.command(cls=Command)
@click.argument("files", nargs=-1, metavar="FILE...", type=AnyPath())
@brief_option
@many_files
@click.option("--deep", is_flag=True, help="Read every byte, and compare it with the checksums.")
@click.option("--values", is_flag=True, help="Read every byte and look for NaN, infinities and zeros. Needs torch.")
@click.option("--strict", is_flag=True, help="Treat odd containers as errors: bytes outside tensors or records.")
@click.option("--device-check", is_flag=True, help="Compare device tags with the devices of this machine. Needs torch.")
@click.option(
    "--like", metavar="OTHER", type=AnyPath(), help="Compare names and shapes with those of another checkpoint."
)
@click.option("--model", metavar="MODULE:CLASS", help="Build this class, or FILE.py:CLASS, and compare with it.")
@click.option(
    "--model-arg", "model_args", multiple=True, metavar="K=V", help="Argument for --model: a Python literal, or text."
)
@click.option("--key", metavar="PATH", help="Which state dict to compare with --like or --model.")
@click.option("--globals", "show_globals", is_flag=True, help="List the names that unpickling would import, and where.")
@click.option(
    "--only",
    metavar="QUESTION,…",
    callback=lambda _, __, value: _questions(value),
    shell_complete=choices(lambda: QUESTIONS, is_list=True),
    help=f"Report only what answers these: {', '.join(QUESTIONS)}.",
)
@click.option(
    "--fail-on",
    multiple=True,
    metavar="WHAT",
    callback=lambda _, __, value: _conditions(value),
    shell_complete=choices(lambda: CONDITIONS),
    help="Exit with 1 only for a code (CK205), or for a grade (code, system) or severity (info, warning, error) and "
    "all that is worse. Repeatable; by default: warning.",
)
@click.option(
    "--explain",
    metavar="TEXT",
    help="Explain an error message and, if FILE is given, say what in it is the cause; '-' reads TEXT from stdin.",
)
@click.option("--list", "list_codes", is_flag=True, help="List the codes of all findings, and what each says.")
@click.option("--sarif", "as_sarif", is_flag=True, help="Print the findings of all files as SARIF, for code hosts.")
@pager_option
@far_options
def check(files: tuple[str, ...], **options: Any) -> None:
    """
    Say whether checkpoints are whole and safe, and will load.

    Nothing in them runs. Each finding has a line, with what to do about it below. The verdict says how much was looked
    at: the structure alone, unless --deep. Exit codes: 0, nothing worse than info; 1, a warning or an error was found,
    or what --fail-on names; 2, a file cannot be opened.
    """
    refuse_idle()
    if options["explain"] is not None:
        from ckptool.cli.explain import print_explanations

        if len(files) > 1:
            raise click.UsageError("--explain looks into one file.")
        path = files[0] if files else None
        sys.exit(print_explanations(options["explain"], path, as_json=options["as_json"]))
    if options["list_codes"]:
        _list_codes(as_json=options["as_json"])
        return
    if not files:
        raise click.UsageError("Missing argument 'FILE...'.")
    compared = "--key" if options["key"] is not None else "--only fits" if "fits" in options["only"] else None
    if compared is not None and options["like"] is None and options["model"] is None:
        raise click.UsageError(f"{compared} is about what --like or --model is compared with: give one of them, too.")
    if options["only"] and "fits" not in options["only"] and (options["like"] or options["model"]) is not None:
        raise click.UsageError("--like and --model ask whether it fits, which --only leaves out: add fits.")
    if options["model_args"] and options["model"] is None:
        raise click.UsageError("--model-arg is for a --model, and none is given.")
    arguments = _arguments(options)
    unseen: list[str] = []
    found = targets(files, recursive=options["recursive"], passed=unseen)
    code = passed = 0
    with pager(asked=options["pager"]):
        output = output_for(options, [one.shown for one in found], is_list=is_many(files, found))
        line = ProgressLine(len(found), shown=not (options["as_json"] or options["as_lines"] or options["as_sarif"]))
        for target in found:
            line.next(target.path)
            try:
                report = narrowed(check_file(target.path, progress=line, **arguments), options["only"])
            except CkptoolError as error:  # not of this file: of what it is compared with, or of this installation
                line.clear()
                output.failed(error, target.shown)
                code = 2
                continue
            line.clear()
            if report.error is not None and not _is_notable(report) and target.passes_over(report.error):
                output.passed_over(target.shown)
                passed += 1
                continue
            code = max(code, 2 if report.error is not None else int(fails(report, options["fail_on"])))
            output.checked(report, target.shown)
        output.end()
    for text in left_out(unseen):
        say(text, err=True)
    refuse_none(passed, found, files)
    sys.exit(code)


def _is_notable(report: CheckReport) -> bool:
    """Say whether a file that is no checkpoint does something when it is loaded, or may do."""
    return bool(report.acts) or any(one.code == "CK209" for one in report.findings)


def _questions(value: str | None) -> tuple[str, ...]:
    asked = tuple(word.strip() for word in (value or "").split(",") if word.strip())
    if unknown := [word for word in asked if word not in QUESTIONS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(QUESTIONS)}", param_hint="--only")
    return asked


def _conditions(value: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := [word for word in value if not is_condition(word)]:
        choices = "a code of `check --list`, data, code, system, info, warning, error"
        raise click.BadParameter(f"{unknown[0]!r} is none of these: {choices}", param_hint="--fail-on")
    return value or ("warning",)


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    devices = None
    if options["device_check"]:
        from ckptool.torch_ops import devices as torch_devices

        found = torch_devices.devices(os.environ.get("CUDA_VISIBLE_DEVICES")).devices
        devices = [device.tag for device in found]
    arguments: dict[str, Any] = {name: options[name] for name in ("deep", "values", "strict", "like", "model", "key")}
    if options["model_args"]:
        from ckptool.cli.migrate import model_argument

        arguments["model_arguments"] = dict(model_argument(text) for text in options["model_args"])
    return {**arguments, "devices": devices}


def _list_codes(*, as_json: bool) -> None:
    if as_json:
        from ckptool.cli.json_output import print_json

        codes = [{"code": code, **entry._asdict()} for code, entry in CODES.items()]
        print_json({"schema": CODES_SCHEMA, "codes": codes})
        return
    for code, entry in CODES.items():
        say(f"{code}  {entry.severity or '':<9}{entry.says}")


class Output(Protocol):
    """One way to say what was found in files."""

    def checked(self, report: CheckReport, path: str) -> None: ...

    def failed(self, error: CkptoolError, path: str) -> None:
        """Say that a file could not be looked at, for what is not of the file; or raise that."""

    def passed_over(self, path: str) -> None: ...

    def end(self) -> None: ...


def output_for(options: dict[str, Any], paths: Sequence[str], *, is_list: bool) -> Output:
    if options["as_sarif"]:
        return Sarif()
    if options["as_json"] or options["as_lines"]:
        from ckptool.cli.check_objects import Objects  # few are asked for

        return Objects(as_lines=options["as_lines"], is_list=is_list)
    return Brief(paths) if options["brief"] else Reports(show_globals=options["show_globals"])


class _Totalled:
    """What ends with a total."""

    def __init__(self) -> None:
        self._totals = Totals("fine", whole=terminal_width() is None)
        self._width = terminal_width()

    def checked(self, report: CheckReport, _: str) -> None:
        self._totals.graded(report.known_grade)
        if report.error is not None:
            self._totals.not_opened()
        else:
            self._totals.opened(report.worst, report.format, report.file_nbytes)

    def failed(self, error: CkptoolError, _: str) -> NoReturn:
        raise error

    def passed_over(self, path: str) -> None:
        self._totals.passed_over(path)


class Reports(_Totalled):
    """For people: all about each file."""

    def __init__(self, *, show_globals: bool) -> None:
        super().__init__()
        self._show_globals = show_globals
        self._begun = False

    def checked(self, report: CheckReport, path: str) -> None:
        super().checked(report, path)
        if self._begun:
            say("")
        self._begun = True
        if report.error is not None:
            say(error_text(report.error), err=True)
        if report.error is None or report.findings:
            lines = map(with_options, report.lines(show_globals=self._show_globals))
            say("\n".join(wrapped(lines, self._width)))

    def end(self) -> None:
        if lines := list(self._totals.lines()):
            say("\n".join(wrapped(lines, self._width)))


class Brief(_Totalled):
    """A line for each file."""

    def __init__(self, paths: Sequence[str]) -> None:
        from ckptool.cli.brief import BriefCheck

        super().__init__()
        self._lines = BriefCheck(paths)

    def checked(self, report: CheckReport, path: str) -> None:
        super().checked(report, path)
        self._lines.checked(report, path)

    def end(self) -> None:
        say("\n".join(wrapped(self._totals.lines(always=True), self._width)))


class Sarif:
    """One document for all files."""

    def __init__(self) -> None:
        self._reports: list[tuple[str, CheckReport]] = []

    def checked(self, report: CheckReport, path: str) -> None:
        self._reports.append((path, report))

    def failed(self, error: CkptoolError, _: str) -> NoReturn:
        raise error

    def passed_over(self, _: str) -> None:
        pass

    def end(self) -> None:
        from ckptool.cli.check_objects import sarif
        from ckptool.cli.json_output import print_json

        print_json(sarif(self._reports))
