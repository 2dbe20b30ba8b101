"""Models whose class the *user* names: built, filled, saved whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from ckptool.errors import MigrationRefused, OutputFailed
from ckptool.names.matching import ANY_SHAPE, Shape
from ckptool.tensors.reading import LazyTensor
from ckptool.torch_ops.needed import needed
from ckptool.torch_ops.user_classes import user_class

_HINT: Final = (
    "Name it as package.module:Class, importable from the current folder, or as path/to/file.py:Class, with its "
    "`model_arguments=`."
)


def save_model(spec: str, arguments: Mapping[str, object], tensors: Mapping[str, LazyTensor], path: str) -> None:
    """
    Build the model that the *user* names, load the tensors into it, and save it whole to ``path``.

    ``spec`` is ``package.module:Class`` or ``path/to/file.py:Class``. Keys must match exactly. The model gets the types
    of the tensors.

    Raises:
        MigrationRefused: The class cannot be imported or built, or its keys are not those of the tensors.
        MissingPackage: torch is not installed.
    """
    needed()
    import torch

    state = {name: _tensor(tensor) for name, tensor in tensors.items()}
    with _built(spec, arguments) as model:
        _refuse_mismatch(spec, state, _shapes(model))
        for name, place in model.state_dict(keep_vars=True).items():
            if name in state and not torch.nn.parameter.is_lazy(place) and place.dtype != state[name].dtype:
                place.data = place.data.to(state[name].dtype)  # loading would cast the weights to the model's type
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
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise OutputFailed(f"torch cannot save the model: {reason}", kind="output-failed") from error


def _refuse_mismatch(spec: str, state: Mapping[str, Any], expected: Mapping[str, Shape]) -> None:
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    reshaped = [name for name in state if name in expected and expected[name] != tuple(state[name].shape)]
    if missing or unexpected or reshaped:
        listed = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        parts = [f"{what}: {', '.join(names[:8])}{' …' if len(names) > 8 else ''}" for what, names in listed if names]
        raise MigrationRefused(
            f"{spec} does not take these weights; {'; '.join(parts)}",
            kind="key-mismatch",
            hint="Change names with `strip_module=True` or `rename=`, or pass other `model_arguments=`.",
        )


@contextmanager
def _built(spec: str, arguments: Mapping[str, object]) -> Iterator[Any]:
    """Give a block the model that the user names, where its class can be found by name."""
    import torch

    with ExitStack() as stack:
        try:
            model = stack.enter_context(user_class(spec))(**arguments)
        except (Exception, SystemExit) as error:  # the user's own code raises what it likes
            reason = f"{type(error).__name__}: {error}"
            raise MigrationRefused(f"{spec!r} cannot be built: {reason}", kind="model-not-built", hint=_HINT) from error
        if not isinstance(model, torch.nn.Module):
            what = f"{spec!r} makes a {type(model).__name__} and no torch.nn.Module"
            raise MigrationRefused(what, kind="model-not-built", hint=_HINT)
        yield model


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


def model_shapes(spec: str, arguments: Mapping[str, object]) -> dict[str, Shape]:
    """
    Build the model that the *user* names, and return the shape of each tensor of its state_dict(), by name.

    Raises:
        MigrationRefused: The class cannot be imported or built.
        MissingPackage: torch is not installed.
    """
    needed()
    with _built(spec, arguments) as model:
        return _shapes(model)


def _shapes(model: Any) -> dict[str, Shape]:
    import torch

    return {
        name: ANY_SHAPE if torch.nn.parameter.is_lazy(value) else tuple(value.shape)
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
