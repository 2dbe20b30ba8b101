"""
Pickled ``nn.Module`` (a whole model) to the entries that its ``state_dict()`` would have, without its classes.

The rule is Module.state_dict's own: parameters, then persistent buffers, then children, each in the order of its
dict; entries that are None are skipped; a tensor that is reached by several names has all of them. Plain attributes
and non-persistent buffers are not in a state_dict, and not here.

What modules add in code is not in the file, but for torch's own quantised modules it follows from what they pickle.
For the others, the walk reports modules that are known to save something else (``unlisted``), those with state-dict
hooks, and the classes that may override anything.

See torch/nn/modules/module.py, Module.state_dict and Module._save_to_state_dict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from ckptool.cancellation import check_cancelled
from ckptool.errors import LimitExceeded, MalformedFile
from ckptool.limits import Limits
from ckptool.names.wrappers import COMPONENTS
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Pairs
from ckptool.tensors.tensor import Kind

_MOST_MODULES = 200_000
_NAMES_NBYTES = 1 << 26
"""Limits of a walk: modules visited, where one with two names counts twice, and the total length of names."""

BOUND_TO = "__self__"
"""Python's attribute for the object of a bound method."""

_OWN_SAVERS = ("bitsandbytes.", "hqq.", "optimum.quanto.", "quanto.", "torch.jit.", "transformer_engine.")
"""Packages whose classes are known to save more or other things than their parameters and buffers."""

_PLAIN_SAVERS = ("torch.nn.", "torch.fx.", "torch._dynamo.", "torch.optim.swa_utils.", "torch.ao.nn.")
"""Packages whose classes save their parameters and buffers, or other entries that are known."""

_HARMLESS_HOOKS = {"torch.nn.utils.spectral_norm.SpectralNormStateDictHook"}
"""Hooks that change only the metadata."""
_OF_VERSION_2: Final = re.compile(r"(Lazy)?(Batch|Instance)Norm[123]d|SyncBatchNorm")
"""torch's classes of version 2, in which ``num_batches_tracked`` was added."""
ModuleFacts: TypeAlias = "dict[str, str | int | float | bool | ModuleFacts | None]"
"""The metadata of one module, mostly its version."""
_MOST_FACTS: Final = 16
_LONGEST_FACT: Final = 256


class ModuleEntry(NamedTuple):
    """One entry of a state_dict: its name inside the module, and the node of its value."""

    name: str
    node: Inert
    kind: Kind | None
    """None for an entry that the module adds in code, which may not be a tensor."""


@dataclass(eq=False, slots=True)
class StateDictWalk:
    """The entries of a module's state_dict(), and what cannot be known about it."""

    entries: list[ModuleEntry] = field(default_factory=list)
    transient: list[ModuleEntry] = field(default_factory=list)
    """Buffers that are not persistent: part of the model, but not of its state_dict()."""
    modules: list[tuple[str, str]] = field(default_factory=list)
    """Each module's path, and its class."""
    versions: dict[str, int] = field(default_factory=dict)
    """The version of each module that has one as its own attribute, by path; it overrides the class's version."""
    hooks: list[tuple[str, str, str]] = field(default_factory=list)
    """State-dict hooks: the path and class of the module that has one, and the hook's name."""
    unlisted: list[tuple[str, str]] = field(default_factory=list)
    """Modules that save something that is not among the entries: the path and class of each."""
    foreign_classes: list[str] = field(default_factory=list)
    """Classes outside torch.nn, which may override anything."""


class Body(NamedTuple):
    class_name: str
    parameters: Pairs
    buffers: Pairs
    children: Pairs
    non_persistent: frozenset[str]
    hooks: list[Inert]
    version: Inert = None


class ModuleGraph:
    """How to walk a whole model that is a pickled nn.Module; ``formats.torchscript`` has a subclass for TorchScript."""

    def is_module(self, node: Inert) -> bool:
        """Return whether a node is a pickled module, a bound method of one, or a compiled wrapper of one."""
        return isinstance(node, Call) and body_of(unbound(node)) is not None

    def class_name(self, node: Inert) -> str:
        """Return the full name of a model's class."""
        return nodes.class_name(unbound(node))

    def walk(self, node: Inert, limits: Limits) -> StateDictWalk:
        """Return the entries, in order, that the model's ``state_dict()`` would have."""
        walk = StateDictWalk()
        seen_classes: set[str] = set()
        inside: set[int] = set()
        # Modules are visited in order; a second visit, marked by True, leaves the module again.
        todo: list[tuple[Inert, str, bool]] = [(unbound(node), "", False)]
        visits = names_nbytes = 0
        bodies: dict[int, Body | None] = {}  # by state, as many modules may share one
        while todo:
            check_cancelled(limits.cancellation)
            current, prefix, leaving = todo.pop()
            if leaving:
                inside.discard(id(current))
                continue
            shared = id(current.state) if isinstance(current, Call) and current.state is not None else id(current)
            if shared not in bodies:
                bodies[shared] = body_of(current)
            body = bodies[shared]
            if body is None:
                continue
            body = body._replace(class_name=nodes.class_name(current))
            if id(current) in inside:
                raise MalformedFile(f"module {prefix!r} holds itself", kind="malformed-module")
            inside.add(id(current))
            todo.append((current, prefix, True))
            visits += 1
            names_nbytes += (len(prefix) + 16) * (1 + len(body.parameters) + len(body.buffers))
            if visits > _MOST_MODULES or names_nbytes > _NAMES_NBYTES or len(prefix) > limits.name_nbytes:
                raise LimitExceeded(
                    f"a model of more than {_MOST_MODULES:,} modules, or of names that are far longer than the file",
                    actual=_MOST_MODULES,
                )
            walk.modules.append((prefix[:-1], body.class_name))
            if type(body.version) is int:
                walk.versions[prefix[:-1]] = body.version
            hooks = [name for name in map(nodes.class_name, body.hooks) if name not in _HARMLESS_HOOKS]
            walk.hooks += ((prefix[:-1], body.class_name, name) for name in hooks)
            if body.class_name.startswith(_OWN_SAVERS):
                walk.unlisted.append((prefix[:-1], body.class_name))
            elif body.class_name not in seen_classes and not body.class_name.startswith(_PLAIN_SAVERS):
                seen_classes.add(body.class_name)
                walk.foreign_classes.append(body.class_name)
            buffers = _named(body.buffers, prefix, "buffer")
            transient = {prefix + name for name in body.non_persistent}
            walk.entries += _named(body.parameters, prefix, "parameter")
            walk.entries += [one for one in buffers if one.name not in transient]
            if _is_quantized(body.class_name):
                added = _added_entries(body.class_name, current)
                walk.entries += [ModuleEntry(prefix + name, node, None) for name, node in added or ()]
                walk.unlisted += [(prefix[:-1], body.class_name)] if added is None else []
            walk.transient += [one for one in buffers if one.name in transient]
            for name, child in reversed(body.children):
                if child is not None and isinstance(name, str):
                    todo.append((child, f"{prefix}{name}.", False))
        return walk

    def children(self, node: Inert) -> Iterable[tuple[Inert, Inert]]:
        """
        Return the children of any node inside a model, by the names that the model's own code would use.

        For bound methods and compiled modules, that is the module inside.
        """
        owner = unbound(node)
        if owner is not node:
            return [(BOUND_TO, owner)]
        compiled = _compiled_original(node) if isinstance(node, Call) else None
        return [("_orig_mod", compiled)] if compiled is not None else nodes.children(node)


def _named(pairs: Pairs, prefix: str, kind: Kind) -> list[ModuleEntry]:
    return [
        ModuleEntry(prefix + name, node, kind) for name, node in pairs if node is not None and isinstance(name, str)
    ]


def _is_quantized(class_name: str) -> bool:
    """Return whether a class is one of torch's quantised modules."""
    return class_name.startswith("torch.") and ".quantized." in class_name


def unbound(node: Inert) -> Inert:
    """Return the object of a bound method, which pickle writes as ``getattr(model, "state_dict")``; else the node."""
    if (
        isinstance(node, Call)
        and isinstance(node.func, Global)
        and isinstance(node.args, tuple)
        and len(node.args) == 2
    ):
        named = (node.func.module, node.func.name)
        if named in (("builtins", "getattr"), ("__builtin__", "getattr")) and isinstance(node.args[1], str):
            return node.args[0]
    return node


def body_of(node: Inert) -> Body | None:
    if not isinstance(node, Call):
        return None
    compiled = _compiled_original(node)
    if compiled is not None:
        return Body(nodes.class_name(node), [], [], [("_orig_mod", compiled)], frozenset(), [])
    attributes, name = attributes_of(node), nodes.class_name(node)
    if attributes is None:
        return None
    if isinstance(node.state, tuple) and _is_quantized(name) and _fields(name) is _CONV:
        return Body(name, [], [], [], frozenset(), [])  # its state is a tuple, without the dicts of modules
    parameters = nodes.mapping_pairs(nodes.lookup(attributes, "_parameters"))
    buffers = nodes.mapping_pairs(nodes.lookup(attributes, "_buffers"))
    children = nodes.mapping_pairs(nodes.lookup(attributes, "_modules"))
    if parameters is None or buffers is None or children is None:
        return None
    hooks = nodes.mapping_pairs(nodes.lookup(attributes, "_state_dict_hooks")) or []
    transient = nodes.lookup(attributes, "_non_persistent_buffers_set")
    return Body(
        name,
        parameters,
        buffers,
        children,
        frozenset(name for name in nodes.members(transient) or () if isinstance(name, str)),
        [hook for _, hook in hooks],
        nodes.lookup(attributes, "_version"),
    )


def attributes_of(node: Call) -> Pairs | None:
    """Return a module's ``__dict__``: its state, or the dict that a graph module is rebuilt from."""
    if isinstance(node.func, Global) and node.func.module == "torch.fx.graph_module" and isinstance(node.args, tuple):
        return next((arg.pairs for arg in node.args[:2] if isinstance(arg, Dict)), None)
    return nodes.attribute_pairs(node) if node.state is not None else None


def _compiled_original(node: Call) -> Inert | None:
    """Return the module that ``torch.compile`` wrapped, the wrapper's first argument; None for other nodes."""
    func = nodes.global_of(node.func)
    if func is not None and func.name == "OptimizedModule" and isinstance(node.args, tuple) and node.args:
        return node.args[0]
    return None


def unwrapped(node: Inert, classes: frozenset[str]) -> Inert | None:
    """Return the model inside a training wrapper of one of ``classes``, or None if the node is not such a wrapper."""
    if not isinstance(node, Call):
        return None
    name = nodes.class_name(node)
    body = body_of(node) if name in classes else None
    return nodes.lookup(body.children, COMPONENTS[name]) if body is not None else None


def names_without(walk: StateDictWalk, classes: frozenset[str]) -> dict[str, str]:
    """Return the name of each entry after wrappers of ``classes`` are removed; empty if there are none."""
    gone = {f"{path}.{COMPONENTS[cls]}" if path else COMPONENTS[cls] for path, cls in walk.modules if cls in classes}
    found: dict[str, str] = {}
    for name in (entry.name for entry in walk.entries if gone):
        parts = name.split(".")
        ends = accumulate(parts, "{}.{}".format)
        found[name] = ".".join(part for part, end in zip(parts, ends, strict=True) if end not in gone)
    return found


def version_of(class_name: str) -> int | None:
    """
    Return the ``_version`` that a module of this class writes into ``state_dict()._metadata``.

    It is an attribute of the class, so not in the file: torch's own are known. None for every other: it is mostly 1.
    """
    name, is_dynamic = class_name.rpartition(".")[2], ".dynamic." in class_name
    if not class_name.startswith("torch."):
        return None
    if _is_quantized(class_name) and not re.search(r"\.(sparse|reference)\.", class_name):
        if name.startswith("Linear"):
            return 4 if is_dynamic else 3
        if is_dynamic and name in ("LSTM", "GRU"):
            return 2
    return 2 if _OF_VERSION_2.fullmatch(name) else 1


def facts_by_module(entries: nodes.Pairs) -> dict[str, ModuleFacts]:
    """Return the metadata of each module by its path, from the entries of a mapping in a pickle or in JSON."""
    found: dict[str, ModuleFacts] = {}
    for path, entry in entries:
        for name, value in _pairs(entry) if isinstance(path, str) else ():
            inside = _pairs(value)  # torch's own is nested two deep at most
            if _is_fact(name) and _is_fact(value):
                found.setdefault(path, {})[name] = value
            elif _is_fact(name) and inside and all(_is_fact(key) and _is_fact(fact) for key, fact in inside):
                found.setdefault(path, {})[name] = dict(inside)
    return found


def _pairs(value: Inert) -> list[tuple[str, Inert]]:
    """Return the named items of a mapping, a pickle's or JSON's; empty if it is too long to be a module's."""
    pairs = list(value.items()) if isinstance(value, dict) else nodes.mapping_pairs(value) or []
    return [(key, item) for key, item in pairs if isinstance(key, str)] if len(pairs) <= _MOST_FACTS else []


def _is_fact(value: Inert) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_FACT
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63)


# Entries that torch's quantised modules add to their state_dict() in code.
#
# They keep weights packed in C++ objects, whose pickles have the unpacked tensors, and numbers as plain attributes.
# ``_save_to_state_dict`` unpacks the weights and makes tensors of the numbers; the functions here do so with nodes.
#
# See torch/ao/nn/quantized: modules/linear.py, conv.py, embedding_ops.py, functional_modules.py,
# dynamic/modules/rnn.py, reference/modules/utils.py. Before PyTorch 1.13 the package was torch/nn/quantized.

_ABSENT: Final = Global("", "")
"""A value that is not as its class pickles it today."""


def _added_entries(class_name: str, module: Call) -> Pairs | None:
    """
    Return the entries that a quantised module adds to its ``state_dict()`` in code, in order.

    None if they are not known, because it is pickled in another form than its class uses today.
    """
    fields = _fields(class_name)
    held = nodes.attribute_pairs(module) or []
    if fields is _CONV:
        state = module.state if isinstance(module.state, tuple) else ()
        held = [(str(place), one) for place, one in enumerate(state)] if len(state) == _CONV_LENGTH else []
    found = [(name, read(nodes.lookup(held, place))) for name, place, read in fields]
    return None if any(value is _ABSENT for _, value in found) or (fields is _CONV and not held) else found


def _fields(class_name: str) -> _Fields:
    """Return the fields that a class adds in code; empty if it saves as every module."""
    return next((fields for pattern, fields in _CLASSES if re.search(pattern, class_name)), ())


def _number_of(kind: type) -> _Reader:
    """Return a reader that makes a ``torch.tensor`` call of a number, which tells how a layer's output is quantised."""
    return lambda node: Call(Global("torch", "tensor"), (node,)) if type(node) is kind else _ABSENT


def _global(node: Inert) -> Inert:
    return node if isinstance(node, Global) else _ABSENT


def _object(node: Inert) -> Inert:
    """Return the node of a C++ object, whose state is ``(contents, class)``."""
    return node if _unpacked(node) is not None else _ABSENT


def _weight_and_bias(node: Inert) -> Inert:
    packed = _unpacked(node)
    return packed if isinstance(packed, tuple) and len(packed) == 2 else _ABSENT


def _one_weight(node: Inert) -> Inert:
    packed = _unpacked(node)
    weights = packed[1] if isinstance(packed, tuple) and len(packed) > 1 else None
    return weights[0] if isinstance(weights, list) and len(weights) == 1 else _ABSENT


def _unpacked(node: Inert) -> Inert:
    func = nodes.global_of(node.func) if isinstance(node, Call) else None
    is_object = func is not None and func.module in ("torch", "torch._C") and func.name == "ScriptObject"
    return node.state[0] if is_object and isinstance(node.state, tuple) and len(node.state) == 2 else None


_Reader: TypeAlias = Callable[[Inert], Inert]
_Fields: TypeAlias = "tuple[tuple[str, str, _Reader], ...]"
_CONV_LENGTH: Final = 15
_CONV: Final[_Fields] = (
    ("weight", "10", lambda node: node),
    ("bias", "11", lambda node: node),
    ("scale", "12", _number_of(float)),
    ("zero_point", "13", _number_of(int)),
)
"""The entries of a convolution, and their places in its state."""
_OUTPUT: Final[_Fields] = (("scale", "scale", _number_of(float)), ("zero_point", "zero_point", _number_of(int)))
_DTYPE: Final = ("dtype", "dtype", _global)
_CLASSES: Final[tuple[tuple[str, _Fields], ...]] = (
    (r"\.sparse\.", (("", "", lambda _: _ABSENT),)),
    (
        r"\.reference\..*\.(Linear|Conv|Embedding)\w*$",
        tuple((f"weight_{one}",) * 2 + (_global,) for one in ("qscheme", "dtype")),
    ),
    (r"\.reference\.", ()),
    (r"\.LinearPackedParams$", (_DTYPE, ("_packed_params", "_packed_params", _weight_and_bias))),
    (r"\.EmbeddingPackedParams$", (_DTYPE, ("_packed_weight", "_packed_weight", _one_weight))),
    (r"\.PackedParameter$", (("param", "param", _object),)),
    (r"\.dynamic\..*\.(RNN|LSTM|GRU)Cell$", tuple((f"_packed_weight_{one}",) * 2 + (_object,) for one in ("ih", "hh"))),
    (r"\.Conv\w*$", _CONV),
    (r"\.(Linear\w*|QFunctional)$", _OUTPUT),
)
"""Fields by pattern of the class, of which the first match counts: entry, attribute, and reader."""
