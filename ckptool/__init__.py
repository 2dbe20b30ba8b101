"""Open any PyTorch checkpoint without running it, say what is in it, and write it again in another form."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptool.cancellation import Cancellation
from ckptool.checkpoint import Checkpoint, ClassSource, Member, StateDict
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
from ckptool.tensors import LazyTensor, StorageRef, TensorInfo

if TYPE_CHECKING:
    from ckptool.checking import CheckReport, check
    from ckptool.comparison import diff
    from ckptool.diff_report import DiffReport
    from ckptool.migration import migrate
    from ckptool.report import MigrationReport
    from ckptool.torch_bridge.assembly import Cost
    from ckptool.torch_bridge.filling import load_into
    from ckptool.torch_bridge.live import LiveModel, Reload, Serving
    from ckptool.torch_bridge.load_report import LoadReport
    from ckptool.torch_bridge.loading import load, predict_memory
    from ckptool.torch_bridge.trusted import load_model

__version__ = "0.1.0"

__all__ = [
    "AmbiguousFile",
    "AmbiguousWeights",
    "Cancellation",
    "Cancelled",
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
    "CheckReport": "ckptool.checking",
    "Cost": "ckptool.torch_bridge.assembly",
    "DiffReport": "ckptool.diff_report",
    "LiveModel": "ckptool.torch_bridge.live",
    "LoadReport": "ckptool.torch_bridge.load_report",
    "MigrationReport": "ckptool.report",
    "Reload": "ckptool.torch_bridge.live",
    "Serving": "ckptool.torch_bridge.live",
    "check": "ckptool.checking",
    "diff": "ckptool.comparison",
    "load": "ckptool.torch_bridge.loading",
    "load_into": "ckptool.torch_bridge.filling",
    "load_model": "ckptool.torch_bridge.trusted",
    "migrate": "ckptool.migration",
    "predict_memory": "ckptool.torch_bridge.loading",
}
"""Names whose modules are imported when they are asked for: most of what there is to import, and seldom needed."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "errors"]
