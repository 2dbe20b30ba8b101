"""``Probe``: what each format is shown of a file, its first bytes and its members."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from ckptool.archives import zips
from ckptool.archives.archive import Archive
from ckptool.archives.zips import LOCAL_MAGIC
from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import UnsupportedFeature
from ckptool.limits import Limits
from ckptool.sources.source import Source

if TYPE_CHECKING:
    from ckptool.archives.compressed import Compression

_HEAD_NBYTES = 4096
_MAX_DEPTH = 4


class Probe:
    """
    What formats need to recognise their own files, read at most once, however many formats use it.

    ``read_inner`` opens what is packed inside: a nested stream, a member, the content of a gzip file.
    """

    def __init__(
        self,
        source: Source,
        limits: Limits,
        read_inner: Callable[[Probe], Parsed],
        *,
        depth: int = 0,
    ) -> None:
        self.source = source
        self.limits = limits
        self._read_inner = read_inner
        self.depth = depth
        """How many sources this one is nested in."""

    @cached_property
    def head(self) -> bytes:
        """The first bytes, up to 4 KiB."""
        return self.source.read(0, min(_HEAD_NBYTES, self.source.nbytes))

    @cached_property
    def compression(self) -> Compression | None:
        """How the whole file is compressed; None if it is not."""
        from ckptool.archives.compressed import compression_of  # asked only of what is not a zip

        return compression_of(self.head)

    @cached_property
    def zip(self) -> Archive | None:
        """The members of a zip; None if it is not one. Raises what ``read_zip`` raises."""
        return zips.read_zip(self.source, self.limits) if self.head.startswith(LOCAL_MAGIC) else None

    @cached_property
    def tar(self) -> Archive | None:
        """The members of a tar; None if it is not one. Raises what ``read_tar`` raises."""
        from ckptool.archives import tars  # asked only of what is not a zip

        return tars.read_tar(self.source, self.limits) if tars.is_tar(self.head) else None

    def read(self) -> Parsed:
        """Read this source itself."""
        return self._read_inner(self)

    def beside(self, source: Source) -> Probe:
        """Return the probe for a file beside this one, or in this folder."""
        return Probe(source, self.limits, self._read_inner, depth=self.depth)

    def inner(self, source: Source) -> Probe:
        """Return the probe for something packed inside this source."""
        if self.depth >= _MAX_DEPTH:
            raise UnsupportedFeature(f"archives packed more than {_MAX_DEPTH} deep", kind="nested-archives")
        return Probe(source, self.limits, self._read_inner, depth=self.depth + 1)

    def read_inner(self, source: Source) -> Parsed:
        """Read a checkpoint that is packed inside this source."""
        return self._read_inner(self.inner(source))
