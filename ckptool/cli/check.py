"""
``ckptool check`` and ``ckptool explain``.

Also the options of ``check`` and ``scan`` that say what fails, and what is let through.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click

from ckptool.arguments import as_utf8
from ckptool.checking.check import QUESTIONS, CheckReport, answers, narrowed, sections_of
from ckptool.checking.check import check as check_file
from ckptool.checking.finding import CODES, Finding
from ckptool.checking.policy import (
    CONDITIONS,
    DEFAULT,
    IGNORED,
    UNREADABLE,
    Judgement,
    Policy,
    Rule,
    judge,
    read_baseline,
    read_policy,
    refuse_unknown_word,
)
from ckptool.checking.safety import of_refused
from ckptool.cli.options import (
    AnyPath,
    brief_option,
    choices,
    many_files,
    model_arg_option,
    pager_option,
    remote_options,
)
from ckptool.cli.printing import Failed, Result, print_json, say_each, with_hints
from ckptool.cli.text import ProgressLine, advised, in_options, say
from ckptool.cli.verbs import Command, F, flag, takes, together
from ckptool.errors import CkptoolError, MalformedFile
from ckptool.formats import member_in
from ckptool.formats.listing import Target
from ckptool.messages import show, show_nbytes, some
from ckptool.sections import Fact, Section
from ckptool.sources.paths import command_line, shown_path

_CODES_SCHEMA: Final = "ckptool.codes/1"
_EXPLAIN_SCHEMA: Final = "ckptool.explain/2"
_MOST_TEXT: Final = 1 << 20
"""Bytes of standard input that are searched for messages."""
_FAILS: Final = (
    "Exit with 1 only for a code (CK205), for a grade (code, system) or severity (info, warning, error) and all that "
    f"is worse, or for what cannot be opened ({UNREADABLE}). Repeatable"
)


def gate_options(default: str) -> Callable[[F], F]:
    """Return a decorator that adds the options to a verb; ``default`` is what fails if none is given."""
    return together(
        click.option(
            "--fail-on",
            multiple=True,
            metavar="WHAT",
            shell_complete=choices(lambda: CONDITIONS),
            help=f"{_FAILS}; by default: {default}.",
        ),
        click.option("--policy", type=AnyPath(), metavar="FILE", help="Read from FILE what fails, and what is known."),
        takes(
            "--allow", "NAME", "Let calls of a name or glob through, but not to the system. Repeatable.", multiple=True
        ),
        takes("--ignore", "CODE", "Let findings with a code through. Repeatable.", multiple=True),
        click.option(
            "--baseline",
            type=AnyPath(),
            metavar="FILE",
            help="Let through what FILE has, which --digest --json -o FILE wrote, of files that are the same.",
        ),
    )


_NEEDED: Final = {
    "values": ("CK110", "CK111", "CK112", "CK113", "CK119"),
    "deep": ("CK104", "CK105"),
}
"""Codes that are found only with an option."""
_ASKING: Final = {"values": "whole", "strict": "whole", "device_check": "loads", "like": "fits", "model": "fits"}
"""Options with the question that each asks."""


def policy_of(options: Mapping[str, Any]) -> Policy | None:
    """Return the policy that the options ask for; None if none of them is given."""
    if not any(options[name] for name in ("fail_on", "policy", "allow", "ignore", "baseline")):
        return None
    try:
        for name, known in (("fail_on", CONDITIONS), ("ignore", IGNORED)):
            for word in options[name]:
                refuse_unknown_word(word, known)
    except MalformedFile as error:
        hint = "The option is given once for each." if "," in word else error.hint
        raise click.BadParameter(f"{error.message}. {hint}") from error
    found = read_policy(options["policy"]) if options["policy"] else Policy()
    for option, codes in _NEEDED.items():
        unseen = [code for code in options["fail_on"] or found.fail_on or () if code in codes]
        if unseen and not (options.get(option) or (option == "deep" and options.get("values"))):
            raise click.UsageError(f"{unseen[0]} is found only with --{option}: add it, or leave out the code.")
    for rule in found.ended:
        say(f"Note: the policy no longer ignores {show(rule)}", err=True)
    return found._replace(
        fail_on=options["fail_on"] or found.fail_on or DEFAULT,
        is_gate=bool(options["fail_on"] or options["policy"]),
        allow=(*((name, "--allow") for name in options["allow"]), *found.allow),
        ignore=(*(Rule(code, reason="--ignore") for code in options["ignore"]), *found.ignore),
        baseline=read_baseline(options["baseline"]) if options["baseline"] else {},
    )


@click.command(cls=Command)
@click.argument("files", nargs=-1, metavar="FILE...", type=AnyPath())
@brief_option
@flag("-q", "--quiet", says="Print only what makes files fail, by code; with -b, a line for each such file.")
@many_files
@flag("--deep", says="Read every byte, and compare it with the checksums.")
@flag("--digest", says="Add the SHA-256 of the file and the digest of its weights, from the same reading as --deep.")
@flag("--values", says="Read every byte and look for NaN, infinities and zeros. Needs torch.")
@flag("--strict", says="Treat odd containers as errors: bytes outside tensors or records.")
@flag("--device-check", says="Compare device tags with the devices of this machine. Needs torch.")
@click.option(
    "--like", metavar="OTHER", type=AnyPath(), help="Compare names and shapes with those of another checkpoint."
)
@takes("--model", "MODULE:CLASS", "Build this class, or FILE.py:CLASS, and compare with it.")
@model_arg_option
@takes("--key", "PATH", "Which state dict to compare with --like or --model.")
@flag("--globals", "show_globals", says="List the names that unpickling would import, and where.")
@click.option(
    "--only",
    metavar="QUESTION,…",
    callback=lambda _, __, value: _questions(value),
    shell_complete=choices(lambda: QUESTIONS, is_list=True),
    help=f"Report only what answers these: {', '.join(QUESTIONS)}.",
)
@gate_options("warning")
@takes(
    "--explain",
    "TEXT",
    "Explain an error message and, if FILE is given, say what in it is the cause; '-' reads TEXT from stdin.",
)
@flag("--list", "list_codes", says="List the codes of all findings, and what each says.")
@flag("--sarif", "as_sarif", says="Print the findings of all files as SARIF, for code hosts.")
@pager_option
@remote_options
def check(files: tuple[str, ...], **options: Any) -> None:
    """
    Say whether checkpoints are whole and safe, and will load.

    Nothing in them runs. Each finding has a line, with what to do about it below. The verdict says how much was looked
    at: the structure alone, unless --deep. Exit codes: 0, nothing worse than info; 1, a warning or an error was found,
    or what --fail-on names; 2, nothing fails, but a file cannot be opened.
    """
    if options["explain"] is not None:
        if len(files) > 1:
            raise click.UsageError("--explain looks into one file.")
        path = files[0] if files else None
        sys.exit(_explain(options["explain"], path, as_json=options["as_json"]))
    if options["list_codes"]:
        _list_codes(as_json=options["as_json"])
        return
    if not files:
        raise click.MissingParameter(param_type="argument", param_hint="'FILE...'")
    compared = "--key" if options["key"] is not None else "--only fits" if "fits" in options["only"] else None
    if compared is not None and options["like"] is None and options["model"] is None:
        raise click.UsageError(f"{compared} is about what --like or --model is compared with: give one of them, too.")
    for option, question in _ASKING.items():
        if options[option] and options["only"] and question not in options["only"]:
            asked = f"--{option.replace('_', '-')} is about a question that --only leaves out: add {question}."
            raise click.UsageError(asked)
    for word in options["fail_on"]:
        if not answers({"code": "CK206", "system": "CK205"}.get(word, word), options["only"]):
            raise click.UsageError(f"--fail-on {word} is about a question that --only leaves out.")
    if options["model_arguments"] and options["model"] is None:
        raise click.UsageError("--model-arg is for a --model, and none is given.")
    arguments, policy = _arguments(options), policy_of(options)

    @contextmanager
    def look(target: Target, line: ProgressLine) -> Iterator[Result | None]:
        report = check_file(target.path, progress=line, **arguments, limits=(policy or _NO_POLICY).limits)
        judged = judge(policy or _NO_POLICY, report, target.path, options["only"])
        is_other = report.error is not None and not is_notable(report) and target.passes_over(report.error)
        report = narrowed(report, options["only"])
        yield None if is_other else _Checked(target.shown, report, judged, options, has_policy=policy is not None)

    def failed(target: Target, error: CkptoolError) -> Result:  # an error of what files are compared with
        if not (options["as_json"] or options["as_lines"]):
            raise error
        empty = CheckReport(target.shown, "structure", (), error=error)
        nothing = {"member": member_in(target.shown), "verdict": "not looked at", "grade": None}
        return Failed(target.shown, error, **{**empty.as_dict(), **nothing})

    sys.exit(say_each(files, options, look, failed))


_NO_POLICY: Final = Policy()


def is_notable(report: CheckReport) -> bool:
    """Return whether loading a file that is not a checkpoint does something, or may do."""
    return bool(report.acts) or any(one.code == "CK209" for one in report.findings)


def _questions(value: str | None) -> tuple[str, ...]:
    asked = () if value is None else tuple(word.strip() for word in value.rstrip(" ,").split(","))
    if unknown := [word for word in asked if word not in QUESTIONS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(QUESTIONS)}", param_hint="--only")
    return asked


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    devices = None
    if options["device_check"]:
        from ckptool.torch_ops import devices as torch_devices

        found = torch_devices.devices(os.environ.get("CUDA_VISIBLE_DEVICES")).devices
        devices = [device.tag for device in found]
    names = ("deep", "values", "strict", "digest", "like", "model", "model_arguments", "key")
    return {**{name: options[name] for name in names}, "devices": devices}


def _list_codes(*, as_json: bool) -> None:
    if as_json:
        codes = [{"code": code, **entry._asdict()} for code, entry in CODES.items()]
        print_json({"schema": _CODES_SCHEMA, "codes": codes})
        return
    for code, entry in CODES.items():
        say(f"{code}  {entry.severity or '':<9}{entry.says}")


class _Checked(Result):
    """A file that was checked, even if it could not be opened."""

    def __init__(
        self, path: str, report: CheckReport, judged: Judgement, options: dict[str, Any], *, has_policy: bool
    ) -> None:
        super().__init__(path)
        self._report = report
        self._judged = judged
        self._has_policy = has_policy
        self._has_digest = options["digest"]
        self._shows_globals = options["show_globals"]
        self.error = report.error
        self.format = report.format
        self.nbytes = report.file_nbytes or 0
        self.grade = report.known_grade
        self.exit_code = judged.exit_code
        self.let_through, self.failing = judged.let, judged.failing

    @property
    def findings(self) -> Sequence[Finding]:
        return self._judged.left

    def sections(self) -> Iterator[Section]:
        if self.error is None or self.findings or self.let_through:
            yield show(self._report.path)
            left = self._report._replace(findings=self._judged.left)
            yield from in_options(sections_of(left, show_globals=self._shows_globals))
        for one, why in self.let_through:
            yield Fact("let through", [f"{one.code} {show(one.message)}", show(why)])

    def cells(self) -> Sequence[str]:
        left = self._report._replace(findings=tuple(self.findings))
        return worst_of(left) or [f"{self.format}, {show_nbytes(self.nbytes)}"]

    def object(self) -> dict[str, object]:
        let = [{"code": one.code, "path": one.path, "reason": why} for one, why in self.let_through]
        gate = {"gate": self._judged.outcome, "let_through": let} if self._has_policy else {}
        found = with_hints(self._report.as_dict())
        for name in ("sha256", "digest", "digest_error") if self._has_digest else ():
            found.setdefault(name, None)
        return {**found, **gate}


def worst_of(report: CheckReport) -> list[str]:
    """Return texts: why a file cannot be opened, or its first most severe finding, and how many more there are."""
    if report.error is not None:
        return [*of_refused(report.acts), f"not opened: {report.error.message}"]  # lines are cut at their end
    found = [one for one in report.findings if one.severity == report.worst != "info"]
    if not found:
        return []
    first, *others = sorted(found, key=lambda one: one.code not in _OF_SAFETY)
    files = dict.fromkeys(os.path.basename(one.path) for one in others if one.path and one.path != report.path)
    more = f" (and {len(others):,} more{f': {some(list(files))}' if files else ''})" if others else ""
    return [f"{first.code} {first.message}{more}"]


_OF_SAFETY: Final = ("CK205", "CK216", "CK206", "CK217", "CK207")
"""Codes that come first if there are many files: what they would run."""


@click.command(cls=Command)
@click.argument("text", metavar="TEXT")
@click.argument("path", required=False, metavar="[FILE]", type=AnyPath())
@flag("--json", "as_json", says="Print one JSON object.")
def explain(text: str, path: str | None, *, as_json: bool) -> None:
    """
    Say what an error message means, and what to do.

    TEXT is the message, or all that was printed around it; '-' reads it from standard input. With a FILE, say what in
    the file causes it, and where the names in it are. Exit code 1: the message is not known, and names nothing in the
    file; 2: the file cannot be opened.
    """
    sys.exit(_explain(text, path, as_json=as_json))


def _explain(text: str, path: str | None, *, as_json: bool) -> int:
    """Print what a message means, and return the exit code."""
    from ckptool.checking.explain import explain as explanations

    if text != "-" and os.path.lexists(text):
        what = "folder" if os.path.isdir(text) else "file"
        look = show(command_line(text, "check"))
        raise click.UsageError(f"{show(text)} is a {what}, and TEXT is the message to explain. To look at it: {look}")
    shown = None if path is None else shown_path(path)
    text = as_utf8(sys.stdin.buffer.read(_MOST_TEXT)).decode(errors="replace") if text == "-" else text
    try:
        found = explanations(text, path)
    except CkptoolError as error:
        if not as_json:
            raise
        print_json(with_hints({"schema": _EXPLAIN_SCHEMA, "path": shown, "error": error.as_dict()}))
        return 2
    if as_json:
        print_json({"schema": _EXPLAIN_SCHEMA, "path": shown, "explanations": [one._asdict() for one in found]})
    elif not found:
        command = command_line(path or "FILE", "check")
        say(advised("not a message that is known here", hint="Look at the file.", command=command), err=True)
    else:
        for number, one in enumerate(found):
            if number:
                say("")
            in_file = [] if shown is None or one.in_file is None else [f"{shown}: {one.in_file}"]
            say(advised(f"{one.kind}: {one.meaning}", *in_file, hint=one.hint, command=one.command))
    return 0 if found else 1
