"""
Programs that archives hold beside their pickles: which of their actions reach the system. Nothing of them runs.

TorchScript runs when it is called, and ``__setstate__`` of its classes when it is loaded. An exported program is a
graph in JSON: its symbolic sizes, its guards and the names of its operators are text that ``torch.export`` evaluates;
what AOTInductor compiled of it is a library that is loaded, or C++ that is compiled first.
``torch.package`` imports Python's source from the archive.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final

from ckptool.archives.archive import Archive
from ckptool.archives.zip_remains import Remnant
from ckptool.errors import Cancelled, CkptoolError, LimitExceeded
from ckptool.formats.runnable.surveys import Act
from ckptool.messages import counted, cut, show_nbytes
from ckptool.pickles.dangerous_names import EVALUATES, FILES, NATIVE, SOURCE, UNFOLLOWED
from ckptool.pickles.reaching import reaching


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LONGEST: Final = 120
_MOST_READ: Final = 1 << 28
"""Bytes of programs that are looked at in one archive."""
_MOST_ACTS: Final = 100
_PACKAGE: Final = "/.data/extern_modules"
_EXPORTED: Final = "/archive_format"
_GRAPHS: Final = "/models/"
"""The folder that every member of is a graph, whatever its name ends with, in the archive of an exported program."""
_COMPILED: Final = re.compile(r".*?/(data/aotinductor/[^/]+)/.", re.IGNORECASE).match
"""The folders that ``torch.export.load`` makes runners of."""
_OPERATORS: Final = _words(
    "aten.save aten.from_file debugprims.load_tensor prim.rpc_async prim.rpc_remote prim.rpc_sync aten.rpc_async"
    " aten.rpc_remote aten.rpc_sync"
)
_VERBS: Final = ("read", "write", "load", "save", "open", "exec", "eval", "system", "download", "file", "files")
_TELLING: Final = re.compile(rf"(?:^|_)(?:{'|'.join(_VERBS)})(?:_|$)").search
"""What operators of other libraries are called that open files."""
_WORDS_OF_OPERATORS: Final = (*_VERBS, "rpc_")
"""One of them is in the name of every operator that opens files."""
_LIBRARIES: Final = frozenset(("aten", "prim", "prims", "quantized", "c10d_functional", "_c10d_functional"))
"""Torch's own, of which all that open files are known."""

_BEGIN: Final = re.compile(r"\"{3}|'{3}|[\"'#]").search
_ENDS: Final = {
    '"""': re.compile(r'\\.|"{3}', re.DOTALL).search,
    "'''": re.compile(r"\\.|'{3}", re.DOTALL).search,
    '"': re.compile(r'\\.|["\n]', re.DOTALL).search,
    "'": re.compile(r"\\.|['\n]", re.DOTALL).search,
    "#": re.compile(r"\n").search,
}
"""What ends strings and comments, as torch's lexer takes them, or what two characters of them are passed over."""
_END_IN_JSON: Final = re.compile(r'\\.|"', re.DOTALL).search
_GAP: Final = r"(?:\s|\\\n)*"
_DOT: Final = rf"{_GAP}\.{_GAP}"
_ALIAS: Final = re.compile(r"(?<![\w.])(?:torch\b(?!\.\w)|ops\b(?!\.\w+\.\w))")
"""Another way to write them than that of ``torch.jit.save``."""
_CALL: Final = re.compile(
    rf"\b(?:ops{_DOT}(?P<library>\w+)|torch){_DOT}(?P<name>\w+)"
    rf"|(?<![\w.])(?P<alias>torch|ops)\b(?!{_GAP}(?::|=(?!=)))"
)
"""An operator with its library; or one of these alone, unless it is a name that is declared or assigned."""
_OPERATOR: Final = re.compile(rb"(\w{1,64})::(?=(\w{1,64}))")
_TEXT_OF_PICKLE: Final = re.compile(rb"X(....)", re.DOTALL)
_COLON: Final = re.compile(r"\s*:").match
_TEXTS: Final = ("expr_str", "guards_code", "target")

_CALLED: Final = re.compile(r"(?<![\w.])([\w.]+)\s*\(").finditer
_FUNCTIONS: Final = _words(
    "sqrt floor ceiling log exp sin cos tan sinh cosh tanh asin acos atan atan2 abs sign gamma size stride"
    " storage_offset max min cast_symbool_to_symint_guardless sym_int sym_float sym_not sym_max sym_min sym_ite"
    " is_integer int float bool len range all any not and or is if else in _check _assert"
)
"""What formulas and guards call, beside sympy's classes, which begin with a capital."""
_FORMULA: Final = re.compile(r"[\w\s().,+\-*/%<>=!&|~^'\"\[\]:@]*").fullmatch


def programs(found: Archive | Remnant, record: str) -> Iterator[Act]:
    """
    Yield what the programs of an archive do, or what one does that remains of an archive. ``record`` is its place.

    Raises:
        LimitExceeded: There is more of them than is looked at. What the others do was yielded.
    """
    return _of_archive(found, record) if isinstance(found, Archive) else _of_remnant(found, record)


def _of_archive(archive: Archive, record: str) -> Iterator[Act]:
    told = {end for name in archive for end in (_PACKAGE, _EXPORTED) if f"/{name}".lower().endswith(end)}
    if _PACKAGE in told:
        yield from _sources(archive, record)
    if _EXPORTED in told:
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
    name = name.lower()  # as torch's reader looks for its members
    if is_exported and _GRAPHS in name:
        return True
    return "code/" in name if name.endswith(".py") else name.endswith((".json", "bytecode.pkl"))


def _of_member(archive: Archive, name: str, record: str) -> Iterator[Act]:
    try:
        content = archive.open(name)
        data = content.read(0, content.nbytes)
    except Cancelled:
        raise
    except CkptoolError:
        return  # that it cannot be read is said elsewhere
    yield from _of_data(name, data, record)


def _of_data(name: str, data: bytes, record: str) -> Iterator[Act]:
    kind = name.lower()
    if kind.endswith(".py"):
        yield from _of_script(str(data, "utf-8", "replace"), record)
    elif kind.endswith("bytecode.pkl"):
        yield from _of_byte_code(data, record)
    else:
        yield from _of_graph(data, record)


def _of_byte_code(data: bytes, record: str) -> Iterator[Act]:
    """Yield the operators of TorchScript's byte code that open files; behind a name, opcodes follow without a gap."""
    for found in _OPERATOR.finditer(data):
        size = _TEXT_OF_PICKLE.fullmatch(data, max(0, found.start() - 5), found.start())
        end = found.start() + int.from_bytes(size[1], "little") if size is not None else found.end(2)
        library, operator = str(found[1], "ascii", "replace"), str(data[found.end() : end], "ascii", "replace")
        if _opens_files(library, operator):
            yield _act(f"{library}::{operator}", f"{library}::{operator}", FILES, record, found.start())


def _opens_files(library: str, operator: str) -> bool:
    if f"{library}.{operator}" in _OPERATORS:
        return True
    return library not in _LIBRARIES and _TELLING(operator) is not None


def _of_script(text: str, record: str) -> Iterator[Act]:
    """Yield the operators of a TorchScript class that open files; strings and comments call nothing."""
    if not any(word in text for word in _WORDS_OF_OPERATORS) and ("getattr" not in text or not _ALIAS.search(text)):
        return  # nor does anything else: only getattr() takes a name from a string, in which it may be in parts
    code = _without_strings(text)
    for found in _CALL.finditer(code):
        if found["alias"]:
            yield _act(found["alias"], f"{found['alias']} under another name", UNFOLLOWED, record, found.start())
        elif _opens_files(found["library"] or "aten", found["name"]):
            line = cut(text[found.start() : found.start() + _LONGEST].partition("\n")[0], _LONGEST)
            yield _act(f"{found['library'] or 'torch'}.{found['name']}", line, FILES, record, found.start())


def _strings(text: str) -> Iterator[tuple[int, int]]:
    """Yield where strings and comments begin and end. What has no end ends with its line, or the text."""
    at = 0
    while (begin := _BEGIN(text, at)) is not None:
        at = _end(text, begin.end(), _ENDS[begin[0]])
        at -= text[at - 1] == "\n" and len(begin[0]) == 1
        yield begin.start(), at


def _end(text: str, at: int, search: Callable[[str, int], re.Match[str] | None]) -> int:
    """Return where a string ends: a pattern for that would need memory for each escape in it."""
    while (found := search(text, at)) is not None:
        at = found.end()
        if found[0][0] != "\\":
            return at
    return len(text)


def _without_strings(text: str) -> str:
    """Return a text, as long, without what is in its strings, and with spaces for comments: an expression may go on."""
    code, at = io.StringIO(), 0
    for begin, end in _strings(text):
        code.write(text[at:begin])
        code.write(" " * (end - begin) if text[begin] == "#" else f'"{" " * (end - begin - 2)}"'[: end - begin])
        at = end
    code.write(text[at:])
    return code.getvalue()


def _of_graph(data: bytes, record: str) -> Iterator[Act]:
    """Yield the formulas, guards and operators of an exported program that are more than that."""
    if not any(one.encode() in data for one in _TEXTS) and b"\\u" not in data:
        return
    key, end = "", 0
    text = str(data, "utf-8", "replace")
    while start := text.find('"', end) + 1:
        end = _end(text, start, _END_IN_JSON)
        value = text[start : end - 1]
        if "\\" in value:
            with suppress(ValueError):
                value = json.loads(f'"{value}"', strict=False)
        if _COLON(text, end):
            key = value
        elif key in ("expr_str", "guards_code") and not _is_formula(value, is_guard=key == "guards_code"):
            yield _act(key, f"{key} {cut(value, _LONGEST)}", EVALUATES, record, start)
        elif (
            key == "target" and not value.startswith("torch.ops.") and value.startswith(("torch", "_operator", "math"))
        ):
            _, _, rest = value.partition(".")
            why = reaching(value, rest) if rest else None
            if why:
                yield _act(value, value, why, record, start)
        elif key == "target" and value.startswith("torch.ops."):
            library, _, operator = value.removeprefix("torch.ops.").partition(".")
            if _opens_files(library, operator.partition(".")[0]):
                yield _act(value, value, FILES, record, start)


def _is_formula(text: str, *, is_guard: bool) -> bool:
    """Say whether a text only reckons with numbers and sizes: it calls nothing but what is known for that."""
    if "__" in text.replace("__torch_function__", "") and not is_guard:
        return False
    bare, quoted = _bare(text)
    if "__" in bare or _FORMULA(bare) is None or "lambda" in bare:
        return False
    if not is_guard and ("[" in bare or any(not re.fullmatch(r".\w*.", one) for one in quoted)):
        return False
    for found in _CALLED(bare):
        *_, last = found[1].split(".")
        if not (last[:1].isupper() or last in _FUNCTIONS):
            return False
    return is_guard or re.search(r"(?:\b[A-Za-z_]\w*|[)\]'\"])\s*\.\s*[A-Za-z_]", bare) is None


def _bare(text: str) -> tuple[str, list[str]]:
    """Return a formula with empty strings in it, and its strings."""
    code, quoted, at = io.StringIO(), [], 0
    for begin, end in _strings(text):
        code.write(text[at:begin] + "''")
        quoted.append(text[begin:end])
        at = end
    code.write(text[at:])
    return code.getvalue(), quoted


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


def _act(name: str, text: str, why: str, record: str, offset: int) -> Act:
    return Act("system", "runs", name, text, why, record, offset)
