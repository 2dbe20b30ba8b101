"""
The rows of ``scan``: the facts about one checkpoint, and the work of one process of many.

``row`` is a pure function of one path, so that any number of processes can share a list of paths.

``Rows`` is the work of one process: local files are read one after the other, remote ones in threads, which mostly
wait.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from time import time_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ckptool.arguments import checked
from ckptool.cancellation import each
from ckptool.checking.check import CheckReport, Scope, examined, refused
from ckptool.checking.policy import Policy, judge
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.summary import Summary, numel_and_nbytes, summarise, writer_of
from ckptool.checkpoints.training import states
from ckptool.errors import Cancelled, Failure, as_ours
from ckptool.formats import open_checkpoint
from ckptool.formats.json_beside import quantization_of
from ckptool.formats.listing import Listing, Target, beside, inside_refused, means_other, refuse_others
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import cut, not_looked_into
from ckptool.sources.paths import is_folder, is_remote, shown_path
from ckptool.sources.versions import Stamp, stamp_of, stamp_of_version

if TYPE_CHECKING:
    from ckptool.sources.address import Remote

SCHEMA: Final = "ckptool.scan/2"
SCHEMA_OF_TENSORS: Final = "ckptool.tensors/1"
SAME: Final = b"same"
"""The answer of ``Rows`` for a remote file whose version is already known."""
ENDED: Final = "worker-ended"
"""The kind of the error of a file whose worker process died."""
_LONGEST: Final = 4096
_FACTS: Final = (
    *("member", "format", "form", "writer", "tensors", "tied", "parameters", "numel"),
    *("tensors_nbytes", "weights_nbytes", "rest_nbytes", "dtypes", "quantized", "devices", "prefixes", "roles"),
    *("shards", "members", "beside", "digest", "digest_error"),
)


Row: TypeAlias = dict[str, object]
_MOST: Final = 64
"""Most devices, types and prefixes in a row: files may have as many as tensors."""


class ScanOptions(NamedTuple):
    """What to find out about each file beyond its index."""

    check: bool = False
    deep: bool = False
    digest: bool = False
    tensors: bool = False

    @property
    def columns(self) -> list[str]:
        """The names of the requested options, as rows list them."""
        return [name for name, wanted in zip(self._fields, self, strict=True) if wanted]


NOTHING: Final = ScanOptions()


def lost_row(path: str, asked: ScanOptions, kind: str, message: str) -> Row:
    """Return a row for a checkpoint of which only the error is known."""
    return {**_begun(path, asked), **_failure(kind, message)}


def _begun(path: str, asked: ScanOptions) -> Row:
    """Return the start of a row: the path, and the version of the file that is there now."""
    scanned_ns = time_ns()
    return {
        "schema": SCHEMA,
        "path": shown_path(path),
        **_stamped(stamp_of(path)),
        "asked": asked.columns,
        "scanned_ns": scanned_ns,
    }


def _stamped(stamp: Stamp | None) -> Row:
    return stamp._asdict() if stamp is not None else dict.fromkeys(Stamp._fields)


def _failure(kind: str, message: str, name: str | None = None) -> Row:
    """Return the rest of a row that has only an error."""
    error = {"kind": kind, "type": name, "message": cut(message, _LONGEST)}
    return {**dict.fromkeys(_FACTS), "grade": "unknown", "findings": {}, "worst": "error", "error": error}


def row(
    path: str,
    asked: ScanOptions = NOTHING,
    limits: Limits = DEFAULT_LIMITS,
    *,
    tell: Callable[[Row], None] | None = None,
    policy: Policy | None = None,
) -> Row:
    """
    Return facts about a checkpoint, as a dict for JSON. Nothing in it runs. ``tell`` is called with each tensor's row.

    With a ``policy``, the row has its judgement.

    A file that cannot be opened gets a row with an ``error``: only a cancellation is raised, whatever the file is.
    """
    found = _begun(path, asked)
    try:
        return {**found, **_facts(path, asked, limits, found, tell, policy)}
    except Cancelled:
        raise
    except Exception as error:  # noqa: BLE001 - one file must not stop thousands
        known = as_ours(error)
        return {**found, **_failure(known.kind, known.message)}


def _facts(
    path: str,
    asked: ScanOptions,
    limits: Limits,
    known: Row,
    tell: Callable[[Row], None] | None,
    policy: Policy | None,
) -> Row:
    scope = Scope("bytes" if asked.deep else "structure", limits, asked.digest, glances=not (asked.check or asked.deep))
    facts: Row = {}
    try:
        with open_checkpoint(path, limits=limits) as checkpoint:
            if is_remote(path) and stamp_of(path) is None:  # no listing had its version; responses may
                facts |= _stamped(stamp_of_version(getattr(checkpoint.source, "version", ())))
            facts |= _counts(checkpoint, summarise(checkpoint))
            report = examined(checkpoint, path, scope)
            error = report.digest_error
            facts |= {"digest": report.digest, "digest_error": error and error.kind}
            facts |= {**_checked(report, path, asked, policy), "error": None}
            if tell is not None:
                for one in _tensor_rows(checkpoint, {**known, **facts}):
                    tell(one)
            return facts
    except Failure as error:
        report = refused(path, path, error, scope)
        others = {"beside": inside_refused(path)} if is_folder(path) else {}
        failed = _failure(error.kind, error.message, type(error).__name__)
        return {**failed, **_checked(report, path, asked, policy), **others}


def _counts(checkpoint: Checkpoint, summary: Summary) -> Row:
    writer = writer_of(checkpoint)
    quantized = quantization_of(checkpoint)
    weights = checkpoint.weights
    of_weights = _sizes([] if weights is None else [weights], summary)
    nbytes = None if weights is None else of_weights["nbytes"]
    by_role: dict[str, list[StateDict]] = {}
    for one in checkpoint.state_dicts:
        by_role.setdefault(one.role, []).append(one)
    for _, _, _, role in states(checkpoint):  # which may have no tensors
        by_role.setdefault(role, [])
    return {
        "member": checkpoint.member,
        "format": checkpoint.format,
        "form": checkpoint.form,
        "writer": writer and writer._asdict(),
        "tensors": summary.tensors,
        "tied": summary.tied,
        "parameters": summary.parameters,
        "numel": summary.numel,
        "tensors_nbytes": summary.nbytes,
        "weights_nbytes": nbytes,
        "rest_nbytes": None if nbytes is None else max(checkpoint.file_nbytes - nbytes, 0),
        "dtypes": dict(islice(summary.dtypes.items(), _MOST)),
        "quantized": quantized and cut(quantized.short),
        "devices": dict(islice(summary.devices.items(), _MOST)),
        "prefixes": [cut(one) for one in summary.prefixes[:_MOST]],
        "roles": {
            role: of_weights if len(dicts) == 1 and dicts[0] is weights else _sizes(dicts, summary)
            for role, dicts in by_role.items()
        },
        "shards": len(checkpoint.shards),
        "members": len(checkpoint.members),
        "beside": beside(checkpoint),
    }


def _sizes(dicts: Sequence[StateDict], summary: Summary) -> dict[str, int]:
    """Return a row's columns on state dicts: tensors, elements (tied ones of each once), bytes (shared ones once)."""
    count = sum(map(len, dicts))
    numel, nbytes = summary.numel, summary.nbytes
    if len(dicts) != 1 or count != summary.tensors:
        numel, nbytes = numel_and_nbytes(tensor for one in dicts for tensor in one.values())
        numel = sum(one.numel for one in dicts) if summary.tied else numel
    return {"tensors": count, "numel": numel, "nbytes": nbytes}


def _checked(report: CheckReport, path: str, asked: ScanOptions, policy: Policy | None) -> Row:
    found: Row = {"sha256": report.sha256} if asked.digest else {}
    found |= {"grade": report.known_grade, "findings": dict(Counter(one.code for one in report.findings))}
    found["worst"] = report.worst
    if policy is not None:
        judged = judge(policy, report, path)
        found["gate"] = {
            "policy": policy.identity,
            "outcome": judged.outcome,
            "failing": sorted({one.code for one in judged.failing}),
            "let_through": dict(Counter(one.code for one, _ in judged.let)),
        }
    return found


def _tensor_rows(checkpoint: Checkpoint, whole: Row) -> Iterator[Row]:
    """Yield a row for each tensor, in the order of the file, with the columns that join it to its checkpoint's row."""
    same = {name: whole[name] for name in ("path", "version", "scanned_ns")}
    roles = {one.head + name: one.role for one in reversed(checkpoint.state_dicts) for name in one}
    for name, tensor in each(checkpoint.tensors.items(), checkpoint.source.cancellation):
        info = tensor.info
        yield {
            "schema": SCHEMA_OF_TENSORS,
            **same,
            "member": checkpoint.member,
            "name": name,
            "role": roles.get(name),
            "dtype": info.dtype.name,
            "shape": list(info.shape),
            "numel": info.numel,
            "nbytes": info.total_nbytes,
            "device": info.location,
            "layout": info.layout,
        }


_OF_ONE_FILE: Final = 4
"""How many parts of one remote file are fetched at once; few, because many files are open."""


class Rows:
    """Passes on the row of each of several files, as a line of JSON; before it, if requested, those of its tensors."""

    def __init__(self, asked: ScanOptions, threads: int, policy: Policy | None = None) -> None:
        self._asked = asked
        self._policy = policy
        self._threads = threads
        """How many remote files are opened at once."""
        self._stores: dict[tuple[str, str], Any] = {}
        """Connections to servers, which later files use again."""

    def __call__(self, places: Sequence[Target], tell: Callable[..., None]) -> None:
        """Call ``tell`` with the index of each file and its row; if anything fails, the row has the error."""
        far = {number: place for number, place in enumerate(places) if is_remote(place.path)}
        if far:
            from concurrent.futures import ThreadPoolExecutor  # local files need no threads

            with ThreadPoolExecutor(min(self._threads, len(far))) as pool:
                for number, place in far.items():
                    pool.submit(self._tell_of_remote, place, partial(tell, number))
        for number, place in enumerate(places):
            if number not in far:
                tell(number, self._row(place.path, partial(tell, number)))

    def _row(self, path: str, tell: Callable[..., None]) -> bytes:
        told = (lambda one: tell(_line(one), more=True)) if self._asked.tensors else None
        limits = DEFAULT_LIMITS if self._policy is None else self._policy.limits
        return _line(row(path, self._asked, limits, tell=told, policy=self._policy))

    def _tell_of_remote(self, place: Target, tell: Callable[..., None]) -> None:
        try:
            answer = self._remote_row(place, tell)
        except Exception as error:  # noqa: BLE001 - the thread would hide it
            known = as_ours(error)
            answer = _line(lost_row(place.path, self._asked, known.kind, known.message))
        tell(answer)

    def _remote_row(self, place: Target, tell: Callable[..., None]) -> bytes:
        from ckptool.sources.address import as_remote
        from ckptool.sources.remote.opening import remote_version

        remote: Remote = as_remote(place.path)
        address = remote.elsewhere(remote)
        address.listed, address.stores, address.connections = remote.listed, self._stores, _OF_ONE_FILE
        address.takes_end = True
        if place.known is not None:
            with suppress(Failure):  # opening raises it again
                stamp = stamp_of_version((remote_version(address) or ())[2:])
                if stamp is not None and stamp.version == place.known:
                    return SAME
        return self._row(address, tell)


_TEXT_OF: Final = json.JSONEncoder(allow_nan=False, check_circular=False).encode


def _line(found: dict[str, object]) -> bytes:
    return _TEXT_OF(found).encode()


@checked()
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
    is inspected; with ``deep``, every byte is read and compared with the checksums; with ``digest``, the weights are
    read for their digest. This process inspects one file after the other; the command line uses all cores. Folders
    that are not searched, as behind links that lead elsewhere, are named in a warning of the log at the end.

    Raises:
        NotACheckpoint: There are files, and none is a checkpoint.
        Cancelled: The cancellation in ``limits`` was triggered.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return _rows([os.fspath(path) for path in given], ScanOptions(check=check, deep=deep, digest=digest), limits)


def _rows(paths: list[str], asked: ScanOptions, limits: Limits) -> Iterator[dict[str, Any]]:
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
    if listing.passed:
        import logging  # rarely needed

        logging.getLogger("ckptool").warning("left out: %s", not_looked_into(listing.passed))
    if passed and is_empty:
        refuse_others(passed, paths)


def is_other(found: Mapping[str, Any], *, is_meant: bool) -> bool:
    """Return whether a row is of a file that is not a checkpoint, and that the caller did not name."""
    error = found["error"]
    if not error or is_meant or found["grade"] != "unknown" or "CK209" in found["findings"]:
        return False
    return means_other(error["type"], error["kind"])
