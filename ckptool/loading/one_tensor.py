"""One tensor of a checkpoint, read when it is asked for: as a numpy array, or as a ``torch.Tensor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptool.errors import CkptoolError, UnsupportedFeature
from ckptool.limits import Limits

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from ckptool.tensors.reading import LazyTensor

_NUMPY = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    }
)
"""Types that numpy has, by the same names."""


def numpy_array(tensor: LazyTensor, limits: Limits) -> NDArray[Any]:
    """Return a new array of a tensor's elements; see ``LazyTensor.numpy``."""
    dtype = tensor.info.dtype.name
    if dtype not in _NUMPY:
        raise UnsupportedFeature(
            f"tensor {tensor.name!r} is {dtype}, and numpy has no such type",
            kind="no-such-dtype",
            hint="Take it as a torch.Tensor with torch(), or its bytes with read().",
        )
    try:
        import numpy as np
    except ImportError as error:
        raise _missing("numpy") from error
    elements = np.frombuffer(bytearray(tensor.read(limits=limits)), np.dtype(dtype).newbyteorder("<"))
    return elements.reshape(tensor.info.shape)


def torch_tensor(tensor: LazyTensor) -> torch.Tensor:
    """Return a tensor in memory of the CPU; see ``LazyTensor.torch``."""
    try:
        from ckptool.loading.memory.assembly import Assembly
        from ckptool.loading.memory.placement import placement
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise _missing("torch") from error
    return Assembly(placement("cpu")).tensors({tensor.name: tensor})[tensor.name]


def _missing(package: str) -> CkptoolError:
    return CkptoolError(f"{package} is not installed here", kind="missing-package", hint=f"Run: pip install {package}")
