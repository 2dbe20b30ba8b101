"""
``Result``, what a verb found out about one file; prints it as text, lines, rows, JSON or SARIF.

A verb makes a ``Result`` of each file. An ``Output`` prints it, whatever the verb; ``output_for`` chooses one by the
options. JSON is printed piece by piece, so that a long one is never in memory as a whole: escapes may make a text of
the file six times as long. SARIF is 2.1.0, for code hosts: https://docs.oasis-open.org/sarif/sarif/v2.1.0/.
"""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO, TypeAlias

import click

from ckptool import __version__
from ckptool.checking.finding import CODES
from ckptool.cli.text import (
    ProgressLine,
    error_text,
    no_room,
    pager,
    painted,
    say,
    say_sections,
    terminal_width,
    with_options,
)
from ckptool.errors import CkptoolError
from ckptool.formats import listing
from ckptool.formats.listing import Target, targets
from ckptool.messages import counted, counts, labelled, not_looked_into, show, show_nbytes, some
from ckptool.sections import Section, Table, padded

if TYPE_CHECKING:
    from ckptool.checking.finding import Finding


class Result:
    """What a verb has found out about one file. Properties are computed only if an output needs them."""

    error: CkptoolError | None = None
    otherwise: str = "fine"
    """The word for the file if nothing is wrong with it."""
    format: str | None = None
    nbytes: int = 0
    grade: str | None = None
    exit_code: int = 0
    failing: Sequence[Finding] = ()
    """The findings that make the file fail."""
    let_through: Sequence[tuple[Finding, str]] = ()
    """Findings that do not count, each with the reason."""

    def __init__(self, path: str) -> None:
        self.path = path
        """As given on the command line."""

    @property
    def findings(self) -> Sequence[Finding]:
        """Return what is notable about the file."""
        return ()

    @property
    def word(self) -> str:
        """Return one word for the file: the worst of "error" and "warning" that it has, else ``otherwise``."""
        found = {"error"} if self.error is not None else {one.severity for one in self.findings}
        return next((one for one in _PAINTED if one in found), self.otherwise)

    @property
    def is_other(self) -> bool:
        """Return whether it did not open because it is not a checkpoint, which is not a failure."""
        return self.error is not None and not self.exit_code and not self.is_let_through

    @property
    def is_let_through(self) -> bool:
        """Return whether the policy lets through that it did not open."""
        return self.error is not None and any(one.code == UNREADABLE for one, _ in self.let_through)

    @property
    def counted_as(self) -> str:
        """Return the word that the file is counted under in a total."""
        return UNREADABLE if self.error is not None else self.word

    @property
    def note(self) -> str | None:
        """What is printed on standard error if standard output is to be pasted or parsed."""
        return None

    def sections(self) -> Iterable[Section]:
        """Return the sections for people, but for the error."""
        return ()

    def cells(self) -> Sequence[str]:
        """Return what is in its line: one text, or the text of each column."""
        return [f"not opened: {self.error.message}"] if self.error is not None else []

    def table(self, *, is_raw: bool) -> Table | None:  # noqa: ARG002 - of the verbs that have one
        """Return its table; with ``is_raw``, for programs, values are not formatted."""
        return None

    def object(self) -> dict[str, object]:
        """Return the object for programs."""
        raise NotImplementedError


class Failed(Result):
    """An error in place of a result; ``head`` are the fields before it in its object."""

    exit_code = 2

    def __init__(self, path: str, error: CkptoolError, /, **head: object) -> None:
        super().__init__(path)
        self.error = error
        self._head = head

    def object(self) -> dict[str, object]:
        """Return the error, and which file it is about."""
        return with_hints({**self._head, "error": self.error and self.error.as_dict()})


class Column(NamedTuple):
    """One column of the lines for files; ``room`` is its width."""

    header: str
    room: int
    is_number: bool
    from_width: int
    """Width of a terminal from which on there is room for it."""


Look: TypeAlias = Callable[[Target, ProgressLine], AbstractContextManager["Result | None"]]
"""Opens a target, and yields its result; None if it is passed over."""


def say_each(
    files: Sequence[str],
    options: dict[str, Any],
    look: Look,
    failed: Callable[[Target, CkptoolError], Result | None],
    *,
    columns: Sequence[Column] = (),
    has_totals: bool = True,
    is_bare: bool = False,
) -> int:
    """
    Print what is found in each of the files that paths stand for. Return the exit code: 1 if that of any is, else the
    highest.

    Raises:
        NotACheckpoint: There are files, and none is a checkpoint.
    """
    unseen: list[str] = []
    found = targets(files, recursive=options["recursive"], passed=unseen)
    codes, passed = {0}, 0
    with pager(asked=options["pager"]), written(options["output"]) as stream:
        # A pattern or a folder stands for several files, even if only one is there.
        paths, is_list = [one.shown for one in found], [one.path for one in found] != list(files[:1])
        for_people = {**options, **dict.fromkeys(_FORMAL, False)} if stream is not None else options
        printed = output_for(
            for_people, paths, is_list=is_list, columns=columns, has_totals=has_totals, is_bare=is_bare
        )
        outputs = [printed]
        if stream is not None:
            outputs.append(output_for(options, paths, is_list=is_list, stream=stream))
        line = ProgressLine(len(found), shown=printed.shows_progress)

        def add(result: Result | None) -> None:
            line.clear()
            for output in outputs:
                if result is not None:
                    output.add(result)

        for target in found:
            line.next(target.path)
            try:
                with look(target, line) as result:
                    add(result)
            except CkptoolError as error:
                line.clear()
                result = failed(target, error)
                add(result)
            if result is None:
                passed += 1
                printed.passed_over(target.shown)
            else:
                codes.add(result.exit_code)
                passed += options["recursive"] and result.is_other  # in a folder, such a file was not inspected
        for output in outputs:
            output.end()
    for text in left_out(unseen):
        say(text, err=True)
    if found and passed == len(found):
        listing.refuse_others(passed, files)
    return 1 if 1 in codes else max(codes)


_FORMAL: Final = ("as_json", "as_lines", "as_sarif")
"""Options of the output for programs."""


def output_for(
    options: Mapping[str, Any],
    paths: Sequence[str],
    *,
    is_list: bool,
    columns: Sequence[Column] = (),
    has_totals: bool = True,
    is_bare: bool = False,
    stream: TextIO | None = None,
) -> Output:
    """
    Return the output that the options ask for; if ``is_bare``, people get only what was requested. What is for programs
    goes to the ``stream``, or to standard output.
    """
    if options["as_json"] or options.get("as_lines"):
        return Json(as_lines=bool(options.get("as_lines")), is_list=is_list, stream=stream)
    if options.get("as_sarif"):
        return Sarif(stream)
    if options.get("table_format") is not None:
        return Rows(options["table_format"], has_paths=is_list)
    if is_bare:
        return Text(None, None, is_bare=True)
    width = None if options.get("wide") else terminal_width()
    totals = Totals(whole=width is None)
    if options.get("brief"):
        return Brief(paths, width, columns, totals, is_quiet=bool(options.get("quiet")))
    if options.get("quiet") and has_totals and "fail_on" in options:
        return ByCode(width, totals)
    return Text(width, totals if has_totals else None)


class Output:
    """One way to print results."""

    shows_progress = True
    totals: Totals | None = None

    def add(self, result: Result) -> None:
        """Print what was found in a file."""
        raise NotImplementedError

    def passed_over(self, path: str) -> None:
        """Note that a file among many is not a checkpoint."""
        if self.totals is not None:
            self.totals.passed_over(path)

    def end(self) -> None:
        """Print what follows all files."""


@contextmanager
def written(path: str | None) -> Iterator[TextIO | None]:
    """Open the file of -o, which gets its name when it is complete; of files with that name, only JSON is replaced."""
    if path is None:
        yield None
        return

    from ckptool.migration.output import Output as File
    from ckptool.migration.output.lines import OutputStream, refuse_others

    refuse_others(path, (b"", b"{", b"["), "JSON")
    with File(path, force=True, shown=path) as file:
        stream = io.TextIOWrapper(io.BufferedWriter(OutputStream(file)), "utf-8")
        yield stream
        stream.flush()
        file.publish()


class Text(Output):
    """For people: all about each file. If ``is_bare``, to be pasted: only what was requested."""

    def __init__(self, width: int | None, totals: Totals | None, *, is_bare: bool = False) -> None:
        self._width = width
        self.totals = totals
        self._is_bare = is_bare
        self._begun = False
        self.shows_progress = not is_bare

    def add(self, result: Result) -> None:
        if self.totals is not None:  # else the file's word need not be computed
            self.totals.add(result)
        if result.is_other and result.error is not None:
            say(f"{show(result.path)}: passed over: {show(result.error.message)}")
            return
        if result.error is not None and not result.is_let_through:
            say(error_text(result.error), err=True)
        if self._is_bare and result.note is not None:
            say(show(result.note), err=True)
        gap = [""] if self._begun and not self._is_bare else []
        self._begun |= say_sections(result.sections(), self._width, gap)

    def end(self) -> None:
        if self.totals is not None and self.totals.files > 1:
            say_sections(self.totals.lines(), self._width)


class Brief(Output):
    """A line for each file, as soon as it is known: a word, its path, and a text or columns. At the end, a total."""

    def __init__(
        self,
        paths: Iterable[str],
        width: int | None,
        columns: Sequence[Column],
        totals: Totals,
        *,
        is_quiet: bool = False,
    ) -> None:
        self._width = width
        self.totals: Totals = totals
        self._is_quiet = is_quiet
        self._columns = columns
        self._shown = [index for index, one in enumerate(columns) if width is None or width >= one.from_width]
        longest = max((len(show(path)) for path in paths), default=0)
        rest = sum(columns[index].room + len(_GAP) for index in self._shown) or int(_SHARE_OF_TEXT * (width or 0))
        most = longest if width is None else max(_SHORTEST_PATH, width - _WORD - len(_GAP) - rest)
        self._room = min(longest, most)
        if columns:
            self._say("", "file", self._in_columns([one.header for one in columns]))

    def add(self, result: Result) -> None:
        self.totals.add(result)
        if self._is_quiet and not result.exit_code:
            return
        cells = result.cells()
        is_text = result.error is not None or not self._columns
        word = "other" if result.error and not result.exit_code else result.word
        if self._columns and word == result.otherwise:  # as for nearly all files
            word = ""
        self._say(word, result.path, "; ".join(cells) if is_text else self._in_columns(cells), is_text=is_text)

    def end(self) -> None:
        left = [one.header for index, one in enumerate(self._columns) if index not in self._shown]
        say_sections([*self.totals.lines(), *([no_room(left)] if left else [])], self._width)

    def _in_columns(self, cells: Sequence[str]) -> str:
        shown = (padded(cells[at], self._columns[at].room, right=self._columns[at].is_number) for at in self._shown)
        return _GAP.join(shown)

    def _say(self, word: str, path: str, text: str, *, is_text: bool = False) -> None:
        """Print a line: with a text, the word comes first; with columns, the path is first and the word last."""
        shown, room = show(path), self._room
        if self._width is not None and len(shown) > room:  # the end of a path tells it from others
            shown = f"…{shown[len(shown) - room + 1 :]}"
        path, text = padded(shown, room), show(with_options(text))
        if not self._columns:
            before, after = "", f"{' ' * (_WORD - len(word))}{_GAP}{path}{_GAP}{text}"
        elif is_text:
            before, after = f"{path}{_GAP}", f"{_GAP}{text}"
        else:
            before, after = f"{path}{_GAP}{text}{_GAP}", ""
        line = f"{before}{word}{after}".rstrip()
        if self._width is not None and len(line) > self._width:
            line = f"{line[: self._width - 1]}…"
        end = len(before) + len(word)
        say(f"{before}{painted(word)}{line[end:]}" if word and end < len(line) + (not after) else line)


_WORD: Final = 7
_PAINTED: Final = ("error", "warning")
_GAP: Final = "  "
_SHORTEST_PATH: Final = 20
_SHARE_OF_TEXT: Final = 0.6
"""The text's share of the width of a terminal, at least."""


class ByCode(Output):
    """Only what makes files fail, by its code, and what cannot be opened; at the end, a total."""

    def __init__(self, width: int | None, totals: Totals) -> None:
        self._width = width
        self.totals: Totals = totals
        self._found: dict[str, list[str]] = {}
        self._levels: dict[str, str] = {}

    def add(self, result: Result) -> None:
        self.totals.add(result)
        if not result.exit_code:
            return
        failing = [(one.code, one.severity, one.path, one.message) for one in result.failing]
        if result.error is not None:
            failing.append((_NOT_OPENED, "error", None, result.error.message))
        for code, severity, path, message in failing or [("", "error", None, f"loading it reaches {result.grade}")]:
            self._levels[code] = "error" if severity == "error" else self._levels.get(code, severity)
            self._found.setdefault(code, []).append(f"  {show(path or result.path)}: {show(with_options(message))}")

    def end(self) -> None:
        lines: list[Section] = []
        for code in sorted(self._found, key=lambda one: (self._levels[one] != "error", one == _NOT_OPENED, one)):
            says = CODES[code].says.removesuffix(".") if code in CODES else ""
            what = f"{self._levels[code]:<{_WORD}}{_GAP}{code}{' ' if says else ''}{says}"
            lines += [f"{what} ({len(self._found[code]):,})", *self._found[code]]
        say_sections([*lines, *(self.totals.lines() if self.totals.files > 1 else ())], self._width)


class Rows(Output):
    """A table to be pasted or parsed: that of one file; of several, the rows of all, each with its path first."""

    def __init__(self, table_format: str, *, has_paths: bool) -> None:
        self._format = table_format
        self._has_paths = has_paths
        self._tables: list[tuple[str, Table]] = []

    def add(self, result: Result) -> None:
        if result.error is not None:
            say(error_text(result.error), err=True)
            return
        if result.note is not None:
            say(f"{show(result.path)}: {result.note}" if self._has_paths else result.note, err=True)
        from ckptool.cli.tables import RAW_FORMATS

        table = result.table(is_raw=self._format in RAW_FORMATS)
        assert table is not None  # verbs without one have no such option
        self._tables.append((show(result.path), table))

    def end(self) -> None:
        if self._tables:
            from ckptool.cli.tables import formatted_table

            _, (headers, _, numbers, _) = self._tables[0]
            rows = [row for _, table in self._tables for row in table.rows]
            if self._has_paths:
                headers, numbers = ["path", *headers], [False, *numbers]
                rows = [[path, *row] for path, table in self._tables for row in table.rows]
            say(formatted_table(headers, rows, numbers, self._format))


class Json(Output):
    """The objects of files, as they come: one on each line, all in a list, or the only one by itself."""

    shows_progress = False

    def __init__(self, *, as_lines: bool, is_list: bool, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._as_lines = as_lines
        self._is_list = is_list
        self._printed = 0

    def add(self, result: Result) -> None:
        stream = self._stream or sys.stdout
        if self._as_lines:
            print_json(result.object(), stream)
        else:
            stream.write((", " if self._printed else "[") if self._is_list else "")
            stream.writelines(_pieces(result.object(), _DEPTH))
        self._printed += 1

    def end(self) -> None:
        if not self._as_lines:
            click.echo(("]" if self._printed else "[]") if self._is_list else "", self._stream)


class Sarif(Output):
    """The findings of all files in one document."""

    shows_progress = False

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._results: list[dict[str, object]] = []

    def add(self, result: Result) -> None:
        for one in result.findings:
            self._add(one.code, _LEVELS[one.severity], one, one.path or result.path)
        for one, why in result.let_through:
            self._add(one.code, _LEVELS[one.severity], one, one.path or result.path, why)
        if result.error is not None and not result.is_let_through:
            self._add(UNREADABLE, "note" if result.is_other else "error", result.error, result.path)

    def _add(self, code: str, level: str, what: Finding | CkptoolError, path: str, why: str | None = None) -> None:
        found: dict[str, object] = {
            "ruleId": code,
            "level": level,
            "message": {"text": with_options(f"{what.message}. {what.hint}" if what.hint else what.message)},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(path)}}}],
        }
        if why is not None:
            found["suppressions"] = [{"kind": "external", "status": "accepted", "justification": why}]
        self._results.append(found)

    def end(self) -> None:
        says = {code: entry.says for code, entry in CODES.items()} | {UNREADABLE: "The file cannot be opened."}
        rules = [{"id": one, "shortDescription": {"text": text}, "helpUri": _HELP} for one, text in says.items()]
        driver = {"name": "ckptool", "version": __version__, "rules": rules}
        print_json(
            {
                "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
                "version": "2.1.0",
                "runs": [{"tool": {"driver": driver}, "results": self._results}],
            },
            self._stream,
        )


def _uri(path: str) -> str:
    """Return a path as a URI reference, with all but plain characters escaped; one with a drive as a complete URI."""
    found = Path(path)
    if found.drive and found.is_absolute():
        return found.as_uri()
    plain = f"{ascii_letters}{digits}-._~/".encode()
    octets = os.fsencode(found.as_posix())
    return "".join(chr(one) if one in plain else f"%{one:02X}" for one in octets)


_LEVELS: Final = {"info": "note", "warning": "warning", "error": "error"}
UNREADABLE: Final = "unreadable"
"""The code for files that cannot be opened."""
_HELP: Final = "https://pypi.org/project/ckptool/"
"""The page of the package, which leads to the list of codes."""


_NOT_OPENED: Final = "not opened"
_LAST: Final = {"warning": "with warnings", "error": "with errors", UNREADABLE: _NOT_OPENED}
"""The words that come last in a total, and what is said there."""
SUMMARY_SCHEMA: Final = "ckptool.summary/1"
_GRADES: Final = ("data", "program", "code", "system", "unknown")
_FACTS: Final = ("formats", "grades", "forms", "frameworks")
_NAMED: Final = 4
"""Most names of files that were passed over, and are shown."""


class Totals:
    """The totals of all files of a verb. ``whole`` names all files that were passed over."""

    def __init__(self, *, whole: bool = False) -> None:
        self._named = sys.maxsize if whole else _NAMED
        self._found: Counter[str] = Counter()
        self._facts: dict[str, Counter[str]] = {}
        self._nbytes = 0
        self._passed = 0
        self._others: list[str] = []
        """The paths of the first files that were passed over."""
        self._pointers: list[str] = []
        self._said_to_be_others = 0
        self._let_through: Counter[str] = Counter()

    @property
    def files(self) -> int:
        """How many files were counted, or are something else."""
        return self._found.total() + self._said_to_be_others

    def add(self, result: Result) -> None:
        """Count a file."""
        self.let_through(Counter(one.code for one, _ in result.let_through))
        if result.is_other and result.error is not None:
            self.other(result.path, result.error.kind)
        elif result.is_let_through:
            self._said_to_be_others += 1
        else:
            self.count(result.counted_as, result.nbytes, formats=result.format, grades=result.grade)

    def count(self, word: str, nbytes: int, **facts: str | None) -> None:
        """Count a file under a word for its state and, as far as they are known, by its facts."""
        self._found[word] += 1
        self._nbytes += nbytes
        for name, value in facts.items():
            if value is not None:
                self._facts.setdefault(name, Counter())[value] += 1

    def other(self, path: str, kind: str) -> None:
        """Count a file that cannot be opened, but is not at fault: a pointer, or no checkpoint."""
        self._said_to_be_others += 1
        if kind.endswith("-pointer"):
            self._pointers.append(show(path))
        else:
            self.passed_over(path)

    def let_through(self, codes: Mapping[str, int]) -> None:
        """Count findings that do not count, by code."""
        self._let_through.update(codes)

    def passed_over(self, path: str) -> None:
        """Count a file that is not a checkpoint, and that the caller did not name as one."""
        self._passed += 1
        if len(self._others) < self._named:
            self._others.append(show(path))

    def lines(self) -> Iterator[str]:
        """Yield the totals."""
        words = [word for word in self._found if word not in _LAST] + [word for word in _LAST if word in self._found]
        how = ", ".join(f"{self._found[word]:,} {_LAST.get(word, word)}" for word in words)
        yield ""
        size = f", {show_nbytes(self._nbytes)}" if self._nbytes else ""
        yield f"{counted(self._found.total(), 'checkpoint')}{size}{': ' if how else ''}{how}"
        for name, found in ((name, self._facts[name]) for name in _FACTS if name in self._facts):
            rank = _GRADES.index if name == "grades" else lambda one: -found[one]  # noqa: B023 - it is called here
            yield labelled(name, counts({one: found[one] for one in sorted(sorted(found), key=rank)}))
        if self._passed:
            rest = self._passed - len(self._others)
            more = f" and {rest:,} more" if rest else ""
            what = f"{counted(self._passed, 'file')} of other kinds"
            yield labelled("passed over", f"{what}: {', '.join(self._others)}{more}")
        if self._pointers:
            what = f"{counted(len(self._pointers), 'pointer')} in the place of files that were not fetched"
            yield labelled("not here", f"{what}: {some(self._pointers, _NAMED)}")
        if self._let_through:
            yield labelled("let through", f"by the policy: {counts(dict(sorted(self._let_through.items())))}")

    def object(self) -> dict[str, object]:
        """Return the totals for programs."""
        facts = {name: dict(self._facts.get(name, {})) for name in _FACTS}
        return {
            "schema": SUMMARY_SCHEMA,
            "checkpoints": self._found.total(),
            "nbytes": self._nbytes,
            "severities": dict(self._found),
            **facts,
            "passed_over": self._passed,
            "not_here": len(self._pointers),
            "let_through": dict(self._let_through),
        }


def left_out(folders: Sequence[str]) -> Iterator[str]:
    """Yield a line about folders that were not searched, if there are any."""
    if folders:
        yield labelled("left out", not_looked_into(folders))


_DEPTH: Final = 2
"""Levels of an object that are printed in pieces: its members, and theirs."""


def print_json(found: object, stream: TextIO | None = None) -> None:
    """Print a value as one line of ASCII."""
    (stream or sys.stdout).writelines(_pieces(found, _DEPTH))
    click.echo("", stream)


def _pieces(found: object, depth: int) -> Iterator[str]:
    import json  # takes milliseconds, and is rarely requested

    if depth and isinstance(found, dict):
        for number, (key, value) in enumerate(found.items()):
            yield f"{', ' if number else '{'}{json.dumps(key)}: "
            yield from _pieces(value, depth - 1)
        yield "}" if found else "{}"
    elif depth and isinstance(found, list | tuple | Iterator):
        yield "["
        for number, value in enumerate(found):
            yield ", " if number else ""
            yield from _pieces(value, depth - 1)
        yield "]"
    else:
        yield json.dumps(found, ensure_ascii=True, allow_nan=False)


def with_hints(found: dict[str, Any]) -> dict[str, Any]:
    """Return an object whose hints, and those of its findings, are spelled as on the command line."""
    for one in (found, found.get("error") or {}, *found.get("findings", ())):
        for name in _IN_OPTIONS & one.keys():
            said = one[name]
            one[name] = list(map(with_options, said)) if isinstance(said, list) else said and with_options(said)
    return found


_IN_OPTIONS: Final = frozenset(("hint", "verdict", "loading"))
