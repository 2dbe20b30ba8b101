"""What calls are known to give, where that is another name, or bytes: ``getattr(os, "system")`` is a name, too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

from ckptool.pickles import nodes
from ckptool.pickles.effects import Effect, Unfollowed
from ckptool.pickles.nodes import Call, Dict, Global, Inert, PersistentId, Set
from ckptool.pickles.reaching import canonical

_MODULES_OF: Final = (
    "importlib.import_module",
    "builtins.__import__",
    "cloudpickle.cloudpickle.subimport",
    "dill._dill._import_module",
)
_UFUNCS: Final = ("numpy.core._ufunc_reconstruct", "numpy._core._ufunc_reconstruct")

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
        return Global(holder.module, f"{holder.name}.{attribute}" if holder.name else attribute, offset)
    if isinstance(holder, Call):
        held = list(_attributes(holder, attribute))
        if held:  # which of them it is, the class decides: with its methods, or where it looks for attributes
            return held[0] if len(held) == 1 else Unfollowed(f"the attribute {attribute!r} of an object")
        made = nodes.class_of(holder)
        return Global(made.module, f"{made.name}.{attribute}", offset) if made is not None else None
    if isinstance(holder, Unfollowed | PersistentId):
        return Unfollowed(f"the attribute {attribute!r} of what the loader knows")
    kind = "dict" if isinstance(holder, Dict) else "set" if isinstance(holder, Set) else type(holder).__name__
    return Global("builtins", f"{kind}.{attribute}", offset)


def _attributes(holder: Call, attribute: str) -> Iterator[Inert]:
    """Yield what an object has got under the name of an attribute: in its state, one dict deeper, or as an item."""
    parts = holder.state if isinstance(holder.state, tuple) else (holder.state,)
    given = [pair for part in parts if isinstance(part, Dict | Call) for pair in part.pairs or ()]
    deeper = (pair for _, inner in given if isinstance(inner, Dict | Call) for pair in inner.pairs or ())
    for key, value in chain(given, deeper, holder.pairs or ()):
        if isinstance(key, str) and key == attribute:
            yield value
