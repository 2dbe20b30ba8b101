"""
TorchScript: which operators of its source, or of its byte code, reach the system.

It runs when it is called, and ``__setstate__`` of its classes when it is loaded.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from typing import Final

from ckptool.formats.runnable.unpacking import Act, of_program
from ckptool.messages import cut
from ckptool.pickles.dangerous_names import FILES, UNFOLLOWED, words

_LONGEST: Final = 120
_OPERATORS: Final = words(
    "aten.save aten.from_file debugprims.load_tensor prim.rpc_async prim.rpc_remote prim.rpc_sync aten.rpc_async"
    " aten.rpc_remote aten.rpc_sync"
)
_VERBS: Final = ("read", "write", "load", "save", "open", "exec", "eval", "system", "download", "file", "files")
_TELLING: Final = re.compile(rf"(?:^|_)(?:{'|'.join(_VERBS)})(?:_|$)").search
"""What operators of other libraries are called that open files."""
_WORDS_OF_OPERATORS: Final = ("read", "write", "load", "save", "open", "exec", "eval", "system", "file", "rpc_")
"""One of them is in the name of every operator that opens files: "load" in "download"."""
_WORDS_OF_TORCH: Final = ("save", "from_file", "rpc_")
"""The same of those that ``torch`` has; others are called as what ``ops`` has."""
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
_GAP: Final = r"(?:\s|\\\n)*"
_DOT: Final = rf"{_GAP}\.{_GAP}"
_ALIASES: Final = (
    re.compile(r"torch(?<![\w.]torch)\b(?!\.\w)").search,
    re.compile(r"ops(?<![\w.]ops)\b(?!\.\w+\.\w)").search,
)
"""Another way to write them than that of ``torch.jit.save``: texts are searched fast for what begins with a word."""
_CALL: Final = re.compile(
    rf"\b(?:ops{_DOT}(?P<library>\w+)|torch){_DOT}(?P<name>\w+)"
    rf"|(?<![\w.])(?P<alias>torch|ops)\b(?!{_GAP}(?::|=(?!=)))"
)
"""An operator with its library; or one of these alone, unless it is a name that is declared or assigned."""
_OPERATOR: Final = re.compile(rb"(\w{1,64})::(?=(\w{1,64}))")
_STRING_OF_FLATBUFFER: Final = re.compile(rb"[^\0]{8,}")
"""Its strings end with NUL, and so does their length before them,"""
_LENGTH_WITHOUT_NUL: Final = 1 << 24
"""unless it is this or more."""
_TEXT_OF_PICKLE: Final = re.compile(rb"X(....)", re.DOTALL)


def of_byte_code(data: bytes, record: str) -> Iterator[Act]:
    """Yield the operators of TorchScript's byte code that open files; behind a name, opcodes follow without a gap."""
    for found in _OPERATOR.finditer(data):
        size = _TEXT_OF_PICKLE.fullmatch(data, max(0, found.start() - 5), found.start())
        end = found.start() + int.from_bytes(size[1], "little") if size is not None else found.end(2)
        library, operator = str(found[1], "ascii", "replace"), str(data[found.end() : end], "ascii", "replace")
        if opens_files(library, operator):
            yield of_program(f"{library}::{operator}", f"{library}::{operator}", FILES, record, found.start())


def is_flatbuffer(head: bytes) -> bool:
    """Say whether a file that begins so is TorchScript in a flatbuffer, which ``torch.jit.load`` loads, too."""
    return head[4:8] == b"PTMF"


def of_flatbuffer(data: bytes, record: str) -> Iterator[Act]:
    """Yield the operators of TorchScript in a flatbuffer that open files: of its byte code, and of the source in it."""
    yield from of_byte_code(data, record)
    for found in _STRING_OF_FLATBUFFER.finditer(data):
        start, end = found.span()
        if data.find(b"torch", start, end) < 0 and data.find(b"ops", start, end) < 0:
            continue
        if end - start >= _LENGTH_WITHOUT_NUL:
            yield of_program("a program", "a long program", UNFOLLOWED, record, start)
            continue
        text = str(data[start:end], "utf-8", "replace")
        yield from (act._replace(offset=start) for act in of_script(text, record))


def opens_files(library: str, operator: str) -> bool:
    if f"{library}.{operator}" in _OPERATORS:
        return True
    return library not in _LIBRARIES and _TELLING(operator) is not None


def of_script(text: str, record: str) -> Iterator[Act]:
    """Yield the operators of a TorchScript class that open files; strings and comments call nothing."""
    telling = _WORDS_OF_OPERATORS if "ops" in text else _WORDS_OF_TORCH
    if not any(map(text.__contains__, telling)) and (
        "getattr" not in text or not any(search(text) for search in _ALIASES)
    ):
        return  # nor does anything else: only getattr() takes a name from a string, in which it may be in parts
    code = _without_strings(text)
    for found in _CALL.finditer(code):
        if found["alias"]:
            yield of_program(found["alias"], f"{found['alias']} under another name", UNFOLLOWED, record, found.start())
        elif opens_files(found["library"] or "aten", found["name"]):
            line = cut(text[found.start() : found.start() + _LONGEST].partition("\n")[0], _LONGEST)
            yield of_program(f"{found['library'] or 'torch'}.{found['name']}", line, FILES, record, found.start())


def strings(text: str) -> Iterator[tuple[int, int]]:
    """Yield where strings and comments begin and end. What has no end ends with its line, or the text."""
    at = 0
    while (begin := _BEGIN(text, at)) is not None:
        at = end_of(text, begin.end(), _ENDS[begin[0]])
        at -= text[at - 1] == "\n" and len(begin[0]) == 1
        yield begin.start(), at


def end_of(text: str, at: int, search: Callable[[str, int], re.Match[str] | None]) -> int:
    """Return where a string ends: a pattern for that would need memory for each escape in it."""
    while (found := search(text, at)) is not None:
        at = found.end()
        if found[0][0] != "\\":
            return at
    return len(text)


def _without_strings(text: str) -> str:
    """Return a text, as long, without what is in its strings, and with spaces for comments: an expression may go on."""
    code, at = io.StringIO(), 0
    for begin, end in strings(text):
        code.write(text[at:begin])
        code.write(" " * (end - begin) if text[begin] == "#" else f'"{" " * (end - begin - 2)}"'[: end - begin])
        at = end
    code.write(text[at:])
    return code.getvalue()
