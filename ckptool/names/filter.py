"""Which names are wanted: globs to include, and globs to exclude."""

from typing import NamedTuple


class Filter(NamedTuple):
    """Globs that names are compared with, case and all; ``*`` also matches dots."""

    include: tuple[str, ...] = ()
    """Where there are any, a name has to match one of them."""
    exclude: tuple[str, ...] = ()

    @property
    def takes_all(self) -> bool:
        """Whether every name is wanted."""
        return not (self.include or self.exclude)

    def takes(self, name: str) -> bool:
        """Say whether a name is wanted."""
        from fnmatch import fnmatchcase  # most calls take all names, without asking

        if self.include and not any(fnmatchcase(name, glob) for glob in self.include):
            return False
        return not any(fnmatchcase(name, glob) for glob in self.exclude)
