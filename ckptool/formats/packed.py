"""
Checkpoints inside something else: compressed files, and members of zips and tars of other programs.

stable-baselines3 zips hold policy.pth beside its optimizer; AllenNLP tars hold weights.th beside a vocabulary. The one
member that holds a model's weights is opened; where several do, they are listed, and ``FILE::MEMBER`` picks one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ckptool.system as system
from ckptool.archives.archive import Archive
from ckptool.archives.compressed import Compression, decompress
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.contents import Contents
from ckptool.checkpoints.parsed import Member, Parsed, Stream, Traits
from ckptool.checkpoints.roles import Role, choose_weights
from ckptool.errors import (
    CkptoolError,
    Failure,
    MalformedFile,
    NotACheckpoint,
    UnknownFormat,
    UnsupportedFeature,
    drop_tracebacks,
    within,
)
from ckptool.formats import slices
from ckptool.formats.probe import Probe
from ckptool.messages import counted
from ckptool.sources.paths import is_likely
from ckptool.sources.source import BytesSource, Source

NAME = "packed"
TRAITS = Traits()

_KNOWN_OF = (
    (
        "/.data/extern_modules",
        "a torch.package archive",
        "Where its code may run, load it with torch.package.PackageImporter, and save the state_dict() of the model.",
    ),
    (
        "/attributes.pkl",
        "TorchScript of PyTorch 1.1 to 1.3 (attributes.pkl)",
        "Where its code may run, load it with torch.jit.load() of PyTorch 1.6, and save its state_dict().",
    ),
)
"""Members that mark torch's own archives which no format here reads."""
_INDEX = ".metadata"
_ITEMS = ".distcp"
_OF_AGENTS = "pytorch_variables"
"""The file of stable-baselines3 for single numbers that an agent learns, such as the coefficient of its entropy."""


def sniff(probe: Probe) -> bool:
    """Return whether this is a compressed file, a zip or a tar; formats that are zips or tars themselves come first."""
    return probe.compression is not None or probe.zip is not None or probe.tar is not None


def read(probe: Probe) -> Parsed:
    """Open the one checkpoint inside, or list those that there are."""
    kind = probe.compression
    if kind is not None:
        content, end = _unpacked(probe, kind)
        if not content.nbytes:
            fact = f"not a checkpoint: a {kind.name} file of {probe.source.nbytes:,} bytes with nothing in it"
            raise NotACheckpoint(fact, kind=f"{kind.name}-empty", hint="Pack or download it again.")
        parsed = probe.read_inner(content)
        behind = Stream("", probe.source, end, end, (), rest=end if end < probe.source.nbytes else None)
        unpacked = Stream("", content, content.nbytes, content.nbytes, ())  # for readers of other formats
        return parsed._replace(streams=(*parsed.streams, unpacked, behind))
    archive = probe.zip or probe.tar
    if archive is None:
        raise MalformedFile("an archive without members", kind="empty-archive")
    for ending, what, hint in _KNOWN_OF:
        if any(name.endswith(ending) for name in archive):
            raise UnsupportedFeature(f"{what}, which is not handled", kind="old-torch-archive", hint=hint)
    return _choose(probe, archive)


def read_member(probe: Probe, name: str) -> Parsed:
    """
    Open the named member of a packed file, or the value of a pickle that is a file; ``A::B`` is the B of the member A.

    Raises:
        MalformedFile: There is no such member.
    """
    if probe.compression is not None:
        return read_member(probe.inner(_unpacked(probe, probe.compression)[0]), name)
    archive = probe.zip or probe.tar
    outer, _, inner = name.partition("::")
    if archive is not None and inner and name not in archive and outer in archive:
        return placed(read_member(probe.inner(archive.open(outer)), inner), archive, outer)
    if archive is None or name not in archive:
        packed = _distributed(archive).get(f"{name.rstrip('/')}/") if archive is not None else None
        if packed is not None:
            raise packed
        return _read_embedded(probe, archive, name)
    return placed(_as_part(probe, archive, name, probe.read_inner(archive.open(name))), archive, name)


def _as_part(probe: Probe, archive: Archive, name: str, parsed: Parsed) -> Parsed:
    """Return a member with the set that it belongs to, by its name and the content of the others."""
    return slices.as_part(parsed, name, "", list(archive), lambda other: probe.read_inner(archive.open(other)))


def _read_embedded(probe: Probe, archive: Archive | None, name: str) -> Parsed:
    """Open the value of a pickle that is a file itself, by its path; the path of a value in that may follow."""
    from ckptool.checkpoints.embedded import find_embedded

    try:
        found = find_embedded(probe.read().contents.extras)
    except (NotACheckpoint, UnknownFormat):
        if archive is None:
            raise
        found = {}
    outer, rest = name, None
    while outer not in found and "::" in outer:
        outer, _, inner = outer.rpartition("::")
        rest = inner if rest is None else f"{inner}::{rest}"
    if outer in found:
        inside = probe.inner(BytesSource(found[outer].data, probe.source.cancellation))
        return placed(inside.read() if rest is None else read_member(inside, rest), None, outer)
    near = [system.quoted(one) for one in (*found, *(archive or ())) if not one.endswith("/")]
    raise MalformedFile(
        f"no member {name!r} among {len(near):,}",
        kind="no-member",
        hint=f"Pick one of: {', '.join(near[:8])}" if near else "It is not an archive: leave the '::' part away.",
    )


def _unpacked(probe: Probe, kind: Compression) -> tuple[Source, int]:
    content, end = decompress(probe.source, kind, probe.limits)
    return BytesSource(content, probe.source.cancellation, packed_nbytes=probe.source.nbytes), end


def _choose(probe: Probe, archive: Archive) -> Parsed:
    folders = _distributed(archive)
    opened, failures = _open_members(probe, archive, folders)
    holding = {name: found for name, found in opened.items() if holds_tensors(found)}
    weights = with_weights(holding)
    apart = slices.together(holding) if len(holding) > 1 else None
    # Each is narrower than the one before, but for the last: a single file without tensors is opened, too.
    for candidates in () if apart else (holding, weights, _outstanding(weights), opened):
        if len(candidates) == 1:
            (name,) = candidates
            return _as_part(probe, archive, name, _chosen(name, opened, failures, archive))
    if opened:
        members = [member(name, found, archive[name].nbytes) for name, found in (holding or opened).items()]
        return listed(archive.source, NAME, members, opened, archive)._replace(
            unmerged=apart, unopened=_unopened(failures, archive), notes=archive.notes, archives=(archive,)
        )
    for error in folders.values():
        raise error
    for name, error in failures.items():
        if is_likely(name):
            with within(f"member {name!r}"):
                raise error
    from ckptool.formats.identify import name_foreign_zip

    foreign = name_foreign_zip(list(archive)) if probe.zip is not None else None
    names = [name for name in archive if not name.endswith("/")]
    without = f"{counted(len(names), 'file')} without one: {', '.join(ascii(name)[1:-1] for name in names[:4])}"
    fact = f"an archive of {without}" if names else "an archive without files"
    raise foreign or NotACheckpoint(f"not a checkpoint: {fact}", kind="archive")


def _outstanding(weights: dict[str, Parsed]) -> dict[str, Parsed]:
    """Return the member that would be the weights if all were in one file, under their names."""
    stems = {name: name.rpartition("/")[2].partition(".")[0] for name in weights}
    names = [name for name in weights if stems[name] != _OF_AGENTS]
    roles: list[tuple[str, Role]] = [(stems[name], "model") for name in names]
    chosen = choose_weights(roles)
    return {} if chosen is None else {names[chosen]: weights[names[chosen]]}


def _chosen(name: str, opened: dict[str, Parsed], failures: dict[str, CkptoolError], archive: Archive) -> Parsed:
    chosen = placed(opened[name], archive, name)
    members: list[Member] = []
    for other, found in opened.items():
        members += (other == name and chosen.members) or (member(other, found, archive[other].nbytes),)
    others = {other: placed(found, archive, other) for other, found in opened.items() if other != name}
    return chosen._replace(
        notes=chosen.notes + archive.notes,
        members=tuple(members),
        inside={**chosen.inside, **others},
        unopened=chosen.unopened + _unopened(failures, archive),
    )


def _distributed(archive: Archive) -> dict[str, CkptoolError]:
    """Return why the folders of ``torch.distributed.checkpoint`` in an archive are not read, by their names."""
    found: dict[str, CkptoolError] = {}
    for index in archive.called(_INDEX):
        folder = index[: -len(_INDEX)]
        count = sum(name.startswith(folder) and name.endswith(_ITEMS) for name in archive)
        if count:
            found[folder] = UnsupportedFeature(
                f"a torch.distributed.checkpoint of {counted(count, 'file')}"
                f"{f' in {folder!r}' if folder else ''} of an archive",
                kind="packed-folder",
                hint="Unpack the archive, and give the folder: its files are read where they lie.",
            )
    return found


def _open_members(
    probe: Probe, archive: Archive, folders: dict[str, CkptoolError]
) -> tuple[dict[str, Parsed], dict[str, CkptoolError]]:
    opened: dict[str, Parsed] = {}
    failures = {f"{folder}{_INDEX}": error for folder, error in folders.items()}
    # What may be inflated is limited for all together: likely members first.
    for name in sorted(archive, key=lambda name: not is_likely(name)):
        if folders and name.startswith(tuple(folders)):
            continue
        try:
            opened[name] = probe.read_inner(archive.open(name))
        except Failure as error:
            drop_tracebacks(error)
            failures[name] = error
    return {name: opened[name] for name in archive if name in opened}, failures


def _unopened(failures: dict[str, CkptoolError], archive: Archive) -> tuple[tuple[str, str], ...]:
    """Return the members that should be checkpoints, by name or content, and why they could not be opened."""
    return tuple(
        (name, error.message)
        for name, error in failures.items()
        if (is_likely(name) and not name.rpartition("/")[2].startswith("._"))  # macOS puts those beside others
        or (archive[name].nbytes and not isinstance(error, (NotACheckpoint, UnknownFormat)))
    )


def placed(parsed: Parsed, archive: Archive | None, name: str) -> Parsed:
    """Return a checkpoint as a member of an archive: the names of its own members get this prefix."""
    return parsed._replace(
        member=name if parsed.member is None else f"{name}::{parsed.member}",
        archives=(*((archive,) if archive is not None else ()), *parsed.archives),
        members=tuple(one._replace(name=f"{name}::{one.name}") for one in parsed.members),
        inside={f"{name}::{key}": placed(one, archive, name) for key, one in parsed.inside.items()},
        unopened=tuple((f"{name}::{key}", why) for key, why in parsed.unopened),
    )


def member(name: str, found: Parsed, nbytes: int | None = None) -> Member:
    """Return the listing of a checkpoint in an archive or a folder; ``nbytes`` is its size there, if known."""
    return Member(name, found.format, found.form, found.number, found.file_nbytes if nbytes is None else nbytes)


def listed(
    source: Source, layout: str, members: Sequence[Member], inside: Mapping[str, Parsed], archive: Archive | None = None
) -> Parsed:
    """Return several checkpoints of which none is chosen: ``inside`` are all that can be opened."""
    return Parsed(
        source,
        layout,
        Traits(),
        Contents(),
        fixed_form="archive",
        members=tuple(members),
        inside={name: placed(found, archive, name) for name, found in inside.items()},
    )


def holds_tensors(parsed: Parsed) -> bool:
    contents = parsed.contents
    return bool(contents.tensors or contents.attributes or parsed.constants or parsed.members)


def with_weights(holding: dict[str, Parsed]) -> dict[str, Parsed]:
    """Return those that hold the weights of a model; empty if there is only one to choose from."""
    if len(holding) < 2:  # nothing to tell apart
        return {}
    return {
        name: found
        for name, found in holding.items()
        if found.members or Checkpoint("", found.source, found).weights is not None
    }
