"""``scan``: a row for every checkpoint that paths stand for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptool.arguments import check_arguments
from ckptool.checking.row import Asked, row
from ckptool.formats.listing import Listing, means_other, refuse_others
from ckptool.limits import DEFAULT_LIMITS, Limits


def scan(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    check: bool = False,
    deep: bool = False,
    digest: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[dict[str, Any]]:
    """
    Yield a row for every checkpoint in folders and below, as ``ckptool scan`` prints it. Nothing in them runs.

    A path is a folder, a checkpoint of any kind, a pattern, or an address. Files of other kinds have no row, unless
    they are named. A file that cannot be opened has one with an ``error``. With ``check``, every pickle and container
    is looked at; with ``deep``, every byte is read and compared with the checksums; with ``digest``, the weights are
    read for their digest. One file is looked at after the other, by this process; the command line uses all cores.

    Raises:
        NotACheckpoint: There are files, and none is a checkpoint.
        Cancelled: ``limits`` have a cancellation, and it was.
    """
    check_arguments(scan, locals())
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return _rows([os.fspath(path) for path in given], Asked(check=check, deep=deep, digest=digest), limits)


def _rows(paths: list[str], asked: Asked, limits: Limits) -> Iterator[dict[str, Any]]:
    listing = Listing(paths)
    passed, is_empty = 0, True
    while (target := listing.next()) is not None:
        found: dict[str, Any] = row(target.path, asked, limits)
        listing.add(found["beside"] or ())
        if is_other(found, is_meant=target.is_meant):
            passed += 1
            continue
        is_empty = False
        yield found
    if passed and is_empty:
        refuse_others(passed, paths)


def is_other(found: Mapping[str, Any], *, is_meant: bool) -> bool:
    """Say whether a row is of a file that is no checkpoint, and was not said to be one."""
    error = found["error"]
    if not error or is_meant or found["grade"] != "unknown" or "CK209" in found["findings"]:
        return False
    return means_other(error["type"], error["kind"])
