"""
Inert nodes, the values of a pickle, and functions that walk them.

A pickled value becomes
    None bool int float str bytes bytearray list tuple    itself
    dict                                                  Dict, its pairs in file order
    set, frozenset                                        Set
    a class or function                                   Global
    anything made by calling one                          Call, with its state and items
    a persistent id (torch: a storage, a class)           PersistentId
    bytes between the opcodes (joblib: an array)          Block
Nodes compare by identity, as objects in a pickle do: two names of one node are tied.

``FieldNames`` lets small dicts share their keys, for the states of many objects of one class. Lists of pairs would take
three times the memory, which matters if a pickle has hundreds of thousands of objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, overload

if TYPE_CHECKING:
    from ckptool.sources.source import Source


# mypy needs too long for a recursive alias of this size, so it is Any, and each consumer narrows it.
Inert: TypeAlias = Any
Pairs: TypeAlias = Sequence[tuple[Inert, Inert]]
"""Pairs that were read: a tuple if there is none or one. Only the reader changes them."""
PairList: TypeAlias = list[tuple[Inert, Inert]]
"""Pairs that may be added to."""
CallKind: TypeAlias = Literal["reduce", "newobj", "newobj_ex"]


# All empty containers share these, as a pickle may have one for each byte. They are tuples, so nothing changes them.
_NO_PAIRS: Final[Pairs] = ()
NO_ITEMS: Final[list[Inert]] = ()  # type: ignore[assignment]


class Global:
    """A ``module.name`` that the pickle refers to. It is never looked up."""

    __slots__ = ("module", "name", "offset")

    def __init__(self, module: str, name: str, offset: int = 0) -> None:
        self.module = module
        self.name = name
        self.offset = offset
        """Offset of its first use in the source, in bytes."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<Global {self}>"


@dataclass(eq=False, slots=True, repr=False)
class Call:
    """
    A call that unpickling would make, ``func(*args, **kwargs)``, and the state, list and dict items of its result.

    ``how`` distinguishes REDUCE (``func(*args)``) and NEWOBJ (``func.__new__(func, *args)``).
    """

    func: Inert
    args: Inert
    how: CallKind = "reduce"
    kwargs: Inert = None
    state: Inert = field(default=None, init=False)
    items: list[Inert] | None = field(default=None, init=False)
    pairs: PairList | None = field(default=None, init=False)

    def __repr__(self) -> str:
        are_plain = isinstance(self.args, tuple) and all(type(one) in (bool, int, float, str) for one in self.args)
        shown = ", ".join(repr(one) for one in self.args[:_SHOWN]) if are_plain else ""
        return f"<Call {class_name(self)}{f'({shown})' if 0 < len(shown) <= _LONGEST_CLASS else ''}>"


@dataclass(eq=False, slots=True, repr=False)
class PersistentId:
    """A reference to something outside the pickle; the meaning of ``pid`` depends on the container."""

    pid: Inert


class Dict:
    """A dict as the pickle has it: its pairs in order, keys never hashed."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Pairs | None = None) -> None:
        self.pairs: Pairs = pairs if pairs is not None else _NO_PAIRS

    def update(self, pairs: Pairs) -> None:
        """Add pairs; a list of them belongs to the dict from now on. A tuple of one pair takes less memory."""
        if not self.pairs:
            self.pairs = pairs
        elif isinstance(self.pairs, list):
            self.pairs.extend(pairs)
        else:
            self.pairs = [*self.pairs, *pairs]

    def __repr__(self) -> str:
        return f"<Dict of {len(self.pairs)}>"


@dataclass(eq=False, slots=True, repr=False)
class Set:
    """A set or frozenset: its members in file order, never hashed."""

    items: list[Inert]
    frozen: bool = field(default=False, kw_only=True)

    def update(self, items: list[Inert]) -> None:
        """Add members; their list belongs to the set from now on."""
        if self.items:
            self.items.extend(items)
        else:
            self.items = items


@dataclass(eq=False, slots=True, repr=False)
class Unknown:
    """A value that only the unpickling process would know; ``why`` says what. Only ``read_as_far`` makes them."""

    why: str


_LONGEST_CLASS: Final[int] = 256
_SHOWN: Final[int] = 8
_FEW: Final[int] = 16


@dataclass(eq=False, slots=True, repr=False)
class Block:
    """Bytes between the opcodes of a pickle: their offset and size in its source."""

    source: Source
    offset: int
    nbytes: int

    def read(self) -> bytes:
        """Return the bytes."""
        return self.source.read(self.offset, self.nbytes)


_MAPPING_CLASSES = frozenset(
    {("collections", name) for name in ("OrderedDict", "defaultdict", "Counter")}
    | {("torch.nn.modules.container", "OrderedDict"), ("builtins", "dict"), ("__builtin__", "dict")}
)


def global_of(node: Inert) -> Global | None:
    """Return the Global that a node is, or the class in a persistent id that has a class with its source; else None."""
    if type(node) is Global:
        return node
    if type(node) is not PersistentId:
        return None
    found = sourced_class(node.pid)
    return found[0] if found and type(found[0]) is Global else None


def sourced_class(pid: Inert) -> tuple[Inert, ...]:
    """Return ``(class, file, source)`` of a persistent id for a class with its source, or an empty tuple."""
    if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
        pid = pid[1:]  # PyTorch 0.1 wrote the other three alone
    if isinstance(pid, tuple) and len(pid) == 3 and isinstance(pid[0], Global):
        return pid
    return ()


def is_sourced_object(pid: Inert) -> bool:
    """Return whether a persistent id for a class with its source has something else in place of the class."""
    if not isinstance(pid, tuple) or len(pid) != (4 if pid[:1] == ("module",) else 3):
        return False
    return pid[0] != "storage" and not isinstance(pid[-3], Global | str)


def class_of(node: Inert) -> Global | None:
    """
    Return the class, or the function, of the object that a Call makes; None if it is not a Global.

    Protocols 0 and 1, and classes with odd constructors, write an object of ``cls`` as
    ``copyreg._reconstructor(cls, object, None)`` and ``copyreg.__newobj__(cls, …)``.
    """
    if not isinstance(node, Call):
        return None
    func = global_of(node.func) or partial_of(node.func)
    if func is not None and func.module in ("copyreg", "copy_reg") and isinstance(node.args, tuple) and node.args:
        return global_of(node.args[0])
    return func


def partial_of(node: Inert) -> Global | None:
    """Return the function that a call of ``functools.partial`` wraps, or None."""
    func = global_of(node.func) if isinstance(node, Call) else None
    if not isinstance(node, Call) or func is None or (func.module, func.name) != ("functools", "partial"):
        return None
    return global_of(node.args[0]) if isinstance(node.args, tuple) and node.args else None


def _defined_class(node: Inert) -> str | None:
    """
    Return the name of a class that the file itself defines, as dill and cloudpickle write classes of scripts, or None.

    Both call a function of theirs with the metaclass and then the arguments of ``type()``: name, bases, namespace.
    """
    if not isinstance(node, Call) or not isinstance(node.args, tuple) or len(node.args) < 4:
        return None
    _, name, bases, namespace = node.args[:4]
    if not (isinstance(name, str) and isinstance(bases, tuple) and isinstance(namespace, Dict)):
        return None
    return f"{name} (defined in the file)" if len(name) <= _LONGEST_CLASS and name.isidentifier() else None


def class_name(node: Inert) -> str:
    """Return the type of the value that a node would become, as ``module.Class``, for people to read."""
    if isinstance(node, Call):
        found = class_of(node)
        return str(found) if found is not None else _defined_class(node.func) or "object"
    if isinstance(node, Global):
        return str(node)
    if isinstance(node, Dict):
        return "dict"
    if isinstance(node, Set):
        return "frozenset" if node.frozen else "set"
    if isinstance(node, PersistentId):
        return "persistent id"
    return type(node).__name__


def mapping_pairs(node: Inert) -> Pairs | None:
    """
    Return the pairs of a dict, or of an object that is one (OrderedDict, defaultdict, a subclass with items), or None.

    Python 2 wrote an OrderedDict as a call with a list of pairs; that is understood, too.
    """
    if isinstance(node, Dict):
        return node.pairs
    if not isinstance(node, Call):
        return None
    found = class_of(node)
    if found is None or (found.module, found.name) not in _MAPPING_CLASSES:
        return node.pairs
    last = node.args[-1] if isinstance(node.args, tuple) and node.args else None
    given: Pairs = last.pairs if isinstance(last, Dict) else []
    if isinstance(last, list) and all(isinstance(p, list | tuple) and len(p) == 2 for p in last):
        given = [(p[0], p[1]) for p in last]
    return [*given, *node.pairs] if given and node.pairs else node.pairs or given


def members(node: Inert) -> list[Inert] | None:
    """Return the members of a set or a frozenset, as any protocol writes them; None for anything else."""
    if isinstance(node, Set):
        return node.items
    func = global_of(node.func) if isinstance(node, Call) else None
    if func is None or func.module not in ("builtins", "__builtin__") or func.name not in ("set", "frozenset"):
        return None
    given = node.args[0] if isinstance(node.args, tuple) and len(node.args) == 1 else None
    return given if isinstance(given, list) else None


def attribute_pairs(node: Inert) -> Pairs:
    """Return the attributes in an object's state: the pairs of a dict, or of a ``(dict, slots)`` tuple."""
    state = node.state if isinstance(node, Call) else None
    return state_pairs(state) if all(part is None or isinstance(part, Dict) for part in state_parts(state)) else []


def state_pairs(state: Inert) -> Pairs:
    """Return the pairs of the dicts in a state: of a dict, or of a ``(dict, slots)`` tuple; others have none."""
    return [pair for part in state_parts(state) if isinstance(part, Dict) for pair in part.pairs]


def state_parts(state: Inert) -> tuple[Inert, ...]:
    """Return the two parts of a ``(dict, slots)`` tuple, or the state itself."""
    return state if type(state) is tuple and len(state) == 2 else (state,)


def lookup(pairs: Pairs, key: str) -> Inert:
    """Return the last value of a string key, as a Python dict made of the pairs would have it, or None."""
    for found, value in reversed(pairs):
        if isinstance(found, str) and found == key:
            return value
    return None


def item(node: Inert, key: str) -> Inert:
    """Return the value of a string key in a mapping; None if it has no such key, or the node is not a mapping."""
    return lookup(mapping_pairs(node) or (), key)


def children(node: Inert) -> Iterator[tuple[Inert, Inert]]:
    """
    Yield ``(component, child)`` for everything in a container node, in file order.

    The component is the dict key, the index, or the attribute's name.
    """
    if isinstance(node, list | tuple):
        yield from enumerate(node)
    elif isinstance(node, Dict):
        yield from node.pairs
    elif isinstance(node, Set):
        yield from enumerate(node.items)
    elif isinstance(node, PersistentId):
        yield "pid", node.pid
    elif isinstance(node, Call):
        pairs = mapping_pairs(node)
        if pairs is not None:
            yield from pairs
        elif isinstance(node.args, tuple):
            yield from enumerate(node.args)
        else:
            yield "args", node.args
        if node.kwargs is not None:
            yield "kwargs", node.kwargs
        yield from enumerate(node.items or ())
        if attributes := attribute_pairs(node):
            yield from attributes
        elif node.state is not None and not isinstance(node.state, Dict):
            yield "state", node.state


def held(node: Inert) -> Iterator[Inert]:
    """
    Yield the nodes that a container refers to, without its keys.

    Unlike ``children``, it yields arguments and states as single nodes, so the cost of a walk is bounded by the size of
    the tree even if many objects share one state.
    """
    if isinstance(node, (list, tuple)):
        yield from node
    elif isinstance(node, Set):
        yield from node.items
    elif isinstance(node, PersistentId):
        yield node.pid
    elif isinstance(node, Dict):
        for _, value in node.pairs:
            yield value
    elif isinstance(node, Call):
        yield node.args
        yield node.kwargs
        yield node.state
        yield from node.items or ()
        for _, value in node.pairs or ():
            yield value


def is_container(node: Inert) -> bool:
    """Return whether a node can hold others."""
    return type(node) in CONTAINERS


def is_small(node: Inert) -> bool:
    """Return whether a container has few nodes and no calls: visiting it again costs less than recording it."""
    todo = [*islice(held(node), _FEW + 1)]
    if CONTAINERS.isdisjoint(map(type, todo)):
        return len(todo) <= _FEW
    for one in todo:  # which grows
        if len(todo) > _FEW or type(one) is Call or type(one) is PersistentId:
            return False
        if type(one) in CONTAINERS:
            todo += islice(held(one), _FEW + 1)
    return True


CONTAINERS: Final[frozenset[type]] = frozenset((list, tuple, Dict, Set, Call, PersistentId))
"""The types of nodes that can hold others. A tree has these exact types, never subclasses."""


# Nodes that only the writer knows, each of which is written as many of those above


class PlainTensor(NamedTuple):
    """
    A node for the call that torch writes for a plain strided tensor: ``_rebuild_tensor_v2``, without hooks.

    It replaces twenty nodes, and fewer values are put into the memo.
    """

    cls: Global
    """The class of its storage."""
    key: str
    """The key of its storage, to which ``location`` and ``numel`` belong, too."""
    location: str
    numel: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


class DictInBatches(NamedTuple):
    """A dict of very many entries, which are made in batches when they are written, and then dropped."""

    batches: Callable[[], Iterator[Pairs]]
    """Returns the batches. Nodes in them that are not in ``shared`` of ``write_pickle`` are written on each use."""


_MOST_NAMES: Final = 16
_MOST_KINDS: Final = 16


class Fields(Sequence[tuple[Inert, Inert]]):
    """The pairs of a dict, from a shared tuple of keys and its own values; made on access."""

    __slots__ = ("_names", "_values")

    def __init__(self, names: tuple[str, ...], values: tuple[Inert, ...]) -> None:
        self._names = names
        self._values = values

    def __iter__(self) -> Iterator[tuple[Inert, Inert]]:
        return zip(self._names, self._values, strict=True)

    def __reversed__(self) -> Iterator[tuple[Inert, Inert]]:
        return zip(reversed(self._names), reversed(self._values), strict=True)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, at: int) -> tuple[Inert, Inert]: ...
    @overload
    def __getitem__(self, at: slice) -> Pairs: ...
    def __getitem__(self, at: int | slice) -> tuple[Inert, Inert] | Pairs:
        return list(self)[at]


class FieldNames:
    """The keys of small dicts that were read, to be shared by others with the same keys."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: list[tuple[str, ...]] = []

    def pairs(self, items: list[Inert]) -> Pairs | None:
        """Return the pairs for alternating keys and values; None if the dict is too large, or has too rare keys."""
        if len(items) > 2 * _MOST_NAMES:
            return None
        names = tuple(items[::2])
        for known in self._kinds:  # compared, not hashed: the keys are not checked yet
            if known == names:
                return Fields(known, tuple(items[1::2]))
        if len(self._kinds) == _MOST_KINDS or not all(type(name) is str for name in names):
            return None
        self._kinds.append(names)
        return Fields(names, tuple(items[1::2]))


def mapping_like(node: Inert, pairs: Pairs) -> Inert:
    """Return a mapping of the same class with other pairs."""
    if not isinstance(node, Call):
        return Dict(pairs)
    made = Call(node.func, () if node.pairs is None else node.args, node.how, node.kwargs)
    made.items, made.pairs, made.state = node.items, list(pairs), node.state
    return made
