"""
What known classes ask objects of their subclasses for while these are loaded, found out by loading some.

Every name that a base has, or that its methods ask for, is put into a subclass and notes when it is used. Each that was
used has to be the third grade where a file brings it as byte code.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType
from typing import Any

import pytest
import torch

from ckptool import check
from ckptool.pickles import plain_names as plain
from tests.build import named
from tests.checking.test_own_methods import FUNCTION, PROPERTY, made, new

MODULES = (
    *("builtins", "collections", "collections.abc", "abc", "typing", "contextlib", "enum", "argparse", "types"),
    *("json.encoder", "json.decoder", "logging", "string", "datetime", "codecs", "random", "_pyio", "weakref"),
    *("torch.nn.modules.rnn", "torch.nn.modules.linear", "torch.nn.modules.transformer", "torch.nn.modules.batchnorm"),
    *("torch.optim.adam", "torch.optim.optimizer", "torch.optim.lr_scheduler", "torch.distributions.normal"),
)
KNOWN_OTHERWISE = plain.RUN_BY_LOADING | {
    "__init__",
    "__slots__",
    "__subclasshook__",
    "__abstractmethods__",
    "_abc_impl",
}


def asked_for(base: type) -> set[str]:
    """Return the names of a subclass that are used while objects of it are made, get a state, and end."""
    return used_of(base, set(dir(base))) | used_of(base, set(dir(base)) | names_asked_for(base))


def used_of(base: type, names: set[str]) -> set[str]:
    used: set[str] = set()
    own = {name: noting(used, name, inspect.getattr_static(base, name, 1)) for name in names - KNOWN_OTHERWISE}
    with suppress(Exception):
        subclass = type(base)("K", (base,), own)
        for args in ((), (1,), ("x",)):
            for state in ({"of_the_state": 1}, (None, {"of_the_state": 1})):
                with suppress(Exception):
                    load(base, subclass, args, state)
    return used


def load(base: type, subclass: type, args: tuple[object, ...], state: Any) -> None:
    """Do what the unpickler does: NEWOBJ, BUILD, and the end of the object."""
    one: Any = base.__new__(subclass, *args)
    with suppress(Exception):
        setter = getattr(one, "__setstate__", None)
        if setter is not None:
            setter(state)
        elif isinstance(state, dict):
            one.__dict__.update(state)
        else:
            for name, value in state[1].items():
                setattr(one, name, value)


def names_asked_for(base: type) -> set[str]:
    """Return the names that the methods of a class ask for, of whatever object, also in ``hasattr`` and the like."""
    codes = (code_of(value) for kind in base.__mro__ for value in vars(kind).values())
    names = {name for code in codes if code is not None for name in (*code.co_names, *code.co_consts)}
    return {name for name in names if isinstance(name, str) and name.isidentifier()}


def code_of(value: Any) -> CodeType | None:
    code = getattr(getattr(value, "fget", getattr(value, "__func__", value)), "__code__", None)
    return code if isinstance(code, CodeType) else None


def noting(used: set[str], name: str, own: Any) -> Any:
    """Return what stands for an attribute of a class, and notes that it is used."""
    function: Callable[..., Any] = getattr(own, "__func__", own)
    if not callable(own) and not isinstance(own, staticmethod | classmethod):

        def get(self: object) -> Any:
            used.add(name)
            return own.fget(self) if isinstance(own, property) and own.fget is not None else own

        def put(self: object, value: object) -> None:
            used.add(name)
            vars(self)[name] = value

        return property(get, put)

    def call(*args: Any, **options: Any) -> Any:
        used.add(name)
        return function(*args, **options)

    return call


def bases_in(module: str) -> Iterator[type]:
    for name, one in vars(importlib.import_module(module)).items():
        is_own = isinstance(one, type) and (one.__module__ == module or not module.startswith("torch."))
        if is_own and not issubclass(one, type) and name == one.__name__:
            yield one


def test_there_is_something_that_bases_ask_for() -> None:
    assert "_flat_weights_names" in asked_for(torch.nn.LSTM)
    assert "profile_hook_step" in asked_for(torch.optim.Adam)


@pytest.mark.parametrize("module", MODULES)
def test_what_a_base_asks_for_is_byte_code_that_loading_runs(module: str) -> None:
    missing = []
    for base in bases_in(module):
        name = named(module, base.__name__)
        for asked in asked_for(base):
            for value in (FUNCTION, PROPERTY):
                if check(b"\x80\4" + new(made(name, **{asked: value})) + b".").grade != "system":
                    missing.append((base.__name__, asked))

    assert not missing


def test_bases_that_are_known_are_there() -> None:
    known = [
        base
        for module in MODULES
        for base in bases_in(module)
        if re.fullmatch(plain.PLAIN_BASES, f"{module}.{base.__name__}")
    ]

    assert len(known) > 100
