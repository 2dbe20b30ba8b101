"""
Whether to load a ``torch.fx`` graph does no more than reckon, though it runs text of the file.

The text runs once, with stand-ins for the tensors; from what it does with them torch makes a graph, and writes new
text, which is compiled. So the text must be what torch writes, what it calls must be modules of the graph, and no name
in the file may change the new text. See ``reduce_graph_module`` in torch/fx/graph_module.py.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from ckptool.pickles import dangerous_names as table
from ckptool.pickles import nodes
from ckptool.pickles.effects import Effect, Unfollowed
from ckptool.pickles.grades import is_plain
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Pairs, Set
from ckptool.pickles.plain_names import SAFE_NAME, words
from ckptool.pickles.reaching import Looks, canonical, is_maker, is_pickler, package_of, reaching

MAKES_GRAPH: Final = "torch.fx.graph_module.reduce_graph_module"

_OF_TEXT: Final = ("_code", "code")
_ODD: Final = ("_graphmodule_graph_node_meta_stack_trace", "__class__", "__dict__")
"""Keys that no pickle of a graph has: of packages, and inside of objects."""
_HOLDERS: Final = (tuple, list, Set, Dict, Call)
_HELD: Final = frozenset(
    (
        *("collections.OrderedDict", "collections.defaultdict", "builtins.set", "builtins.frozenset"),
        *("builtins.slice", "builtins.complex", "builtins.getattr", "copyreg._reconstructor", "functools.partial"),
        *("_codecs.encode", "argparse.Namespace", "datetime.datetime", "fractions.Fraction"),
    )
)
"""Of Python's library, what a graph may hold."""
_CONTAINERS: Final = re.compile(r"torch\.nn\.modules\.(?:module\.Module|container\.\w+)")
_OF_GRAPHS: Final = re.compile(
    r"torch\.(?:(?:nn|ao|fx|export|utils\._pytree)\.[\w.]+|ScriptObject|storage\._load_from_bytes)"
)
"""Of torch, what a graph may hold beside tensors and the like."""
_CALLED: Final = re.compile(r"torch\.(?:nn|ao)\.[\w.]+")
_OF_MODULES: Final = words(
    "T_destination add_module append apply bfloat16 buffers call_super_init children clear compile copy cpu cuda"
    " double dump_patches eval extend extra_repr float forward fromkeys get get_buffer get_extra_state"
    " get_parameter get_submodule half insert ipu items keys load_state_dict modules mtia named_buffers"
    " named_children named_modules named_parameters parameters pop popitem register_backward_hook"
    " register_buffer register_forward_hook register_forward_pre_hook register_full_backward_hook"
    " register_full_backward_pre_hook register_load_state_dict_post_hook register_load_state_dict_pre_hook"
    " register_module register_parameter register_state_dict_post_hook register_state_dict_pre_hook"
    " requires_grad_ set_extra_state set_submodule setdefault share_memory state_dict to to_empty train"
    " training type update values xpu zero_grad"
    " _apply _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl _forward_hooks"
    " _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs"
    " _get_abs_string_index _get_backward_hooks _get_backward_pre_hooks _get_item_by_idx _get_name"
    " _is_full_backward_hook _key_to_attr _load_from_state_dict _load_state_dict_post_hooks"
    " _load_state_dict_pre_hooks _maybe_warn_non_full_backward_hook _modules _named_members"
    " _non_persistent_buffers_set _parameters _register_load_state_dict_pre_hook _register_state_dict_hook"
    " _replicate_for_data_parallel _save_to_state_dict _slow_forward _state_dict_hooks _state_dict_pre_hooks"
    " _version _wrapped_call_impl"
)
"""What modules have from their class: none of their own modules has such a name, whatever a file says."""


def functions_called(effect: Effect, looks: Looks | None) -> frozenset[str] | None:
    """Return the functions of packages that making a graph may call; None if it may do more than that and reckon."""
    given = effect.arguments
    if looks is None or effect.how != "calls" or effect.keywords is not None:
        return None
    body, imports = given if type(given) is tuple and len(given) == 2 else (None, None)
    if type(body) is not Dict or type(imports) is not str:
        return None
    looks.left -= len(body.pairs)
    if looks.left <= 0:
        return None
    texts = [value for key, value in body.pairs if key in _OF_TEXT]
    if not texts or not all(_is_plain(key, value) for key, value in body.pairs) or not _is_harmless(body, looks):
        return None
    from ckptool.pickles.graph_text import graph_text  # few files have graphs

    functions: set[str] = set()
    modules = _Modules(body)
    for text in texts:
        looks.left -= len(imports) + len(text) if type(text) is str else 0
        found = graph_text(imports + text) if type(text) is str and looks.left > 0 else None
        if found is None or not all(map(modules.are_called, found.modules)):
            return None
        functions |= found.functions
    return frozenset(functions)


def _is_plain(key: Inert, value: Inert) -> bool:
    """Say whether an attribute of a graph leaves it to torch, or to a package, how the text is run."""
    if key == "_tracer_cls":
        name = canonical(value.module, value.name) if type(value) is Global else ""
        is_known = type(value) is Global and (package_of(name) in table.STDLIB or reaching(name, value.name))
        return value is None or (name.endswith("Tracer") and not is_known)
    if key == "_tracer_extras":
        return type(value) is Dict and not value.pairs
    if key == "_graphmodule_cls_name":
        return type(value) is str and value.isidentifier()
    return type(key) is str and key not in _ODD


def _is_harmless(body: Dict, looks: Looks) -> bool:
    """
    Say whether all keys in what a graph holds stay names wherever they are written, or are no text; and whether all
    that it holds was made by names, none of which reaches the system, or makes functions or classes.
    """
    todo: list[tuple[Inert, bool]] = [(body, False)]
    seen: set[tuple[int, bool]] = set()
    for one, may_be_key in todo:
        looks.left -= 1
        kind = type(one)
        if (
            looks.left <= 0
            or kind is Unfollowed
            or (may_be_key and kind is str and not re.fullmatch(SAFE_NAME, str(one)))
        ):
            return False
        named = looks.methods.get(id(one), one)
        if type(named) is Global and reaching(canonical(named.module, named.name), named.name):
            return False
        if kind not in _HOLDERS or (id(one), may_be_key) in seen or (not may_be_key and nodes.is_leaf(one)):
            continue
        seen.add((id(one), may_be_key))
        if type(one) is tuple or type(one) is list:
            todo += ((part, may_be_key) for part in one)
        elif type(one) is Set:
            todo += ((part, may_be_key) for part in one.items)
        elif type(one) is Dict or type(one) is Call:
            if any(type(key) is Call and _is_of_library(key) is not False for key, _ in one.pairs or ()):
                return False
            todo += ((key, True) for key, _ in one.pairs or ())
            todo += ((value, may_be_key) for _, value in one.pairs or ())
            if type(one) is Call:
                is_of_library = _is_of_library(one)
                if is_of_library is None:
                    return False
                todo += (((one.args, one.kwargs), is_of_library), ((one.state, one.items), False))
    return True


def _is_of_library(call: Call) -> bool | None:
    """Say whether Python's library made something, maybe a dict of its arguments; None if it may be anything."""
    func = nodes.global_of(call.func)
    name = canonical(func.module, func.name) if func is not None else ""
    package = package_of(name)
    is_of_library = package in table.STDLIB
    is_held = name in _HELD or (func is not None and is_plain(func.module, func.name))
    if package in ("torch", "numpy") and not (is_held or _OF_GRAPHS.fullmatch(name)):
        return None
    if name not in _HELD and (is_of_library or not name or is_pickler(name) or is_maker(name)):
        return None
    return is_of_library


class _Modules:
    """The modules of a graph, by their paths."""

    def __init__(self, body: Dict) -> None:
        self._body = body
        self._known: dict[int, dict[str, Inert]] = {}

    def are_called(self, path: tuple[str, ...]) -> bool:
        """Say whether what a path leads to is called as a module: no attribute has its name."""
        pairs, held = self._body.pairs, None
        for index, part in enumerate(path):
            held = self._below(pairs).get(part)
            if index + 1 < len(path):
                state = held.state if type(held) is Call and _is_of(held, _CONTAINERS) else None
                pairs = state.pairs if type(state) is Dict else ()
        return _is_of(held, _CALLED)

    def _below(self, pairs: Pairs) -> dict[str, Inert]:
        """Return the modules of one, but for those that may not be what it gives under their names."""
        known = self._known.get(id(pairs))
        if known is None:
            own = {key for key, _ in pairs if type(key) is str}
            dicts = [value for key, value in pairs if key == "_modules"]
            found = getattr(dicts[0], "pairs", None) or () if len(dicts) == 1 else ()
            counts = Counter(key for key, _ in found if type(key) is str)
            named = {key: value for key, value in found if type(key) is str and counts[key] == 1}
            known = {key: value for key, value in named.items() if key not in own and key not in _OF_MODULES}
            self._known[id(pairs)] = known
        return known


def _is_of(module: Inert, known: re.Pattern[str]) -> bool:
    """Say whether something is of one of these classes of torch, or of a package; or is a graph that may be called."""
    if type(module) is not Call:
        return False
    func = nodes.global_of(module.func)
    if func is not None and canonical(func.module, func.name) == MAKES_GRAPH:
        return known is _CALLED
    made = nodes.class_of(module)
    name = canonical(made.module, made.name) if made is not None else ""
    return known.fullmatch(name) is not None or package_of(name) not in ("", "torch", "numpy", *table.STDLIB)
