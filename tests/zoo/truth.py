"""What the libraries' own loaders read in a file: every tensor in it, by its dotted name."""

from __future__ import annotations

import hashlib
import pickle
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.against_torch.oracle import tensor_bytes


class Content(NamedTuple):
    """A tensor as a value that can be compared: no two tensors that differ have the same."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


class NotOpened(Exception):
    """No loader takes the file."""


def read(path: Path) -> Any:
    """Return what a file holds, as the loaders of its format give it."""
    reasons = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for loader in _loaders(path):
            try:
                return loader(path)
            except Exception as error:  # noqa: BLE001 - any loader, any reason
                reasons.append(f"{loader.__name__}: {type(error).__name__}: {str(error)[:120]}")
    raise NotOpened("; ".join(reasons))


def _loaders(path: Path) -> list[Any]:
    with path.open("rb") as file:
        head = file.read(16)
    if path.suffix == ".safetensors":
        return [_safetensors]
    if path.suffix == ".pt2":
        return [_exported]
    if not head or head[:1] in b"{[#<" or path.suffix in (".py", ".txt", ".json", ".yaml", ".md", ".csv"):
        return []
    return [_torch_load, _scripted, _exported, _pickled, _joblib, _safetensors]


def _torch_load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def _scripted(path: Path) -> Any:
    return dict(torch.jit.load(str(path), map_location="cpu").state_dict())


def _exported(path: Path) -> Any:
    return dict(torch.export.load(str(path)).state_dict)


def _pickled(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)


def _joblib(path: Path) -> Any:
    import joblib

    return joblib.load(path)


def _safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def not_in_file(path: Path, tensors: Mapping[str, Content]) -> set[str]:
    """Return the names of tensors that unpickling a file does not rebuild: what code of classes makes besides."""
    try:
        rebuilt = _rebuilt(path) if tensors else set()
    except Exception:  # noqa: BLE001 - no file of torch.save: there, all count as in it
        return set()
    return {name for name, one in tensors.items() if one not in rebuilt}


def _rebuilt(path: Path) -> set[Content]:
    found: set[Content] = set()

    def noting(rebuild: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            tensor = rebuild(*arguments, **options)
            found.update(named({"": tensor}).values())
            return tensor

        return call

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            one = super().find_class(module, name)
            return noting(one) if name.startswith("_rebuild") else one

    module = types.SimpleNamespace(__name__="pickle", Unpickler=Unpickler, load=pickle.load)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.load(path, map_location="cpu", weights_only=False, pickle_module=module)
    return found


def modules(tree: Any) -> list[str]:
    """Return the names of the modules in whatever was loaded, as ``named`` gives names."""
    return [name for name, value in _values(tree, "", set(), 0) if isinstance(value, torch.nn.Module)]


def content(tensor: torch.Tensor) -> Content:
    """Return what there is to compare of a tensor without parts."""
    data = tensor_bytes(tensor) if tensor.device.type != "meta" else b""
    return Content(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), hashlib.sha1(data).hexdigest())


def named(tree: Any) -> dict[str, Content]:
    """Return the tensors of whatever was loaded: in mappings, lists, modules, optimizers and objects' attributes."""
    found: dict[str, Content] = {}
    tensors = ((name, value) for name, value in _values(tree, "", set(), 0) if isinstance(value, torch.Tensor))
    for name, tensor in (part for one in tensors for part in _parts(one[1], one[0])):
        try:
            found.setdefault(name, content(tensor))
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # a kind without bytes of its own
    return found


def arrays(tree: Any) -> dict[str, Content]:
    """Return numpy's arrays in nested mappings and lists, as tensors: weights may be kept as such."""
    found: dict[str, Content] = {}
    if isinstance(tree, Mapping | list | tuple):
        for key, value in _items(tree):
            for name, one in arrays(value).items():
                found[f"{key}.{name}".rstrip(".")] = one
    elif type(tree).__name__ == "ndarray" and tree.dtype.kind in "fiub":
        found[""] = content(torch.from_numpy(tree.copy()))
    return found


def _values(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield everything in a tree, and its name."""
    yield name, value
    if isinstance(value, torch.Tensor) or depth > 25 or isinstance(value, type | str | bytes | int | float | None):
        return
    if not isinstance(value, torch.nn.Module) and id(value) in seen:
        return
    seen.add(id(value))
    for key, item in _items(value):
        yield from _values(item, f"{name}.{key}" if name else str(key), seen, depth + 1)


def _parts(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if type(tensor).__name__ in ("FakeTensor", "UninitializedParameter", "UninitializedBuffer"):
        return
    if tensor.layout == torch.sparse_coo:
        yield from ((f"{name}[indices]", tensor._indices()), (f"{name}[values]", tensor._values()))
        return
    if tensor.layout != torch.strided:
        yield f"{name}[values]", tensor.values()
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            if isinstance(getattr(tensor, part), torch.Tensor):
                yield from _parts(getattr(tensor, part), f"{name}[{part}]")
        return
    yield name, tensor


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, torch.nn.Module):
        try:
            return list(value.state_dict().items())
        except Exception:  # noqa: BLE001 - a module whose code is not what it was
            return []
    if isinstance(value, torch.optim.Optimizer):
        return list(value.state_dict().items())
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | set):
        return list(enumerate(value))
    return list(vars(value).items()) if hasattr(value, "__dict__") and type(value).__module__ != "builtins" else []
