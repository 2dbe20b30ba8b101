"""How much a file may make the reader do, in one object that callers can replace."""

from typing import Final, NamedTuple

from ckptool.cancellation import Cancellation
from ckptool.errors import LimitExceeded

# What no caller changes: each is far above what writers make, and below what would cost more than the file is large.
IDENTIFIER: Final = 4096
"""Characters of the name of a class or a module, of a device tag, of a storage's key. Torch's own have some dozens."""
TENSOR_PARTS: Final = 1_000_000
"""Parts and attributes of all tensors of a file: they may be shared, so that a short file names very many."""
TENSOR_DEPTH: Final = 32
"""Tensors inside tensors: a parameter around a subclass around a quantised tensor is four."""
FOLDER_NAMES: Final = 1_000_000
"""Names in one folder, which is listed as a whole."""
FOLDER_OBJECTS: Final = 100_000
"""Objects below a prefix of a store: each answer lists a thousand."""
TAR_NAME_NBYTES: Final = 1 << 16
"""An extended header of a tar, which is read into memory."""
PADDING_NBYTES: Final = 1 << 26
"""Zeros between the parts of a file, or behind its end: of more, nobody knows that they are."""
UNSIZED_NBYTES: Final = 16 << 30
"""What is downloaded at most where the server does not say how much there is."""


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
    """Containers, calls and states in each other. Python's own pickler, on a stack of 8 MiB, writes about as many."""
    header_nbytes: int = 100_000_000
    """The safetensors header; the reference library's own limit. Also an index of shards."""
    shards: int = 1_000
    """Files that an index of shards may name. ``sources.descriptors`` bounds how many are open at once."""
    cancellation: Cancellation | None = None
    """What can stop the call, and every later read of what it opened; None lets it run to its end."""

    def __dir__(self) -> tuple[str, ...]:
        return self._fields

    def __repr__(self) -> str:
        # Every signature in help() has the defaults in it.
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
    """Raise LimitExceeded for identifiers longer than 4,096 characters: they are shown with every tensor."""
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
    """Raise LimitExceeded where far more bytes would be made than were read: views and arrays may repeat the same."""
    allowed = limits.expanded(source_nbytes)
    if nbytes > allowed:
        raise LimitExceeded(
            f"what was {source_nbytes:,} bytes would become {nbytes:,}: its tensors repeat them",
            hint=hint,
            needed=nbytes,
            actual=allowed,
        )
