"""What lies beside a file far away, and belongs to it: shards that an index names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptool.sources.remote.parts import Fetchers
from ckptool.sources.siblings import components
from ckptool.sources.source import HasVersions, SourceInFolder


class Beside:
    """The face of a source that can open what lies in its folder; what was opened ends with the source."""

    path: str
    _open_named: Callable[[str], SourceInFolder]
    _siblings: list[SourceInFolder]
    _fetchers: Fetchers | None
    version: tuple[object, ...] = ()
    """What its server says of the version: the size, and a tag or a date; empty where it says nothing."""

    def lie_at(self, path: str, open_named: Callable[[str], SourceInFolder], fetchers: Fetchers | None = None) -> None:
        """Say where it lies. ``open_named`` opens a name in its folder; ``fetchers`` end with this one."""
        self.path = path
        self._open_named = open_named
        self._siblings = []
        self._fetchers = fetchers

    def open_sibling(self, name: str) -> SourceInFolder:
        """
        Return a file that this one names.

        Raises:
            CkptoolError: It is missing, or its name could lead out of the folder.
        """
        components(name)
        found = self._open_named(name)
        self._siblings.append(found)
        return found

    @property
    def place(self) -> tuple[int, int]:
        """What no two open files have in common. Whether two names lead to one is not known far away."""
        return id(self), 0

    def versions(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        """Yield the address of the file, and of those that were opened beside it, with what servers say of them."""
        yield self.path, self.version
        for one in self._siblings:
            yield from one.versions() if isinstance(one, HasVersions) else ()

    def close_siblings(self) -> None:
        """Close what was opened beside it, and end the threads."""
        for one in self._siblings:
            one.close()
        if self._fetchers is not None:
            self._fetchers.close()
