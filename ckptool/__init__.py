"""Open any PyTorch checkpoint without running it, and say what is in it."""

from ckptool.checkpoint import Checkpoint, ClassSource, Member, StateDict
from ckptool.errors import (
    AmbiguousFile,
    CkptoolError,
    FileUnavailable,
    LimitExceeded,
    MalformedFile,
    NotACheckpoint,
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
    "NotACheckpoint",
    "SourceChanged",
    "StateDict",
    "StorageRef",
    "TensorInfo",
    "TruncatedFile",
    "UnknownFormat",
    "UnreadableFile",
    "UnsafePickle",
    "UnsupportedFeature",
    "open_checkpoint",
]
