"""
The page that `report` writes: one file of HTML with all that it shows, which needs no network and no library.

Nothing from a checkpoint is markup. All of it is JSON in an element that no browser runs, and the script puts it on the
page as text. A policy in the page forbids everything but this style and this script, which it knows by their hashes.

The modules of the script are joined to one: the lines that import are left out, and names are unique in all of them.
https://www.w3.org/TR/CSP3/
"""

from __future__ import annotations

import json
import math
import re
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from typing import Final

from ckptool.checking.check import CheckReport
from ckptool.checking.finding import Finding
from ckptool.checking.value_survey import ValueRow
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import summarise
from ckptool.cli.inspect_report import extra_lines, head_facts
from ckptool.cli.tables import COLUMNS, Related
from ckptool.cli.text import with_options
from ckptool.diffing.report import DiffReport, facts_of
from ckptool.messages import LISTED, counted, cut, show
from ckptool.sources.files import packaged
from ckptool.sources.naming import local_name
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity

LONGEST: Final = 1 << 10
"""Characters of a name or a text from a file that a page shows."""
_DIGITS: Final = 6
"""Of a number that people look at."""
STATUSES: Final = (
    *("same", "close", "device", "layout", "values", "dtype", "shape"),
    *("only in A", "only in B", "not compared"),
)
"""What is said of each tensor: of several, the one that stands last."""
_IN_TABLE: Final = ("shape", "dtype", "device", "layout", "values", "close")
"""What the table says of each tensor: the first few are enough above it."""
_OF_VALUES: Final = ("differing", "nan", "max_abs", "max_rel", "at", "a", "b")
_OF_LIKENESS: Final = ("cosine", "relative")
_MOST: Final = 200
"""Items of a list that a page shows."""
ASSETS: Final = Path(__file__).parent / "assets"
SCRIPTS: Final = (
    *("dom", "text", "data", "tree", "selection", "colours", "squares", "treemap"),
    *("histogram", "columns", "entries", "table", "panel", "head", "main"),
)
"""The modules of the script, each behind those that it imports."""
_IMPORT: Final = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ", re.MULTILINE)
_COMMENT: Final = re.compile(r"^ *(/\*.*?\*/|//.*?)$", re.MULTILINE | re.DOTALL)
_SPACE: Final = re.compile(r"\s*\n\s*")
_PLACE: Final = re.compile(r"\{\{(\w+)\}\}")
_IN_SCRIPT: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def shown(text: str) -> str:
    """Return text from a file as it is on a page: bounded, and what is not printable as an escape."""
    return show(cut(text, LONGEST))


def _kinds_column(infos: Sequence[TensorInfo | None], kinds: dict[object, int]) -> list[int]:
    """Return which of ``kinds`` each tensor is; -1 where there is none."""
    return [-1 if info is None else kinds.setdefault(_kind(info), len(kinds)) for info in infos]


def _ties_column(infos: Sequence[TensorInfo | None]) -> list[list[int]]:
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
    kinds: dict[object, int] = {}
    roles: dict[str, int] = {}
    of = [roles.setdefault(role, len(roles)) for one in parts.values() for role in _roles(one)]
    return {
        "names": _front_coded(f"{head}{name}" for head, one in parts.items() for name in one.tensors),
        "kind": [_kinds_column(infos, kinds)],
        "kinds": list(kinds),
        "ties": _ties_column(infos) if all(one.traits.keeps_ties for one in parts.values()) else [],
        "role": {"of": of, "roles": list(roles)},
    }


def _kind(info: TensorInfo) -> tuple[object, ...]:
    """Return a tensor's shape, type, device, sizes in bytes and elements, whether a parameter, and its parts."""
    dtype = COLUMNS["dtype"].value("", info, Related())
    parts = ", ".join(f"{name}: {part.dtype.name} {list(part.shape)}" for name, part in info.parts)
    numel = info.numel
    return (info.shape, dtype, shown(info.location), info.total_nbytes, numel, info.kind, shown(parts))


def packed(columns: Mapping[str, object]) -> str:
    """Return columns as JSON, deflated (zlib's format), in base64."""
    text = json.dumps(columns, allow_nan=False, separators=(",", ":"))
    return b64encode(zlib.compress(text.encode("ascii"), 9)).decode("ascii")


def _front_coded(names: Iterable[str]) -> dict[str, list[object]]:
    """Return names of tensors: how many characters, as JavaScript counts, each shares with the one before; the rest."""
    shared: list[object] = []
    rests: list[object] = []
    before = ""
    for name in (shown(one) or "(root)" for one in names):
        same = commonprefix((before, name))  # noqa: RUF071 - characters are what is meant
        shared.append(len(same) if same.isascii() else len(same.encode("utf-16-le")) // 2)
        rests.append(name[len(same) :])
        before = name
    return {"shared": shared, "rest": rests}


def rounded(value: object) -> object:
    """Return a number to six digits; what JSON does not have, infinities and complex numbers, as text."""
    if isinstance(value, complex):
        return str(value)
    if not isinstance(value, float):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)


def comparison_columns(
    report: DiffReport, a: Mapping[str, LazyTensor], b: Mapping[str, LazyTensor]
) -> tuple[list[str], dict[str, object]]:
    """Return the names in both, and the columns: what a tensor is in each, and how it differs."""
    names = [*a, *(name for name in b if name not in a)]
    kinds: dict[object, int] = {}
    sides = [[side[name].info if name in side else None for name in names] for side in (a, b)]
    status = _status(report, names)
    return names, {
        "names": _front_coded(names),
        "kind": [_kinds_column(infos, kinds) for infos in sides],
        "kinds": list(kinds),
        "ties": [],
        "change": {"of": [STATUSES.index(one) for one in status], "statuses": list(STATUSES)},
        "measures": _measures(report, names),
    }


def comparison_facts(report: DiffReport) -> dict[str, object]:
    """Return the verdict, and what differs by kind."""
    facts: list[object] = [
        [fact.label or "names", listing(map(with_options, fact.items), LISTED if fact.label in _IN_TABLE else None)]
        for fact in facts_of(report)
        if fact.items
    ]
    return {"verdict": with_options(report.verdict), "same": report.same, "facts": facts}


def _status(report: DiffReport, names: Iterable[str]) -> list[str]:
    found: dict[str, str] = {}
    by_status: dict[str, Iterable[str]] = {
        "close": (one.name for one in report.close),
        "device": (one.name for one in report.devices),
        "layout": (one.name for one in report.layouts),
        "values": (one.name for one in report.values),
        "dtype": (one.name for one in report.dtypes),
        "shape": (one.name for one in report.shapes),
        "only in A": report.only_a,
        "only in B": report.only_b,
    }
    for status in STATUSES:
        found.update((name, status) for name in by_status.get(status, ()))
    unsaid = "same" if report.values_compared else "not compared"
    return [found.get(name, unsaid) for name in names]


def _measures(report: DiffReport, names: Iterable[str]) -> dict[str, list[object]]:
    """Return by how much values differ: the rows of which that is known, and a column for each measure."""
    rows = {name: row for row, name in enumerate(names)}
    values = {found.name: found for found in (*report.values, *report.close) if found.name in rows}
    likeness = {found.name: found for found in report.likeness}
    columns: dict[str, list[object]] = {"row": [rows[name] for name in values]}
    for field in _OF_VALUES:
        columns[field] = [rounded(found._asdict()[field]) for found in values.values()]
    for field in _OF_LIKENESS:
        columns[field] = [rounded(likeness[name]._asdict()[field]) if name in likeness else None for name in values]
    return columns


def file_facts(checkpoint: Checkpoint, report: CheckReport) -> dict[str, object]:
    """Return what a file is, what is notable about it, and what it holds beside tensors."""
    facts = [[fact.label, listing(fact.items)] for fact in head_facts(checkpoint, summarise(checkpoint))]
    rest = len(checkpoint.extras) - _MOST
    some = "the values" if any(one.code == "CK113" for one in report.findings) else "every value"
    looked = f"and at {some}" if report.depth == "values" else "alone"
    extras = [shown(line) for line in islice(extra_lines(checkpoint), _MOST)]
    return {
        **report_facts(report),
        "verdict": f"{report.outcome}; looked at the structure {looked}",
        "facts": facts,
        "extras": [*extras, f"and {counted(rest, 'other value')}"] if rest > 0 else extras,
    }


def report_facts(report: CheckReport) -> dict[str, object]:
    """Return what a check says of a file, whether it can be opened or not."""
    error, worst = report.error, report.worst
    return {
        "path": shown(report.path),
        "name": shown(local_name(report.path).rstrip("/").rpartition("/")[2] or report.path),
        "verdict": report.outcome,
        "status": "fine" if worst in (None, "info") else worst,
        "loading": [shown(with_options(one)) for one in report.loading],
        "findings": [_finding(one) for one in report.findings],
        "error": error and _finding(Finding(error.kind, "error", error.message, error.hint, error.command)),
    }


def listing(items: Iterable[str], most: int | None = None) -> list[str]:
    """Return the first of some items, and how many more there are."""
    found = list(items)
    most = _MOST if most is None else most
    more = [f"and {len(found) - most:,} more"] if len(found) > most else []
    return [*map(shown, found[:most]), *more]


def _finding(found: Finding) -> dict[str, object]:
    return {
        "code": found.code,
        "severity": found.severity,
        "message": shown(found.message),
        "hint": found.hint and shown(with_options(found.hint)),
        "command": found.command and shown(found.command),
    }


def document(title: str, content: Mapping[str, object]) -> bytes:
    """Return a page that shows this content. The same content makes the same bytes."""
    style, script = _lean(packaged(ASSETS / "page.css")), joined_script()
    filled = {
        "title": escape(title),
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "content": json.dumps(content, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPT),
    }
    return _PLACE.sub(lambda place: filled[place[1]], packaged(ASSETS / "page.html")).encode()


def joined_script() -> str:
    """Return the modules of the script as one."""
    return "".join(_EXPORT.sub("", _IMPORT.sub("", _lean(packaged(ASSETS / f"{name}.js")))) for name in SCRIPTS)


def _lean(text: str) -> str:
    """Return a script or a style without comments that stand by themselves, blank lines, and blanks around lines."""
    return _SPACE.sub("\n", _COMMENT.sub("", text)).lstrip()


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
