"""Open any PyTorch checkpoint without running it, say what is in it, and write it again in another form."""

from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint, ClassSource, Member, StateDict
from ckptool.errors import (
    AmbiguousFile,
    CkptoolError,
    FileUnavailable,
    LimitExceeded,
    MalformedFile,
    MigrationRefused,
    NotACheckpoint,
    OutputExists,
    OutputFailed,
    SourceChanged,
    TruncatedFile,
    UnknownFormat,
    UnreadableFile,
    UnsafePickle,
    UnsupportedFeature,
)
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from ckptool.tensors import LazyTensor, StorageRef, TensorInfo

if TYPE_CHECKING:
    from ckptool.comparison import diff
    from ckptool.diff_report import DiffReport
    from ckptool.migration import MigrationReport, migrate

__version__ = "0.1.0"

__all__ = [
    "AmbiguousFile",
    "Checkpoint",
    "CkptoolError",
    "ClassSource",
    "DiffReport",
    "FileUnavailable",
    "LazyTensor",
    "LimitExceeded",
    "Limits",
    "MalformedFile",
    "Member",
    "MigrationRefused",
    "MigrationReport",
    "NotACheckpoint",
    "OutputExists",
    "OutputFailed",
    "SourceChanged",
    "StateDict",
    "StorageRef",
    "TensorInfo",
    "TruncatedFile",
    "UnknownFormat",
    "UnreadableFile",
    "UnsafePickle",
    "UnsupportedFeature",
    "diff",
    "migrate",
    "open_checkpoint",
]


def __getattr__(name: str) -> Any:
    # Comparing and writing are imported when they are asked for: inspecting starts in a third less time without them.
    if name in ("diff", "DiffReport"):
        from ckptool.comparison import diff
        from ckptool.diff_report import DiffReport

        return diff if name == "diff" else DiffReport
    if name in ("migrate", "MigrationReport"):
        from ckptool.migration import MigrationReport, migrate

        return migrate if name == "migrate" else MigrationReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
