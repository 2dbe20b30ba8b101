"""Names that honest pickles are full of, as data: those of containers and arrays, of TorchScript, and of indexes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.formats.runnable import SETTINGS
from ckptool.pickles.alarms import canonical
from ckptool.pickles.constructions import BY_NAME
from ckptool.pickles.judge import is_listed
from ckptool.pickles.weights_only import is_allowed

TORCHSCRIPT: Final = frozenset(
    ("torch.jit._pickle.build_tensor_from_id", *(name for name in BY_NAME if name.startswith("torch.jit._pickle.")))
)
"""Functions that ``torch.jit.save`` calls in its pickles; each returns what it is given."""

_CLASS_OF_TORCH: Final = r"torch\.(nn|optim)\.[a-z0-9_.]+\.[A-Z]\w*"


def is_torchscripts(module: str, name: str) -> bool:
    """Say whether TorchScript puts ``module.name`` in its pickles: a class in the archive's own code, or a type tag."""
    return module.partition(".")[0] == "__torch__" or f"{module}.{name}" in TORCHSCRIPT


def is_of_index(module: str, name: str) -> bool:
    """Say whether every index of a ``torch.distributed.checkpoint`` asks for this, or may, as for the path it is at."""
    return module.startswith(("torch.distributed.checkpoint.", "pathlib")) and is_listed(f"{module}.{name}")


@lru_cache(maxsize=512)  # 4 MiB of the longest names
def is_usual(module: str, name: str) -> bool:
    """Say whether ``module.name`` is a construction that only makes data, or an object of torch's own."""
    full = canonical(module, name)
    return is_listed(full) or is_allowed(module, name) or re.fullmatch(_CLASS_OF_TORCH, full) is not None


def has_settings(checkpoint: Checkpoint) -> bool:
    """Say whether settings lie beside a checkpoint in an archive, whose loader calls what they name."""
    return any(name.endswith(SETTINGS) for archive in checkpoint.archives[:-1] for name in archive)
