"""
Programs that archives hold beside their pickles: which of their actions reach the system. Nothing of them runs.

TorchScript runs when it is called, and ``__setstate__`` of its classes when it is loaded. An exported program is a
graph in JSON: its symbolic sizes, its guards and the names of its operators are text that ``torch.export`` evaluates.
``torch.package`` imports Python's source from the archive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from ckptool.archives.archive import Archive
from ckptool.checking.surveys import Act
from ckptool.errors import Cancelled, CkptoolError
from ckptool.messages import cut
from ckptool.pickles.dangerous_names import EVALUATES, FILES, SOURCE, UNFOLLOWED
from ckptool.pickles.reaching import reaching


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LONGEST: Final = 120
_MOST_READ: Final = 1 << 28
"""Bytes of programs that are looked at in one archive."""
_MOST_ACTS: Final = 100
_PACKAGE: Final = "/.data/extern_modules"
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

_STRINGS: Final = re.compile(
    r'\"\"\"(?s:.*?)\"\"\"|\'\'\'(?s:.*?)\'\'\'|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|#[^\n]*'
)
_GAP: Final = r"(?:\s|\\\n)*"
_OTHER_NAME: Final = r"=\s*(?P<alias>torch|ops)\s*(?:$|[,;\n])"
_ALIAS: Final = re.compile(_OTHER_NAME)
_CALL: Final = re.compile(rf"\b(?:ops{_GAP}\.{_GAP}(?P<library>\w+)|torch){_GAP}\.{_GAP}(?P<name>\w+)|{_OTHER_NAME}")
_OPERATOR: Final = re.compile(rb"(\w{1,64})::(\w{1,64})")
_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?', re.DOTALL)
_TEXTS: Final = ("expr_str", "guards_code", "target")

_CALLED: Final = re.compile(r"([\w.]+)\s*\(").finditer
_FUNCTIONS: Final = _words(
    "sqrt floor ceiling log exp sin cos tan sinh cosh tanh asin acos atan atan2 abs sign gamma size stride"
    " storage_offset max min cast_symbool_to_symint_guardless sym_int sym_float sym_not sym_max sym_min sym_ite"
    " is_integer int float bool len range all any not and or is if else in _check _assert"
)
"""What formulas and guards call, beside sympy's classes, which begin with a capital."""
_FORMULA: Final = re.compile(r"[\w\s().,+\-*/%<>=!&|~^'\"\[\]:@]*").fullmatch


def programs(archive: Archive, names: Sequence[str], record: str) -> Iterator[Act]:
    """Yield what the programs of an archive do, which are among members of these names. ``record`` is its own place."""
    if any(f"/{name}".endswith(_PACKAGE) for name in names):
        yield from _sources(archive, record)
    left, count = _MOST_READ, 0
    for name in names:
        if not _is_program(name):
            continue
        left -= archive[name].nbytes
        if left < 0:
            return
        for act in _of_member(archive, name, "::".join(filter(None, (record, name)))):
            count += 1
            if count > _MOST_ACTS:
                return
            yield act


def _is_program(name: str) -> bool:
    return "code/" in name if name.endswith(".py") else not name.endswith(_PACKAGE[1:])


def _of_member(archive: Archive, name: str, record: str) -> Iterator[Act]:
    try:
        content = archive.open(name)
        data = content.read(0, content.nbytes)
    except Cancelled:
        raise
    except CkptoolError:
        return  # that it cannot be read is said elsewhere
    if name.endswith(".py"):
        yield from _of_script(str(data, "utf-8", "replace"), record)
    elif name.endswith(".json"):
        yield from _of_graph(data, record)
    else:
        for found in _OPERATOR.finditer(data):
            library, operator = str(found[1], "ascii", "replace"), str(found[2], "ascii", "replace")
            if _opens_files(library, operator):
                yield _act(f"{library}::{operator}", f"{library}::{operator}", FILES, record, found.start())


def _opens_files(library: str, operator: str) -> bool:
    if f"{library}.{operator}" in _OPERATORS:
        return True
    return library not in _LIBRARIES and _TELLING(operator) is not None


def _of_script(text: str, record: str) -> Iterator[Act]:
    """Yield the operators of a TorchScript class that open files; strings and comments call nothing."""
    if not any(word in text for word in _WORDS_OF_OPERATORS) and _ALIAS.search(text) is None:
        return  # nor does anything else
    code = _STRINGS.sub(lambda found: '"' + " " * (len(found[0]) - 2) + '"', text)
    for found in _CALL.finditer(code):
        if found["alias"]:
            yield _act(found["alias"], f"{found['alias']} under another name", UNFOLLOWED, record, found.start())
        elif _opens_files(found["library"] or "aten", found["name"]):
            line = cut(text[found.start() : found.start() + _LONGEST].partition("\n")[0], _LONGEST)
            yield _act(f"{found['library'] or 'torch'}.{found['name']}", line, FILES, record, found.start())


def _of_graph(data: bytes, record: str) -> Iterator[Act]:
    """Yield the formulas, guards and operators of an exported program that are more than that."""
    if not any(one.encode() in data for one in _TEXTS) and b"\\u" not in data:
        return
    key = ""
    text = str(data, "utf-8", "replace")
    for found in _STRING.finditer(text):
        value = found[1]
        if "\\" in value:
            with suppress(ValueError):
                value = json.loads(f'"{value}"', strict=False)
        if found[2]:
            key = value
        elif key in ("expr_str", "guards_code") and not _is_formula(value, is_guard=key == "guards_code"):
            yield _act(key, f"{key} {cut(value, _LONGEST)}", EVALUATES, record, found.start(1))
        elif (
            key == "target" and not value.startswith("torch.ops.") and value.startswith(("torch", "_operator", "math"))
        ):
            _, _, rest = value.partition(".")
            why = reaching(value, rest) if rest else None
            if why:
                yield _act(value, value, why, record, found.start(1))
        elif key == "target" and value.startswith("torch.ops."):
            library, _, operator = value.removeprefix("torch.ops.").partition(".")
            if _opens_files(library, operator.partition(".")[0]):
                yield _act(value, value, FILES, record, found.start(1))


def _is_formula(text: str, *, is_guard: bool) -> bool:
    """Say whether a text only reckons with numbers and sizes: it calls nothing but what is known for that."""
    if "__" in text.replace("__torch_function__", "") and not is_guard:
        return False
    bare = _STRINGS.sub("''", text)
    if "__" in bare or _FORMULA(bare) is None or "lambda" in bare:
        return False
    if not is_guard and ("[" in bare or any(not re.fullmatch(r".\w*.", one[0]) for one in _STRINGS.finditer(text))):
        return False
    for found in _CALLED(bare):
        *_, last = found[1].split(".")
        if not (last[:1].isupper() or last in _FUNCTIONS):
            return False
    return is_guard or re.search(r"(?:\b[A-Za-z_]\w*|[)\]'\"])\s*\.\s*[A-Za-z_]", bare) is None


def _sources(archive: Archive, record: str) -> Iterator[Act]:
    """Yield the modules of a torch.package archive, which its importer runs."""
    for name in archive:
        _, _, path = name.partition("/")
        if path.endswith(".py"):
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            place = "::".join(filter(None, (record, name)))
            yield Act("code", "runs", module, f"the source of {module}", SOURCE, place, 0)


def _act(name: str, text: str, why: str, record: str, offset: int) -> Act:
    return Act("system", "runs", name, text, why, record, offset)
