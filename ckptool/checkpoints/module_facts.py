"""What modules write beside their tensors (``state_dict()._metadata``), as far as it is short and plain."""

from __future__ import annotations

from typing import Final, TypeAlias

from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert

ModuleFacts: TypeAlias = "dict[str, str | int | float | bool | ModuleFacts | None]"
"""What one module wrote: its version, mostly."""

_MOST_FACTS: Final = 16
_LONGEST_FACT: Final = 256


def facts_by_module(entries: nodes.Pairs) -> dict[str, ModuleFacts]:
    """Return the facts of each module by its path, from the entries of a mapping in a pickle or in JSON."""
    found = {path: _facts(entry) for path, entry in entries if isinstance(path, str)}
    return {path: facts for path, facts in found.items() if facts}


def _facts(entry: Inert) -> ModuleFacts:
    """Return the facts of one module; torch's own are nested two deep at most."""
    facts: ModuleFacts = {}
    for name, value in _pairs(entry):
        inside = _pairs(value)
        if _is_fact(name) and _is_fact(value):
            facts[name] = value
        elif _is_fact(name) and inside and all(_is_fact(key) and _is_fact(fact) for key, fact in inside):
            facts[name] = dict(inside)
    return facts


def _pairs(value: Inert) -> list[tuple[str, Inert]]:
    """Return the named items of a mapping, a pickle's or JSON's; nothing if it is too long to be a module's."""
    pairs = list(value.items()) if isinstance(value, dict) else nodes.mapping_pairs(value) or []
    return [(key, item) for key, item in pairs if isinstance(key, str)] if len(pairs) <= _MOST_FACTS else []


def _is_fact(value: Inert) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_FACT
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63)
