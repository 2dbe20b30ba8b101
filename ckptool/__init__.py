"""Open any PyTorch checkpoint without running it, say what is in it, and write it again in another form."""

from typing import TYPE_CHECKING, Any

from ckptool.cancellation import Cancellation
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.parsed import ClassSource, Member
from ckptool.errors import (
    AmbiguousWeights,
    Cancelled,
    CkptoolError,
    DamagedFile,
    KeyMismatch,
    MigrationRefused,
    MissingPackage,
    OutOfMemory,
    ShapeMismatch,
    TruncatedFile,
    UnreadableFile,
    WeightsNotFound,
)
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from ckptool.pickles.nodes import Global
from ckptool.sources.source import Source
from ckptool.tensors.dtypes import DType
from ckptool.tensors.reading import LazyTensor, converters
from ckptool.tensors.tensor import StorageRef, TensorInfo

if TYPE_CHECKING:
    from ckptool.checking.check import CheckReport, check
    from ckptool.diffing.diff import diff
    from ckptool.diffing.report import DiffReport
    from ckptool.loading.load import load, predict_memory
    from ckptool.loading.load_into import load_into
    from ckptool.loading.load_model import load_model
    from ckptool.loading.memory.assembly import Cost
    from ckptool.loading.report import LoadReport
    from ckptool.loading.serving.live_model import LiveModel, Reload, Serving
    from ckptool.migration.changes import Changes
    from ckptool.migration.migrate import migrate
    from ckptool.migration.report import MigrationReport

__version__ = "0.1.0"

__all__ = [
    "AmbiguousWeights",
    "Cancellation",
    "Cancelled",
    "Changes",
    "CheckReport",
    "Checkpoint",
    "CkptoolError",
    "ClassSource",
    "Cost",
    "DType",
    "DamagedFile",
    "DiffReport",
    "Global",
    "KeyMismatch",
    "LazyTensor",
    "Limits",
    "LiveModel",
    "LoadReport",
    "Member",
    "MigrationRefused",
    "MigrationReport",
    "MissingPackage",
    "OutOfMemory",
    "Reload",
    "Serving",
    "ShapeMismatch",
    "Source",
    "StateDict",
    "StorageRef",
    "TensorInfo",
    "TruncatedFile",
    "UnreadableFile",
    "WeightsNotFound",
    "check",
    "diff",
    "load",
    "load_into",
    "load_model",
    "migrate",
    "open_checkpoint",
    "predict_memory",
]


_LATER = {
    "Changes": "ckptool.migration.changes",
    "CheckReport": "ckptool.checking.check",
    "Cost": "ckptool.loading.memory.assembly",
    "DiffReport": "ckptool.diffing.report",
    "LiveModel": "ckptool.loading.serving.live_model",
    "LoadReport": "ckptool.loading.report",
    "MigrationReport": "ckptool.migration.report",
    "Reload": "ckptool.loading.serving.live_model",
    "Serving": "ckptool.loading.serving.live_model",
    "check": "ckptool.checking.check",
    "diff": "ckptool.diffing.diff",
    "load": "ckptool.loading.load",
    "load_into": "ckptool.loading.load_into",
    "load_model": "ckptool.loading.load_model",
    "migrate": "ckptool.migration.migrate",
    "predict_memory": "ckptool.loading.load",
}
"""Names whose modules are imported when they are asked for: most of what there is to import, and seldom needed."""

_ERRORS = frozenset(
    {
        "AmbiguousFile",
        "DeviceUnavailable",
        "FileUnavailable",
        "IncompleteWeights",
        "LimitExceeded",
        "MalformedFile",
        "NotACheckpoint",
        "OutputExists",
        "OutputFailed",
        "SourceChanged",
        "UnknownFormat",
        "UnsafePickle",
        "UnsupportedFeature",
        "WeightsMismatch",
    }
)
"""Errors that few callers catch by name: they can be imported from here, and are listed in ``ckptool.errors`` alone."""


def _numpy(tensor: LazyTensor, limits: Limits) -> Any:
    from ckptool.loading.one_tensor import numpy_array

    return numpy_array(tensor, limits)


def _torch(tensor: LazyTensor, _: Limits) -> Any:
    from ckptool.loading.one_tensor import torch_tensor

    return torch_tensor(tensor)


converters.update(numpy=_numpy, torch=_torch)


def __getattr__(name: str) -> Any:
    from importlib import import_module  # importing it takes as long as a fifth of this package

    if name == "reports":
        return import_module("ckptool.reports")
    module = "ckptool.errors" if name in _ERRORS else _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if module.startswith("ckptool.loading."):
        import_module("ckptool.torch_ops.needed").needed()  # all of it is made of torch
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    from importlib.util import find_spec

    # help() asks for every name that is listed here, so what needs torch is listed where torch is installed.
    there = find_spec("torch") is not None
    names = (name for name in __all__ if there or not _LATER.get(name, "").startswith("ckptool.loading."))
    return [*names, "__version__", "errors", "reports"]
