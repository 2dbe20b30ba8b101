"""What calls are known to give, where that is another name, or bytes: ``getattr(os, "system")`` is a name, too."""

from __future__ import annotations

import re
from itertools import chain, islice
from typing import Final

from ckptool.pickles import nodes
from ckptool.pickles import plain_names as plain
from ckptool.pickles.effects import Effect, Unfollowed
from ckptool.pickles.nodes import Call, Dict, Global, Inert, PersistentId, Set
from ckptool.pickles.reaching import canonical

_LONGEST: Final = 80
_MOST_PARTS: Final = 32
"""Of a name, between its dots."""
_MOST_PAIRS: Final = 1_000
"""Attributes of an object that are looked at."""
_MODULES_OF: Final = (
    "importlib.import_module",
    "builtins.__import__",
    "cloudpickle.cloudpickle.subimport",
    "dill._dill._import_module",
)
_UFUNCS: Final = ("numpy.core._ufunc_reconstruct", "numpy._core._ufunc_reconstruct")
IMPORTING: Final = frozenset((*_MODULES_OF, *_UFUNCS))
"""Calls that import the module that their first argument names."""

_GET: Final = ("builtins.getattr", "dill._dill._get_attr", "dill._dill._getattribute")
_OF_TYPES: Final = ("SimpleNamespace", "GenericAlias", "DynamicClassAttribute")
_TYPES: Final = ("cloudpickle.cloudpickle._builtin_type", "dill._dill._load_type")


def result(effect: Effect) -> Inert:
    """Return what a call is known to give, where that is another name; None otherwise."""
    if effect.how != "calls" or not isinstance(effect.target, Global) or not isinstance(effect.arguments, tuple):
        return None
    name, args = canonical(effect.target.module, effect.target.name), effect.arguments
    if name in _GET and len(args) > 1 and isinstance(args[1], str):
        return _attribute(args[0], args[1], effect.offset)
    if name == "_codecs.encode" and len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1") if args[0].isascii() or max(args[0]) < "\u0100" else None
    if name == "operator.getitem" and len(args) == 2 and isinstance(args[0], Global) and isinstance(args[1], str):
        if canonical(args[0].module, args[0].name) == "sys.modules":
            return Global(args[1], "", effect.offset)
        return _attribute(args[0], args[1], effect.offset)
    if name == "dill._dill._getattr" and len(args) == 3 and all(isinstance(one, str) for one in args[1:]):
        found = re.fullmatch(plain.METHODS_OF_VALUES, args[2], re.ASCII)
        return Global("builtins", f"{found[2]}.{found[1]}", effect.offset) if found and found[1] == args[1] else None
    if name == "dill._dill._create_namedtuple" and len(args) > 2 and isinstance(args[0], str):
        return Global(args[2], args[0], effect.offset) if isinstance(args[2], str) else None
    if name in _MODULES_OF and args and isinstance(args[0], str):
        return Global(args[0], "", effect.offset)
    if name == "pkgutil.resolve_name" and args and isinstance(args[0], str):
        module, _, rest = args[0].partition(":") if ":" in args[0] else args[0].rpartition(".")
        return Global(module, rest, effect.offset)
    if name in _UFUNCS and len(args) == 2 and all(isinstance(one, str) for one in args):
        return Global(args[0], args[1], effect.offset)
    if name in _TYPES and args and isinstance(args[0], str):
        is_builtin = name.startswith("dill.") and not args[0].endswith("Type") and args[0] not in _OF_TYPES
        return Global("builtins" if is_builtin else "types", args[0], effect.offset)
    return None


def _attribute(holder: Inert, attribute: str, offset: int) -> Inert:
    """Return the name of an attribute: of a name, of what a call of one gives, of a plain value."""
    if isinstance(holder, Global):
        if holder.name.count(".") > _MOST_PARTS:
            return Unfollowed(f"the attribute {attribute[:_LONGEST]!r} of what has a name of many parts")
        return Global(holder.module, f"{holder.name}.{attribute}" if holder.name else attribute, offset)
    if isinstance(holder, Call):
        held = _attributes(holder, attribute)
        if held is None:
            return Unfollowed(f"the attribute {attribute[:_LONGEST]!r} of an object that has got very many")
        if held:  # which of them it is, the class decides: with its methods, or where it looks for attributes
            return held[0] if len(held) == 1 else Unfollowed(f"the attribute {attribute!r} of an object")
        made = nodes.class_of(holder)
        if made is not None and canonical(made.module, made.name) in plain.KEEPERS and attribute not in plain.METHODS:
            return Unfollowed(f"the attribute {attribute!r} of what keeps what it was given")
        return Global(made.module, f"{made.name}.{attribute}", offset) if made is not None else None
    if isinstance(holder, Unfollowed | PersistentId):
        return Unfollowed(f"the attribute {attribute!r} of what the loader knows")
    kind = "dict" if isinstance(holder, Dict) else "set" if isinstance(holder, Set) else type(holder).__name__
    return Global("builtins", f"{kind}.{attribute}", offset)


def _attributes(holder: Call, attribute: str) -> list[Inert] | None:
    """
    Return what an object has got under the name of an attribute: in its state, one dict deeper, or as an item.

    None where these are more than are looked at, or the state is not known.
    """
    if isinstance(holder.state, Unfollowed):
        return None
    parts = holder.state if isinstance(holder.state, tuple) else (holder.state,)
    given = chain.from_iterable(part.pairs or () for part in parts if isinstance(part, Dict | Call))
    inner = (part for part in parts if isinstance(part, Dict | Call))
    deeper = (
        pair
        for part in inner
        for _, value in part.pairs or ()
        if isinstance(value, Dict | Call)
        for pair in value.pairs or ()
    )
    pairs = list(islice(chain(given, holder.pairs or (), deeper), _MOST_PAIRS + 1))
    if len(pairs) > _MOST_PAIRS:
        return None
    return [value for key, value in pairs if isinstance(key, str) and key == attribute]
