"""The ways in which ``migrate`` says what it wrote: for people, a line for each file, names alone, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ckptool.cli.text import error_text, say, terminal_width, with_options, wrapped
from ckptool.errors import CkptoolError, MigrationRefused, WeightsNotFound
from ckptool.messages import counted, show, show_nbytes
from ckptool.migration.report import MigrationReport

_SCHEMA: Final = "ckptool.migrate/2"


def output_for(options: dict[str, Any], sources: Sequence[str]) -> Objects | Names | Brief | Reports:
    if options["as_json"] or options["as_lines"]:
        return Objects(as_lines=options["as_lines"], is_list=len(sources) > 1)
    if options["quiet"]:
        return Names()
    return Brief(sources) if options["brief"] else Reports()


def is_refused(error: CkptoolError) -> bool:
    """Say whether an error means that something would be lost, and not that a file cannot be read or written."""
    return isinstance(error, MigrationRefused | WeightsNotFound)


class Objects:
    """JSON."""

    def __init__(self, *, as_lines: bool, is_list: bool) -> None:
        from ckptool.cli.json_output import JsonOutput

        self._output = JsonOutput(as_lines=as_lines, is_list=is_list)

    def done(self, report: MigrationReport) -> None:
        fields = report._asdict()
        del fields["dropped_at_root"]  # they are among those that are dropped
        head = {name: fields.pop(name) for name in ("source", "target", "form")}
        found = {"schema": _SCHEMA, **head, "source_format": report.before.format, **fields}
        found["renamed"] = [list(pair) for pair in report.renamed]
        found["casts"] = [cast._asdict() for cast in report.casts]
        found["files"] = [file._asdict() for file in report.files]
        for name, file in (("before", report.before), ("after", report.after)):
            found[name] = file._asdict()
        self._output.add(found)

    def failed(self, source: str, error: CkptoolError) -> None:
        from ckptool.cli.json_output import error_object

        self._output.add({"schema": _SCHEMA, "source": source, "error": error_object(error)})

    def end(self) -> None:
        self._output.end()


class Names:
    """The name of each result, for scripts."""

    def done(self, report: MigrationReport) -> None:
        say(show(report.target))

    def failed(self, _: str, error: CkptoolError) -> None:
        say(error_text(error), err=True)

    def end(self) -> None:
        pass


class _Totalled:
    """What ends with a total."""

    def __init__(self) -> None:
        self._found: Counter[str] = Counter()
        self._nbytes = 0
        self._width = terminal_width()

    def done(self, report: MigrationReport) -> None:
        self._found[_word(report)] += 1
        self._nbytes += report.written_nbytes

    def failed(self, _: str, error: CkptoolError) -> None:
        self._found["refused" if is_refused(error) else "failed"] += 1

    def total(self) -> Iterator[str]:
        """Yield the total: how many of what, and the bytes that were written."""
        sizes = {word: f" ({show_nbytes(self._nbytes)})" for word in ("written", "planned")}
        kinds = (f"{number:,} {word}{sizes.get(word, '')}" for word, number in self._found.items())
        yield from ("", f"{counted(self._found.total(), 'checkpoint')}: {', '.join(kinds)}")


class Reports(_Totalled):
    """For people: all about each file."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = False

    def done(self, report: MigrationReport) -> None:
        super().done(report)
        lines = [""] * self._begun + [with_options(line) for line in report.lines(self._width)]
        self._begun = True
        say("\n".join(wrapped(lines, self._width)))

    def failed(self, source: str, error: CkptoolError) -> None:
        super().failed(source, error)
        self._begun = True
        say(error_text(error), err=True)

    def end(self) -> None:
        if self._found.total() > 1:
            say("\n".join(wrapped(self.total(), self._width)))


class Brief(_Totalled):
    """A line for each file."""

    def __init__(self, sources: Sequence[str]) -> None:
        from ckptool.cli.brief import BriefMigrate

        super().__init__()
        self._lines = BriefMigrate(sources)

    def done(self, report: MigrationReport) -> None:
        super().done(report)
        self._lines.done(_word(report), report)

    def failed(self, source: str, error: CkptoolError) -> None:
        super().failed(source, error)
        self._lines.failed(source, error)

    def end(self) -> None:
        say("\n".join(wrapped(self.total(), self._width)))


def _word(report: MigrationReport) -> str:
    return "written" if report.written else "planned"
