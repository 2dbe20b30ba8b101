"""``Limits`` that callers can set, and fixed bounds: how much a file may cost."""

from typing import Final, NamedTuple

from ckptool.arguments import spelled_right
from ckptool.cancellation import Cancellation
from ckptool.errors import LimitExceeded

# Fixed bounds. Each is far above what writers make, and below what would cost more than the size of the file.
IDENTIFIER: Final = 4096
"""Characters of the name of a class or a module, of a device tag, of a storage's key. Torch's own have a few dozen."""
TENSOR_PARTS: Final = 1_000_000
"""Parts and attributes of all tensors of a file: they may be shared, so a short file can refer to very many."""
TENSOR_DEPTH: Final = 32
"""Tensors inside tensors: a parameter around a subclass around a quantised tensor is four."""
FOLDER_NAMES: Final = 1_000_000
"""Names in one folder, which is listed as a whole."""
FOLDER_OBJECTS: Final = 100_000
"""Objects below a prefix of a store: each answer lists a thousand."""
TAR_NAME_NBYTES: Final = 1 << 16
"""Bytes of an extended header of a tar, which is read into memory."""
PADDING_NBYTES: Final = 1 << 26
"""Bytes of padding, between the parts of a file or after its end, that are read to see that they are zeros."""
UNSIZED_NBYTES: Final = 16 << 30
"""Bytes that are downloaded at most if the server does not say how large the file is."""


@spelled_right
class Limits(NamedTuple):
    """
    Bounds that are checked before memory is allocated or time is spent.

    The defaults let every honest file through and keep a small hostile one from costing more than its size.
    """

    inflation_ratio: int = 4
    """A compressed file may grow to this many times its own size…"""
    inflated_nbytes: int = 64 << 20
    """…or to this many bytes, whichever is more."""
    expansion_ratio: int = 8
    """A tensor read out may be this many times as large as its storage (strides of 0 repeat elements)…"""
    expanded_nbytes: int = 64 << 20
    """…or this many bytes, whichever is more."""
    entries: int = 1_000_000
    """Members of an archive."""
    tensors: int = 1_000_000
    """Names of tensors; a tensor with two names counts twice."""
    name_nbytes: int = 65_536
    """Length of one full dotted name."""
    depth: int = 50_000
    """Nesting of containers, calls and states. Python's own pickler, on a stack of 8 MiB, writes about as many."""
    header_nbytes: int = 100_000_000
    """Size of the safetensors header: the reference library's own limit. Also of an index of shards."""
    shards: int = 1_000
    """Files that an index of shards may name. ``sources.descriptors`` bounds how many are open at once."""
    cancellation: Cancellation | None = None
    """What can stop the call, and every later read of what it opened; None lets it run to its end."""

    def __dir__(self) -> tuple[str, ...]:
        return self._fields

    def __repr__(self) -> str:
        # Every signature in help() shows the defaults: only what differs from them is of interest.
        changed = [(name, value) for name, value in self._asdict().items() if value != self._field_defaults[name]]
        return f"Limits({', '.join(f'{name}={value!r}' for name, value in changed)})"

    def inflated(self, stored_nbytes: int) -> int:
        """Return how many bytes ``stored_nbytes`` compressed bytes may grow to."""
        return max(self.inflated_nbytes, self.inflation_ratio * stored_nbytes)

    def expanded(self, stored_nbytes: int) -> int:
        """Return how many bytes tensors on ``stored_nbytes`` bytes may be read out to."""
        return max(self.expanded_nbytes, self.expansion_ratio * stored_nbytes)


DEFAULT_LIMITS = Limits()


def refuse_long(what: str, *texts: str) -> None:
    """Raise LimitExceeded if one of the texts has more than 4,096 characters; ``what`` begins the message."""
    length = max(map(len, texts))
    if length > IDENTIFIER:
        raise LimitExceeded(
            f"{what} has {length:,} characters; {IDENTIFIER:,} are allowed",
            kind="name-too-long",
            needed=length,
            actual=IDENTIFIER,
        )


def refuse_repeated(
    nbytes: int, source_nbytes: int, limits: Limits, hint: str = "Leave some out with `exclude=`."
) -> None:
    """Raise LimitExceeded if the result has far more bytes than its source: views and arrays may repeat elements."""
    allowed = limits.expanded(source_nbytes)
    if nbytes > allowed:
        raise LimitExceeded(
            f"what was {source_nbytes:,} bytes would become {nbytes:,}: its tensors repeat them",
            hint=hint,
            needed=nbytes,
            actual=allowed,
        )
