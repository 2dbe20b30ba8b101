"""
Checkpoints packed in something else: gzip, or the members of a zip or tar made by other programs.

stable-baselines3 zips hold policy.pth beside its optimizer; AllenNLP tars hold weights.th beside a vocabulary. The one
member that holds a model's weights is opened; where several do, they are listed, and ``FILE::MEMBER`` picks one.
"""

from __future__ import annotations

from ckptool.archives.archive import Archive, gunzip
from ckptool.checkpoints.checkpoint import Checkpoint, Member
from ckptool.checkpoints.contents import Contents
from ckptool.errors import Cancelled, CkptoolError, MalformedFile, NotACheckpoint, UnknownFormat, UnsupportedFeature
from ckptool.formats.probe import Probe
from ckptool.sources.paths import is_likely
from ckptool.sources.source import BytesSource, Source

NAME = "packed"

_GZIP_MAGIC = b"\x1f\x8b"
_KNOWN_OF = (
    ("/.data/extern_modules", "a torch.package archive"),
    ("/attributes.pkl", "TorchScript of PyTorch 1.0 or 1.1 (model.json)"),
)
"""Members that tell archives of torch's that no format here reads."""


def sniff(probe: Probe) -> bool:
    """Say whether this is a gzip file, a zip or a tar; formats that are zips or tars themselves were asked before."""
    return probe.head.startswith(_GZIP_MAGIC) or probe.zip is not None or probe.tar is not None


def read(probe: Probe) -> Checkpoint:
    """Open the one checkpoint inside, or list those that are there."""
    if probe.head.startswith(_GZIP_MAGIC):
        content = _unpacked(probe)
        if not content.nbytes:
            raise NotACheckpoint(
                f"not a checkpoint: a gzip file of {probe.source.nbytes:,} bytes with nothing in it",
                kind="gzip-empty",
                hint="Pack or download it again.",
            )
        return probe.read_inner(content)
    archive = probe.zip or probe.tar
    if archive is None:
        raise MalformedFile("an archive without members", kind="empty-archive")
    for ending, what in _KNOWN_OF:
        if any(name.endswith(ending) for name in archive):
            raise UnsupportedFeature(f"{what}, which is not handled", kind="old-torch-archive")
    return _choose(probe, archive)


def read_member(probe: Probe, name: str) -> Checkpoint:
    """
    Open the named member of a packed file; ``A::B`` is the member B of the member A.

    Raises:
        MalformedFile: There is no such member.
    """
    if probe.head.startswith(_GZIP_MAGIC):
        return read_member(probe.inner(_unpacked(probe)), name)
    archive = probe.zip or probe.tar
    outer, _, inner = name.partition("::")
    if archive is not None and inner and name not in archive and outer in archive:
        return _placed(read_member(probe.inner(archive.open(outer)), inner), archive, outer)
    if archive is None or name not in archive:
        near = [member for member in archive or () if not member.endswith("/")]
        raise MalformedFile(
            f"no member {name!r} among {len(near):,}",
            kind="no-member",
            hint=f"Pick one of: {', '.join(near[:8])}" if near else "It is no archive: leave the '::' part away.",
        )
    return _placed(probe.read_inner(archive.open(name)), archive, name)


def _placed(checkpoint: Checkpoint, archive: Archive, name: str) -> Checkpoint:
    """Say in a checkpoint that it is this member of an archive: so do the names of members that it knows."""
    checkpoint.member = name if checkpoint.member is None else f"{name}::{checkpoint.member}"
    checkpoint.archives = (archive, *checkpoint.archives)
    checkpoint.members = tuple(one._replace(name=f"{name}::{one.name}") for one in checkpoint.members)
    checkpoint.inside = {f"{name}::{key}": _placed(one, archive, name) for key, one in checkpoint.inside.items()}
    checkpoint.unopened = tuple((f"{name}::{key}", why) for key, why in checkpoint.unopened)
    return checkpoint


def _unpacked(probe: Probe) -> Source:
    content = gunzip(probe.source, probe.limits)
    return BytesSource(content, probe.source.cancellation, packed_nbytes=probe.source.nbytes)


def _choose(probe: Probe, archive: Archive) -> Checkpoint:
    opened, failures = _open_members(probe, archive)
    holding = {name: found for name, found in opened.items() if found.tensors or found.attributes or found.members}
    modelled = {name: found for name, found in holding.items() if found.weights is not None or found.members}
    for candidates in (modelled, holding, opened):
        if len(candidates) == 1:
            return _chosen(next(iter(candidates)), opened, failures, archive)
    if opened:
        members = tuple(_member(name, found, archive) for name, found in (holding or opened).items())
        listed = Checkpoint(
            archive.source, NAME, Contents(), form="archive", members=members, notes=archive.notes, archives=(archive,)
        )
        listed.inside = {name: _placed(found, archive, name) for name, found in opened.items()}
        listed.unopened = _unopened(failures, archive)
        return listed
    for name, error in failures.items():
        if is_likely(name):
            error.message = f"member {name!r}: {error.message}"
            raise error
    from ckptool.formats.identify import name_foreign_zip

    foreign = name_foreign_zip(list(archive)) if probe.zip is not None else None
    raise foreign or _no_checkpoint(archive)


def _chosen(
    name: str, opened: dict[str, Checkpoint], failures: dict[str, CkptoolError], archive: Archive
) -> Checkpoint:
    """Return the checkpoint that is meant, with what is known of the others."""
    chosen = _placed(opened[name], archive, name)
    members: list[Member] = []
    for other, found in opened.items():
        members += (found is chosen and chosen.members) or (_member(other, found, archive),)
    others = {other: _placed(found, archive, other) for other, found in opened.items() if found is not chosen}
    chosen.notes += archive.notes
    chosen.members = tuple(members)
    chosen.inside = {**chosen.inside, **others}
    chosen.unopened += _unopened(failures, archive)
    return chosen


def _open_members(probe: Probe, archive: Archive) -> tuple[dict[str, Checkpoint], dict[str, CkptoolError]]:
    opened: dict[str, Checkpoint] = {}
    failures: dict[str, CkptoolError] = {}
    # What may be inflated is limited for all together: likely members first.
    for name in sorted(archive, key=lambda name: not is_likely(name)):
        try:
            opened[name] = probe.read_inner(archive.open(name))
        except Cancelled:
            raise
        except CkptoolError as error:
            failures[name] = error
    return {name: opened[name] for name in archive if name in opened}, failures


def _unopened(failures: dict[str, CkptoolError], archive: Archive) -> tuple[tuple[str, str], ...]:
    """Return the members that should have been checkpoints, going by name or content, and why they are not there."""
    return tuple(
        (name, error.message)
        for name, error in failures.items()
        if (is_likely(name) and not name.rpartition("/")[2].startswith("._"))  # macOS puts those beside others
        or (archive[name].nbytes and not isinstance(error, (NotACheckpoint, UnknownFormat)))
    )


def _member(name: str, checkpoint: Checkpoint, archive: Archive) -> Member:
    return Member(name, checkpoint.format, checkpoint.form, len(checkpoint.tensors), archive[name].nbytes)


def _no_checkpoint(archive: Archive) -> CkptoolError:
    names = [name for name in archive if not name.endswith("/")]
    if not names:
        return NotACheckpoint("not a checkpoint: an archive without files", kind="archive")
    shown = ", ".join(ascii(name)[1:-1] for name in names[:4])
    return NotACheckpoint(
        f"not a checkpoint: an archive of {len(names):,} files, none of which is one: {shown}", kind="archive"
    )
