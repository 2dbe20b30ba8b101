"""
Programs that archives hold beside their pickles: which of their words reach the system. Nothing of them runs.

TorchScript runs when it is called, and ``__setstate__`` of its classes when it is loaded. An exported program is a
graph in JSON: its symbolic sizes, its guards and the names of its operators are text that ``torch.export`` evaluates;
what AOTInductor compiled of it is a library that is loaded, or C++ that is compiled first.
``torch.package`` imports Python's source from the archive. Settings say what their loader calls.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeAlias

from ckptool.errors import Failure, LimitExceeded
from ckptool.formats.other_programs import NEMO
from ckptool.formats.runnable.acts import Act, of_kind, of_program, place
from ckptool.messages import counted, cut, show_nbytes
from ckptool.pickles.alarms import is_known, reaching
from ckptool.pickles.dangerous_names import (
    CALLED_CLASSES,
    EVALUATES,
    FILES,
    LOADS,
    NATIVE,
    SETTINGS,
    SOURCE,
    UNFOLLOWED,
    words,
)
from ckptool.pickles.judge import is_listed
from ckptool.sources.source import Source

_MOST_READ: Final = 1 << 28
"""Bytes of programs that are looked at in one archive."""
_MOST_ACTS: Final = 100
_PACKAGE: Final = "/.data/extern_modules"
_EXPORTED: Final = "/archive_format"
EXPORTED: Final = "an exported program"
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


Member: TypeAlias = "tuple[str, int, Callable[[], Source]]"
"""Its name, its bytes, and what opens it."""


def of_members(members: Sequence[Member], record: str, *, is_whole: bool = True) -> Iterator[Act]:
    """
    Yield what the programs of an archive do, or those of members that remain of one that is not whole.

    Raises:
        LimitExceeded: There is more of them than is looked at. What the others do was yielded.
    """
    names = [name for name, _, _ in members]
    ends = [f"/{name}".lower() for name in names]
    is_exported = not is_whole or any(one.endswith(_EXPORTED) for one in ends)
    if is_whole and any(one.endswith(_PACKAGE) for one in ends):
        yield from _sources(names, record)
    elif is_whole and any(one.endswith("/constants.pkl") or _is_torchscript(one) for one in ends):
        yield of_kind("TorchScript", record)
    if is_exported:
        yield from [of_kind(EXPORTED, record)] if is_whole else ()
        yield from islice(_compiled(names, record), _MOST_ACTS)
    left, unread, found = _MOST_READ, 0, 0
    for name, nbytes, opened in members:
        if not _is_program(name, is_exported=is_exported):
            continue
        if nbytes > left:
            unread += 1
            continue
        left -= nbytes
        try:
            content = opened()
            data = content.read(0, content.nbytes)
        except Failure:
            continue  # that it cannot be read is said elsewhere
        for act in _of_data(name, data, place(record, name)):
            found += 1
            if found > _MOST_ACTS:
                return
            yield act
    if unread:
        raise LimitExceeded(f"{counted(unread, 'program')}: all together are more than {show_nbytes(_MOST_READ)}")


def _is_torchscript(name: str) -> bool:
    return "code/" in name if name.endswith(".py") else name.endswith("bytecode.pkl")


def _is_program(name: str, *, is_exported: bool) -> bool:
    lowered = name.lower()  # as torch's reader looks for its members
    is_graph = lowered.endswith(".json") or (is_exported and _GRAPHS in lowered)
    return is_graph or name.endswith(NEMO) or _is_torchscript(lowered)


def _of_data(name: str, data: bytes, record: str) -> Iterable[Act]:
    kind = name.lower()
    if kind.endswith("bytecode.pkl"):
        return of_byte_code(data, record)
    if name.endswith(NEMO) or kind.endswith(".py"):
        read = of_settings if name.endswith(NEMO) else of_script
        return read(str(data, "utf-8", "replace"), record)
    return of_graph(data, record)


def _sources(names: Iterable[str], record: str) -> Iterator[Act]:
    """Yield the modules of a torch.package archive, which its importer runs."""
    for name in names:
        _, _, path = name.partition("/")
        if path.endswith(".py"):
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            yield Act("code", "runs", module, f"the source of {module}", SOURCE, place(record, name), 0)


def _compiled(names: Iterable[str], record: str) -> Iterator[Act]:
    """Yield the folders of native code, which the loader of exported programs loads, or compiles and loads."""
    found = {match[1]: name for name in names if (match := _COMPILED(f"/{name}"))}
    for folder, name in found.items():
        yield Act("code", "runs", folder, f"native code in {folder}", NATIVE, place(record, name), 0)


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
        yield Act("system" if why else "code", "runs", name, shown, why or SETTINGS, record, found.start())


# TorchScript: the operators of its source, or of its byte code


_OPERATORS: Final = words(
    "aten.save aten.from_file debugprims.load_tensor prim.rpc_async prim.rpc_remote prim.rpc_sync aten.rpc_async"
    " aten.rpc_remote aten.rpc_sync"
)
_VERBS: Final = "read|write|load|save|open|exec|eval|system|download|files?"
_TELLING: Final = re.compile(rf"(?:^|_)(?:{_VERBS})(?:_|$)").search
"""What operators of other libraries are called that open files."""
_LIBRARIES: Final = frozenset(("aten", "prim", "prims", "quantized", "c10d_functional", "_c10d_functional"))
"""Torch's own, of which all that open files are known."""
_OF_ANY: Final = re.compile(rf"{_VERBS}|rpc_|getattr").search
"""One of them is in every program that opens files: only getattr() takes a name from a string, in parts maybe."""
_ESCAPE_IN_CODE: Final = re.compile(r"\\[^\n]")
_QUIET: Final = re.compile(
    r"\"{3}.*?(?:\"{3}|\Z)|'{3}.*?(?:'{3}|\Z)|#[^\n]*"
    r"|\"[^\"\n\\]*(?:\\\n[^\"\n\\]*)*[\"\n]?|'[^'\n\\]*(?:\\\n[^'\n\\]*)*['\n]?",
    re.DOTALL,
)
"""Strings and comments, as torch's lexer takes them: they call nothing."""
_DOT: Final = r"(?:\s|\\\n)*\.(?:\s|\\\n)*"
_CALL_IN_CODE: Final = re.compile(
    rf"\b(?:ops{_DOT}(?P<library>\w+)|torch){_DOT}(?P<name>\w+)"
    r"|(?<![\w.])(?P<alias>torch|ops)\b(?!(?:\s|\\\n)*(?::|=(?!=)))"
)
"""An operator with its library; or one of these alone, unless it is a name that is declared or assigned."""
_OPERATOR: Final = re.compile(rb"(\w{1,64})::(?=(\w{1,64}))")
_STRING_OF_FLATBUFFER: Final = re.compile(rb"[^\0]{8,}")
"""Its strings end with NUL, and so does their length before them,"""
_LENGTH_WITHOUT_NUL: Final = 1 << 24
"""unless it is this or more."""
_TEXT_OF_PICKLE: Final = re.compile(rb"X(....)", re.DOTALL)


def of_script(text: str, record: str) -> Iterator[Act]:
    """Yield the operators of a TorchScript class that open files."""
    if not _OF_ANY(text):
        return
    code = _ESCAPE_IN_CODE.sub("  ", text)
    code = _QUIET.sub(lambda found: (" " if found[0][0] == "#" else '"') * len(found[0]), code)
    for found in _CALL_IN_CODE.finditer(code):
        if found["alias"]:
            yield of_program(found["alias"], f"{found['alias']} under another name", UNFOLLOWED, record, found.start())
        elif _opens_files(found["library"] or "aten", found["name"]):
            line = cut(text[found.start() : found.start() + _LONGEST].partition("\n")[0], _LONGEST)
            yield of_program(f"{found['library'] or 'torch'}.{found['name']}", line, FILES, record, found.start())


def of_byte_code(data: bytes, record: str) -> Iterator[Act]:
    """Yield the operators of TorchScript's byte code that open files; behind a name, opcodes follow without a gap."""
    for found in _OPERATOR.finditer(data):
        size = _TEXT_OF_PICKLE.fullmatch(data, max(0, found.start() - 5), found.start())
        end = found.start() + int.from_bytes(size[1], "little") if size is not None else found.end(2)
        library, operator = str(found[1], "ascii", "replace"), str(data[found.end() : end], "ascii", "replace")
        if _opens_files(library, operator):
            yield of_program(f"{library}::{operator}", f"{library}::{operator}", FILES, record, found.start())


def of_flatbuffer(source: Source, record: str) -> Iterator[Act]:
    """
    Yield what the program in a flatbuffer does: its operators that open files, of its byte code and its source.

    Raises:
        LimitExceeded: It is larger than what is looked at.
    """
    if source.nbytes > _MOST_READ:
        raise LimitExceeded(f"a program of more than {show_nbytes(_MOST_READ)}")
    yield of_kind("TorchScript", record)
    yield from islice(_in_flatbuffer(source.read(0, source.nbytes), record), _MOST_ACTS)


def _in_flatbuffer(data: bytes, record: str) -> Iterator[Act]:
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


def _opens_files(library: str, operator: str) -> bool:
    if f"{library}.{operator}" in _OPERATORS:
        return True
    return library not in _LIBRARIES and _TELLING(operator) is not None


# Exported programs: the texts of their graphs, in JSON


_DEEPEST: Final = 8
"""Texts of JSON inside each other: there are two in what torch writes."""
_NAMING: Final = re.compile(r"(?:\w*_)?names?|fqn").fullmatch
"""Keys of names that are written into source code."""
_NAME: Final = re.compile(r"[\w.@:-]*").fullmatch
_CODE: Final = re.compile(r"[()\[\]=;\n\r]").search
"""What is in no key."""
_WORDS_IN: Final = re.compile(r"(?<![\w.])[A-Za-z_]\w*").findall
_FORBIDDEN: Final = (
    frozenset(dir(builtins)) | words("torch for async await yield lambda key sympify parse_expr lambdify")
) - words(
    "max min abs int float bool len range all any not and or is if else in True False None isinstance tuple list dict"
    " str"
)
"""Words that no formula and no guard has: functions that evaluate, what gives one to another, or a name to it."""

_STRING: Final = re.compile(r"(?<![\w'\"])(?:'[^'\"\\\n]*'|\"[^'\"\\\n]*\")").sub
"""Without the other quotes, for torch writes it into a longer text."""
_SYMBOL: Final = re.compile(r"\b(Symbol|Dummy|Float)\('[\w.+-]*'").sub
_ODD: Final = re.compile(r"['\"\\#;`{}\n\r]|[)\]0]\s*\(|:=|(?:\.\s*(?:[eE][\d_]+)?[jJ]?|\b\d\w*)for\b").search
"""
What no formula and no guard has once its texts are out: other texts, escapes, calls of what is no name, names for parts
of lists, also right behind a number.
"""
_CALLS: Final = re.compile(r"(\.\s*)?\b(\w+)\s*\(").finditer
_ATTRIBUTE: Final = re.compile(r"\.\s*[A-Za-z_]").search
_OF_SIZES: Final = words(
    "size stride storage_offset dim numel ndimension is_integer isnan isinf floor ceil trunc sqrt pow log2 bit_length"
)
"""Methods of tensors and numbers, and functions of math, that guards call."""
_FUNCTIONS: Final = words(
    "Symbol Dummy Integer Rational Float Add Mul Pow Mod Max Min Abs Piecewise ExprCondPair ITE Eq Ne Lt Le Gt Ge"
    " Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan And Or Not Xor sign floor ceiling exp"
    " log sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh FloorDiv ModularIndexing Where PythonMod"
    " CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv TruncToFloat"
    " IsNonOverlappingAndDenseIndicator TruncToInt RoundToInt RoundDecimal ToFloat Identity"
    " min max abs int float bool and or not in is if else"
)
"""Functions of formulas, and words that a parenthesis may follow."""
_OPERATION: Final = re.compile(r"(?:OpaqueUnaryFn|BitwiseFn)_\w+").fullmatch


def of_graph(data: bytes, record: str) -> list[Act]:
    """
    Return what of an exported program is more than formulas, guards, operators that reckon, and names.

    ``torch.export`` evaluates the symbolic sizes and the guards, looks up the names of operators, writes the names of
    values into source code that it compiles, and imports what the layouts of arguments name.
    """
    found: list[Act] = []
    if not any(one in data for one in (b"graph", b"expr_str", b"guards_code", b"_spec", b"\\u")):
        return found  # other JSON: settings, most likely

    def look(text: str | bytes, depth: int) -> None:
        def visit(pairs: list[tuple[str, Any]]) -> None:
            named = dict(pairs)
            for key, value in pairs:
                for one in _texts(value):
                    found.extend(_of_text(key, one, named, record))
                    if ('"' in one or _CODE(one)) and (depth or key.endswith("_spec")):
                        look(one, depth + 1)
                if _CODE(key):
                    found.append(of_program("a key", f"a key {cut(key, _LONGEST)}", EVALUATES, record, 0))

        if depth > _DEEPEST:
            found.append(of_program("a layout", "a layout of arguments", UNFOLLOWED, record, 0))
            return
        try:
            value = json.loads(text, object_pairs_hook=visit, strict=False)
            if depth:
                visit([("", value)])
        except ValueError:  # nor can torch read it
            if depth > 1 and _CODE(str(text)):
                found.append(of_program("a key", f"a key {cut(str(text), _LONGEST)}", EVALUATES, record, 0))
        except RecursionError:
            found.append(of_program("a layout", "a layout of arguments", UNFOLLOWED, record, 0))

    look(data, 0)
    return found


def _of_text(key: str, text: str, beside: dict[str, Any], record: str) -> Iterator[Act]:
    """Yield what a text in a graph does; ``beside`` are those it stands with."""
    if key == "fqn" and "__enum__" in beside:
        shown = f"a layout that imports {cut(text, _LONGEST)}"
        yield Act("code", "runs", text.replace(":", "."), shown, LOADS, record, 0)
    if why := _why_of_text(key, text, beside):
        name, shown = (text, text) if key == "target" else (key, f"{key} {cut(text, _LONGEST)}")
        yield of_program(name, shown, why, record, 0)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts that a value is or holds, of lists in lists too."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            left += one


def _why_of_text(key: str, text: str, beside: dict[str, Any]) -> str | None:
    """Return in which way a text in a graph reaches the system, by its words; ``beside`` are those it stands with."""
    if key in ("expr_str", "guards_code"):
        return None if _reckons(text, is_guard=key == "guards_code") else EVALUATES
    if key in ("target", "as_operator"):
        return _of_target(text)
    if key == "fqn" and "__enum__" in beside:
        module, _, name = text.partition(":")
        return LOADS if is_known(f"{module}.{name}") else reaching(f"{module}.{name}", name)
    if key == "default_factory_name":
        factory = f"{beside.get('default_factory_module')}.{text}"
        return None if is_listed(factory) else LOADS
    return EVALUATES if _NAMING(key) and not _NAME(text) else None


def _reckons(text: str, *, is_guard: bool) -> bool:
    """
    Say whether a formula or a guard only reckons and compares, by its words and what it calls.

    sympy evaluates formulas, and again the texts in them: there are none but the names of symbols and the digits of
    numbers. A guard has texts as keys and values; what it calls are functions of sizes.
    """
    bare = _STRING("0", text) if is_guard else _SYMBOL(r"\1(0", text)
    if not text.isascii() or "__" in bare or _ODD(bare) or not _FORBIDDEN.isdisjoint(_WORDS_IN(bare)):
        return False
    calls = [(bool(found[1]), found[2]) for found in _CALLS(bare)]
    if is_guard:
        return all(name in _OF_SIZES for is_attribute, name in calls if is_attribute)
    return not _ATTRIBUTE(bare) and all(name in _FUNCTIONS or _OPERATION(name) for _, name in calls)


def _of_target(value: str) -> str | None:
    if not value.startswith(("torch", "_operator", "math")):
        return None
    library, _, operator = value.removeprefix("torch.ops.").partition(".")
    if value.startswith("torch.ops.") and operator:
        return FILES if _opens_files(library, operator.partition(".")[0]) else None
    _, _, rest = value.partition(".")
    return (reaching(value, rest) if rest else None) or (FILES if _opens_files("", rest.rpartition(".")[2]) else None)
