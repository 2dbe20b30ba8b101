"""One tensor of a checkpoint, read when it is asked for: as a numpy array, or as a ``torch.Tensor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptool.errors import UnsupportedFeature
from ckptool.limits import Limits
from ckptool.torch_ops.packages import needed

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from ckptool.tensors.reading import LazyTensor


def numpy_array(tensor: LazyTensor, limits: Limits) -> NDArray[Any]:
    """Return a new array of a tensor's elements; see ``LazyTensor.numpy``."""
    of_type = tensor.info.dtype
    dtype = of_type.name
    if not of_type.numpy or of_type.is_quantised or dtype == "complex32":
        raise UnsupportedFeature(
            f"tensor {tensor.name!r} is {dtype}, and numpy has no such type",
            kind="no-such-dtype",
            hint="Take it as a torch.Tensor with torch(), or its bytes with read().",
        )
    np = needed("numpy", "numpy", "numpy")
    elements = np.frombuffer(bytearray(tensor.read(limits=limits)), np.dtype(dtype).newbyteorder("<"))
    found: NDArray[Any] = elements.reshape(tensor.info.shape)
    return found


def torch_tensor(tensor: LazyTensor) -> torch.Tensor:
    """Return a tensor in memory of the CPU; see ``LazyTensor.torch``."""
    needed()
    from ckptool.loading.memory.assembly import Assembly
    from ckptool.loading.memory.placement import placement

    return Assembly(placement("cpu")).tensors({tensor.name: tensor})[tensor.name]
