"""Names that honest pickles are full of, as data: those of containers and arrays, of TorchScript, and of indexes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.parsed import Stream
from ckptool.formats.runnable import SETTINGS
from ckptool.pickles.nodes import Global
from ckptool.pickles.weights_only import ALLOWED, PYTHON_2, each

TORCHSCRIPT: Final = frozenset(
    each("torch.jit._pickle.build_{}", "intlist tensorlist doublelist boollist tensor_from_id")
    | {"torch.jit._pickle.restore_type_tag"}
)
"""Functions that ``torch.jit.save`` calls in its pickles; each returns what it is given."""

_USUAL: Final = frozenset(
    each("builtins.{}", "object dict list tuple frozenset int long float str unicode bytes bool slice range")
    | each("collections.{}", "defaultdict deque")
    | each("copyreg.{}", "_reconstructor __newobj__ __newobj_ex__")
    | each("numpy.{}", "dtype ndarray core.numeric._frombuffer _core.numeric._frombuffer")
    | each("numpy.core.multiarray.{}", "scalar _reconstruct")
    | each("numpy._core.multiarray.{}", "scalar _reconstruct")
    | each("torch.{}", "_utils._rebuild_sparse_csr_tensor storage._load_from_bytes")
)
_CLASS_OF_TORCH: Final = r"torch\.(nn|optim)\.[a-z0-9_.]+\.[A-Z]\w*"

_PATH: Final = r"pathlib\.(?:_local\.)?(?:Pure)?(?:Posix|Windows)?Path"
"""The path at which an index was saved."""


def is_torchscripts(module: str, name: str) -> bool:
    """Say whether TorchScript puts ``module.name`` in its pickles: a class in the archive's own code, or a type tag."""
    return module.partition(".")[0] == "__torch__" or f"{module}.{name}" in TORCHSCRIPT


def is_of_index(module: str, name: str) -> bool:
    """Say whether every index of a ``torch.distributed.checkpoint`` asks for this, or may."""
    from ckptool.pickles.plain_names import INDEX_CLASSES  # a large table, and most files are no index

    return re.fullmatch(rf"{INDEX_CLASSES}|{_PATH}", f"{module}.{name}") is not None


def unexpected(stream: Stream) -> list[Global]:
    """Return the names that are not usual where a stream asks for them."""
    found = [one for one in stream.globals if not is_usual(one.module, one.name)]
    return [one for one in found if not is_of_index(one.module, one.name)] if stream.is_index else found


@lru_cache(maxsize=512)  # 4 MiB of the longest names
def is_usual(module: str, name: str) -> bool:
    """Say whether ``module.name`` only makes a container, a number, an array, a tensor, or an object of torch's own."""
    full = f"{'copyreg' if module == 'copy_reg' else PYTHON_2.get(module, module)}.{name}"
    return full in ALLOWED or full in _USUAL or re.fullmatch(_CLASS_OF_TORCH, full) is not None


def has_settings(checkpoint: Checkpoint) -> bool:
    """Say whether settings lie beside a checkpoint in an archive, whose loader calls what they name."""
    return any(name.endswith(SETTINGS) for archive in checkpoint.archives[:-1] for name in archive)
