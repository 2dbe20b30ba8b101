"""``report`` of Python: collects what the page of one checkpoint, or of two, shows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

from ckptool import __version__
from ckptool.arguments import checked
from ckptool.checking.check import CheckReport, Depth, check
from ckptool.checking.finding import Finding
from ckptool.checking.safety import inside
from ckptool.checking.structure import examine
from ckptool.checking.value_survey import ValueRow, facts_of, statistics_of, survey
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.cli.check import is_notable
from ckptool.cli.page import (
    add_values,
    compared_rows,
    comparison_facts,
    document,
    file_facts,
    folder_facts,
    packed,
    report_facts,
    tensor_rows,
)
from ckptool.diffing.diff import diff
from ckptool.diffing.sides import side_of
from ckptool.errors import CkptoolError, Failure, FileUnavailable
from ckptool.formats import open_checkpoint
from ckptool.formats.listing import Target, targets
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import show
from ckptool.migration.output import Output, mode_of
from ckptool.sources.paths import file_of, is_same_file
from ckptool.sources.source import SILENT, Progress
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity
from ckptool.torch_ops.statistics import ValueFacts

SCHEMA: Final = "ckptool.page/2"


@checked()
def report(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    values: bool | None = None,
    key_a: str | None = None,
    key_b: str | None = None,
    ignore_wrappers: bool = False,
    digest: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> CkptoolError | None:
    """
    Write a page of HTML that says what is in a checkpoint or, with ``other``, where the two differ. Nothing runs.

    With ``values``, it also shows what the values are like, for which all are read; those of two files are compared
    unless it is False. ``key_a``, ``key_b`` and ``ignore_wrappers`` are as for ``diff``. ``digest`` reads the files for
    their SHA-256 and the digests of their weights. Whoever may not read the files may not read the page. A file that is
    there and cannot be opened has a page that says why, and that error is returned; else None.

    Raises:
        OutputExists: The page is there, and ``force`` does not say to overwrite it.
        OutputFailed: It cannot be written.
        CkptoolError: ``path`` is not there, or one of two files cannot be read.
        ValueError: ``output`` is not a name for a page, or is a file to read; or options for two files come with one.
    """
    if other is None and (key_a or key_b or ignore_wrappers):
        raise ValueError("key_a, key_b and ignore_wrappers are about two files: give other, too")
    name, a, b = os.fspath(output), os.fspath(path), None if other is None else os.fspath(other)
    if "://" in name:
        raise ValueError("an address, and pages are written to files here")
    stem, suffix = os.path.splitext(name)
    if suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"a page is a file of HTML: name it {show(stem)}.html")
    if any(one is not None and is_same_file(name, file_of(one)) for one in (a, b)):
        raise ValueError(f"{show(name)} is what is read: write to another file")
    error, compared = None, None
    with Output(name, force=force, shown=name) as page:
        # It is created before anything is read, so that a name that cannot be written fails at once.
        rows = _Rows(page, progress, limits, with_values=bool(values))
        if b is None:
            files, error = _of_one(a, rows, digest=digest)
        else:
            sides = {"key_a": key_a, "key_b": key_b, "ignore_wrappers": ignore_wrappers}
            files, compared = _of_two(a, b, rows, progress, values=values, digest=digest, **sides)
        tensors = packed(rows.found) if error is None else None
        content = {"schema": SCHEMA, "version": __version__, "files": files, "compared": compared, "tensors": tensors}
        page.write(document(" and ".join(str(file["name"]) for file in files), content))
        page.publish()
    return error


class _Rows:
    """The rows of a page: those of one checkpoint after the other."""

    def __init__(self, page: Output, progress: Progress | None, limits: Limits, *, with_values: bool) -> None:
        self.page = page
        self.limits = limits
        self.depth: Depth = "values" if with_values else "structure"
        self.values = partial(statistics_of, depth=None, progress=progress, limits=limits)
        self.found: list[dict[str, Any]] = []

    def add(self, checkpoint: Checkpoint, found: CheckReport, head: str = "") -> CheckReport:
        """Add the rows of a checkpoint; return its report, ``found``, with findings about values, if they are read."""
        own = tensor_rows(checkpoint, head, len(self.found))
        if self.depth == "values":
            tensors = [*checkpoint.tensors.values(), *checkpoint.attributes.values()]
            values = list(self.values(checkpoint, tensors))
            add_values(own, values[: len(own)])
            found = _with_values(found, checkpoint, zip(tensors, values, strict=True))
        self.found += own
        self.page.narrow(mode_of(checkpoint.source))
        checkpoint.check_unchanged()
        return found

    def note(self, path: str) -> None:
        """Permit the page only to those who may read a path, which is not opened here."""
        with suppress(OSError, ValueError):  # remote
            self.page.narrow(os.stat(file_of(path)).st_mode)


def _of_one(path: str, rows: _Rows, *, digest: bool) -> tuple[list[dict[str, object]], CkptoolError | None]:
    """Return the facts of one file, or of a folder, and the error if it cannot be opened."""
    found = None if os.path.isdir(path) else check(path, digest=digest, limits=rows.limits)
    if found is None or found.form == "archive":
        files, own = _files_in(path, rows.limits)
        if files:
            rows.note(path)
            return [folder_facts(path, own, _reports(files, rows), rows.depth)], None
    found = found or check(path, digest=digest, limits=rows.limits)
    if found.error is not None:
        if isinstance(found.error, FileUnavailable) and not os.path.isdir(path):
            raise found.error
        rows.note(path)
        return [report_facts(found)], found.error
    with open_checkpoint(path, limits=rows.limits) as checkpoint:
        return [file_facts(checkpoint, rows.add(checkpoint, found))], None


def _files_in(path: str, limits: Limits) -> tuple[dict[str, Target], Sequence[Finding]]:
    """Return the checkpoints in a folder or an archive of several, by their names, and the findings about it."""
    is_folder = os.path.isdir(path)
    try:
        with open_checkpoint(path, limits=limits) as checkpoint:
            found = list(examine(checkpoint))
            names = [one.member for one in inside(checkpoint) if one.tensors and one.member]
            is_one = bool(checkpoint.tensors or not checkpoint.inside)
    except Failure:  # the check says why
        return {}, ()
    is_chosen = is_folder and any(one.code == "CK167" for one in found)  # one of several was chosen by its content
    if is_one and not is_chosen:
        return {}, found
    if is_folder:
        return {os.path.relpath(one.path, path): one for one in targets([path], recursive=True)}, found
    return {name: Target(f"{path}::{name}") for name in names}, found


def _reports(files: Mapping[str, Target], rows: _Rows) -> dict[str, CheckReport]:
    """Add the rows of several files, and return their reports, but for files that are surely not checkpoints."""
    reports: dict[str, CheckReport] = {}
    for name, one in files.items():
        found = check(one.path, limits=rows.limits)
        if found.error is None:
            with open_checkpoint(one.path, limits=rows.limits) as checkpoint:
                found = rows.add(checkpoint, found, f"{name}.")
        elif one.passes_over(found.error) and not is_notable(found):
            continue
        else:
            rows.note(one.path)
        reports[name] = found
    return reports


def _of_two(
    a: str, b: str, rows: _Rows, progress: Progress | None, *, values: bool | None, digest: bool, **sides: Any
) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Return the facts of two files and of their differences; ``values`` adds statistics, and False compares none."""
    compared = diff(a, b, values=values is not False, stat=bool(values), progress=progress, limits=rows.limits, **sides)
    with ExitStack() as stack:
        checkpoints = [stack.enter_context(open_checkpoint(path, limits=rows.limits)) for path in (a, b)]
        both = []
        for one, label in zip(checkpoints, "ab", strict=True):
            side = side_of(one, compared.scope, sides[f"key_{label}"], label, aligned=sides["ignore_wrappers"])
            both.append({**side.tensors, **side.attributes})
        rows.found = compared_rows(compared, *both)
        found = [check(path, digest=digest, limits=rows.limits) for path in (a, b)]
        if values:
            names = dict.fromkeys((*both[0], *both[1]))
            for at, (one, tensors) in enumerate(zip(checkpoints, both, strict=True)):
                own = dict(zip(tensors, rows.values(one, list(tensors.values())), strict=True))
                add_values(rows.found, map(own.get, names))
                found[at] = _with_values(found[at], one, zip(tensors.values(), own.values(), strict=True))
        facts = [file_facts(*one) for one in zip(checkpoints, found, strict=True)]
        for one in checkpoints:
            rows.page.narrow(mode_of(one.source))
            one.check_unchanged()
    return facts, comparison_facts(compared)


def _with_values(
    found: CheckReport, checkpoint: Checkpoint, rows: Iterable[tuple[LazyTensor, ValueRow]]
) -> CheckReport:
    """Return a report with findings about the values of a checkpoint, as `check` has them, from their statistics."""
    by_place = {identity(tensor.info): row for tensor, row in rows}

    def known(tensor: LazyTensor) -> ValueFacts | str:
        row = by_place.get(identity(tensor.info))
        return "they are not compared" if row is None else facts_of(row, tensor)

    odd = survey(checkpoint, DEFAULT_LIMITS, SILENT, known)
    return found._replace(depth="values", findings=(*found.findings, *odd))
