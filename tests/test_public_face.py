"""What a person meets at the prompt: completion, types, single tensors, missing names, printed reports, tables."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

import ckptool
from ckptool import errors, reports

ROOT = Path(ckptool.__file__).parents[1]
VALID = ROOT / "fixtures" / "valid"

GIVEN = {"Checkpoint.__init__", "StateDict.__init__", "Checkpoint.add_attributes"}
"""What only readers of formats call."""


def prompt(code: str) -> list[str]:
    """Return the words that a fresh interpreter prints."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_completion_shows_what_is_public_and_nothing_else() -> None:
    public = {*ckptool.__all__, "__version__", "errors", "reports"}
    complete = (
        "import ckptool, rlcompleter; complete = rlcompleter.Completer({'ckptool': ckptool}).complete; "
        "import ckptool.checking.check; "  # a submodule that somebody imported
        "print(*(text.partition('(')[0] for state in range(1000) if (text := complete('ckptool.', state))))"
    )

    assert {word.removeprefix("ckptool.") for word in prompt(complete)} == public - {"__version__"}
    assert set(prompt("import ckptool, ckptool.checking.check; print(*dir(ckptool))")) == public
    assert {"load", "load_into", "LiveModel", "diff"} <= public
    assert not {name for name in public if name.islower()} & {"checking", "loading", "formats", "limits"}


def test_reports_are_completed_without_an_import_of_their_own() -> None:
    assert set(prompt("import ckptool; print(*ckptool.reports.__all__)")) == set(reports.__all__)
    assert "torch" not in prompt("import ckptool, sys; ckptool.reports; print(*sys.modules)")


def test_every_error_can_be_imported_from_the_top() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.CkptoolError):
            assert getattr(ckptool, name) is value
    with pytest.raises(AttributeError):
        ckptool.Final  # noqa: B018 - what errors imports is none


def test_types_of_public_signatures_and_fields_are_public() -> None:
    modules = (ckptool, errors, reports)
    public = {name: getattr(module, name) for module in modules for name in dir(module) if name[0].isalpha()}
    known = {id(value) for value in public.values()}
    names = {**public, "Self": Any, "NDArray": Any, "Tensor": torch.Tensor}

    hidden = {
        f"{found.__module__}.{found.__name__} of {where}"
        for name, value in public.items()
        for where, annotated in annotated_in(name, value)
        for hint in get_type_hints(annotated, localns=names).values()
        for found in classes(hint)
        if found.__module__.startswith("ckptool") and id(found) not in known
    }

    assert not hidden


def annotated_in(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield a public function, or a class and its public methods."""
    if inspect.isfunction(value):
        yield name, value
    if not isinstance(value, type) or not value.__module__.startswith("ckptool"):
        return
    yield name, value
    for key, member in vars(value).items():
        function = member.fget if isinstance(member, property) else getattr(member, "func", member)
        where = f"{name}.{key}"
        if inspect.isfunction(function) and (key == "__init__" or key[0] != "_") and where not in GIVEN:
            yield where, function


def classes(hint: object) -> Iterator[type]:
    """Yield the classes that an annotation is made of."""
    if isinstance(hint, list):  # the arguments of a Callable
        for one in hint:
            yield from classes(one)
    elif isinstance(hint, type) and not get_args(hint):
        yield hint
    for one in get_args(hint):
        yield from classes(one)
