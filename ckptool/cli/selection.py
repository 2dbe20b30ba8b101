"""Which tensors of a file to list, and in which order, as the options of several verbs say."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ckptool import messages
from ckptool.cli import tables
from ckptool.cli.text import say
from ckptool.tensors.reading import LazyTensor

if TYPE_CHECKING:
    from ckptool.names.filter import Filter


class Selection(NamedTuple):
    """Which tensors to list, and in which order."""

    grep: re.Pattern[str] | None
    filter: "Filter | None"
    sort: str

    def of(self, tensors: Iterable[LazyTensor]) -> list[LazyTensor]:
        chosen = list(tensors)
        if self.filter is not None:
            chosen = [tensor for tensor in chosen if self.filter.takes(tensor.name)]
        if self.grep is not None:
            chosen = _matching(self.grep, chosen)
        sort = tables.OTHER_SORT_KEYS.get(self.sort, self.sort)
        return chosen if sort == "file" else sorted(chosen, key=tables.SORT_KEYS[sort])  # type: ignore[arg-type]

    def nothing(self, tensors: Mapping[str, LazyTensor], chosen: Sequence[LazyTensor]) -> str | None:
        """Return a line about a selection that takes none of the names there are, and what would take some."""
        if chosen or not tensors:
            return None
        patterns = (self.grep.pattern,) if self.grep is not None else ()
        include, exclude = self.filter or ((), ())
        options = {"grep": patterns, "include": include, "exclude": exclude}
        asked = " ".join(f"--{option} {value!r}" for option, values in options.items() for value in values)
        near = next(filter(None, self._nearly(tensors)), "")
        return messages.labelled("listed", f"0 of {len(tensors):,} names match {messages.show(asked)}{near}")

    def _nearly(self, tensors: Mapping[str, LazyTensor]) -> Iterator[str]:
        if self.grep is not None:
            count = len(_matching(re.compile(self.grep.pattern, re.IGNORECASE), list(tensors.values())))
            yield f"; {count:,} do in another case: --grep '(?i)…'" if count else ""
        if self.filter is not None:
            for glob in self.filter.include:
                inside = self.filter._replace(include=(f"*{glob}*",), exclude=())
                count = sum(1 for name in tensors if inside.takes(name))
                wider = messages.show(repr(inside.include[0]))
                yield f"; a glob is compared with whole names: {wider} matches {count:,}" if count else ""


def _matching(pattern: re.Pattern[str], tensors: Sequence[LazyTensor]) -> list[LazyTensor]:
    """Return the tensors whose name matches; that names are too long to be tried is said."""
    from ckptool.names.patterns import LONGEST, Trials

    tried = [tensor for tensor in tensors if len(tensor.name) <= LONGEST]
    if len(tried) < len(tensors):
        long = messages.counted(len(tensors) - len(tried), "name")
        say(f"Note: {long} of more than {LONGEST:,} characters not tried with --grep.", err=True)
    trials = Trials()
    return [tensor for tensor in tried if trials.on(tensor.name, pattern.search)]


def selection_of(options: Mapping[str, Any], *, sort: str = "file") -> Selection:
    """Return what the options --grep, --include and --exclude say."""
    wanted = None
    if options["include"] or options["exclude"]:
        from ckptool.names.filter import Filter  # most calls list all names

        wanted = Filter(options["include"], options["exclude"])
    return Selection(_pattern(options["grep"]), wanted, sort)


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(grep) if grep is not None else None
    except re.error as error:
        raise click.BadParameter(str(error), param_hint="--grep") from error
