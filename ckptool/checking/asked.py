"""What a row of ``scan`` is asked for, and what of it is known without a look into the file."""

from __future__ import annotations

from time import time_ns
from typing import Final, NamedTuple, TypeAlias

from ckptool.messages import cut
from ckptool.sources.naming import shown_path
from ckptool.sources.stamps import Stamp, stamp_of

SCHEMA: Final = "ckptool.scan/2"
SCHEMA_OF_TENSORS: Final = "ckptool.tensors/1"
SAME: Final = b"same"
"""Its answer about a file far away whose version is the one that is known."""
ENDED: Final = "worker-ended"
"""The kind of the error of a file whose worker process died."""
_LONGEST: Final = 4096
_FACTS: Final = (
    *("member", "format", "form", "writer", "tensors", "tied", "parameters", "numel"),
    *("tensors_nbytes", "weights_nbytes", "rest_nbytes", "dtypes", "quantized", "devices", "prefixes", "roles"),
    *("shards", "members", "beside", "digest", "digest_error"),
)


Row: TypeAlias = dict[str, object]


class Asked(NamedTuple):
    """What is to be known beyond what is in each."""

    check: bool = False
    deep: bool = False
    digest: bool = False
    tensors: bool = False

    @property
    def columns(self) -> list[str]:
        """The names of what is asked for, as rows have them."""
        return [name for name, wanted in zip(self._fields, self, strict=True) if wanted]


NOTHING: Final = Asked()


def lost_row(path: str, asked: Asked, kind: str, message: str) -> Row:
    """Return the row of a checkpoint of which nothing is known, but why."""
    return {**identity(path, asked), **failure(kind, message)}


def identity(path: str, asked: Asked) -> Row:
    """Return what a row begins with: the path, and which version is there now."""
    scanned_ns = time_ns()
    stamp = stamp_of(path)
    return {
        "schema": SCHEMA,
        "path": shown_path(path),
        **stamped(stamp),
        "asked": asked.columns,
        "scanned_ns": scanned_ns,
    }


def stamped(stamp: Stamp | None) -> Row:
    """Return the columns that tell a version from others."""
    nbytes, mtime_ns, version, etag = stamp or (None, None, None, None)
    return {"nbytes": nbytes, "mtime_ns": mtime_ns, "version": version, "etag": etag}


def failure(kind: str, message: str, name: str | None = None) -> Row:
    """Return what a row ends with where there is nothing but an error."""
    error = {"kind": kind, "type": name, "message": cut(message, _LONGEST)}
    return {**dict.fromkeys(_FACTS), "grade": "unknown", "findings": {}, "worst": "error", "error": error}
