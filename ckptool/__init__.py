"""Open any PyTorch checkpoint without running it, say what is in it, and write it again in another form."""

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


def __getattr__(name: str) -> Any:
    # Writing, and torch, are imported when they are asked for: most of what there is to import, and seldom needed.
    if name == "migrate":
        from ckptool import migration

        return migration.__dict__[name]
    if name == "MigrationReport":
        from ckptool import report

        return report.__dict__[name]
    if name == "diff":
        from ckptool import comparison

        return comparison.__dict__[name]
    if name == "DiffReport":
        from ckptool import diff_report

        return diff_report.__dict__[name]
    if name in ("CheckReport", "check"):
        from ckptool import checking

        return checking.__dict__[name]
    if name in ("load", "predict_memory"):
        from ckptool.torch_bridge import loading

        return loading.__dict__[name]
    if name == "load_into":
        from ckptool.torch_bridge import filling

        return filling.__dict__[name]
    if name == "LoadReport":
        from ckptool.torch_bridge import load_report

        return load_report.__dict__[name]
    if name in ("LiveModel", "Reload", "Serving"):
        from ckptool.torch_bridge import live

        return live.__dict__[name]
    if name == "Cost":
        from ckptool.torch_bridge import assembly

        return assembly.__dict__[name]
    if name == "load_model":
        from ckptool.torch_bridge import trusted

        return trusted.__dict__[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
