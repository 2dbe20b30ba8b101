"""
What makes ``check`` and ``scan`` fail: conditions, a policy that lets findings through, a baseline.

1. A file fails if what was found in it meets a condition: has a code, or at least a severity or a grade.
2. A file that cannot be opened, and may be a checkpoint, neither fails nor passes: its content is unknown.
3. Findings that are let through stay in the report, and are counted. Findings of code that reaches the system, and of
   parts that were not inspected, are not let through by a name: only by code and path, or by the file's SHA-256.

A policy is a table of TOML. It counts only where it is named: a file in the folder that is checked changes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from ckptool.checking import safety
from ckptool.checking.check import CheckReport, answers
from ckptool.checking.finding import CODES, Finding, Severity
from ckptool.errors import Failure, MalformedFile, NotACheckpoint, UnknownFormat, about
from ckptool.formats.runnable import Act, reached
from ckptool.formats.runnable.pickle_search import MOST_LISTED
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.pickles.alarms import Grade
from ckptool.pickles.judge import is_listed
from ckptool.sources.files import read_text, read_toml
from ckptool.sources.paths import ONLY_CHECKPOINTS, is_folder

Outcome: TypeAlias = Literal["passes", "fails", "unknown", "other"]
"""``unknown``: it cannot be opened. ``other``: it is surely not a checkpoint, a pickle, or an archive of them."""
EXIT_CODES: Final = {"passes": 0, "other": 0, "fails": 1, "unknown": 2}
UNREADABLE: Final = "unreadable"
"""The condition, and the code, for a file that cannot be opened, whatever it is."""
_RANK: Final = {str(grade): rank for rank, grade in enumerate(get_args(Grade))}
_SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "error")
CONDITIONS: Final = (*_RANK, *_SEVERITIES, UNREADABLE, *CODES)
IGNORED: Final = (UNREADABLE, *CODES)
DEFAULT: Final = ("warning",)
_GRADED: Final = {"CK205": "system", "CK216": "system", "CK206": "code", "CK207": "code", "CK217": "code"}
_UNSEEN: Final = ("CK209", "CK114", "CK147", "CK169")
"""Codes of parts that were not inspected: they may have any grade."""
_NAMED: Final = ("refers", "calls", "builds", "sets", "adds")
_OTHERS: Final = frozenset(
    (
        *("text", "html", "xml", "json", "index-json", "lfs-pointer", "xet-pointer", "dvc-pointer", "annex-pointer"),
        *("image", "media", "pdf", "office", "executable", "appledouble", "parquet", "arrow", "tensorboard"),
        *("numpy", "npz", "gguf", "ggml", "onnx", "tflite", "flax", "mindspore", "wheel", "jar", "archive"),
    )
)
"""Kinds of files that hold no pickle, or were searched for pickles; programs of other frameworks are left out."""


class Rule(NamedTuple):
    """Findings that do not count: those with a code, in files whose paths match."""

    code: str
    path: str = "*"
    reason: str = "ignored"

    def takes(self, code: str, path: str) -> bool:
        """Return whether the rule covers a finding; ``*`` in its path matches any characters, slashes too."""
        return code == self.code and fnmatchcase(path, self.path)


class Policy(NamedTuple):
    """What fails, and what is let through."""

    fail_on: tuple[str, ...] = DEFAULT
    is_gate: bool = False
    """Whether the user said what fails; then a file that is surely not a checkpoint does not fail."""
    allow: tuple[tuple[str, str], ...] = ()
    """Globs of names whose code may run, with reasons."""
    ignore: tuple[Rule, ...] = ()
    accept: Mapping[str, str] = {}
    """Why files are let through, by their SHA-256."""
    baseline: Mapping[str, frozenset[str]] = {}
    """The codes found in files by an earlier check, by their SHA-256."""
    limits: Limits = DEFAULT_LIMITS
    ended: tuple[str, ...] = ()
    """Rules whose last day has passed."""

    @property
    def identity(self) -> str:
        """A text that is equal for policies that judge alike."""
        from hashlib import sha256  # only shared gates need it

        baseline = sorted((content, sorted(codes)) for content, codes in self.baseline.items())
        text = repr((*self._replace(accept={}, baseline={}, ended=()), sorted(self.accept.items()), baseline))
        return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


class Judgement(NamedTuple):
    """How a policy judges a report."""

    outcome: Outcome
    failing: tuple[Finding, ...] = ()
    """Findings that meet a condition."""
    left: tuple[Finding, ...] = ()
    """Findings that count."""
    let: tuple[tuple[Finding, str], ...] = ()
    """Findings that do not count, each with the reason."""

    @property
    def exit_code(self) -> int:
        """0, or 1 if it fails, or 2 if it is unknown."""
        return EXIT_CODES[self.outcome]


def judge(policy: Policy, report: CheckReport, origin: str, only: Collection[str] = ()) -> Judgement:
    """
    Return how a policy judges the report of a file. ``only`` are the questions whose findings count; empty for all.

    The file is read for its SHA-256 if that matters, and is not in the report.
    """
    found = _judged(policy, report, origin, only)
    if found.outcome in ("passes", "other") or not (policy.accept or policy.baseline):
        return found
    from ckptool.checking.integrity import sha256_of  # rarely requested

    content = report.sha256 or sha256_of(origin) or ""
    if (reason := policy.accept.get(content)) is not None:
        accepted = (*found.left, *([_unreadable(report)] if report.error is not None else []))
        return Judgement("passes", (), (), (*found.let, *((one, reason) for one in accepted)))
    known = policy.baseline.get(content)
    return found if known is None else _judged(policy, report, origin, only, known)


def _judged(
    policy: Policy, report: CheckReport, origin: str, only: Collection[str], known: Collection[str] = frozenset()
) -> Judgement:
    # Findings with these codes are found because of names.
    allowed = {code: _allowed(policy, report, code) for code in ("CK206", "CK202", "CK204")}

    def why(code: str, path: str | None = None) -> str | None:
        if code in known:
            return "in the baseline"
        place = _plain(path or report.path) if policy.ignore else ""
        return next((rule.reason for rule in policy.ignore if rule.takes(code, place)), allowed.get(code))

    asked = [one for one in report.findings if answers(one.code, only)]
    reasons = [None if one.severity == "info" else why(one.code, one.path) for one in asked]
    left = [one for one, reason in zip(asked, reasons, strict=True) if reason is None]
    let = [(one, reason) for one, reason in zip(asked, reasons, strict=True) if reason is not None]
    # Names of records come from the file itself, so rules are not about them, but only about its path.
    grade = reached(act for act in report.acts if not any(map(why, _codes_of(act))))
    unseen = [one for one in report.findings if one.code in _UNSEEN]
    is_let = bool(unseen) and all(why(one.code, one.path) for one in unseen)
    is_unseen = bool(report.unseen) and report.error is None and not is_let
    # A file that cannot be opened was not inspected: findings that say so do not count, too.
    counted = [one for one in left if report.error is None or one.code not in _UNSEEN or one.code in policy.fail_on]
    conditions = [one for one in policy.fail_on if _is_met(one, grade, counted, is_unseen=is_unseen)]
    ignored = None if report.error is None else why(UNREADABLE, None)
    is_unreadable = report.error is not None and ignored is None
    if report.error is not None and ignored is not None:
        let.append((_unreadable(report), ignored))
    if conditions or (is_unreadable and UNREADABLE in policy.fail_on):
        outcome: Outcome = "fails"
    elif not is_unreadable:
        outcome = "passes"
    else:
        outcome = "other" if policy.is_gate and _is_other(report, origin) else "unknown"
    failing = tuple(one for one in counted if any(_meets(one, condition) for condition in conditions))
    return Judgement(outcome, failing, tuple(left), tuple(let))


def _unreadable(report: CheckReport) -> Finding:
    return Finding(UNREADABLE, "error", report.error.message if report.error is not None else "")


def _is_met(condition: str, grade: Grade, left: Sequence[Finding], *, is_unseen: bool) -> bool:
    if condition in _RANK:  # uninspected parts may have any grade; data never fails
        return is_unseen or (grade != "data" and _RANK[grade] >= _RANK[condition])
    return any(_meets(one, condition) for one in left)


def _meets(finding: Finding, condition: str) -> bool:
    if condition in _SEVERITIES:
        return finding.severity in _SEVERITIES[_SEVERITIES.index(condition) :]
    if condition in _RANK:
        grade = _GRADED.get(finding.code)
        return finding.code in _UNSEEN or (grade is not None and _RANK[grade] >= _RANK[condition])
    return finding.code == condition


def _allowed(policy: Policy, report: CheckReport, code: str) -> str | None:
    """Return why findings with a code are allowed: the first reason, if all names that they are about are allowed."""
    if not policy.allow or len(report.acts) >= MOST_LISTED:  # more acts are not all listed
        return None
    if code == "CK206":
        acts = [act for act in report.acts if act.grade == "code" and act.how != "runs"]
        if any(act.how not in _NAMED or (act.how == "refers" and act.why is not None) for act in acts):
            return None  # it has no name, or another module takes the place of the one that is named
        names = [act.name for act in acts]
    else:
        names = [one.name for one in report.globals if not one.is_allowed]
    reasons = {name: next((why for glob, why in policy.allow if fnmatchcase(name, glob)), None) for name in names}
    given = [why for why in reasons.values() if why is not None]
    is_all = all(why is not None or (code != "CK206" and is_listed(name)) for name, why in reasons.items())
    return given[0] if given and is_all else None


def _codes_of(act: Act) -> tuple[str, ...]:
    """Return the codes of findings that report an act; nothing for a program, as no finding does."""
    if act.grade == "system":
        return {"runs": ("CK216",), "refers": ("CK207", "CK205")}.get(act.how, ("CK205",))
    return () if act.grade == "program" else ("CK217" if act.how == "runs" else "CK206",)


def _plain(path: str) -> str:
    """Return a path relative to the working directory; the absolute one for a file outside it."""
    if "://" in path:
        return path
    try:
        inside = os.path.relpath(path)
        return (os.path.abspath(path) if inside.startswith(os.pardir) else inside).replace(os.sep, "/")
    except (ValueError, OSError):  # not a path, one of another drive, or the folder is gone
        return path


def _is_other(report: CheckReport, origin: str) -> bool:
    error = report.error
    is_unknown = isinstance(error, UnknownFormat) and not report.path.lower().endswith((*ONLY_CHECKPOINTS, ".distcp"))
    if not (is_unknown or (isinstance(error, NotACheckpoint) and error.kind in _OTHERS)):
        return False
    if report.acts or report.unseen or report.globals or is_folder(origin):
        return False
    try:  # errors about a shard or a member begin with its name
        return error is not None and error.message.startswith("not a checkpoint") and not safety.may_be_pickle(origin)
    except Failure:
        return False


# The file

_RULES: Final[dict[str, tuple[dict[str, str], tuple[str, ...]]]] = {
    "allow": ({"name": "str", "reason": "str"}, ("name",)),
    "ignore": ({"code": "str", "path": "str", "until": "date", "reason": "str"}, ("code",)),
    "accept": ({"sha256": "str", "path": "str", "reason": "str"}, ("sha256", "reason")),
}
"""Lists of tables: the types of their keys, and the keys that they need. A text is a table with the first of these."""
_HINT: Final = "docs/ci.md has an example of each key."


def read_policy(path: str) -> Policy:
    """
    Read a policy from a file of TOML.

    Raises:
        MalformedFile: It is not TOML, or has an unknown key or value.
        FileUnavailable: It cannot be read.
        MissingPackage: This Python cannot read TOML, and tomli is not installed.
    """
    table = read_toml(path, "malformed-policy", _HINT)
    _refuse_unknown(path, table, ("fail-on", *_RULES, "limits"))
    fail_on = table.get("fail-on", list(DEFAULT))
    if not (isinstance(fail_on, list) and fail_on):
        raise _malformed(path, "fail-on is not a list of what fails")
    for word in fail_on:
        refuse_unknown_word(str(word), CONDITIONS, path)
    limits = table.get("limits", {})
    if not isinstance(limits, dict):
        raise _malformed(path, "limits is not a table")
    _refuse_unknown(path, limits, tuple(name for name in Limits._fields if name != "cancellation"), "limits.")
    if wrong := next((name for name, value in limits.items() if type(value) is not int or value < 0), None):
        raise _malformed(path, f"limits.{wrong} is not a number of 0 or more")
    found = {name: list(_tables(path, name, table.get(name, []))) for name in _RULES}
    today, ended = datetime.now(tz=timezone.utc).date(), []
    ignore = []
    for one in found["ignore"]:
        refuse_unknown_word(one["code"], IGNORED, path)
        if "until" in one and one["until"] < today:
            ended.append(f"{one['code']} in {one.get('path', '*')!r}, until {one['until']}")
        else:
            ignore.append(Rule(one["code"], one.get("path", "*"), one.get("reason", "ignored by the policy")))
    for one in found["accept"]:
        if not re.fullmatch("[0-9a-f]{64}", one["sha256"]):
            raise _malformed(path, f"no SHA-256, which is 64 digits of 0-9 and a-f: {one['sha256']!r}")
    return Policy(
        tuple(fail_on),
        True,
        tuple((one["name"], one.get("reason", "allowed by the policy")) for one in found["allow"]),
        tuple(ignore),
        {one["sha256"]: one["reason"] for one in found["accept"]},
        limits=DEFAULT_LIMITS._replace(**limits),
        ended=tuple(ended),
    )


def read_baseline(path: str) -> dict[str, frozenset[str]]:
    """
    Return the codes found in each file, by its SHA-256, from JSON of ``check`` or ``scan`` with digests.

    Raises:
        MalformedFile: It is something else.
        FileUnavailable: It cannot be read.
    """
    from ckptool.formats.strict_json import parse  # most calls have no baseline

    known: dict[str, frozenset[str]] = {}
    for line in read_text(path).splitlines():
        with about(path):
            value: Any = parse(line, "the baseline", "baseline")
        for one in value if isinstance(value, list) else [value]:
            is_one = isinstance(one, dict) and "sha256" in one and "findings" in one
            listed = one["findings"] if is_one else None  # those of a scan are counts by code
            findings = listed if isinstance(listed, list | dict) else [None]
            found = [each.get("code") if isinstance(each, dict) else each for each in findings]
            codes = {each for each in found if isinstance(each, str)}
            if not all(isinstance(each, str) for each in found):
                fact = f"no baseline: {'findings have no code' if is_one else 'objects have no sha256'}"
                hint = "docs/ci.md says how to write one."
                raise MalformedFile(fact, kind="malformed-baseline", path=path, hint=hint)
            codes |= {UNREADABLE} if one.get("error") else set()
            known[str(one["sha256"])] = known.get(str(one["sha256"]), frozenset()) | codes
    known.pop("None", None)  # folders have none
    return known


def refuse_unknown_word(word: str, known: Sequence[str], path: str | None = None) -> None:
    """Refuse a word that is neither a condition nor a code."""
    if word not in known:
        choices = [one for one in known if one not in CODES]
        raise _malformed(path, f"{word!r} is none of these: the code of a finding, {', '.join(choices)}", word, known)


def _tables(path: str, name: str, value: Any) -> Iterator[dict[str, Any]]:
    keys, needed = _RULES[name]
    if not isinstance(value, list):
        raise _malformed(path, f"{name} is not a list")
    for one in value:
        table = {needed[0]: one} if isinstance(one, str) else one
        if not isinstance(table, dict):
            raise _malformed(path, f"{name} has what is not a table: {one!r}")
        _refuse_unknown(path, table, tuple(keys), f"{name}: ")
        for key, given in table.items():
            if type(given).__name__ != keys[key]:
                what = "date, as 2027-01-31" if keys[key] == "date" else "text"
                raise _malformed(path, f"{name}: {key} is not a {what}: {given!r}")
        if lacks := next((key for key in needed if key not in table), None):
            raise _malformed(path, f"{name}: {lacks} is missing")
        yield table


def _refuse_unknown(path: str, table: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    for key in table:
        if key not in known:
            raise _malformed(path, f"unknown key {where}{key!r}", key, known)


def _malformed(path: str | None, fact: str, word: str = "", known: Iterable[str] = ()) -> MalformedFile:
    from difflib import get_close_matches  # most are right

    near = get_close_matches(word, list(known), n=1) if word else []
    return MalformedFile(fact, kind="malformed-policy", path=path, hint=f"Did you mean {near[0]!r}?" if near else _HINT)
