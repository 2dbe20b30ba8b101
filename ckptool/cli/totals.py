"""What many files come to: a line for each, and how many there are of each kind at the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from ckptool.messages import counted, counts, labelled, show, show_nbytes, some

_WORDS = {"warning": "with warnings", "error": "with errors"}
_NOT_OPENED = "not opened"
_NAMED = 4
"""Of files that were passed over."""
_GRADES = ("data", "program", "code", "system", "unknown")


class Totals:
    """
    Counts of the files that a verb was given; ``otherwise`` is its word for those with which nothing is wrong.

    If they are ``whole``, all files that were passed over are named.
    """

    def __init__(self, otherwise: str, *, whole: bool = False) -> None:
        self._otherwise = otherwise
        self._named = sys.maxsize if whole else _NAMED
        self._found: Counter[str] = Counter()
        self._formats: Counter[str] = Counter()
        self._grades: Counter[str] = Counter()
        self._nbytes = 0
        self._passed = 0
        self._others: list[str] = []
        """The first of those that were passed over."""

    def opened(self, worst: str | None, file_format: str | None, nbytes: int | None) -> None:
        """Count a file that was opened, by the severest of its findings."""
        self._found[_WORDS.get(worst or "", self._otherwise)] += 1
        self._formats[file_format or "unknown"] += 1
        self._nbytes += nbytes or 0

    def graded(self, grade: str) -> None:
        """Count a file by what unpickling it would do: ``unknown`` if not all of it could be looked at."""
        self._grades[grade] += 1

    def not_opened(self) -> None:
        self._found[_NOT_OPENED] += 1

    def passed_over(self, path: str) -> None:
        """Count a file that is no checkpoint, and was not said to be one."""
        self._passed += 1
        if len(self._others) < self._named:
            self._others.append(show(path))

    def lines(self, *, always: bool = False) -> Iterator[str]:
        """Yield the totals of several files; of one, only if asked to."""
        files = self._found.total()
        if files < 2 and not always:
            return
        kinds = ", ".join(
            f"{number:,} {word}"
            for word in (self._otherwise, *_WORDS.values(), _NOT_OPENED)
            if (number := self._found[word])
        )
        yield ""
        yield f"{counted(files, 'checkpoint')}, {show_nbytes(self._nbytes)}{': ' if kinds else ''}{kinds}"
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
