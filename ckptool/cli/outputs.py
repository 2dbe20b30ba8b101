"""
How verbs say what they have found out about files: as text, a line for each, rows, JSON or SARIF.

A verb makes a ``Result`` of each file. What says it knows no verb, and ``output_for`` chooses by the options. JSON is
printed piece by piece, so that a long one is never in memory as a whole: a text of the file's may become six times as
long by its escapes. SARIF is 2.1.0, for code hosts: https://docs.oasis-open.org/sarif/sarif/v2.1.0/.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import click

from ckptool import __version__
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
from ckptool.formats.listing import Target, is_many, refuse_none, targets
from ckptool.messages import counted, counts, labelled, show, show_nbytes, some
from ckptool.sections import Section, Table, padded

if TYPE_CHECKING:
    from ckptool.checking.finding import Finding


class Result:
    """What a verb has found out about one file. What no output asks for is not worked out."""

    error: CkptoolError | None = None
    otherwise: str = "fine"
    """How it is where nothing is wrong with it."""
    format: str | None = None
    nbytes: int = 0
    grade: str | None = None
    exit_code: int = 0

    def __init__(self, path: str) -> None:
        self.path = path
        """As it was given."""

    @property
    def findings(self) -> Sequence[Finding]:
        """What is notable."""
        return ()

    @property
    def word(self) -> str:
        """How it is, in a word."""
        found = {"error"} if self.error is not None else {one.severity for one in self.findings}
        return next((one for one in _PAINTED if one in found), self.otherwise)

    @property
    def counted_as(self) -> str:
        """How it is, as a total says it."""
        return NOT_OPENED if self.error is not None else COUNTED_AS.get(self.word, self.word)

    @property
    def note(self) -> str | None:
        """What is said on standard error where standard output is to be pasted or parsed."""
        return None

    def sections(self) -> Iterable[Section]:
        """Return what is said for people, but for the error."""
        return ()

    def cells(self) -> Sequence[str]:
        """Return what one line says of it: a text, or what is in each of the columns."""
        return [f"not opened: {self.error.message}"] if self.error is not None else []

    def table(self, *, is_raw: bool) -> Table | None:  # noqa: ARG002 - of the verbs that have one
        """Return its rows; with ``is_raw`` for programs, with values as they are."""
        return None

    def object(self) -> dict[str, object]:
        """Return what is said for programs."""
        raise NotImplementedError


class Failed(Result):
    """An error in the place of a result; ``head`` is what stands before it in its object."""

    exit_code = 2

    def __init__(self, path: str, error: CkptoolError, /, **head: object) -> None:
        super().__init__(path)
        self.error = error
        self._head = head

    def object(self) -> dict[str, object]:
        """Return the error, and which file it is about."""
        return with_hints({**self._head, "error": self.error and self.error.as_dict()})


class Column(NamedTuple):
    """One column of lines for each file, as wide as it may become."""

    header: str
    room: int
    is_number: bool
    from_width: int
    """Columns of a terminal from which on there is room for it."""


Look: TypeAlias = Callable[[Target, ProgressLine], AbstractContextManager["Result | None"]]
"""Opens a target and gives what was found in it; None if it is passed over."""


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
    Say what is found in each of the files that paths stand for, and return the worst exit code.

    Raises:
        NotACheckpoint: There are files, and none is a checkpoint.
    """
    unseen: list[str] = []
    found = targets(files, recursive=options["recursive"], passed=unseen)
    code = passed = 0
    with pager(asked=options["pager"]):
        paths, is_list = [one.shown for one in found], is_many(files, found)
        output = output_for(options, paths, is_list=is_list, columns=columns, has_totals=has_totals, is_bare=is_bare)
        line = ProgressLine(len(found), shown=output.shows_progress)
        for target in found:
            line.next(target.path)
            try:
                with look(target, line) as result:
                    line.clear()
                    if result is not None:
                        output.add(result)
            except CkptoolError as error:
                line.clear()
                result = failed(target, error)
                if result is not None:
                    output.add(result)
            if result is None:
                passed += 1
                output.passed_over(target.shown)
            else:
                code = max(code, result.exit_code)
        output.end()
    for text in left_out(unseen):
        say(text, err=True)
    refuse_none(passed, found, files)
    return code


def output_for(
    options: dict[str, Any],
    paths: Sequence[str],
    *,
    is_list: bool,
    columns: Sequence[Column] = (),
    has_totals: bool = True,
    is_bare: bool = False,
) -> Output:
    """Return what says results as the options ask; where it is ``bare``, people get nothing but that."""
    if options.get("as_sarif"):
        return Sarif()
    if options["as_json"] or options["as_lines"]:
        return Json(as_lines=options["as_lines"], is_list=is_list)
    if options.get("table_format") is not None:
        return Rows(options["table_format"], has_paths=is_list)
    if is_bare:
        return Text(None, None, is_bare=True)
    width = None if options.get("wide") else terminal_width()
    totals = Totals(whole=width is None)
    if options.get("brief"):
        return Brief(paths, width, columns, totals)
    return Text(width, totals if has_totals else None)


class Output:
    """One way to say results."""

    shows_progress = True

    def add(self, result: Result) -> None:
        """Say what was found in a file."""
        raise NotImplementedError

    def passed_over(self, path: str) -> None:
        """Note that a file among many is no checkpoint."""

    def end(self) -> None:
        """Say what comes after all."""


class Text(Output):
    """For people: all about each file. What is to be pasted is ``bare``: nothing but what was asked for."""

    def __init__(self, width: int | None, totals: Totals | None, *, is_bare: bool = False) -> None:
        self._width = width
        self._totals = totals
        self._is_bare = is_bare
        self._begun = False
        self.shows_progress = not is_bare

    def add(self, result: Result) -> None:
        if self._totals is not None:
            self._totals.add(result)
        if result.error is not None:
            say(error_text(result.error), err=True)
        if self._is_bare and result.note is not None:
            say(show(result.note), err=True)
        gap = [""] if self._begun and not self._is_bare else []
        self._begun |= say_sections(result.sections(), self._width, gap)

    def passed_over(self, path: str) -> None:
        if self._totals is not None:
            self._totals.passed_over(path)

    def end(self) -> None:
        if self._totals is not None and self._totals.files > 1:
            say_sections(self._totals.lines(), self._width)


class Brief(Output):
    """A line for each file, as soon as it is known: how it is, its path, and a text or columns. At the end, a total."""

    def __init__(self, paths: Iterable[str], width: int | None, columns: Sequence[Column], totals: Totals) -> None:
        self._width = width
        self._totals = totals
        self._columns = columns
        self._shown = [index for index, one in enumerate(columns) if width is None or width >= one.from_width]
        longest = max((len(show(path)) for path in paths), default=0)
        rest = sum(columns[index].room + len(_GAP) for index in self._shown) or int(_SHARE_OF_TEXT * (width or 0))
        most = longest if width is None else max(_SHORTEST_PATH, width - _WORD - len(_GAP) - rest)
        self._room = min(longest, most)
        if columns:
            self._say("", "file", self._in_columns([one.header for one in columns]))

    def add(self, result: Result) -> None:
        self._totals.add(result)
        cells = result.cells()
        is_text = result.error is not None or not self._columns
        self._say(result.word, result.path, "; ".join(cells) if is_text else self._in_columns(cells))

    def passed_over(self, path: str) -> None:
        self._totals.passed_over(path)

    def end(self) -> None:
        left = [one.header for index, one in enumerate(self._columns) if index not in self._shown]
        say_sections([*self._totals.lines(), *([no_room(left)] if left else [])], self._width)

    def _in_columns(self, cells: Sequence[str]) -> str:
        shown = (padded(cells[at], self._columns[at].room, right=self._columns[at].is_number) for at in self._shown)
        return _GAP.join(shown)

    def _say(self, word: str, path: str, text: str) -> None:
        shown, room = show(path), self._room
        if self._width is not None and len(shown) > room:  # the end of a path tells it from others
            shown = f"…{shown[len(shown) - room + 1 :]}"
        line = f"{word:<{_WORD}}{_GAP}{padded(shown, room)}{_GAP}{show(with_options(text))}".rstrip()
        if self._width is not None and len(line) > self._width:
            line = f"{line[: self._width - 1]}…"
        say(f"{painted(word)}{line[len(word) :]}" if word in _PAINTED else line)


_WORD: Final = 7
_PAINTED: Final = ("error", "warning")
_GAP: Final = "  "
_SHORTEST_PATH: Final = 20
_SHARE_OF_TEXT: Final = 0.45
"""Of the width of a terminal, at least."""


class Rows(Output):
    """A table to be pasted or parsed: that of one file; of several, the rows of all, each with its file in front."""

    def __init__(self, table_format: str, *, has_paths: bool) -> None:
        self._format = table_format
        self._has_paths = has_paths
        self._headers: list[str] = []
        self._numbers: list[bool] = []
        self._rows: list[Sequence[Any]] = []

    def add(self, result: Result) -> None:
        if result.error is not None:
            say(error_text(result.error), err=True)
            return
        if result.note is not None:
            say(f"{show(result.path)}: {result.note}" if self._has_paths else result.note, err=True)
        from ckptool.cli.tables import RAW_FORMATS

        table = result.table(is_raw=self._format in RAW_FORMATS)
        assert table is not None  # verbs without one have no such option
        front = [show(result.path)] if self._has_paths else []
        self._headers = [*(["path"] if self._has_paths else []), *table.headers]
        self._numbers = [*([False] if self._has_paths else []), *table.numbers]
        self._rows += ([*front, *row] for row in table.rows)

    def end(self) -> None:
        if self._headers:
            from ckptool.cli.tables import formatted_table

            say(formatted_table(self._headers, self._rows, self._numbers, self._format))


class Json(Output):
    """The objects of files, as they come: each a line, or all together a list, or the only one by itself."""

    shows_progress = False

    def __init__(self, *, as_lines: bool, is_list: bool) -> None:
        self._as_lines = as_lines
        self._is_list = is_list
        self._printed = 0

    def add(self, result: Result) -> None:
        if self._as_lines:
            print_json(result.object())
        else:
            sys.stdout.write((", " if self._printed else "[") if self._is_list else "")
            sys.stdout.writelines(_pieces(result.object(), _DEPTH))
        self._printed += 1

    def end(self) -> None:
        if not self._as_lines:
            click.echo(("]" if self._printed else "[]") if self._is_list else "")


class Sarif(Output):
    """The findings of all files in one document."""

    shows_progress = False

    def __init__(self) -> None:
        self._results: list[dict[str, object]] = []

    def add(self, result: Result) -> None:
        found = [(one.code, _LEVELS[one.severity], one.message, one.hint, one.path) for one in result.findings]
        if result.error is not None:
            found.append((_UNREADABLE, "error", result.error.message, result.error.hint, None))
        self._results += (
            {
                "ruleId": code,
                "level": level,
                "message": {"text": with_options(f"{message}. {hint}" if hint else message)},
                "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(path or result.path)}}}],
            }
            for code, level, message, hint, path in found
        )

    def end(self) -> None:
        from ckptool.checking.finding import CODES

        rules = [{"id": code, "shortDescription": {"text": entry.says}} for code, entry in CODES.items()]
        rules.append({"id": _UNREADABLE, "shortDescription": {"text": "The file cannot be opened."}})
        driver = {"name": "ckptool", "version": __version__, "rules": rules}
        print_json(
            {
                "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
                "version": "2.1.0",
                "runs": [{"tool": {"driver": driver}, "results": self._results}],
            }
        )


def _uri(path: str) -> str:
    """Return a path as a reference: what is no plain character is escaped."""
    plain = f"{ascii_letters}{digits}-._~/".encode()
    octets = Path(path).as_posix().encode("utf-8", "surrogateescape")
    return "".join(chr(one) if one in plain else f"%{one:02X}" for one in octets)


_LEVELS: Final = {"info": "note", "warning": "warning", "error": "error"}
_UNREADABLE: Final = "unreadable"


COUNTED_AS: Final = {"warning": "with warnings", "error": "with errors"}
NOT_OPENED: Final = "not opened"
_LAST: Final = (*COUNTED_AS.values(), NOT_OPENED)
_GRADES: Final = ("data", "program", "code", "system", "unknown")
_NAMED: Final = 4
"""Of files that were passed over."""


class Totals:
    """What the files come to that a verb was given. ``whole`` names all that were passed over."""

    def __init__(self, *, whole: bool = False) -> None:
        self._named = sys.maxsize if whole else _NAMED
        self._found: Counter[str] = Counter()
        self._formats: Counter[str] = Counter()
        self._grades: Counter[str] = Counter()
        self._nbytes = 0
        self._passed = 0
        self._others: list[str] = []
        """The first of those that were passed over."""

    @property
    def files(self) -> int:
        """How many were counted."""
        return self._found.total()

    def add(self, result: Result) -> None:
        """Count a file."""
        self.count(result.counted_as, result.nbytes, result.format, result.grade)

    def count(self, word: str, nbytes: int, file_format: str | None, grade: str | None) -> None:
        """Count a file by how it is and, as far as it is known, by its format and by what unpickling it would do."""
        self._found[word] += 1
        self._nbytes += nbytes
        self._formats.update(filter(None, [file_format]))
        self._grades.update(filter(None, [grade]))

    def passed_over(self, path: str) -> None:
        """Count a file that is no checkpoint, and was not said to be one."""
        self._passed += 1
        if len(self._others) < self._named:
            self._others.append(show(path))

    def lines(self) -> Iterator[str]:
        """Yield the totals."""
        kinds = sorted(self._found, key=lambda word: _LAST.index(word) if word in _LAST else -1)
        how = ", ".join(f"{self._found[word]:,} {word}" for word in kinds)
        yield ""
        size = f", {show_nbytes(self._nbytes)}" if self._nbytes else ""
        yield f"{counted(self.files, 'checkpoint')}{size}{': ' if how else ''}{how}"
        if self._formats:
            most_first = sorted(self._formats.items(), key=lambda one: (-one[1], one[0]))
            yield labelled("formats", counts(dict(most_first)))
        if self._grades:
            yield labelled("grades", counts({grade: self._grades[grade] for grade in _GRADES if self._grades[grade]}))
        if self._passed:
            rest = self._passed - len(self._others)
            more = f" and {rest:,} more" if rest else ""
            what = f"{counted(self._passed, 'file')} of other kinds"
            yield labelled("passed over", f"{what}: {', '.join(self._others)}{more}")


def left_out(folders: Sequence[str]) -> Iterator[str]:
    """Yield a line about folders that were not looked into, if there are some."""
    if folders:
        what = f"{counted(len(folders), 'folder')} of version control or of tools, or behind links that lead elsewhere"
        yield labelled("left out", f"{what}: {some([show(one) for one in folders], _NAMED)}")


_DEPTH: Final = 2
"""Of an object, the members of its members are pieces."""


def print_json(found: object) -> None:
    """Print a value as one line of ASCII."""
    sys.stdout.writelines(_pieces(found, _DEPTH))
    click.echo("")


def _pieces(found: object, depth: int) -> Iterator[str]:
    import json  # takes milliseconds, and is seldom asked for

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
    """Return an object with its hints, and those of its findings, as they are written on the command line."""
    for one in (found, found.get("error") or {}, *found.get("findings", ())):
        for name in _IN_OPTIONS & one.keys():
            said = one[name]
            one[name] = list(map(with_options, said)) if isinstance(said, list) else said and with_options(said)
    return found


_IN_OPTIONS: Final = frozenset(("hint", "verdict", "loading"))
