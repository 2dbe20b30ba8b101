"""
Finds what reaches the system in programs that archives contain (TorchScript and others). Nothing of them runs.

TorchScript runs when it is called, and ``__setstate__`` of its classes when it is loaded. An exported program is a
graph in JSON: its symbolic sizes, its guards and the names of its operators are text that ``torch.export`` evaluates;
what AOTInductor compiled of it is a library that is loaded, or C++ that is compiled first.
``torch.package`` imports Python's source from the archive. Settings name what their loader calls.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from math import inf, prod
from typing import Any, Final, TypeAlias

from ckptool.errors import Failure, LimitExceeded
from ckptool.formats.other_programs import NEMO, uncommented
from ckptool.formats.runnable import Act, of_kind, of_program, place
from ckptool.messages import counted, cut, show_nbytes
from ckptool.pickles.alarms import (
    CALLED_CLASSES,
    EVALUATES,
    FILES,
    LOADS,
    NATIVE,
    PACKED,
    SETTINGS,
    SOURCE,
    UNFOLLOWED,
    is_known,
    reaching,
    words,
)
from ckptool.pickles.judge import is_listed
from ckptool.sources.source import Source

_MOST_READ: Final = 1 << 28
"""Bytes of programs that are inspected in one archive."""
_MOST_ACTS: Final = 100
_EXPORTED: Final = ("/archive_format", "/serialized_exported_program.json")
EXPORTED: Final = "an exported program"
_GRAPHS: Final = "/models/"
"""In the archive of an exported program, every member of this folder is a graph, whatever its suffix."""
_COMPILED: Final = re.compile(r".*?(data/aotinductor/[^/]*)", re.IGNORECASE).match
"""The folders that ``torch.export.load`` makes runners of; it takes a file in their place for one of them."""

_LONGEST: Final = 120
_ROOT: Final = re.compile(r"^( *)([^\s#%!&.-])", re.MULTILINE)
_MENTION: Final = (
    r"(?<!\w)_target_(?!\w)|(?<!\w)[&!][^\s&!]*\s+[\"']?(?:target|cls)(?!\w)|{}[\"']?(?:target|cls)(?=[\"']?\s*:)"
)
"""A call of Hydra's anywhere, or a class that a key of the outermost mapping names, which begins so."""
_CALL: Final = re.compile(
    r"[\"']?[ \t]*:[ \t]+(?P<quote>[\"']?)(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)+)(?P=quote)[ \t]*(?:[,}#\r\n]|$)"
)
_NOTHING: Final = re.compile(r"[\"']?[ \t]*:[ \t]+(?:null|~)?[ \t]*(?:[,}#\r\n]|$)")


Member: TypeAlias = "tuple[str, int, Callable[[], Source]]"
"""Its name, its size in bytes, and a function that opens it."""


def of_members(members: Sequence[Member], record: str) -> Iterator[Act]:
    """
    Yield what the programs of an archive do.

    Raises:
        LimitExceeded: Some are too much to be inspected. What the others do was yielded before.
    """
    names = [name for name, _, _ in members]
    ends = [f"/{name}".lower() for name in names]
    is_exported = any(one.endswith(_EXPORTED) for one in ends)
    if any(one.endswith("/.data/extern_modules") for one in ends):
        yield from _sources(names, record)
    elif any(
        one.endswith("/constants.pkl") or _reader(one, is_exported=False) in (of_source, of_byte_code) for one in ends
    ):
        yield of_kind("TorchScript", record)
    if is_exported:
        yield of_kind(EXPORTED, record)
    # The loader of exported programs loads the native code in these folders, or compiles it first.
    folders = {match[1]: name for name in names if (match := _COMPILED(name))}
    for folder, name in islice(folders.items(), _MOST_ACTS):
        yield Act("code", "runs", folder, f"native code in {folder}", NATIVE, place(record, name), 0)
    left, unread, found = _MOST_READ, 0, 0
    for name, nbytes, opened in members:
        read = _reader(name, is_exported=is_exported)
        if read is None:
            continue
        if nbytes > left:
            unread += 1
            continue
        left -= nbytes
        try:
            content = opened()
            data = content.read(0, content.nbytes)
        except Failure:
            continue  # an error of reading is reported elsewhere
        for act in read(data, place(record, name)):
            found += 1
            if found > _MOST_ACTS:
                return
            yield act
    if unread:
        raise LimitExceeded(f"{counted(unread, 'program')}: all together are more than {show_nbytes(_MOST_READ)}")


def _reader(name: str, *, is_exported: bool) -> Callable[[bytes, str], Iterator[Act]] | None:
    """Return the reader of a member by its name, which torch looks up in lower case; None if it is not a program."""
    lowered = name.lower()
    if name.endswith(NEMO):
        return lambda data, record: of_settings(str(data, "utf-8", "replace"), record)
    if lowered.endswith(".json") or (is_exported and _GRAPHS in lowered):
        return of_graph
    if lowered.endswith("bytecode.pkl"):
        return of_byte_code
    return of_source if lowered.endswith(".py") and "code/" in lowered else None


def _sources(names: Iterable[str], record: str) -> Iterator[Act]:
    """Yield the modules of a torch.package archive, which its importer runs."""
    for name in names:
        _, _, path = name.partition("/")
        if path.endswith(".py"):
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            yield Act("code", "runs", module, f"the source of {module}", SOURCE, place(record, name), 0)


def of_settings(text: str, record: str) -> Iterator[Act]:
    """
    Yield what settings make their loader call; what cannot be followed may reach the system.

    NeMo's ``restore_from`` imports the class under ``target``, and calls what each ``_target_`` names with the settings
    beside it, as Hydra does. YAML is not parsed: a mention that is not plainly a key with a name cannot be followed.
    """
    text = uncommented(text)
    root = _ROOT.search(text)
    begin = rf"^{root[1]}(?:\? *)?" if root is not None and root[2] != "{" else r"(?<!\w)"
    for found in re.finditer(_MENTION.format(begin), text, re.MULTILINE):
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
"""Words in the names of operators of other libraries that open files."""
_LIBRARIES: Final = frozenset(("aten", "prim", "prims", "quantized", "c10d_functional", "_c10d_functional"))
"""Torch's own libraries, of which all operators that open files are known."""
_OF_ANY: Final = re.compile(rf"{_VERBS}|rpc_|classes|getattr").search
"""Every program that opens files contains one of these: only getattr() takes a name from a string, maybe in parts."""
_ESCAPE_IN_CODE: Final = re.compile(r"\\[^\n]")
_QUIET: Final = re.compile(
    r"\"{3}.*?(?:\"{3}|\Z)|'{3}.*?(?:'{3}|\Z)|#[^\n]*"
    r"|\"[^\"\n\\]*(?:\\\n[^\"\n\\]*)*[\"\n]?|'[^'\n\\]*(?:\\\n[^'\n\\]*)*['\n]?",
    re.DOTALL,
)
"""Strings and comments, as torch's lexer takes them: they call nothing."""
_DOT: Final = r"(?:\s|\\\n)*\.(?:\s|\\\n)*"
_CALL_IN_CODE: Final = re.compile(
    rf"\b(?:ops{_DOT}(?P<library>\w+)|torch){_DOT}(?P<name>\w+)(?:(?<=\bclasses){_DOT}(?P<classes>\w+))?"
    rf"|(?<![\w.])(?P<alias>(?:torch|ops)\b(?!(?:\s|\\\n)*(?::|=(?!=)))|__torch__(?:{_DOT}torch)?\b(?!{_DOT}\w))"
)
"""
An operator, or classes in C++, with their library; or one of these alone, unless it is a name that is declared or
assigned.
"""
_CLASSES: Final = re.compile(rb"__torch__\.torch\.classes\.(\w*)")
_OPERATOR: Final = re.compile(rb"(\w{1,64})::(?=(\w{1,64}))")
_STRING_OF_FLATBUFFER: Final = re.compile(rb"[^\0]{8,}")
"""The strings of a flatbuffer end with NUL, and so does the length before them if it is less than this:"""
_LENGTH_WITHOUT_NUL: Final = 1 << 24
"""from here on, the last byte of a length is not NUL."""
_TEXT_OF_PICKLE: Final = re.compile(rb"X(....)", re.DOTALL)


def of_source(data: bytes, record: str) -> Iterator[Act]:
    """Yield the operators of a TorchScript class that open files."""
    text = str(data, "utf-8", "replace")
    if not _OF_ANY(text):
        return
    code = _ESCAPE_IN_CODE.sub("  ", text)
    code = _QUIET.sub(lambda found: (" " if found[0][0] == "#" else '"') * len(found[0]), code)
    for found in _CALL_IN_CODE.finditer(code):
        if found["alias"]:
            yield of_program(found["alias"], f"{found['alias']} under another name", UNFOLLOWED, record, found.start())
            continue
        line = cut(text[found.start() : found.start() + _LONGEST].partition("\n")[0], _LONGEST)
        if found["name"] == "classes" and not found["library"]:
            if found["classes"] not in PACKED:
                yield of_program("torch.classes", line, LOADS, record, found.start())
        elif _opens_files(found["library"] or "aten", found["name"]):
            yield of_program(f"{found['library'] or 'torch'}.{found['name']}", line, FILES, record, found.start())


def of_byte_code(data: bytes, record: str) -> Iterator[Act]:
    """Yield the operators of TorchScript's byte code that open files; opcodes follow a name without a gap."""
    for found in _OPERATOR.finditer(data):
        size = _TEXT_OF_PICKLE.fullmatch(data, max(0, found.start() - 5), found.start())
        end = found.start() + int.from_bytes(size[1], "little") if size is not None else found.end(2)
        library, operator = str(found[1], "ascii", "replace"), str(data[found.end() : end], "ascii", "replace")
        if _opens_files(library, operator):
            yield of_program(f"{library}::{operator}", f"{library}::{operator}", FILES, record, found.start())
    for found in _CLASSES.finditer(data):
        if (library := str(found[1], "ascii", "replace")) not in PACKED:
            yield of_program("torch.classes", f"torch.classes.{library}", LOADS, record, found.start())


def of_flatbuffer(source: Source, record: str) -> Iterator[Act]:
    """
    Yield what the program in a flatbuffer does: operators that open files, in its byte code and its source.

    Raises:
        LimitExceeded: It is larger than what is inspected.
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
        yield from (act._replace(offset=start) for act in of_source(data[start:end], record))


def _opens_files(library: str, operator: str) -> bool:
    if f"{library}.{operator}" in _OPERATORS:
        return True
    return library not in _LIBRARIES and _TELLING(operator) is not None


# Exported programs: the texts of their graphs, in JSON


_LONGEST_FORMULA: Final = 1 << 14
_FREE: Final = words("stack_trace nn_module_stack torch_fn from_node custom as_string as_strings")
"""Keys of texts that torch only keeps, or passes to operators unchanged."""
_PLAIN: Final = re.compile(r"[\w .:/@+*-]*").fullmatch
"""Any other text: names, some of which torch writes into source code that it compiles. It can call nothing."""
_TARGET: Final = re.compile(
    r"torch\.ops\.(?!__|load_library|import_module)(\w+)\.((?!__)\w+|__i?(?:and|or|xor|[lr]shift)__)(?:\.(?!__)\w+)?"
    r"|_operator\.(?:eq|ne|[lg][et]|neg|pos|abs|add|sub|mul|mod|pow|truediv|floordiv|and_|or_|xor|[lr]shift|getitem)"
    r"|math\.(?!_)\w+|torch\._?sym_\w+|torch\._functorch\.predispatch\.\w+"
).fullmatch
"""Operators that torch.export writes; the groups are the library and the name of an operator."""
_LOOKED_UP: Final = ("torch", "_operator", "math")
"""Beginnings of texts that torch takes for paths of attributes. It has no operator for other texts."""

_CHARACTERS: Final = re.compile(r"[\w .,:'()\[\]+*/%<>=!&|^~-]*", re.ASCII).fullmatch
_NODES: Final = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Tuple, ast.Load),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_SYMBOL: Final = re.compile(r"[a-z]{1,8}\d+|L|true|false|oo|zoo|nan|inf|int_oo").fullmatch
_FUNCTIONS: Final = words(
    "Symbol Dummy Integer Rational Float Add Mul Pow Mod Max Min Abs Piecewise ExprCondPair ITE Eq Ne Lt Le Gt Ge"
    " Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan And Or Not Xor sign floor ceiling"
    " FloorDiv ModularIndexing Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural"
    " FloatPow FloatTrueDiv IntTrueDiv TruncToFloat IsNonOverlappingAndDenseIndicator TruncToInt RoundToInt"
    " RoundDecimal ToFloat Identity max min abs round int float bool"
)
"""No roots and angles of sympy's own, which it can take very long to compare: torch has names for these."""
_POWERS: Final = words("Pow PowByNatural FloatPow LShift RShift")
_PRODUCTS: Final = words("Mul Mult Div Mod PythonMod FloorDiv CleanDiv CeilDiv ModularIndexing IntTrueDiv FloatTrueDiv")
_LARGEST: Final = 1 << 128
_LARGEST_POWER: Final = 64
"""Also the most bits of a number that is not an integer."""
_MOST_TERMS: Final = 1 << 10
"""For larger numbers, or for more terms, sympy could run forever."""
_METHODS: Final = words("size stride storage_offset dim numel ndimension is_integer bit_length")
"""Methods of tensors and numbers that guards call."""


def of_graph(data: bytes, record: str) -> Iterator[Act]:
    """
    Yield what in an exported program is more than formulas, guards, operators that calculate, and names.

    ``torch.export`` evaluates the symbolic sizes and the guards, looks up the names of operators, writes the names of
    values into source code that it compiles, and imports what the layouts of arguments name.
    """
    if b"graph_module" not in data and b"\\u" not in data:
        return  # other JSON: settings, most likely
    try:
        root = json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return  # no Python reads it as JSON
    except (ValueError, RecursionError):  # too long a number, or too deep: another Python may read it
        yield of_program("a layout", "a layout of arguments", UNFOLLOWED, record, 0)
        return
    is_graph = type(root) is dict and "graph_module" in root
    left: list[tuple[str, Any, bool]] = [("", root, False)] if is_graph else []
    while left:
        key, value, is_layout = left.pop()
        if type(value) is dict:
            yield from _imported(value, record) if is_layout else ()
            left += ((name, one, is_layout) for name, one in value.items())
            left += (("a key", name, False) for name in value if not _PLAIN(name))
        elif type(value) is list:
            left += ((key, one, is_layout) for one in value)
        elif type(value) is str and (is_layout or key not in _FREE):
            if is_layout or key.endswith("_spec"):  # JSON, which may contain more JSON as text
                try:
                    left.append((key, json.loads(value), True))
                    continue
                except (ValueError, RecursionError):
                    pass
            if why := _why_of_text(key, value):
                shown = value if key == "target" else f"{key} {cut(value, _LONGEST)}"
                yield of_program(value if key == "target" else key, shown, why, record, 0)


def _imported(layout: dict[str, Any], record: str) -> Iterator[Act]:
    """Yield what a part of a layout imports: an enumeration, or the factory of a defaultdict."""
    if "__enum__" in layout:
        name = str(layout.get("fqn")).replace(":", ".", 1)
        is_system = is_known(name) or reaching(name, name.rpartition(".")[2]) is not None
    else:
        name = f"{layout.get('default_factory_module', 'builtins')}.{layout.get('default_factory_name', 'list')}"
        is_system = not is_listed(name)
        if not is_system:
            return
    shown = f"a layout that imports {cut(name, _LONGEST)}"
    yield Act("system" if is_system else "code", "runs", name, shown, LOADS, record, 0)


def _why_of_text(key: str, text: str) -> str | None:
    """Return how a text in a graph, under this key, reaches the system; None if it does not."""
    if key in ("expr_str", "guards_code"):
        return None if len(text) <= _LONGEST_FORMULA and _reckons(text) else EVALUATES
    if key in ("target", "as_operator"):
        found = _TARGET(text)
        if found is None:
            return EVALUATES if text.startswith(_LOOKED_UP) else None
        return FILES if found[1] and _opens_files(found[1], found[2]) else None
    if key == "source_fn_stack":  # not called, but found by attributes, some of which load libraries
        looked_up = (one for one in re.split("[,;]", text) if one.startswith(_LOOKED_UP))
        return next(filter(None, (reaching(one, one.partition(".")[2]) for one in looked_up)), None)
    # Keys of names of values, which become variables.
    is_plain = (
        text.isidentifier() or not text if key in ("name", "as_name", "forward_arg_names") else _PLAIN(text) is not None
    )
    return None if is_plain else EVALUATES


@lru_cache(maxsize=256)
def _reckons(text: str) -> bool:
    """
    Return whether a formula or a guard only calculates and compares: sympy evaluates the one, Python the other.

    sympy evaluates texts in formulas again, so only those are allowed that it takes for names and digits.
    """
    if not _CHARACTERS(text):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a number right before a word
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    is_sound = all(_is_of_formula(one, parent) for parent in ast.walk(tree) for one in ast.iter_child_nodes(parent))
    return is_sound and _terms(tree) <= _MOST_TERMS


def _terms(tree: ast.AST) -> float:
    """Return the most terms of a formula that is multiplied out; infinity if a number is too large."""
    found: dict[int, float] = {}
    for node in reversed(list(ast.walk(tree))):  # inner nodes come first
        func = getattr(node, "func", None)
        name = func.id if isinstance(func, ast.Name) else type(getattr(node, "op", node)).__name__
        parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr) and one is not func]
        counts = [found[id(one)] for one in parts]
        if name in _POWERS and parts:
            exponent = _size(parts[-1])
            is_small = exponent <= _LARGEST_POWER and counts[0] <= _MOST_TERMS
            counts = [(1 + counts[0]) ** exponent if is_small else inf]
        elif name in _PRODUCTS:
            counts = [prod(counts)]
        elif name in ("Max", "Min", "max", "min"):  # each is compared with each
            counts.append(len(parts) ** 2)
        elif name in ("round", "RoundDecimal"):
            counts += [inf for digits in parts[1:] if _size(digits) > _LARGEST_POWER]
        elif name == "Float" or (isinstance(node, ast.Constant) and isinstance(node.value, int | float)):
            counts = [1.0 if _size(node) < _LARGEST else inf]
        found[id(node)] = max(1.0, sum(counts))
    return max(found.values())


def _size(node: ast.AST) -> float:
    """Return the size of a number, or of its precision; infinity for what has to be calculated first."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Integer", "Float"):
        values = [*node.args, *(one.value for one in node.keywords)]
        is_short = all(_size(one) <= _LARGEST_POWER for one in values[1:])
        return _size(values[0]) if values and is_short else inf
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    try:
        return abs(float(node.value)) if isinstance(node, ast.Constant) else inf  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return inf


def _is_of_formula(node: ast.AST, parent: ast.AST) -> bool:
    is_called = isinstance(parent, ast.Call) and parent.func is node
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, str):
            return type(node.value) in (int, float, bool, type(None))
        func = parent.func if isinstance(parent, ast.Call) else None
        called = func.id if isinstance(func, ast.Name) else ""
        if called in ("Symbol", "Dummy"):
            return node.value.isidentifier()
        return (called == "Float" or isinstance(parent, ast.Compare | ast.Subscript)) and _PLAIN(node.value) is not None
    if isinstance(node, ast.Name):
        if is_called:
            # Besides, torch makes a class for each other function, with one of these prefixes.
            return node.id in _FUNCTIONS or node.id.startswith(("OpaqueUnaryFn_", "BitwiseFn_"))
        return _SYMBOL(node.id) is not None or (isinstance(parent, ast.Attribute) and node.id in ("math", "torch"))
    if isinstance(node, ast.Attribute):
        base = node.value.id if isinstance(node.value, ast.Name) else ""
        if base == "torch":
            return node.attr in ("sym_float", "_sym_sqrt")
        return node.attr in _METHODS if is_called and base != "math" else not node.attr.startswith("_")
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name | ast.Attribute)
    if isinstance(node, ast.keyword):
        return node.arg is not None and _size(node.value) <= _LARGEST_POWER
    return isinstance(node, _NODES)
