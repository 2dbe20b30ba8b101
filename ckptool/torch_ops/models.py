"""Builds, fills and saves models whose class the user names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module, invalidate_caches
from operator import itemgetter
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptool.checkpoints.quantized import CASTABLE
from ckptool.checkpoints.quantized_layouts import TYPES
from ckptool.errors import MigrationRefused, OutputFailed, first_line
from ckptool.messages import as_path, counted, some
from ckptool.names.matching import ANY_SHAPE, Shape
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo
from ckptool.torch_ops import needed
from ckptool.torch_ops.differences import differ
from ckptool.torch_ops.values import lost_in_cast

if TYPE_CHECKING:
    import torch
else:
    torch = needed()  # the error says how to get it

_HINT: Final = (
    "Name it as package.module:Class, importable from the current folder, or as path/to/file.py:Class, with its "
    "`model_arguments=`."
)
_LACKING: Final = re.compile(r"missing \d+ required (?:positional|keyword-only) argument")
_KINDS: Final = "Build the model with tensors of the file's kind, with `model_arguments=`."
_CODES: Final = {"bool", *TYPES} - CASTABLE
"""Types of matrices that cannot be parameters of floats."""
_TURN = RLock()  # all threads share sys.path and sys.modules
_IMPORTED: dict[str, dict[str, ModuleType]] = {}
"""Modules that were imported from folders which are not on Python's path, by folder."""


def save_model(spec: str, arguments: Mapping[str, object], tensors: Mapping[str, LazyTensor], path: str) -> None:
    """
    Build the model that the *user* names, load the tensors into it, and save it whole to ``path``.

    ``spec`` is ``package.module:Class`` or ``path/to/file.py:Class``. Keys must match exactly. The model gets the types
    of the tensors.

    Raises:
        MigrationRefused: The class cannot be imported or built, or its keys are not those of the tensors.
        MissingPackage: torch is not installed.
    """
    for tensor in tensors.values():
        if tensor.info.storage is None:
            tensor.read()  # raises: on the meta device there are no values
    state = {name: tensor.torch() for name, tensor in tensors.items()}
    with _built(spec, arguments) as model:
        refuse_mismatch(spec, tensors, _tensors(model))
        for name, place in model.state_dict(keep_vars=True).items():
            if name not in state or torch.nn.parameter.is_lazy(place) or place.dtype == state[name].dtype:
                continue
            if place.is_floating_point() == state[name].is_floating_point():
                place.data = place.data.to(state[name].dtype)  # loading would cast the weights to the model's type
            elif lost_in_cast(state[name], place.dtype).numel:
                what = f"{name!r} has values that {str(place.dtype).removeprefix('torch.')} cannot hold"
                raise MigrationRefused(f"{spec} does not take these weights; {what}", kind="key-mismatch", hint=_KINDS)
        try:
            model.load_state_dict(state, strict=True)
        except Exception as error:  # whatever the model's own code raises
            reason = " ".join((str(error) or type(error).__name__).split())
            raise MigrationRefused(
                f"{spec} does not take these weights; {reason}",
                kind="key-mismatch",
                hint="Check that they are this class's, and that it is built with the same `model_arguments=`.",
            ) from error
        try:
            with open(path, "wb") as stream:
                torch.save(model, stream)
        except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
            raise OutputFailed(f"torch cannot save the model: {first_line(error)}", kind="output-failed") from error


def refuse_mismatch(spec: str, tensors: Mapping[str, LazyTensor], places: Mapping[str, torch.Tensor]) -> None:
    """Raise MigrationRefused unless a model takes tensors: names and shapes are its own, and no value would be lost."""
    expected = shapes_of(places)
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    reshaped = [name for name in tensors if name in expected and expected[name] != tensors[name].info.shape]
    if missing or unexpected or reshaped:
        listed = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        parts = [f"{what}: {', '.join(names[:8])}{' …' if len(names) > 8 else ''}" for what, names in listed if names]
        raise MigrationRefused(
            f"{spec} does not take these weights; {'; '.join(parts)}",
            kind="key-mismatch",
            hint="Change names with `strip_module=True` or `rename=`, or pass other `model_arguments=`.",
        )
    if unlike := kind_mismatches(tensors, places):
        raise MigrationRefused(f"{spec} does not take these weights; {unlike[0]}", kind="key-mismatch", hint=_KINDS)
    if apart := ties_with_two_values(tensors, places):
        first, second = apart[0]
        raise MigrationRefused(
            f"{spec} ties {first!r} and {second!r}, for which the file has different values",
            kind="tied-values",
            hint="Build it without the tie, with `model_arguments=`, or give both the same value first.",
        )


def kind_mismatches(tensors: Mapping[str, LazyTensor], places: Mapping[str, torch.Tensor]) -> list[str]:
    """Return why a model's tensors do not take those of a file with the same names, though their shapes fit."""
    pairs = {name: (tensors[name], place) for name, place in places.items() if name in tensors}
    real = {name: pair for name, pair in pairs.items() if not (torch.nn.parameter.is_lazy(pair[1]) or pair[1].is_meta)}
    reasons = ((name, why_unlike(one.info, place)) for name, (one, place) in real.items())
    found = [f"tensor {name!r} {reason}" for name, reason in reasons if reason]
    return [*found, fact] if (fact := codes_for_floats(pairs.values())) else found


def why_unlike(info: TensorInfo, tensor: torch.Tensor) -> str | None:
    """Return why torch would refuse to copy a file's tensor into one of a model, or lose something in it."""
    theirs = "strided" if info.layout == "strided" and info.storage is not None else info.layout
    mine = str(tensor.qscheme() if tensor.is_quantized else tensor.layout).removeprefix("torch.")
    if info.layout == "strided" and info.storage is None:
        parts = ", ".join(part for part, _ in info.parts)
        return f"is {info.subclass or 'no plain tensor'}, which the file holds as {parts}" if parts else "has no bytes"
    if theirs != mine and (info.layout != "strided" or tensor.is_quantized or tensor.is_sparse):
        return f"is {info.layout}, the model's {mine}"
    if info.dtype.name.startswith("complex") and not tensor.is_complex():
        return f"is {info.dtype}, the model's {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.layout == torch.strided and torch._debug_has_internal_overlap(tensor) == 1:
        return "has several elements in one place of the model's memory"
    return None


def codes_for_floats(taken: Iterable[tuple[LazyTensor, torch.Tensor | None]]) -> str | None:
    """Return a text about integer matrices, which seem quantised, for parameters of floats; None if there are none."""
    floats = (one for one, into in taken if isinstance(into, torch.nn.Parameter) and into.dtype.is_floating_point)
    codes = [one.name for one in floats if len(one.shape) > 1 and one.dtype in _CODES]
    what = f"{counted(len(codes), 'tensor')} of integers, as quantised weights are, for parameters of floats"
    return f"{what}: {some(codes)}" if codes else None


def ties_with_two_values(
    tensors: Mapping[str, LazyTensor], places: Mapping[str, torch.Tensor]
) -> list[tuple[str, str]]:
    """Return pairs of names that have one memory in a model, or overlap in it, but for which a file's values differ."""
    first: dict[int, str] = {}
    pairs = [(first.setdefault(id(place), name), name) for name, place in places.items() if name in tensors]
    apart = [pair for pair in pairs if differ(*(tensors[name] for name in pair))]
    overlapping = _overlapping({name: places[name] for name in first.values()})
    return [*apart, *(pair for pair in overlapping if _overwrites(*pair, tensors, places))]


def _overlapping(places: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names: in memory, one tensor begins between the first and the last element of the other."""
    spans = []
    for name, one in places.items():
        is_plain = type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout == torch.strided
        if is_plain and one.numel() and not (one.is_meta or one.is_quantized):
            last = sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True))
            spans.append((str(one.device), one.data_ptr(), one.data_ptr() + last * one.itemsize, name))
    open_spans: list[tuple[str, int, str]] = []
    for device, begin, last, name in sorted(spans, key=itemgetter(0, 1)):  # of equal ones, the first stays first
        open_spans = [one for one in open_spans if (device, begin) <= one[:2]]
        yield from ((other, name) for _, _, other in open_spans)
        open_spans.append((device, last, name))


def _overwrites(first: str, second: str, tensors: Mapping[str, LazyTensor], places: Mapping[str, torch.Tensor]) -> bool:
    """Return whether writing a file's values to the second place changes those that were written to the first."""
    one, other = places[first], places[second]
    if one.dtype != other.dtype:
        return True
    memory = torch.empty(one.untyped_storage().nbytes() // one.itemsize, dtype=one.dtype)
    one, other = (memory.as_strided(each.shape, each.stride(), each.storage_offset()) for each in (one, other))
    one.copy_(tensors[first].torch())
    before = one.clone()
    other.copy_(tensors[second].torch())
    return not torch.equal(one.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8))


@contextmanager
def _built(spec: str, arguments: Mapping[str, object]) -> Iterator[Any]:
    """Yield the model that the user names; within the block, its class can be found by name."""
    with ExitStack() as stack:
        try:
            model = stack.enter_context(user_class(spec))(**arguments)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            reason = f"{type(error).__name__}: {error}"
            lacking = re.findall(r"'(\w+)'", str(error)) if _LACKING.search(str(error)) else []
            hint = f"Give {', '.join(lacking)} with `model_arguments=`." if lacking else _HINT
            raise MigrationRefused(
                f"{as_path(spec)} cannot be built: {reason}", kind="model-not-built", hint=hint
            ) from error
        if not isinstance(model, torch.nn.Module):
            what = f"{as_path(spec)} makes a {type(model).__name__} and no torch.nn.Module"
            raise MigrationRefused(what, kind="model-not-built", hint=_HINT)
        yield model


def model_tensors(spec: str, arguments: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """
    Build the model that the *user* names, and return the tensors of its state_dict(), by name.

    Raises:
        MigrationRefused: The class cannot be imported or built.
        MissingPackage: torch is not installed.
    """
    with _built(spec, arguments) as model:
        return _tensors(model)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    own = model.state_dict(keep_vars=True)
    return {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    """Return the shapes of a model's tensors; for lazy ones, which have none yet, one that is equal to all."""
    is_lazy = torch.nn.parameter.is_lazy
    return {name: ANY_SHAPE if is_lazy(value) else tuple(value.shape) for name, value in tensors.items()}


class _Place(NamedTuple):
    folder: str
    """The folder that has to be first on Python's path."""
    module: str
    name: str
    is_file: bool = False


@contextmanager
def user_class(spec: str) -> Iterator[Any]:
    """
    Yield the class of ``package.module:Class`` or ``path/to/file.py:Class``.

    The current folder, or the file's (its package's), is first on Python's path in the block, so modules beside it are
    found. After the block, modules from there are set aside: another folder may have modules of the same names.

    Raises:
        Exception: There is no such module, file or class; or whatever the module raises while it is imported.
    """
    place = _place(spec)
    with _TURN, _in_front(place):
        found: Any = import_module(place.module)
        for part in place.name.split("."):
            if not hasattr(found, part) and (near := get_close_matches(part, dir(found), 1)):
                raise AttributeError(f"there is no {part!r} in it; {near[0]!r} is")
            found = getattr(found, part)
        yield found


def _place(spec: str) -> _Place:
    where, colon, name = spec.rpartition(":")
    if not (where and colon and name):
        raise ValueError("it names no class after a ':'")
    if not where.endswith(".py"):
        return _Place(os.getcwd(), where, name)
    path = os.path.abspath(os.path.expanduser(where))
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {as_path(where)}")
    folder, last = os.path.split(path.removesuffix(".py"))
    parts = [] if last == "__init__" else [last]
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, package = os.path.split(folder)
        parts.insert(0, package)
    return _Place(folder, ".".join(parts), name, is_file=True)


@contextmanager
def _in_front(place: _Place) -> Iterator[None]:
    """Let a block import from a folder before all others."""
    on_path = {os.path.abspath(entry) for entry in sys.path}
    is_new, known = place.folder not in on_path, set(sys.modules)
    mine = _IMPORTED.setdefault(place.folder, {})
    hidden = _modules_of_another_file(place) | {name: sys.modules[name] for name in mine if name in sys.modules}
    for name in hidden:
        del sys.modules[name]
    sys.path.insert(0, place.folder)
    sys.modules.update(mine)
    invalidate_caches()  # the file may be newer than what Python knows of the folder
    try:
        yield
    finally:
        with suppress(ValueError):  # a module may have taken it away itself
            sys.path.remove(place.folder)
        fresh = [name for name in sys.modules if name not in known or name in hidden]
        for name in fresh if is_new else ():
            if _is_from(sys.modules.get(name.partition(".")[0]), place.folder):
                mine[name] = sys.modules[name]
        for name in mine:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def _modules_of_another_file(place: _Place) -> dict[str, ModuleType]:
    """
    Return the imported modules that hide those of a folder: a ``model`` that came from another folder.

    Raises:
        ImportError: The file has the name of an installed module, or of Python's own: others may need that.
    """
    files = os.listdir(place.folder)
    packages = [name for name in files if os.path.isfile(os.path.join(place.folder, name, "__init__.py"))]
    tops = {*packages, *(name.removesuffix(".py") for name in files if name.endswith(".py"))} & sys.modules.keys()
    hiding = {top for top in tops if not _is_from(sys.modules[top], place.folder)}
    kept = {top for top in hiding if _is_installed(sys.modules[top])}
    top = place.module.partition(".")[0]
    if place.is_file and top in kept:
        raise ImportError(f"{getattr(sys.modules[top], '__file__', 'Python')} is called {top!r}, too: rename one")
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in hiding - kept}


def _is_installed(module: ModuleType) -> bool:
    """Return whether a module is Python's own, or this package's, or is in a folder of installed packages."""
    if module.__name__.partition(".")[0] in (*sys.stdlib_module_names, "__main__", __name__.partition(".")[0]):
        return True
    prefixes = tuple(os.path.realpath(prefix) + os.sep for prefix in {sys.prefix, sys.base_prefix})
    return any(os.path.realpath(place).startswith(prefixes) for place in _places(module))


def _is_from(module: ModuleType | None, folder: str) -> bool:
    """Return whether a module, or package, is directly in a folder."""
    homes = {os.path.dirname(place) for place in _places(module)}
    return folder in homes or os.path.realpath(folder) in {os.path.realpath(home) for home in homes}


def _places(module: ModuleType | None) -> list[str]:
    """Return the file of a module, or the folders of a package."""
    packages = [entry for entry in getattr(module, "__path__", ()) or () if isinstance(entry, str)]
    return packages or [file for file in [getattr(module, "__file__", None)] if file]
