"""Which tensors of a file to list, and in which order, as the options of several verbs say."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from ckptool import messages
from ckptool.cli import tables
from ckptool.cli.text import say
from ckptool.tensors.reading import LazyTensor

if TYPE_CHECKING:
    from ckptool.checkpoints.checkpoint import Checkpoint
    from ckptool.names.filter import Filter

_LISTED: Final = "listed"
"""Under which it is noted whether anything was listed at all."""


class Selection(NamedTuple):
    """Which tensors to list, and in which order."""

    grep: re.Pattern[str] | None
    filter: "Filter | None"
    sort: str
    allows: bool
    """Whether a pattern may match no name in any file."""
    seen: dict[str, bool]
    """The options that choose names, as they are written, and whether they match a name in what was looked at."""

    def of(self, checkpoint: "Checkpoint") -> list[LazyTensor]:
        """
        Return the tensors to list.

        Raises:
            MigrationRefused: A glob means one thing as a full path, and another as a name in a state dict.
        """
        chosen = list(checkpoint.tensors.values())
        if self.filter is not None:
            chosen = self._filtered(checkpoint, self.filter)
        if self.grep is not None:
            found = _matching(self.grep, chosen)
            self._note("grep", self.grep.pattern, found)
            chosen = found
        if self.seen:
            self.seen[_LISTED] = self.seen.get(_LISTED, False) or bool(chosen)
        sort = tables.OTHER_SORT_KEYS.get(self.sort, self.sort)
        return chosen if sort == "file" else sorted(chosen, key=tables.SORT_KEYS[sort])  # type: ignore[arg-type]

    def _filtered(self, checkpoint: "Checkpoint", wanted: "Filter") -> list[LazyTensor]:
        from ckptool.checkpoints.summary import candidates
        from ckptool.names.filter import matched

        names = {one.key: list(one) for one in candidates(checkpoint)}
        within = {f"{key}.{name}" if key else name for key, own in names.items() for name in own}
        names[""] = [*names.get("", ()), *(name for name in checkpoint.tensors if name not in within)]
        read = wanted.read(names, prefers_full=True)
        for option, given, globs in zip(wanted._fields, wanted, read, strict=True):
            for text, glob in zip(given, globs, strict=True):
                self._note(option, text, matched(glob, names))
        taken = {
            f"{key}.{name}" if key else name for key, own in names.items() for name in own if read.takes(name, key)
        }
        return [tensor for name, tensor in checkpoint.tensors.items() if name in taken]

    def _note(self, option: str, text: str, found: Sequence[object]) -> None:
        word = f"--{option} {text!r}"
        self.seen[word] = self.seen.get(word, False) or bool(found)

    def refused(self) -> bool:
        """Say so where patterns match no name in any file, or leave none, and return whether that is an error."""
        none = [word for word, is_there in self.seen.items() if not is_there and word != _LISTED]
        if self.allows or not (none or not self.seen.get(_LISTED, True)):
            return False
        fact = f"{', '.join(none)} match{'es' * (len(none) == 1)} no name" if none else "no tensor is left to look at"
        hint = "If this is meant, say so with --allow-unmatched."
        say(f"Error: {messages.show(fact)}\nHint: {hint}", err=True)
        return True

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
    from ckptool.names.renaming import LONGEST, Trials

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
    return Selection(_pattern(options["grep"]), wanted, sort, options["allow_unmatched"], {})


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(grep) if grep is not None else None
    except re.error as error:
        raise click.BadParameter(str(error), param_hint="--grep") from error
