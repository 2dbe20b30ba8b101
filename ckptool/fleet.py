"""
Functions of one checkpoint, for engines that map over many: Ray, Dask, Spark, a pool of processes.

Each takes plain arguments, can be pickled, and returns a dict that JSON can hold. None raises for what is wrong with
a file: the dict has that as its ``error``. So a fleet of workers can share a list, and no file stops the others.
"""

from __future__ import annotations

import os

from ckptool.arguments import Unpack, checked
from ckptool.checking.scan import ScanOptions
from ckptool.checking.scan import row as row_of
from ckptool.errors import Cancelled, as_ours
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import cut
from ckptool.migration.changes import ChangeOptions, Changes, changes_of
from ckptool.migration.migrate import migrate
from ckptool.sources.paths import shown_path

__all__ = ["migrate_one", "row"]

_LONGEST = 4096


@checked()
def row(
    path: str | os.PathLike[str],
    *,
    check: bool = False,
    deep: bool = False,
    digest: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> dict[str, object]:
    """
    Return the facts of a checkpoint, as ``ckptool scan`` prints them. Nothing in it runs.

    ``path`` may be a folder or an address, too. With ``check``, every pickle and container in it is inspected; with
    ``deep``, every byte is read and compared with the checksums; with ``digest``, the weights are read for their
    digest. Sizes are in bytes.

    Raises:
        Cancelled: ``limits`` have a cancellation, and it was cancelled. Nothing else is raised, whatever the file is.
    """
    return row_of(os.fspath(path), ScanOptions(check=check, deep=deep, digest=digest), limits)


@checked(options=Changes._fields)
def migrate_one(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    **options: Unpack[ChangeOptions],
) -> dict[str, object]:
    """
    Migrate a checkpoint as ``ckptool.migrate`` does, with its guarantees, and return a report as a dict.

    ``path`` is the source, ``target`` the file or folder that was written (or with ``dry_run`` would be), of this
    ``form`` and ``format``, with the numbers of ``tensors`` and ``nbytes``; ``written`` and ``verified`` say what was
    done. If it failed, all these are None or False, and ``error`` has a ``kind`` for programs, the ``type`` of the
    exception, a ``message`` and a ``hint``, which may be None. Else ``error`` is None.

    Raises:
        Cancelled: ``limits`` have a cancellation, and it was cancelled. Nothing else is raised, whatever the file is.
    """
    changes_of(None, options)
    path = os.fspath(source)
    found: dict[str, object] = dict.fromkeys(("path", "target", "form", "format", "tensors", "nbytes"))
    found |= {"path": shown_path(path), "written": False, "verified": False, "error": None}
    try:
        done = migrate(source, target, force=force, verify=verify, dry_run=dry_run, limits=limits, **options)
    except Cancelled:
        raise
    except Exception as error:  # noqa: BLE001 - one file must not stop thousands
        known = as_ours(error)
        said = {"message": cut(known.message, _LONGEST), "hint": known.hint}
        return found | {"error": {"kind": known.kind, "type": type(error).__name__, **said}}
    found |= {name: getattr(done, name) for name in ("target", "form", "tensors", "nbytes", "written")}
    return found | {"format": done.after.format, "verified": done.written and done.verified}
