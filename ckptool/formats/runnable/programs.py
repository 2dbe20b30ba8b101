"""
Programs that archives hold beside their pickles: which of their actions reach the system. Nothing of them runs.

TorchScript runs when it is called, and ``__setstate__`` of its classes when it is loaded. An exported program is a
graph in JSON: its symbolic sizes, its guards and the names of its operators are text that ``torch.export`` evaluates;
what AOTInductor compiled of it is a library that is loaded, or C++ that is compiled first.
``torch.package`` imports Python's source from the archive. Settings say what their loader calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from ckptool.archives.archive import Archive
from ckptool.archives.zips import Remnant
from ckptool.errors import Failure, LimitExceeded
from ckptool.formats.runnable import SETTINGS
from ckptool.formats.runnable.exported import of_graph
from ckptool.formats.runnable.scripts import of_byte_code, of_flatbuffer, of_script
from ckptool.formats.runnable.unpacking import Act, of_kind
from ckptool.messages import counted, cut, show_nbytes
from ckptool.pickles.alarms import reaching
from ckptool.pickles.dangerous_names import CALLED_CLASSES, LOADS, NATIVE, SOURCE, UNFOLLOWED
from ckptool.pickles.dangerous_names import SETTINGS as BY_SETTINGS
from ckptool.sources.source import Source

_MOST_READ: Final = 1 << 28
"""Bytes of programs that are looked at in one archive."""
_MOST_ACTS: Final = 100
_PACKAGE: Final = "/.data/extern_modules"
_OF_TORCHSCRIPT: Final = (".py", "bytecode.pkl")
_EXPORTED: Final = "/archive_format"
_GRAPHS: Final = "/models/"
"""The folder that every member of is a graph, whatever its name ends with, in the archive of an exported program."""
_COMPILED: Final = re.compile(r".*?/(data/aotinductor/[^/]+)/.", re.IGNORECASE).match
"""The folders that ``torch.export.load`` makes runners of."""

_LONGEST: Final = 120
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|\r?\n[ \t]*)")
"""In a string of YAML: a character by its number, or a line that goes on."""
_MENTION: Final = re.compile(r"(?<!\w)_target_(?!\w)|^(?:target|cls)(?=[\"']?[ \t]*:)", re.MULTILINE)
_CALL: Final = re.compile(
    r"[\"']?[ \t]*:[ \t]+(?P<quote>[\"']?)(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)+)(?P=quote)[ \t]*(?:[,}#\r\n]|$)"
)
_NOTHING: Final = re.compile(r"[\"']?[ \t]*:[ \t]+(?:null|~)?[ \t]*(?:[,}#\r\n]|$)")
_COMMENT: Final = re.compile(r"^[ \t]*#[^\n]*$", re.MULTILINE)


def programs(found: Archive | Remnant, record: str) -> Iterator[Act]:
    """
    Yield what the programs of an archive do, or what one does that remains of an archive. ``record`` is its place.

    Raises:
        LimitExceeded: There is more of them than is looked at. What the others do was yielded.
    """
    return _of_archive(found, record) if isinstance(found, Archive) else _of_remnant(found, record)


def settings(archive: Archive) -> Iterator[Act]:
    """Yield what the settings in an archive have called, and nothing else of it."""
    for name in archive:
        if name.endswith(SETTINGS) and archive[name].nbytes <= _MOST_READ:
            yield from islice(_of_member(archive, name, name), _MOST_ACTS)


def of_file(source: Source, record: str) -> Iterator[Act]:
    """
    Yield what the program in a flatbuffer does.

    Raises:
        LimitExceeded: It is larger than what is looked at.
    """
    if source.nbytes > _MOST_READ:
        raise LimitExceeded(f"a program of more than {show_nbytes(_MOST_READ)}")
    yield of_kind("TorchScript", record)
    yield from islice(of_flatbuffer(source.read(0, source.nbytes), record), _MOST_ACTS)


def _of_archive(archive: Archive, record: str) -> Iterator[Act]:
    lowered = [f"/{name}".lower() for name in archive]
    told = {_PACKAGE if one.endswith(_PACKAGE) else _EXPORTED for one in lowered if one.endswith((_PACKAGE, _EXPORTED))}
    if _PACKAGE in told:
        yield from _sources(archive, record)
    elif any(_is_program(one, is_exported=False) and one.endswith(_OF_TORCHSCRIPT) for one in lowered) or any(
        one.endswith("/constants.pkl") for one in lowered
    ):
        yield of_kind("TorchScript", record)
    if _EXPORTED in told:
        yield of_kind("an exported program", record)
        yield from islice(_compiled(archive, record), _MOST_ACTS)
    left, count, unread = _MOST_READ, 0, 0
    for name in archive:
        if not _is_program(name, is_exported=_EXPORTED in told):
            continue
        if archive[name].nbytes > left:
            unread += 1
            continue
        left -= archive[name].nbytes
        for act in _of_member(archive, name, "::".join(filter(None, (record, name)))):
            count += 1
            if count > _MOST_ACTS:
                return
            yield act
    if unread:
        raise LimitExceeded(f"{counted(unread, 'program')}: all together are more than {show_nbytes(_MOST_READ)}")


def _of_remnant(member: Remnant, record: str) -> Iterator[Act]:
    yield from (act._replace(record=record) for act in _compiled([member.name], record))
    if not _is_program(member.name, is_exported=True):
        return
    if member.source.nbytes > _MOST_READ:
        raise LimitExceeded(f"a program of more than {show_nbytes(_MOST_READ)}")
    yield from islice(_of_data(member.name, member.source.read(0, member.source.nbytes), record), _MOST_ACTS)


def _is_program(name: str, *, is_exported: bool) -> bool:
    if name.endswith(SETTINGS):
        return True
    name = name.lower()  # as torch's reader looks for its members
    if is_exported and _GRAPHS in name:
        return True
    return "code/" in name if name.endswith(".py") else name.endswith((".json", "bytecode.pkl"))


def _of_member(archive: Archive, name: str, record: str) -> Iterator[Act]:
    try:
        content = archive.open(name)
        data = content.read(0, content.nbytes)
    except Failure:
        return  # that it cannot be read is said elsewhere
    yield from _of_data(name, data, record)


def _of_data(name: str, data: bytes, record: str) -> Iterator[Act]:
    kind = name.lower()
    if name.endswith(SETTINGS):
        yield from of_settings(str(data, "utf-8", "replace"), record)
    elif kind.endswith(".py"):
        yield from of_script(str(data, "utf-8", "replace"), record)
    elif kind.endswith("bytecode.pkl"):
        yield from of_byte_code(data, record)
    else:
        yield from of_graph(data, record)


def _sources(archive: Archive, record: str) -> Iterator[Act]:
    """Yield the modules of a torch.package archive, which its importer runs."""
    for name in archive:
        _, _, path = name.partition("/")
        if path.endswith(".py"):
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            place = "::".join(filter(None, (record, name)))
            yield Act("code", "runs", module, f"the source of {module}", SOURCE, place, 0)


def _compiled(names: Iterable[str], record: str) -> Iterator[Act]:
    """Yield the folders of native code, which the loader of exported programs loads, or compiles and loads."""
    found = {match[1]: name for name in names if (match := _COMPILED(f"/{name}"))}
    for folder, name in found.items():
        place = "::".join(filter(None, (record, name)))
        yield Act("code", "runs", folder, f"native code in {folder}", NATIVE, place, 0)


def of_settings(text: str, record: str) -> Iterator[Act]:
    """
    Yield what settings have their loader call; what cannot be followed may reach the system.

    NeMo's ``restore_from`` imports the class under ``target``, and calls what each ``_target_`` names with the settings
    beside it, as Hydra does. No reader of YAML is needed: a mention that is not plainly a key with a name is one that
    cannot be followed.
    """
    text = _COMMENT.sub("", _ESCAPE.sub(lambda one: chr(int(one[1] or one[2] or "0", 16)).strip("\0"), text))
    for found in _MENTION.finditer(text):
        call = _CALL.match(text, found.end())
        if call is None:
            if _NOTHING.match(text, found.end()) is None:
                rest = cut(" ".join(text[found.start() : found.end() + _LONGEST].split()), _LONGEST)
                yield Act("system", "runs", rest, f"settings with {rest!r}", UNFOLLOWED, record, found.start())
            continue
        name = call["name"]
        why = LOADS if name in CALLED_CLASSES else reaching(name, name.rpartition(".")[2])
        shown = f"settings that call {cut(name, _LONGEST)}(…)"
        yield Act("system" if why else "code", "runs", name, shown, why or BY_SETTINGS, record, found.start())
