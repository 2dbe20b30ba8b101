"""
The other files in a checkpoint's folder: what unpickling them runs, and copies that differ.

They matter because loaders of frameworks read such files, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from typing import Final, NamedTuple

from ckptool.archives.compressed import CUT
from ckptool.checking import safety
from ckptool.checking.finding import CODES, MOST_FINDINGS, SEVERITIES, Advice, Finding, note
from ckptool.checking.safety import merged, modules_beside
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Failure, FileUnavailable, NotACheckpoint, UnknownFormat
from ckptool.formats import folder_source, open_checkpoint, other_programs
from ckptool.formats.runnable import Survey
from ckptool.formats.runnable.pickle_search import Search
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import counted, some
from ckptool.sources.descriptors import LINK
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import IGNORED_FOLDERS, command_line, is_below, is_likely, is_remote, shown_path
from ckptool.sources.source import Meter, SliceSource
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

_DEEPEST = 64
"""Most folders inside each other; a path of the system has no more."""
_MOST_FILES = 10_000
_MOST_FOLDERS = 10_000
_KNOWN = frozenset(("leftover", "incomplete"))
"""Roles that have findings of their own."""
_MOST_BESIDE = 64


class Neighbours(NamedTuple):
    """What unpickling would do for the files of a folder that are not part of its checkpoint."""

    folder: str
    files: Sequence[tuple[str, Survey]]
    """Name and survey of each file; for the folder itself, the name is empty."""
    passed: Sequence[str] = ()
    """Folders in it that were not searched."""

    @property
    def are_plain(self) -> bool:
        """Whether all of them were inspected, and only make data."""
        return not any(one.unseen or one.of("code") or one.of("system") for _, one in self.files)

    def with_others(self, own: Survey) -> Survey:
        """Return one survey of the checkpoint, ``own``, and of these files."""
        return merged([("", own), *self.files])

    def findings(self) -> Iterator[Finding]:
        """Yield the findings in each file, the most severe first; of many with one code, the first, and a count."""
        every: list[Finding] = []
        for name, survey in self.files:
            path = os.path.join(self.folder, name) if name else self.folder
            look = Advice("Do not unpickle it, unless you trust where it comes from.", command_line(path, "check"))
            who = f"{name!r} in the folder: " if name else ""
            for one in safety.findings(survey, lambda look=look: look):  # type: ignore[misc]
                # 'check' says no more of source code, or of files that could not be inspected.
                command = look.command if one.code not in ("CK209", "CK217") else None
                every.append(one._replace(message=f"{who}{one.message}", command=command, path=path))
        by_code: dict[str, list[Finding]] = {}
        for one in sorted(every, key=lambda one: SEVERITIES.index(one.severity)):
            by_code.setdefault(one.code, []).append(one)
        for code, found in by_code.items():
            yield from found[:MOST_FINDINGS]
            if rest := found[MOST_FINDINGS:]:
                paths = some([one.path or self.folder for one in rest])
                what = f"{counted(len(rest), 'more file')} of the folder with the same: {paths}"
                yield Finding(code, rest[0].severity, what, path=self.folder)
        if self.passed:
            what = f"not looked into: {counted(len(self.passed), 'folder')} of version control or tools"
            yield note("CK210", f"{what}: {some(self.passed)}", path=self.folder)


def survey(path: str, checkpoint: Checkpoint | None, limits: Limits) -> Neighbours:
    """Inspect all files in a folder that are not part of its ``checkpoint``."""
    found: list[tuple[str, Survey]] = []
    passed: list[str] = []
    try:
        with closing(folder_source(path, limits.cancellation)) as folder:
            known = _parts(checkpoint) if checkpoint is not None else set()
            names: list[str] = []
            for count, name in enumerate(_names(folder, passed)):
                if name is None or count >= _MOST_FILES:
                    what = f"folders below it after {_MOST_FOLDERS:,}, or more than {_DEEPEST} deep"
                    what = f"files of the folder after {_MOST_FILES:,}" if name is not None else what
                    found.append(("", Survey(unseen=(what,))))
                    break
                names.append(name)
                if _identity(os.path.join(folder.path, name)) not in known:
                    found.append((name, _of_file(folder, name, limits)))
            # programs that loaders run by the names of files, or by settings
            programs = other_programs.among(dict.fromkeys(names), partial(_head, folder))
            found += ((one[0], _of_program(one)) for one in programs)
    except Failure as error:
        found.append(("", Survey(unseen=(error.message,))))
    return Neighbours(shown_path(path), [(name, one) for name, one in found if one != Survey()], passed)


def _of_program(known: other_programs.Known) -> Survey:
    search = Search(DEFAULT_LIMITS)
    search.foreign("", [("", *known[1:])])
    return search.survey()


def of_name(path: str, limits: Limits) -> Survey:
    """Return what loaders of the folder run because of a file of this name, or because of what it says."""
    folder, last = os.path.split(os.path.abspath(path))
    above, own = os.path.split(folder)
    for place, name in ((folder, last), (above, f"{own}/{last}")):
        if other_programs.is_telling(name):
            with closing(folder_source(place, limits.cancellation)) as source:
                names = [name, *filter(None, islice(_names(source, []), _MOST_FILES))]
                if not name.endswith(".py") or any(map(is_likely, names)):
                    programs = other_programs.among(dict.fromkeys(names), partial(_head, source))
                    return merged([("", _of_program(one)) for one in programs if one[0] == name])
    return Survey()


def unreadable(checkpoint: Checkpoint, limits: Limits) -> Iterator[tuple[Finding, bool]]:
    """CK169: another checkpoint in the folder cannot be opened, or is incomplete; each with whether it was read."""
    beside = [one for one in checkpoint.beside if one.nbytes is None or is_likely(one.name)]
    own = [one for one in beside if one.role not in _KNOWN and not os.path.islink(one.path)]
    for one in own[:_MOST_BESIDE]:
        is_read = True
        try:
            with open_checkpoint(one.path, limits=limits) as other:
                errors = [what for code, what, _ in other.remarks if CODES[code].severity == "error"]
                errors += [f"{name!r}: {why}" for name, why in other.unopened]
                is_read = not other.unopened
        except (NotACheckpoint, UnknownFormat):
            continue  # not a checkpoint
        except Failure as error:
            errors, is_read = [error.message], False
        if errors:
            fact, hint = (
                f"{one.name!r}, which lies beside, is not whole: {some(errors)}",
                "Copy it again; what was opened needs nothing of it.",
            )
            yield note("CK169", fact, hint, command_line(one.path, "check"), path=one.path), is_read


def _of_file(folder: FolderSource, name: str, limits: Limits) -> Survey:
    path = os.path.join(folder.path, name)
    search = Search(limits, modules_beside(path))
    unread: tuple[str, ...] = ()
    try:
        with closing(folder.detached(_target(folder, name))) as source:
            if source.nbytes:
                safety.search_file(search, name, source)
                search.in_text(source)
    except FileUnavailable as error:
        if error.kind != LINK and error.kind != "missing":
            unread = (error.message.removeprefix(f"{name!r}: "),)
        elif not is_remote(folder.path) and os.path.exists(path) and not is_below(folder.path, path):
            unread = ("a link that leads out of the folder, which is not followed",)
    except Failure as error:
        # Unrelated files may begin like an archive, and then seem damaged: what was unpacked was inspected.
        if error.kind not in CUT or (is_likely(name) and not name.endswith(".safetensors")):
            unread = (error.message.removeprefix(f"{name!r}: "),)
    found = search.survey()
    return found._replace(unseen=(*found.unseen, *unread))


def _target(folder: FolderSource, name: str) -> str:
    """Return the name of the file that a link stands for, if it leads to one in the folder; else the name itself."""
    path = os.path.join(folder.path, name)
    if is_remote(folder.path) or not (os.path.islink(path) and os.path.isfile(path) and is_below(folder.path, path)):
        return name
    return os.path.relpath(os.path.realpath(path), os.path.realpath(folder.path)).replace(os.sep, "/")


def _head(folder: FolderSource, name: str, most: int) -> bytes:
    return folder.head(_target(folder, name), most)


def _names(folder: FolderSource, passed: list[str]) -> Iterator[str | None]:
    """
    Yield the names of all files in a folder, and in those below; None at the end if there are more folders.

    Folders that are not searched are added to ``passed``. Links to folders are not followed: their names are yielded.
    """
    todo, is_all = [("", 0)], True
    for place, depth in todo:  # the list grows
        files, folders = folder.names(place)
        yield from (f"{place}/{name}".lstrip("/") for name in files)
        below: list[str] = []
        for name in folders:
            one = f"{place}/{name}".lstrip("/")
            if folder.is_link(one):
                yield one
            else:
                (passed if name in IGNORED_FOLDERS else below).append(one)
        room = _MOST_FOLDERS - len(todo) if depth < _DEEPEST else 0
        is_all = is_all and len(below) <= room
        todo += ((one, depth + 1) for one in below[:room])
    if not is_all:
        yield None


def _parts(checkpoint: Checkpoint) -> set[tuple[int, int] | str | None]:
    """Return the identities of the files that were inspected with a checkpoint; others were only opened."""
    found: set[tuple[int, int] | str | None] = set()
    sources = [one.source for one in checkpoint.streams] + [one.source for one in checkpoint.archives]
    for source in (checkpoint.source, *sources, *(one.source for one in checkpoint.shards)):
        while isinstance(source, SliceSource):
            source = source.whole
        if (path := getattr(source, "path", None)) is not None:
            found.add(_identity(path))
    return found


def _identity(path: str) -> tuple[int, int] | str | None:
    if is_remote(path):
        return path
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_NOT_COMPARED: Final = "the same names and shapes are there once more, with values that were not compared:"
_EQUAL: Final = "the same weights are there once more, with equal values:"


def twins(checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS, meter: Meter | None = None) -> Iterator[Finding]:
    """Yield CK161 for duplicates of a checkpoint in its folder; with a ``meter``, their values are compared, too."""
    alike: dict[str, list[str]] = {}
    for one in (one for one in checkpoint.beside if one.role == "duplicate"):
        if is_remote(one.path):
            alike.setdefault(_NOT_COMPARED, []).append(f"{one.name} (going by its name)")
            continue
        parts, unlike, unread = list[str](), list[str](), list[str]()
        try:
            with open_checkpoint(one.path, limits=limits) as other:
                parts = _unlike(checkpoint, other)
                if not parts and meter is not None:
                    unlike, unread = _values(checkpoint, other, limits, meter)
        except Failure as error:
            fact = f"{one.name} cannot be compared with what was opened: {error.message}"
            yield note("CK161", fact, severity="info")
            continue
        if parts:
            fact = f"{one.name} is not a second form of what was opened: it has {'; '.join(parts)}"
            hint = "One of them is not whole, or they are two checkpoints: give the path of the file that is meant."
            yield note("CK161", fact, hint, command_line(one.path, "inspect"), severity="warning")
        elif unlike:
            fact = f"other values in {counted(len(unlike), 'tensor')}: {some(unlike)}"
            fact = f"{one.name} has the names and shapes of what was opened, and {fact}"
            hint = "Loaders differ in which of them they take: keep the one that is meant."
            yield note("CK161", fact, hint, command_line(checkpoint.path, "diff", one.path), severity="warning")
        else:
            what = f"{_NOT_COMPARED[:-1]} of {some(unread)}:" if unread else _EQUAL if meter else _NOT_COMPARED
            alike.setdefault(what, []).append(one.name)
    for what, names in alike.items():
        yield note("CK161", f"{what} {some(names)}", severity="info")


def _unlike(checkpoint: Checkpoint, other: Checkpoint) -> list[str]:
    """Return texts on how names and shapes of another checkpoint's weights differ from these; empty if they do not."""
    more, less = _names_without(other, checkpoint), _names_without(checkpoint, other)
    two, own = (_weights(one) for one in (other, checkpoint))
    unlike = [f"{name} {list(two[name].shape)}, not {list(own[name].shape)}" for name in more if name in less]
    parts = [some(unlike)] if unlike else []
    for names, than, others in ((more, "more", less), (less, "less", more)):
        rest = [name for name in names if name not in others]
        parts += [f"{counted(len(rest), 'tensor')} {than}: {some(rest)}"] if rest else []
    return parts


def _weights(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    return dict(checkpoint.weights if checkpoint.weights is not None else checkpoint.tensors)


def _names_without(checkpoint: Checkpoint, other: Checkpoint) -> list[str]:
    """Return the names of weights that ``other`` lacks: neither they nor names tied to them are there in that shape."""
    from ckptool.names.matching import is_benign  # few folders hold weights twice

    weights, others = _weights(checkpoint), _weights(other)
    there = {(name, one.info.shape) for name, one in others.items()}
    held = {identity(one.info) for name, one in weights.items() if (name, one.info.shape) in there}
    own = ((name, one.info) for name, one in weights.items() if not is_benign(name))
    return [name for name, info in own if (name, info.shape) not in there and identity(info) not in held]


def _values(checkpoint: Checkpoint, other: Checkpoint, limits: Limits, meter: Meter) -> tuple[list[str], list[str]]:
    """Return names of tensors with other values; and of those not compared: two types, not plain, too many views."""
    from ckptool.torch_ops.differences import differ  # few are read

    own, others = _weights(checkpoint), _weights(other)
    unlike, unread = list[str](), list[str]()
    left = limits.expanded(checkpoint.file_nbytes + other.file_nbytes)
    known: dict[tuple[object, ...], list[str] | None] = {}
    for name in (name for name in own if name in others):
        pair = own[name], others[name]
        key = tuple(chain(*(identity(one.info) for one in pair)))
        if key not in known:
            left -= pair[0].nbytes
            meter.read(pair[1].nbytes)
            is_plain = all(one.info.storage is not None and one.info.layout == "strided" for one in pair)
            if left < 0 or not is_plain or pair[0].dtype != pair[1].dtype:
                known[key] = unread
            else:
                known[key] = unlike if differ(*pair) else None
        if (names := known[key]) is not None:
            names.append(name)
    return unlike, unread
