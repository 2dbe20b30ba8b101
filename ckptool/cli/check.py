"""``ckptool check``: whether files are whole and safe, will load here, and fit into a model."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from ckptool.checking.check import CheckReport
from ckptool.checking.check import check as check_file
from ckptool.checking.finding import CODES
from ckptool.checking.pickle_search import Act
from ckptool.checking.policy import QUESTIONS, about, fails, is_condition
from ckptool.checking.torch_load import GlobalUse
from ckptool.cli.json_output import error_object, finding_object, print_json
from ckptool.cli.paths import AnyPath, far_options
from ckptool.cli.text import error_text, say, with_options
from ckptool.errors import CkptoolError
from ckptool.messages import cut

SCHEMA = "ckptool.check/2"
_LONGEST = 4096
"""Of a name in JSON: torch's own have some dozens of characters."""
CODES_SCHEMA = "ckptool.codes/1"


@click.command()
@click.argument("files", nargs=-1, metavar="FILE...", type=AnyPath())
@click.option("--deep", is_flag=True, help="Read every byte, and compare it with the checksums.")
@click.option("--values", is_flag=True, help="Read every byte and look for NaN, infinities and zeros. Needs torch.")
@click.option("--strict", is_flag=True, help="Treat odd containers as errors: bytes outside tensors or records.")
@click.option("--device-check", is_flag=True, help="Compare device tags with the devices of this machine. Needs torch.")
@click.option(
    "--like", metavar="OTHER", type=AnyPath(), help="Compare names and shapes with those of another checkpoint."
)
@click.option("--model", metavar="MODULE:CLASS", help="Build this class, or FILE.py:CLASS; compare with it.")
@click.option(
    "--model-arg", "model_args", multiple=True, metavar="K=V", help="Argument for --model: a Python literal, or text."
)
@click.option("--key", metavar="PATH", help="Which state dict to compare with --like or --model.")
@click.option("--globals", "show_globals", is_flag=True, help="List the names that unpickling would import, and where.")
@click.option(
    "--only",
    metavar="QUESTION,…",
    callback=lambda _, __, value: _questions(value),
    help=f"Report only what answers these: {', '.join(QUESTIONS)}.",
)
@click.option(
    "--fail-on",
    multiple=True,
    metavar="WHAT",
    callback=lambda _, __, value: _conditions(value),
    help="Exit 1 only for this: a code (CK205), a grade (code, system), or a severity (info, warning, error) or worse. "
    "Repeatable; by default: warning.",
)
@click.option(
    "--explain",
    metavar="TEXT",
    help="Explain an error message, and what in FILE causes it if one is given; '-' reads TEXT from stdin.",
)
@click.option("--list", "list_codes", is_flag=True, help="List the codes of all findings, and what each says.")
@click.option("--sarif", "as_sarif", is_flag=True, help="Print the findings of all files as SARIF, for code hosts.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object for each file; a list if there are several."
)
@far_options
def check(files: tuple[str, ...], **options: Any) -> None:
    """
    Say whether checkpoints are whole and safe, and will load.

    Nothing in them runs. One line for each finding, with what to do about it below, and a verdict that claims no more
    than what was looked at: the structure alone, unless --deep. Exit codes: 0, nothing beyond notes; 1, a warning or an
    error was found, or what --fail-on names; 2, a file cannot be opened.
    """
    if options["explain"] is not None:
        from ckptool.cli.explain import print_explanations

        if len(files) > 1:
            raise click.UsageError("--explain looks into one file.")
        path = files[0] if files else None
        sys.exit(print_explanations(options["explain"], path, as_json=options["as_json"]))
    if options["list_codes"]:
        _list_codes(as_json=options["as_json"])
        return
    if options["as_sarif"] and options["as_json"]:
        raise click.UsageError("--sarif and --json are two forms: give one of them.")
    if not files:
        raise click.UsageError("Missing argument 'FILE...'.")
    arguments = _arguments(options)
    code = 0
    objects: list[dict[str, object]] = []
    reports: list[tuple[str, CheckReport]] = []
    for number, path in enumerate(files):
        try:
            report = about(check_file(path, **arguments), options["only"])
        except CkptoolError as error:  # not of this file: of what it is to be compared with, or of this installation
            if not options["as_json"]:
                raise
            objects.append(_not_looked_at(path, error))
            code = 2
            continue
        code = max(code, 2 if report.error is not None else int(fails(report, options["fail_on"])))
        if options["as_sarif"]:
            reports.append((path, report))
        elif options["as_json"]:
            objects.append(_object(report))
        else:
            _print(report, number, show_globals=options["show_globals"])
    if options["as_sarif"]:
        from ckptool.cli.sarif import sarif

        print_json(sarif(reports))
    elif options["as_json"]:
        print_json(objects[0] if len(files) == 1 else objects)
    sys.exit(code)


def _print(report: CheckReport, number: int, *, show_globals: bool) -> None:
    if number:
        say("")
    if report.error is not None:
        say(error_text(report.error), err=True)
    if report.error is None or report.findings:
        say(with_options("\n".join(report.lines(show_globals=show_globals))))


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


def _object(report: CheckReport) -> dict[str, object]:
    found: dict[str, object] = {
        "schema": SCHEMA,
        "path": report.path,
        "depth": report.depth,
        "worst": report.worst,
        "verdict": with_options(report.verdict),
        "findings": [finding_object(finding) for finding in report.findings],
    }
    found |= {"globals": [_global(one) for one in report.globals], "acts": [_act(one) for one in report.acts]}
    if report.error is not None:
        return {**found, "error": error_object(report.error)}
    return {
        **found,
        "loading": report.loading and with_options(report.loading),
        "format": report.format,
        "form": report.form,
        "file_nbytes": report.file_nbytes,
        "shards": report.shards,
        "records": report.records,
        "matching": report.matching,
    }


def _not_looked_at(path: str, error: CkptoolError) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "path": path,
        "depth": "structure",
        "worst": "error",
        "verdict": "not looked at",
        "findings": [],
        "globals": [],
        "acts": [],
        "error": error_object(error),
    }


def _act(one: Act) -> dict[str, object]:
    names = {"name": cut(one.name, _LONGEST), "text": cut(one.text, _LONGEST), "package": cut(one.package, _LONGEST)}
    return one._asdict() | names | {"record": one.record or None}


def _global(one: GlobalUse) -> dict[str, object]:
    return {
        "name": cut(one.name, _LONGEST),
        "allowed": one.is_allowed,
        "record": one.record or None,
        "offset": one.offset,
        "nested_at": one.nested_at,
    }


def _list_codes(*, as_json: bool) -> None:
    if as_json:
        codes = [{"code": code, **entry._asdict()} for code, entry in CODES.items()]
        print_json({"schema": CODES_SCHEMA, "codes": codes})
        return
    for code, entry in CODES.items():
        say(f"{code}  {entry.severity or '':<9}{entry.says}")
