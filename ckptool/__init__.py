"""Open any PyTorch checkpoint without running it, say what is in it, and write it again in another form."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptool.cancellation import Cancellation
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.parsed import ClassSource, Member
from ckptool.errors import (
    AmbiguousFile,
    AmbiguousWeights,
    Cancelled,
    CkptoolError,
    DamagedFile,
    DeviceUnavailable,
    FileUnavailable,
    KeyMismatch,
    LimitExceeded,
    MalformedFile,
    MigrationRefused,
    NotACheckpoint,
    OutOfMemory,
    OutputExists,
    OutputFailed,
    ShapeMismatch,
    SourceChanged,
    TruncatedFile,
    UnknownFormat,
    UnreadableFile,
    UnsafePickle,
    UnsupportedFeature,
    WeightsMismatch,
    WeightsNotFound,
)
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from ckptool.tensors.reading import LazyTensor
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
    "AmbiguousFile",
    "AmbiguousWeights",
    "Cancellation",
    "Cancelled",
    "Changes",
    "CheckReport",
    "Checkpoint",
    "CkptoolError",
    "ClassSource",
    "Cost",
    "DamagedFile",
    "DeviceUnavailable",
    "DiffReport",
    "FileUnavailable",
    "KeyMismatch",
    "LazyTensor",
    "LimitExceeded",
    "Limits",
    "LiveModel",
    "LoadReport",
    "MalformedFile",
    "Member",
    "MigrationRefused",
    "MigrationReport",
    "NotACheckpoint",
    "OutOfMemory",
    "OutputExists",
    "OutputFailed",
    "Reload",
    "Serving",
    "ShapeMismatch",
    "SourceChanged",
    "StateDict",
    "StorageRef",
    "TensorInfo",
    "TruncatedFile",
    "UnknownFormat",
    "UnreadableFile",
    "UnsafePickle",
    "UnsupportedFeature",
    "WeightsMismatch",
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


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "errors"]
