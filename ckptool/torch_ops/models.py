"""Models whose class the *user* names: built, filled, saved whole."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ckptool.errors import MigrationRefused, OutputFailed
from ckptool.tensors.reading import LazyTensor
from ckptool.torch_ops.needed import needed


def save_model(spec: str, arguments: Mapping[str, object], tensors: Mapping[str, LazyTensor], path: str) -> None:
    """
    Build the model that the *user* names, load the tensors into it, and save it whole to ``path``.

    ``spec`` is ``package.module:Class``. Keys must match exactly. The model gets the types of the tensors.

    Raises:
        MigrationRefused: The class cannot be imported or built, or its keys are not those of the tensors.
        MissingPackage: torch is not installed.
    """
    needed()
    import torch

    model = _build(spec, arguments)
    state = {name: _tensor(tensor) for name, tensor in tensors.items()}
    expected = model.state_dict()
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    reshaped = [name for name in state if name in expected and state[name].shape != expected[name].shape]
    if missing or unexpected or reshaped:
        listed = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        parts = [f"{what}: {', '.join(names[:8])}{' …' if len(names) > 8 else ''}" for what, names in listed if names]
        raise MigrationRefused(
            f"{spec} does not take these weights; {'; '.join(parts)}",
            kind="key-mismatch",
            hint="Change names with --strip-module, --strip-prefix or --rename, or pass other --model-arg values.",
        )
    for name, place in model.state_dict(keep_vars=True).items():
        if name in state and place.dtype != state[name].dtype:
            place.data = place.data.to(state[name].dtype)  # loading would cast the weights to the model's type
    model.load_state_dict(state, strict=True)
    try:
        with open(path, "wb") as stream:  # noqa: PTH123 - a path of ours, to what has no name yet
            torch.save(model, stream)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OutputFailed(f"torch cannot save the model: {reason}", kind="output-failed") from error


def _build(spec: str, arguments: Mapping[str, object]) -> Any:
    module_name, _, class_name = spec.partition(":")
    try:
        cls = import_module(module_name)
        for part in class_name.split("."):
            cls = getattr(cls, part)
        return cls(**arguments)  # type: ignore[operator]
    except Exception as error:
        raise MigrationRefused(
            f"{spec!r} cannot be built: {type(error).__name__}: {error}",
            kind="model-not-built",
            hint="Name it as package.module:Class, importable from here, with its --model-arg values.",
        ) from error


def _tensor(tensor: LazyTensor) -> Any:
    import torch

    info = tensor.info
    data = tensor.read()
    dtype = getattr(torch, info.dtype.name)
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).reshape(info.shape)
        if data
        else torch.empty(info.shape, dtype=dtype, device="cpu")
    )


def model_shapes(spec: str, arguments: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """
    Build the model that the *user* names, and return the shape of each tensor of its state_dict(), by name.

    Raises:
        MigrationRefused: The class cannot be imported or built.
        MissingPackage: torch is not installed.
    """
    needed()
    import torch

    state = _build(spec, arguments).state_dict()
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
