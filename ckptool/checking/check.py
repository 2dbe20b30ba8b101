"""
``check``: whether a checkpoint is whole, safe, will load here, and fits a model, as a ``CheckReport``.

By default, only the structure is inspected, in time that does not grow with the tensors. ``deep`` reads every byte.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from ckptool.arguments import checked
from ckptool.cancellation import check_cancelled
from ckptool.checking import finding, safety, torch_load
from ckptool.checking import structure as known
from ckptool.checking.finding import Finding, finding_facts, note
from ckptool.checking.torch_load import GlobalUse
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import CkptoolError, Failure, MalformedFile, MissingPackage, TruncatedFile, about, drop_tracebacks
from ckptool.formats import member_in, open_checkpoint
from ckptool.formats.runnable import Act, Survey, reached
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import counted, cut, show, show_nbytes, some
from ckptool.pickles.alarms import Grade
from ckptool.pickles.weights_only import is_allowed
from ckptool.sections import Fact, Section, completed, html_of, text_of
from ckptool.sources.files import Origin
from ckptool.sources.paths import is_folder, shown_path
from ckptool.sources.source import Meter, Progress
from ckptool.tensors.tensor import identity

if TYPE_CHECKING:
    from ckptool.checking.folder_files import Neighbours


Depth: TypeAlias = Literal["structure", "bytes", "values"]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
_Expected: TypeAlias = tuple[str, Shapes, Mapping[str, Any]]
"""What to compare with: its name, its shapes, and, if it is a model, its tensors."""
SCHEMA: Final = "ckptool.check/3"
_LONGEST: Final = 4096
"""Most characters of a name in JSON; torch's own names have some dozens."""
QUESTIONS: Final = ("whole", "safe", "loads", "fits")
"""CK1: is it whole? CK2: is it safe? CK3 to CK5: will it load, and as what? CK6: does it fit into the model?"""
_OF_HUNDRED: Final = {"1": "whole", "2": "safe", "3": "loads", "4": "loads", "5": "loads", "6": "fits"}


class Scope(NamedTuple):
    """How much of a checkpoint is inspected, and what it is compared with."""

    depth: Depth
    limits: Limits = DEFAULT_LIMITS
    digest: bool = False
    strict: bool = False
    glances: bool = False
    """Whether pickles are only inspected quickly (see ``safety.survey``), and files that were cut are not searched."""
    devices: Collection[str] | None = None
    expected: Sequence[_Expected] = ()
    key: str | None = None
    progress: Progress | None = None


class CheckReport(NamedTuple):
    """What was found, and what was inspected."""

    path: str
    depth: Depth
    findings: tuple[Finding, ...]
    format: str | None = None
    """None where the file cannot be opened."""
    form: str | None = None
    file_nbytes: int | None = None
    shards: int = 0
    """Number of files that it consists of, if the opened one is an index of them."""
    parts: int = 0
    """Number of pieces of tensors, and values, in the files of a directory, each with checksums of its own."""
    intact: int = 0
    """How many of the parts match their checksums and the index."""
    records: int | None = None
    """Number of members of its archives, all of which were read; None if bytes were not read."""
    matching: int | None = None
    """How many of the records match their checksums."""
    globals: tuple[GlobalUse, ...] = ()
    """Every name that unpickling would import, and where it is requested; in other members of its archive, too."""
    members: int = 0
    """Number of other checkpoints in its archive; only their structure was inspected."""
    acts: tuple[Act, ...] = ()
    """What unpickling would do beyond making data, in order; in other members of its archive, too."""
    unseen: tuple[str, ...] = ()
    """Parts that could not be inspected, and why."""
    loading: tuple[str, ...] = ()
    """What loading would run: a line for each way to load it."""
    only: tuple[str, ...] = ()
    """The questions whose findings are kept, of whole, safe, loads and fits; empty for all."""
    member: str | None = None
    """The member of its archive that was opened; ``path`` has it after ``::``."""
    sha256: str | None = None
    """Of the file, if it was requested; None if the checkpoint is several files."""
    digest: str | None = None
    """Of the weights, if it was requested."""
    digest_error: CkptoolError | None = None
    """Why there is no digest, though it was requested."""
    tensors: int | None = None
    """Number of tensors, in all members if none was picked; None if the file cannot be opened."""
    error: CkptoolError | None = None
    """Why it cannot be opened. Then ``globals`` and ``acts`` are those of the part that could be read."""

    def __dir__(self) -> list[str]:
        return completed(self)

    def __str__(self) -> str:
        return "\n".join(text_of((show(self.path), *sections_of(self), *_reason_of(self))))

    def __repr__(self) -> str:
        return f"<CheckReport {self.path!r}: {self.verdict}>"

    def _repr_html_(self) -> str:
        return html_of(f"{self.path}: {self.verdict}", (*_reason_of(self), *sections_of(self)))

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON, as the command line prints it, also if the file cannot be opened."""
        head = {
            "schema": SCHEMA,
            "path": self.path,
            "member": self.member,
            "depth": self.depth,
            "worst": self.worst,
            "verdict": self.verdict,
            "findings": [one._asdict() for one in self.findings],
            "globals": [
                {
                    "name": cut(one.name, _LONGEST),
                    "allowed": one.is_allowed,
                    "record": one.record or None,
                    "offset": one.offset,
                    "nested_at": one.nested_at,
                }
                for one in self.globals
            ],
            "acts": [
                one._asdict()
                | {name: cut(getattr(one, name), _LONGEST) for name in ("name", "text", "package")}
                | {"record": one.record or None}
                for one in self.acts
            ],
            "grade": self.grade,
            "unseen": [cut(one, _LONGEST) for one in self.unseen],
        }
        error = self.digest_error
        hashed = {"sha256": self.sha256, "digest": self.digest, "digest_error": error and error.kind}
        hashed = hashed if any(hashed.values()) else {}
        if self.error is not None:
            return {**head, "error": self.error.as_dict(), **hashed}
        names = ("format", "form", "file_nbytes", "shards", "records", "matching")
        facts = {name: value for name, value in self._asdict().items() if name in names}
        return {**head, "loading": list(self.loading), **facts, **hashed}

    @property
    def worst(self) -> Literal["error", "warning", "info"] | None:
        """The highest severity of all findings; None if there are none."""
        return "error" if self.error is not None else finding.worst_of(self.findings)

    @property
    def grade(self) -> Grade:
        """How far loading reaches. Parts that were not inspected (``unseen``), or not opened, may be code."""
        return reached(self.acts, is_whole=self.error is None and not self.unseen)

    @property
    def known_grade(self) -> Grade | Literal["unknown"]:
        """The grade; unknown if only parts that were not inspected make it higher than what was found."""
        is_known = reached(self.acts) == self.grade
        return self.grade if is_known else "unknown"

    @property
    def verdict(self) -> str:
        """One line that claims no more than what was inspected."""
        return self.outcome if self.error is not None else f"{self.outcome}; {self._looked_at()}"

    @property
    def outcome(self) -> str:
        """What was found, in short."""
        if self.error is not None:
            return "; ".join(["cannot be opened", *safety.of_refused(self.acts)])
        counts = [
            counted(count, severity)
            for severity in ("error", "warning")
            if (count := sum(finding.severity == severity for finding in self.findings))
        ]
        asked = f" about {', '.join(self.only)}" if self.only else ""
        return f"{', '.join(counts) or 'nothing wrong found'}{asked}"

    def _looked_at(self) -> str:
        if self.depth == "structure":
            return "looked at the structure alone, `deep=True` reads every byte"
        values = ", and every value looked at" if self.depth == "values" else ""
        if values and self.members:
            values += f" but those of {counted(self.members, 'member')}"
        if not self.matching:
            return f"every byte was read{values}; there are no checksums, so a changed byte would not show"
        if self.parts:
            share = "all" if self.intact == self.parts else f"{self.intact:,} of"
            return f"every byte was read{values}; {share} {counted(self.parts, 'item')} match their checksums"
        share = "all" if self.matching == self.records else f"{self.matching:,} of"
        return f"every byte was read{values}; {share} {self.records:,} records match their checksums"


def _reason_of(report: CheckReport) -> Iterator[Fact]:
    error = report.error
    if error is not None:
        yield from finding_facts([Finding(error.kind, "error", error.message, error.hint, error.command)])


def sections_of(report: CheckReport, *, show_globals: bool = False) -> Iterator[Section]:
    """Yield the sections of a report for display, but for the error of a file that cannot be opened."""
    if report.format is not None and report.file_nbytes is not None:
        shards = f" in {counted(report.shards, 'shard')}" if report.shards else ""
        yield Fact("format", [f"{report.format}{shards}, {show_nbytes(report.file_nbytes)}"])
    why = f"none: {show(report.digest_error.message)}" if report.digest_error is not None else None
    for label, value in (("sha256", report.sha256), ("digest", report.digest or why)):
        yield from [Fact(label, [value])] if value is not None else ()
    codes = {one.code for one in report.findings if one.path is None and one.severity != "info"}
    is_told = not codes.isdisjoint(("CK202", "CK204"))  # they also name what the opened file would import
    yield from finding_facts(one for one in report.findings if one.code != "CK201" or one.path or not is_told)
    for use in report.globals if show_globals else ():
        allowed = "allowed" if use.is_allowed else "not allowed"
        place = finding.place(use.record, use.offset, use.nested_at)
        yield Fact("global", [f"{show(use.name)} {allowed}, {show(place)}"])
    messages = [one.message for one in report.findings if one.code in ("CK202", "CK205", "CK206")]
    for line in report.loading:
        does = line.partition(" ")[2]
        if not any(line in one or f"unpickling {does}" in one for one in messages):  # these also say where and why
            yield Fact("loading", [show(line)])
    yield Fact("verdict", [report.verdict])


@checked()
def check(
    origin: Origin,
    *,
    deep: bool = False,
    values: bool = False,
    devices: Collection[str] | str | None = None,
    like: Origin | None = None,
    model: str | None = None,
    model_arguments: Mapping[str, object] | None = None,
    key: str | None = None,
    strict: bool = False,
    digest: bool = False,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> CheckReport:
    """
    Look for what is wrong with a checkpoint, or will make trouble later. Nothing in it runs.

    ``deep`` reads every byte and compares it with checksums; ``values`` also looks for NaN, infinities and zeros, which
    needs torch. ``devices`` are the tags of the devices that are there, such as ``cuda:0``. ``like`` is a checkpoint,
    ``model`` a class as ``package.module:Class`` (imported because the caller names it), whose names and shapes the
    weights are compared with; ``key`` says which state dict they are. With ``strict``, what is odd about the container
    is an error: bytes after the last tensor, in gaps of an archive, and the like (CK101). ``digest`` reads the file for
    its SHA-256 and the digest of its weights, with ``deep`` in the same reading. ``progress`` is called with the bytes
    that were read so far, and those to be read in all.

    A file that cannot be opened is a report with an ``error``. So exceptions are about the other arguments:

    Raises:
        Cancelled: The cancellation in ``limits`` was triggered.
        WeightsNotFound: It is not clear which state dict of ``like`` is the weights.
        MigrationRefused: ``model`` cannot be built, or one of the ``devices`` is not a device.
        MissingPackage: ``values`` or ``model`` is given, and torch is not installed.
        CkptoolError: ``like`` cannot be read.
        ValueError: ``key`` is given without ``like`` or ``model``, or ``model_arguments`` without ``model``.
    """
    depth: Depth = "values" if values else "bytes" if deep else "structure"
    if key is not None and like is None and model is None:
        raise ValueError("key is about what like or model is compared with: give one of them, too")
    if model_arguments and model is None:
        raise ValueError("model_arguments are for a model, and none is given")
    devices = (devices,) if isinstance(devices, str) else devices
    if devices is not None:
        from ckptool.torch_ops.devices import device_there  # few calls name any

        devices = [device_there(one) for one in devices]
    if values:
        from ckptool.torch_ops import check_installed

        check_installed()  # before any byte is read
    expected = _expected(like, model, model_arguments or {}, limits)
    scope = Scope(depth, limits, digest, strict, False, devices, expected, key, progress)
    shown = shown_path(origin) if isinstance(origin, str | os.PathLike) else "<bytes>"
    try:
        with about(shown), open_checkpoint(origin, limits=limits) as checkpoint:
            return examined(checkpoint, origin, scope)
    except MissingPackage:
        raise  # the file is not wrong
    except Failure as error:
        with about(shown):
            return refused(shown, origin, error, scope)


def _expected(
    like: Origin | None, model: str | None, arguments: Mapping[str, object], limits: Limits
) -> list[_Expected]:
    found: list[_Expected] = []
    if like is not None:
        from ckptool.checking.model_fit import shapes_of

        with open_checkpoint(like, limits=limits) as other:
            found.append((other.path, shapes_of(other), {}))
    if model is not None:
        from ckptool.torch_ops import models as torch_models

        places = torch_models.model_tensors(model, arguments)
        found.append((model, torch_models.shapes_of(places), places))
    return found


def examined(checkpoint: Checkpoint, origin: Origin, scope: Scope) -> CheckReport:
    """Return the report of an open checkpoint; ``origin`` is what it was opened from."""
    depth, limits = scope.depth, scope.limits
    whole = hashing = None
    if scope.digest:
        from ckptool.checking.integrity import Hashing  # rarely requested

        hashing = Hashing(checkpoint, limits)
    if depth != "structure":
        from ckptool.checking import folder_files, integrity, value_survey

        distinct = {identity(tensor.info): tensor.info.nbytes for tensor in checkpoint.tensors.values()}
        values_nbytes = sum(distinct.values()) if depth == "values" else 0
        twins_nbytes = sum(one.nbytes or 0 for one in checkpoint.beside if one.role == "duplicate")
        meter = Meter(scope.progress, checkpoint.file_nbytes + values_nbytes + twins_nbytes)
        # This comes first, because it also reads parts of an index that opening left unread.
        whole = integrity.verify(checkpoint, limits, meter, None if hashing is None else hashing.watch)
    content, of_weights, no_digest = (None, None, None) if hashing is None else hashing.finish()
    found, is_refused = _structure(checkpoint, scope)
    asked = list(torch_load.asked(checkpoint))
    members = tuple(safety.inside(checkpoint))
    for member in members:
        found += _of_member(checkpoint, member, _structure(member, scope)[0])
        named = torch_load.asked(member)
        asked += (one._replace(record="::".join(filter(None, (member.member, one.record)))) for one in named)
    survey = safety.whole(checkpoint, limits, glances=scope.glances)
    beside = _neighbours(origin, checkpoint, limits)
    seen = survey if beside is None else beside.with_others(survey)
    # Loaders may read what was refused here, so it is not known what they would run.
    unread = [f"{name}: {why}" for one in (checkpoint, *members) for name, why in one.unopened]
    unread += (f"{name}: an item that cannot be read" for name in checkpoint.lost)
    unread += (one.message for one in found if one.code == "CK147")
    if checkpoint.beside:
        from ckptool.checking import folder_files

        for one, is_read in folder_files.unreadable(checkpoint, limits):
            found.append(one)
            unread += () if is_read else (one.message,)
    found += safety.findings(survey, lambda: finding.state_dict(checkpoint))
    survey = survey._replace(unseen=(*survey.unseen, *unread))
    found += beside.findings() if beside is not None else ()
    for name, shapes, places in scope.expected:
        from ckptool.checking import model_fit

        found += model_fit.examine(checkpoint, shapes, name, scope.key, places)
    if whole is not None:
        found = [one for one in found if one.code != "CK161"]  # ``twins`` says more, as it compares values
        found += folder_files.twins(checkpoint, limits, meter)
        found += (*whole.findings, *value_survey.examine(checkpoint, limits))
        found += value_survey.survey(checkpoint, limits, meter) if depth == "values" else ()
    return CheckReport(
        f"{checkpoint.path}::{checkpoint.member}" if checkpoint.member else checkpoint.path,
        depth,
        tuple(found),
        format=checkpoint.format,
        form=checkpoint.form,
        file_nbytes=checkpoint.file_nbytes,
        shards=len(checkpoint.shards),
        parts=whole.parts if whole else 0,
        intact=whole.intact if whole else 0,
        records=whole and whole.records,
        matching=whole and whole.matching,
        globals=_with_others(asked, seen),
        members=len(members),
        acts=seen.acts,
        unseen=(*seen.unseen, *unread),
        member=checkpoint.member,
        sha256=content,
        digest=of_weights,
        digest_error=no_digest,
        tensors=len(checkpoint.tensors) or sum(one.tensors for one in checkpoint.members),
        loading=safety.loading(
            survey, (checkpoint, *members), refused=is_refused, is_alone=beside is None or beside.are_plain
        ),
    )


def _neighbours(origin: Origin, checkpoint: Checkpoint | None, limits: Limits) -> Neighbours | None:
    """Inspect all files in a folder that are not part of its ``checkpoint``; None if ``origin`` is not a folder."""
    path = os.fspath(origin) if isinstance(origin, str | os.PathLike) else None
    if path is None or not is_folder(path):
        return None
    from ckptool.checking import folder_files  # few checkpoints are folders

    return folder_files.survey(path, checkpoint, limits)


def _with_others(asked: list[GlobalUse], survey: Survey) -> tuple[GlobalUse, ...]:
    """Return the names that are requested, with those in pickles that are not part of a checkpoint."""
    others = (
        GlobalUse(f"{one.module}.{one.name}", one.record, one.offset, is_allowed(one.module, one.name), one.nested_at)
        for one in survey.names
    )
    return tuple(dict.fromkeys((*asked, *others)))


def _structure(checkpoint: Checkpoint, scope: Scope) -> tuple[list[Finding], bool]:
    """Return the findings of the structure alone, and whether torch.load refuses the file."""
    check_cancelled(checkpoint.source.cancellation)
    refusals = torch_load.refusals(checkpoint)
    found = [*known.examine(checkpoint), *torch_load.findings(checkpoint, refusals)]
    check_cancelled(checkpoint.source.cancellation)
    found += torch_load.examine(checkpoint, scope.devices)
    if scope.strict:
        found = [one._replace(severity="error") if one.code == "CK101" else one for one in found]
    return found, bool(refusals)


def _of_member(checkpoint: Checkpoint, member: Checkpoint, findings: list[Finding]) -> list[Finding]:
    """CK115: one finding that sums up the problems of another checkpoint in the archive, errors and CK2 first."""
    found = [one for one in findings if one.severity != "info" and one.code != "CK125"]  # others have its tensors
    found.sort(key=lambda one: (one.severity != "error", not one.code.startswith("CK2")))
    if not found:
        return []
    fact = f"member {member.member!r}: {some([one.message for one in found])}"
    return [note("CK115", fact, *finding.run(checkpoint, "check", member=member.member), severity=found[0].severity)]


def refused(path: str, origin: Origin, error: CkptoolError, scope: Scope) -> CheckReport:
    """Return the report of a file that cannot be opened: what its pickles would do, and which tensors are complete."""
    drop_tracebacks(error)
    limits = scope.limits
    survey = safety.survey_origin(origin, limits, glances=scope.glances)
    if isinstance(origin, str | os.PathLike) and os.path.isfile(origin):
        from ckptool.checking import folder_files  # most files can be opened

        survey = safety.merged([("", survey), ("", folder_files.of_name(os.fspath(origin), limits))])
    beside = _neighbours(origin, None, limits)
    seen = survey if beside is None else beside.with_others(survey)
    # The error of a damaged file already says that not all of it could be inspected.
    is_damaged = isinstance(error, MalformedFile | TruncatedFile)
    others = () if is_damaged else tuple(one for one in survey.unseen if error.message not in one)
    found: list[Finding] = []
    if isinstance(error, TruncatedFile) and not scope.glances:
        from ckptool.checking.integrity import of_cut  # few files are

        found += of_cut(origin, limits)
    found += (*safety.imported(survey), *safety.findings(survey._replace(unseen=others)))
    found += beside.findings() if beside is not None else ()
    content = None
    if scope.digest:
        from ckptool.checking.integrity import sha256_of  # rarely requested

        content = sha256_of(origin, limits.cancellation)
    return CheckReport(
        path,
        scope.depth,
        tuple(found),
        globals=_with_others([], seen),
        acts=seen.acts,
        unseen=seen.unseen,
        member=member_in(origin),
        sha256=content,
        error=error,
    )


def answers(code: str, questions: Collection[str]) -> bool:
    """Return whether a code is of one of these questions; that of members (CK115) always is, and what is not code."""
    return not questions or code == "CK115" or not code.startswith("CK") or _OF_HUNDRED[code[2]] in questions


def narrowed(report: CheckReport, questions: Collection[str]) -> CheckReport:
    """Return a report with only the findings that answer these questions; without questions, with all."""
    if not questions:
        return report
    kept = tuple(one for one in report.findings if answers(one.code, questions))
    return report._replace(findings=kept, only=tuple(questions))
