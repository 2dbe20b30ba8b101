"""``ckptool scan``: its options, its files of rows, its totals; the rows are made in ``checking/scan``."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import click

import ckptool.system as system
from ckptool.arguments import UTF_16_MARKS, as_utf8
from ckptool.checking.policy import EXIT_CODES, Policy
from ckptool.checking.scan import ENDED, SAME, SCHEMA, SCHEMA_OF_TENSORS, Rows, ScanOptions, is_other, lost_row
from ckptool.cli.check import gate_options, policy_of
from ckptool.cli.options import AnyPath, RayCommand, ray_option, reach_options
from ckptool.cli.pool import MOST_ITEMS, Lost, Pool, Processes
from ckptool.cli.printing import UNREADABLE, Totals, left_out, print_json
from ckptool.cli.text import painted, say, terminal_width
from ckptool.cli.verbs import flag
from ckptool.errors import NotACheckpoint
from ckptool.formats.listing import Listing, Target, refuse_others
from ckptool.messages import counted, labelled, show, show_nbytes
from ckptool.migration.output.lines import Lines, need_parquet, write_parquet
from ckptool.sources.checksums import processors
from ckptool.sources.files import packaged
from ckptool.sources.paths import is_relative, is_remote, is_same_file, shown_path
from ckptool.sources.versions import stamp_of

_HEAD: Final = f'{{"schema": "{SCHEMA}", '.encode()
_HEAD_OF_TENSOR: Final = f'{{"schema": "{SCHEMA_OF_TENSORS}", '.encode()
_PASSING: Final = (ENDED, "out-of-memory", "permission", "source-changed", "missing-package", "unfinished-edit")
"""Kinds of errors that may be gone at the next try, though the file stays the same."""

_NO_ROW: Final = "no row of scan"
CONNECTIONS: Final = 64
_CONNECTIONS_HELP: Final = f"Read N files far away at once, over all processes; by default {CONNECTIONS}."
_ROUNDS: Final = 4
"""Remote files in a batch for each that a process reads at once: so few connections wait for the last file."""


@click.command(cls=RayCommand)
@click.argument("paths", nargs=-1, metavar="PATH...", type=AnyPath())
@click.option(
    "--from",
    "listed",
    type=click.File("rb"),
    metavar="LIST",
    help="Also take the paths in the file LIST, one on each line.",
)
@click.option(
    "-o",
    "--output",
    type=AnyPath(),
    metavar="FILE",
    help="Append lines to FILE, and skip checkpoints that it already has.",
)
@flag("--check", says="Look at every pickle and container, as 'check' does.")
@flag("--deep", says="Read every byte, and compare it with the checksums.")
@flag("--digest", says="Read the file, and add its SHA-256 and the digest of its weights, the same in any form.")
@gate_options("nothing")
@flag("--summary", says="Print only what all come to.")
@flag("--json", "as_json", says="Print the summary as a JSON object.")
@click.option("--tensors", type=AnyPath(), metavar="FILE", help="Append a line for each tensor to FILE.")
@flag("--parquet", says="At the end, also write the files of -o and --tensors as tables.")
@click.option(
    "--jobs", type=click.IntRange(1, 1024), metavar="N", help="Processes to use; by default as many as cores."
)
@click.option(
    "--connections", "files", type=click.IntRange(1, 256), default=CONNECTIONS, metavar="N", help=_CONNECTIONS_HELP
)
@ray_option("Work")
@reach_options
def scan(paths: tuple[str, ...], listed: BinaryIO | None, **options: Any) -> None:
    """
    Print a line of JSON for every checkpoint in folders and below.

    To fail on what is found, say on what (--fail-on, --policy), or use 'check', which does by itself. On a terminal,
    what is printed is a table.

    PATH is a folder, a checkpoint of any kind, an address of either, or '-' for a list of them on standard input.
    Nothing in them runs. A file that cannot be opened has a line that says why, and does not stop the scan. Exit codes:
    1, a file fails; 2, none does, and one could not be opened.
    """
    lists = [listed] if listed is not None else []
    if "-" in paths:
        lists.append(sys.stdin.buffer)
    if not (paths or lists):
        raise click.MissingParameter(param_type="argument", param_hint="'PATH...'")
    if options["as_json"] and not options["summary"]:
        raise click.UsageError("--json is the form of --summary: rows are lines of JSON in any case.")
    policy = policy_of(options)
    options["check"] |= policy is not None  # a gate inspects everything
    asked = ScanOptions(**{name: bool(options[name]) for name in ScanOptions._fields})
    if options["parquet"]:
        if not (options["output"] or options["tensors"]):
            raise click.UsageError("--parquet writes what is in the files of -o and --tensors: give one of them.")
        need_parquet()
    pool: Pool = Processes(options["jobs"] or processors())
    if options["ray"]:
        from ckptool.cli.on_ray import OnRay  # most scans are of this machine

        pool = OnRay(options["ray"], options["jobs"])
    with ExitStack() as files:
        lines, tensors = (
            path and files.enter_context(Lines(path, head))
            for path, head in ((options["output"], _HEAD), (options["tensors"], _HEAD_OF_TENSOR))
        )
        run = _Run(asked, lines, tensors, policy, is_summary=options["summary"])
        with pool:
            run.scan(_paths(paths, lists), pool, options["files"])
        if options["parquet"]:
            for one, name in ((lines, "scan"), (tensors, "tensors")):
                if one is not None:
                    _write_table(one, json.loads(packaged(Path(__file__).parent / "schemas" / f"{name}.json")))
    run.say_totals(paths, as_json=options["as_json"])
    sys.exit(run.exit_code)


def _paths(paths: Iterable[str], lists: Iterable[BinaryIO]) -> Iterator[str]:
    yield from (path for path in paths if path != "-")
    for stream in lists:  # their lines are taken as they come; with a mark of UTF-16, as PowerShell writes it, at once
        first = stream.readline()
        is_wide = first.startswith(UTF_16_MARKS)
        lines = as_utf8(first + stream.read()).splitlines() if is_wide else chain([as_utf8(first)], stream)
        for path in (system.listed_path(line.rstrip(b"\r\n")) for line in lines):
            if path:
                yield AnyPath().convert(path, None, click.get_current_context())


class _Known(NamedTuple):
    """What this run needs of a row from an earlier run."""

    beside: Sequence[str]
    exit_code: int


class _Run:
    """One run: its options, and its results so far."""

    def __init__(
        self,
        asked: ScanOptions,
        lines: Lines | None,
        tensors: Lines | None,
        policy: Policy | None,
        *,
        is_summary: bool,
    ) -> None:
        self._asked = asked
        self._policy = policy
        self._is_summary = is_summary
        self._is_table = lines is None and sys.stdout.isatty()
        self._codes = {0}
        self._tensors = tensors
        if tensors is not None:
            deque(tensors, maxlen=0)  # reading removes a line that was cut off
        self._lines = lines
        self._unfinished: set[int] = set()
        """Hashes of paths whose row has an error that may be gone by now, so they get a new row."""
        self._versions: dict[int, str] = {}
        """Versions in rows of remote files, by hash of the path; only the server knows whether they have changed."""
        self._known = self._read(lines) if lines is not None else {}
        self._listing = Listing(())
        self._totals = Totals()
        self._printed = sys.stdout.buffer
        self._rows = self._skipped = self._passed = self._skipped_failed = 0

    def _read(self, lines: Lines) -> dict[int, _Known]:
        """Return the rows of an earlier run that have all that is requested now, by hash of path and version."""
        found: dict[int, _Known] = {}
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                path, version, beside, error = (row[name] for name in ("path", "version", "beside", "error"))
                kind, columns = error and error["kind"], set(row["asked"])
                exit_code = _exit_code(row)
                is_judged = self._policy is None or row.get("gate", {}).get("policy") == self._policy.identity
            except (ValueError, KeyError, TypeError) as cause:
                raise lines.foreign(number, _NO_ROW) from cause
            if kind in _PASSING:
                self._unfinished.add(hash(path))
            elif version is not None and set(self._asked.columns) <= columns and is_judged:
                if is_remote(path):
                    self._versions[hash(path)] = version
                found[hash((path, version))] = _Known(beside or (), exit_code)
        return found

    @property
    def exit_code(self) -> int:
        """1 if anything failed, in this run or an earlier one; else 2 if anything could not be opened."""
        return 1 if 1 in self._codes else max(self._codes)

    def scan(self, paths: Iterable[str], pool: Pool, connections: int) -> None:
        """Scan the checkpoints that have no row yet, and print their rows as they come."""
        self._listing = Listing(paths)
        threads = -(-connections // pool.workers)
        # Files that are read completely take long each; of remote files, many are read at once.
        most = 1 if self._asked.deep or self._asked.digest else MOST_ITEMS
        for answers in pool.answers(
            Rows(self._asked, threads, self._policy),
            self._next,
            least=lambda place: _ROUNDS * threads if is_remote(place.path) else 1,
            most=most,
            starts_here=lambda place: is_relative(place.path),
        ):
            rows: list[bytes] = []
            of_tensors: list[bytes] = []
            for place, answer in answers:
                if isinstance(answer, Lost):
                    answer = json.dumps(lost_row(place.path, self._asked, answer.kind, answer.message)).encode()
                if answer.startswith(_HEAD_OF_TENSOR):
                    of_tensors.append(answer)
                elif answer == SAME:
                    self._skip(self._known[hash((shown_path(place.path), place.known))])
                elif self._is_counted(answer, is_meant=place.is_meant):
                    rows.append(answer)
            self._write(rows, of_tensors)

    def _next(self) -> Target | None:
        """Return the next checkpoint that has no row yet; None if there is none at the moment."""
        while (target := self._listing.next()) is not None:
            is_here = not is_remote(target.path)
            if is_here and self._lines is not None and is_same_file(target.path, self._lines.path):
                continue
            if not self._known:
                return target
            stamp = stamp_of(target.path)
            identity = hash((target.shown, stamp and stamp.version))
            if identity in self._known:
                self._skip(self._known[identity])
                continue
            return target._replace(known=None if is_here or stamp else self._versions.get(hash(target.shown)))
        return None

    def _skip(self, known: _Known) -> None:
        self._skipped += 1
        self._skipped_failed += known.exit_code == 2
        self._codes.add(known.exit_code)
        self._listing.add(known.beside)

    def _write(self, rows: Sequence[bytes], of_tensors: Sequence[bytes]) -> None:
        """Write rows, those of tensors first: so a checkpoint that has its row has those of its tensors."""
        if of_tensors and self._tensors is not None:
            self._tensors.append(of_tensors)
        if rows and self._lines is not None:
            self._lines.append(rows)
        elif rows and self._is_table and not self._is_summary:
            if len(rows) == self._rows:
                say(_in_columns(*_HEADERS))
            say("\n".join(map(_shown, rows)))
        elif rows and not self._is_summary:
            self._printed.write(b"".join(b"%b\n" % row for row in rows))
            self._printed.flush()

    def _is_counted(self, line: bytes, *, is_meant: bool) -> bool:
        """Count a row, unless it is of a file that is not a checkpoint; return whether it was counted."""
        row = json.loads(line)
        error = row["error"]
        self._listing.add(row["beside"] or ())
        if is_other(row, is_meant=is_meant) and hash(row["path"]) not in self._unfinished:
            self._passed += 1
            self._totals.passed_over(row["path"])
            return False
        self._rows += 1
        self._codes.add(_exit_code(row))
        gate = row.get("gate") or {"outcome": "", "failing": (), "let_through": {}}
        self._totals.let_through(gate["let_through"])
        if gate["outcome"] == "fails":
            say(f"fails  {show(row['path'])}: {', '.join(gate['failing']) or (error or row)['message']}", err=True)
        is_pointer = error and error["kind"].endswith("-pointer") and gate["outcome"] in ("", "unknown")
        if error and (is_pointer or gate["outcome"] == "other"):
            self._totals.other(row["path"], error["kind"])
        if error and (is_pointer or gate["outcome"] in ("other", "passes")):
            return True
        word = row["worst"] if row["worst"] in ("warning", "error") else "fine"
        facts = {"formats": row["format"], "grades": row["grade"]}
        if self._is_summary:
            writer = row["writer"]
            facts |= {"forms": row["form"], "frameworks": writer and writer["name"]}
        self._totals.count(UNREADABLE if error else word, 0 if error else row["nbytes"], **facts)
        return True

    def say_totals(self, paths: Iterable[str], *, as_json: bool) -> None:
        """
        Print the totals on standard error; on standard output, if only they are requested.

        Raises:
            NotACheckpoint: There are files, and none is a checkpoint; or no path was given at all.
        """
        if not (self._passed or self._rows or self._skipped):
            raise NotACheckpoint("nothing to scan: the list of paths is empty", kind="no-checkpoint")
        if self._passed and not (self._rows or self._skipped):
            refuse_others(self._passed, paths)
        if as_json:
            print_json(self._totals.object())
            return
        for line in (*self._totals.lines(), *left_out(self._listing.passed)):
            say(line, err=not self._is_summary)
        if self._skipped:
            failed = f", {self._skipped_failed:,} of them not opened" if self._skipped_failed else ""
            fact = f"{counted(self._skipped, 'checkpoint')} that the file has already{failed}"
            say(labelled("skipped", fact), err=True)


def _exit_code(row: dict[str, Any]) -> int:
    """Return 1 for the row of a file that fails, 2 if it could not be opened; 0 if a policy lets it pass."""
    outcome = (row.get("gate") or {}).get("outcome", "unknown" if row["error"] else "passes")
    return EXIT_CODES.get(outcome, 0)


_HEADERS: Final = ("", "grade", "format", "form", "parameters", "size", "file")


def _in_columns(word: str, grade: str, format_: str, form: str, parameters: str, size: str, path: str) -> str:
    """Return a line of a table, the path last: it may be long."""
    line = f"{word:<7}  {grade:<7}  {format_:<12}  {form:<10}  {parameters:>10}  {size:>9}  {path}"
    width = terminal_width()
    return f"{line[: width - 1]}…" if width is not None and len(line) > width else line


def _shown(line: bytes) -> str:
    row = json.loads(line)
    word = "error" if row["error"] else row["worst"] or "fine"
    size = show_nbytes(row["nbytes"]) if row["nbytes"] is not None else ""
    parameters = "" if row["parameters"] is None else f"{row['parameters']:,}"
    path = f"{row['path']}: {row['error']['message']}" if row["error"] else row["path"]
    text = _in_columns(word, row["grade"], row["format"] or "", row["form"] or "", parameters, size, show(path))
    return f"{painted(word)}{text[len(word) :]}"


def _write_table(lines: Lines, schema: dict[str, Any]) -> None:
    """
    Write the latest rows of each path in a file of lines to a table beside it: ``rows.parquet`` for ``rows.jsonl``.

    Raises:
        OutputFailed: It cannot be written, or lines are not rows.
    """
    latest: dict[int, int] = {}
    for row in _rows(lines):
        key = hash(row["path"])
        latest[key] = max(row["scanned_ns"], latest.get(key, 0))
    rows = (row for row in _rows(lines) if row["scanned_ns"] == latest[hash(row["path"])])
    write_parquet(f"{lines.path.removesuffix('.jsonl')}.parquet", rows, schema)


def _rows(lines: Lines) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row["path"], row["scanned_ns"] + 0
        except (ValueError, KeyError, TypeError) as error:
            raise lines.foreign(number, _NO_ROW) from error
        yield row
