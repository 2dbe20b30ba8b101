"""
``Finding``, the table ``CODES`` of all findings, and the commands of their hints.

Which command line of ``ckptool migrate`` helps with a checkpoint is judged by its content, without making a plan. A
command is given only if that migration is possible, and if plain ``torch.load(path)`` opens what it writes. If needed,
it writes only the weights, without those of their entries that ``torch.load`` refuses, unless these hold tensors or
arrays. A test runs the commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.completeness import refuse_broken, refuse_incomplete, refuse_slice, refuse_stubs
from ckptool.errors import Failure
from ckptool.limits import DEFAULT_LIMITS, refuse_repeated
from ckptool.messages import counted, show, some
from ckptool.names.renaming import Filter
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Global, Inert, PersistentId
from ckptool.pickles.numpy_values import is_array
from ckptool.pickles.weights_only import is_allowed
from ckptool.sections import Fact
from ckptool.sources.paths import command_line, is_remote
from ckptool.tensors.tensor import TensorInfo, identity

if TYPE_CHECKING:
    from ckptool.names.matching import Renames

Severity: TypeAlias = Literal["info", "warning", "error"]
"""A note; something that will get in somebody's way; something that is broken."""
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "info")
"""The most severe first."""


MOST_FINDINGS: Final = 16
"""Most findings of one kind in a report; one more counts the rest."""


class Finding(NamedTuple):
    """One notable fact. ``code`` is stable, for programs; ``hint`` says what to do, where something can be done."""

    code: str
    severity: Severity
    message: str
    hint: str | None = None
    command: str | None = None
    """The command line that carries out the hint, for a POSIX shell."""
    path: str | None = None
    """The file that it is about, if that is not the opened one, but another one of the folder."""


def note(
    code: str,
    message: str,
    hint: str | None = None,
    command: str | None = None,
    *,
    severity: Severity | None = None,
    path: str | None = None,
) -> Finding:
    """Return a finding. Without a ``severity``, it has that of its code in ``CODES``, or else is a warning."""
    return Finding(code, severity or CODES[code].severity or "warning", message, hint, command, path)


def place(record: str, offset: int, nested_at: int | None = None) -> str:
    """Return a position in a file as text for people; the folder in the record's name is left out."""
    inside = "" if nested_at is None else f" of a pickle inside, at {nested_at:,}"
    member, mark, record = record.rpartition("::")
    record = f"{member}{mark}{record.rpartition('/')[2]}"
    return f"{record + ', ' if record else ''}byte {offset:,}{inside}"


class Advice(NamedTuple):
    """The last two fields of a finding."""

    hint: str | None = None
    command: str | None = None


def run(
    checkpoint: Checkpoint,
    verb: str,
    *words: str,
    why: str | None = None,
    member: str | None = None,
    **options: str | bool | Sequence[str],
) -> Advice:
    """
    Return advice to run a ``verb`` of the command line on this checkpoint; ``why`` is the hint.

    ``options`` and ``words`` are those of ``command_line``; ``member`` names another member of its archive instead.
    """
    path, inside = checkpoint.path or "FILE", member or checkpoint.member
    return Advice(why, command_line(f"{path}::{inside}" if inside else path, verb, *words, **options))


def finding_facts(findings: Iterable[Finding]) -> Iterator[Fact]:
    """Yield each finding for display, with its hint and its command, unless these were shown before."""
    shown: set[tuple[str | None, ...]] = set()
    for finding in findings:
        items = [f"{finding.code} {show(finding.message)}"]
        if finding.hint and (finding.hint, finding.command) not in shown:
            items.append(show(finding.hint))
        if finding.command and (finding.command,) not in shown:
            items.append(f"Run: {show(finding.command)}")
        shown |= {(finding.hint, finding.command), (finding.command,)}
        yield Fact(finding.severity, items)


def worst_of(findings: Iterable[Finding]) -> Severity | None:
    """Return the highest severity; None if there are no findings."""
    severities = {one.severity for one in findings}
    return next((one for one in SEVERITIES if one in severities), None)


class Code(NamedTuple):
    """What all findings with one code have in common."""

    severity: Severity | None
    """None if it depends on the file, or on the options."""
    says: str


CODES: Final = {
    "CK101": Code(None, "The archive or stream has something unusual but harmless."),
    "CK102": Code("info", "The archive holds more checkpoints than the one that was opened."),
    "CK103": Code("error", "The index does not match its checksum."),
    "CK104": Code("info", "Records have no checksum, so a changed byte there would not show."),
    "CK105": Code("error", "A record is damaged: it does not match its checksum, or cannot be unpacked."),
    "CK106": Code("info", "Some tensors of a file that was cut short are whole."),
    "CK107": Code("warning", "An index of shards announces another size than its tensors have."),
    "CK108": Code(None, "Sparse tensors have wrong indices, or indices that were not looked at."),
    "CK109": Code(None, "Two tensors have the same dotted name."),
    "CK110": Code("warning", "Values are NaN."),
    "CK111": Code(None, "Values are infinite."),
    "CK112": Code(
        None, "All values of a tensor are zero; or of nearly all tensors, as of a file that was never filled."
    ),
    "CK113": Code("info", "Values were not looked at."),
    "CK114": Code("error", "A member of the archive is a checkpoint that cannot be opened."),
    "CK115": Code(None, "Another checkpoint in the archive has a problem."),
    "CK118": Code("error", "Metadata of a safetensors file is not text: its own library refuses the file."),
    "CK119": Code("info", "Values are unlike all others of their tensor: far beyond them, or a block of zeros."),
    "CK120": Code("warning", "Tensors are empty stubs: the values of these weights are in other files."),
    "CK121": Code("warning", "Most tensors of the weights have no elements."),
    "CK122": Code(
        "warning", "An adapter has no tensors of the modules that its settings announce, or one half of each."
    ),
    "CK123": Code(None, "An adapter has no tensors of some modules that its settings announce, or one half."),
    "CK124": Code("info", "Some weights have no elements."),
    "CK125": Code(None, "There is no tensor in the file."),
    "CK126": Code("warning", "Tensors are on the meta device: they have no values, or are loaded without them."),
    "CK127": Code(
        "warning", "The tensors of an adapter are not what its settings say: another rank, other layers, no DoRA."
    ),
    "CK128": Code("warning", "A layer or an expert is missing between others that are alike."),
    "CK130": Code(None, "Arrays of numpy are listed as tensors."),
    "CK131": Code("info", "Bytes inside the file are a file of their own: a checkpoint, a pickle or an archive."),
    "CK132": Code("warning", "The weights of a TorchScript program have no names."),
    "CK133": Code("info", "The file is the index of a torch.distributed.checkpoint."),
    "CK140": Code("error", "A file of the folder is missing, or too short: what was in it cannot be read."),
    "CK141": Code("error", "The pieces of a tensor do not fill it, or overlap."),
    "CK142": Code("warning", "The folder has files of items that the index does not name."),
    "CK143": Code("error", "An item cannot be read, or is not what the index says."),
    "CK144": Code("warning", "Ranks saved copies that are not equal: the copy of the first rank is taken."),
    "CK145": Code("info", "Nothing says how many ranks there were: whether any is missing cannot be known."),
    "CK146": Code("error", "Items overlap in a file."),
    "CK147": Code("warning", "The index has items for names that it does not list."),
    "CK148": Code("warning", "Files that belong together contradict each other: they may be of different saves."),
    "CK149": Code("error", "A file of the folder is a link, which is not followed: what was in it was not read."),
    "CK150": Code("warning", "Files in the folder belong to another run, and were left out."),
    "CK151": Code("warning", "The float32 weights are not there: those that are listed may be rounded."),
    "CK152": Code("warning", "Names of the model have no values in any file of the folder."),
    "CK153": Code("warning", "State of the optimizer is not listed, because that of some ranks is missing."),
    "CK154": Code("info", "Tensors that every rank has are not equal: those of the first rank are taken."),
    "CK155": Code(
        "warning", "The ranks' parts of tensors are listed rank by rank, because the files do not say how to join them."
    ),
    "CK156": Code("warning", "Ranks have no file that the others have: tensors may be smaller than they were."),
    "CK157": Code("warning", "A file of a rank is missing; no weight that is listed needs it."),
    "CK158": Code(
        "warning", "Tensors of a torch.distributed.checkpoint are safetensors, which its own loader does not read."
    ),
    "CK159": Code(
        "warning",
        "The files of the optimizer, with the float32 weights, are not there: those that are listed are rounded.",
    ),
    "CK160": Code("warning", "The file is one of several that are one checkpoint together."),
    "CK161": Code(None, "A folder holds the same names and shapes once more, or others where they should be."),
    "CK162": Code("warning", "A folder holds shards that its index does not name."),
    "CK163": Code("warning", "A folder holds downloads that were not finished."),
    "CK164": Code("warning", "Components of a pipeline are not there, or have no weights."),
    "CK165": Code("warning", "A checkpoint of the folder has no weights: others were opened, or are listed."),
    "CK166": Code("warning", "A file that is saved with the others is missing; it held no weights."),
    "CK167": Code("info", "Of several checkpoints in a folder, the one that holds weights was opened."),
    "CK168": Code("info", "Shards were put together by their names, because no index names them."),
    "CK169": Code("warning", "What lies beside the checkpoint cannot be opened, or is not whole."),
    "CK170": Code("info", "Parts of the index of a file far away were not read, and not compared."),
    "CK171": Code("info", "The folder has other checkpoints, going by names, that were not opened."),
    "CK179": Code("info", "Beside a file is a journal of an edit in place, or what has its name."),
    "CK201": Code("info", "Unpickling would import more than containers, numbers, arrays and objects of torch."),
    "CK202": Code(None, "Plain torch.load(path) does not open the file."),
    "CK203": Code("info", "Pickles inside strings of the file ask for names that torch.load() does not allow."),
    "CK204": Code(
        "warning", "The pickles ask for names that torch.load() does not allow; another loader opens the file."
    ),
    "CK205": Code(
        "error", "Unpickling would call what reaches the system: commands, text as code, files, connections."
    ),
    "CK206": Code("warning", "Unpickling would run code of packages, which is not in the file."),
    "CK207": Code("warning", "The pickles name something that reaches the system, but do not call it."),
    "CK209": Code("warning", "Some of what the file holds could not be looked at."),
    "CK210": Code("info", "Folders of version control or of tools were not looked into."),
    "CK216": Code("error", "A program in the file reaches the system: it opens files, or has text that is evaluated."),
    "CK217": Code("warning", "Its loader runs Python or native code in the archive, or what its settings name."),
    "CK301": Code("info", "A training wrapper put a prefix in front of every name."),
    "CK302": Code(
        None, "Several state dicts could be the weights; or beside those that are taken is what may belong to them."
    ),
    "CK303": Code("info", "Tensors are small views of storages that were saved whole."),
    "CK401": Code("info", "A whole model holds tensors that its state_dict() would not give."),
    "CK402": Code("warning", "A hook of the model's class may add or rename entries of its state_dict()."),
    "CK403": Code("warning", "Code of the model's class adds entries to its state_dict() that are not listed."),
    "CK404": Code("info", "Names are right only if classes of the model do not override state_dict()."),
    "CK405": Code("warning", "A bound method was saved, and the whole model with it."),
    "CK406": Code("warning", "Parameters or buffers can be read only by their own classes."),
    "CK407": Code("warning", "The file holds one rank's part of distributed tensors."),
    "CK501": Code("warning", "Tensors were saved on more than one accelerator."),
    "CK502": Code("info", "Tensors are sparse, quantised or of a class of their own."),
    "CK503": Code(None, "Tensors were saved on a device that loading asks for again."),
    "CK504": Code("info", "Element types need a recent release of torch."),
    "CK505": Code("info", "Loading the whole model needs packages or scripts that define its classes."),
    "CK506": Code("info", "Weights are quantised: they are numbers that mean something only with their scales."),
    "CK507": Code("warning", "Quantised weights have no scale, though others have one."),
    "CK600": Code("warning", "The weights cannot be compared with the model."),
    "CK601": Code("info", "All names and shapes are those of the model."),
    "CK602": Code("warning", "After a change of names, they are those of the model."),
    "CK603": Code(None, "Names that the model expects are missing."),
    "CK604": Code(None, "The file has names that the model does not expect."),
    "CK605": Code("warning", "Tensors have another shape than the model expects."),
    "CK606": Code("warning", "Names match the model's in more than one way."),
    "CK607": Code("warning", "Tensors are of another kind than the model's, or differ where it has one for two names."),
}
"""Every code."""

RETIRED: Final = {"CK208": "More pickles follow the one that is loaded."}
"""Codes that are no longer found, with what they said: never used again for something else."""


def migration(
    checkpoint: Checkpoint, why: str | None = None, *, renames: Renames = (), **options: str | bool | Sequence[str]
) -> Advice:
    """
    Return the command line of a migration that helps, with ``why`` as its hint; only ``why`` if none helps.

    ``options`` are fields of ``Changes``, as is ``renames``. Options that are needed are added.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value}
    hints = [why] if why else []
    if "form" not in given and checkpoint.traits.is_plain:
        given = {"form": "safetensors", **given}
    elif "form" not in given and not _may_be_kept(checkpoint):
        given = {"form": "state_dict", **given}
        hints.append("Write the weights alone, which plain torch.load() opens.")
    if "form" in given:
        refused = _refused(checkpoint, given)
        if refused is None:
            return Advice(why)
        if refused:
            given["drop_unsupported"] = True
            hints.append(f"Leave out what torch.load() refuses: {some(refused)}.")
    if given.get("form") in (None, "state_dict") and "to" not in given:
        alone = checkpoint.weights if "form" in given else None
        taken = (alone if alone is not None else checkpoint.tensors).values()
        tags = {one.info.location for one in taken if one.info.storage is not None}
        if not tags <= {"cpu", "meta"}:
            given["to"] = "cpu"  # else plain torch.load() opens it only where that device is
    words = [word for change in renames for word in change.arguments]
    return run(checkpoint, "migrate", *words, why=" ".join(hints) or None, **given)


def state_dict(checkpoint: Checkpoint, why: str | None = None) -> Advice:
    """Return the command line that takes the weights out of a checkpoint, if it is clear which they are."""
    models = [one for one in checkpoint.state_dicts if one.role in ("model", "ema")]
    if checkpoint.weights is not None:
        return migration(checkpoint, why, form="state_dict")
    if len(models) != 1 or not models[0].key:
        return Advice(why)  # the others would be left out
    return migration(checkpoint, why, form="state_dict", key=models[0].key)


def dense(checkpoint: Checkpoint) -> Advice:
    """Return the command line that makes plain weights of quantised ones, if the layouts of all of them are known."""
    from ckptool.checkpoints.weights import NameChanges, prepare  # few files hold any
    from ckptool.dense import make_dense

    if checkpoint.weights is None or is_remote(checkpoint.path):
        return Advice(None)
    try:
        make_dense(checkpoint, prepare(checkpoint, checkpoint.weights, NameChanges()))
    except Failure:
        return Advice(None)
    form = "safetensors" if checkpoint.traits.is_plain else "state_dict"
    return migration(checkpoint, "Plain weights, which load anywhere (needs torch).", form=form, dequantize=True)


def instead(checkpoint: Checkpoint) -> Advice:
    """Return advice if no migration helps: to take one state dict, to open a file inside, or to use our reader."""
    from ckptool.checkpoints.embedded import find_embedded  # few files hold others

    if checkpoint.weights:
        return Advice(
            "No migration of it opens with torch.load(path): read what it holds with ckptool.open_checkpoint()."
        )
    if keys := [one.key for one in checkpoint.state_dicts if one.key]:
        return Advice(f"It holds {counted(len(keys), 'state dict')}: take one with `key=`, as {some(keys)}.")
    for path in find_embedded(checkpoint.extras):
        member = f"{checkpoint.member}::{path}" if checkpoint.member else path
        return run(checkpoint, "inspect", why="It holds no state dict itself: look at the file inside.", member=member)
    return Advice("It holds no state dict to migrate: read what it holds with ckptool.open_checkpoint().")


def literal(name: str) -> str:
    """Return a glob that matches only this name."""
    return "".join(f"[{char}]" if char in "*?[" or (not at and char == ".") else char for at, char in enumerate(name))


def _may_be_kept(checkpoint: Checkpoint) -> bool:
    """Return whether everything in a file can be written again, in a file that ``torch.load`` opens."""
    return (
        checkpoint.form in ("state_dict", "checkpoint", "tensors", "training")
        and checkpoint.traits.has_tree
        and not (checkpoint.contents.clashes or checkpoint.shards or checkpoint.lost)
        and all(is_allowed(one.module, one.name) for one in checkpoint.globals)
    )


def _refused(checkpoint: Checkpoint, options: Mapping[str, Any]) -> list[str] | None:
    """
    Return the names of entries that have to be left out of the weights, because ``torch.load`` refuses them.

    Return None if such an entry holds tensors or arrays, if the weights cannot be written, or nothing would remain.
    """
    from ckptool.checkpoints.weights import choose, entries_of  # most files need no advice

    taken = Filter(tuple(options.get("include", ())), tuple(options.get("exclude", ())))
    is_plain = options["form"] == "safetensors"
    try:  # what a migration of the weights would refuse
        refuse_slice(checkpoint)
        chosen = choose(checkpoint, options.get("key"), "auto")
        refuse_incomplete(checkpoint, chosen, taken)
        refuse_stubs(checkpoint, chosen, taken)
        takes_all = taken.takes_all
        tensors = [one for name, one in chosen.items() if takes_all or taken.takes(name, chosen.key)]
        refuse_broken(tensors)
        if is_plain:  # it stores each view of the same bytes anew
            stored = {identity(one.info): one.info.total_nbytes for one in tensors}
            refuse_repeated(sum(stored.values()), checkpoint.file_nbytes, DEFAULT_LIMITS)
    except Failure:
        return None
    fitting = [_is_plain(one.info) if is_plain else _is_written(one.info) for one in tensors]
    fits = any(fitting) if "drop_unsupported" in options else all(fitting)
    others = [(name, value) for name, value in entries_of(checkpoint, chosen) if name not in chosen]
    if not fits or checkpoint.contents.clashes or not any(one.info.numel for one in tensors):
        return None
    if is_plain:
        return [] if not others or "drop_unsupported" in options else None
    refused = []
    for name, entry in others:
        is_taken, has_data = _taken(checkpoint, entry) if taken.takes(name, chosen.key) else (True, False)
        if not is_taken and has_data:
            return None
        if not is_taken:
            refused.append(name)
    return refused


def _taken(checkpoint: Checkpoint, entry: Inert) -> tuple[bool, bool]:
    """Return whether ``torch.load`` takes an entry that is written again, and whether it holds tensors or arrays."""
    is_taken, has_data = True, False
    todo, seen = [entry], set[int]()
    while todo:
        node = todo.pop()
        if type(node) is Global:
            is_taken = is_taken and is_allowed(node.module, node.name)
            # Pickles call these to make arrays.
            has_data = has_data or (node.module.startswith("numpy.") and node.name in ("_reconstruct", "_frombuffer"))
        if not nodes.is_container(node) or id(node) in seen:
            continue
        seen.add(id(node))
        info = checkpoint.rebuilder.tensor(node) if checkpoint.rebuilder is not None else None
        if info is not None and not info.is_array:
            is_taken, has_data = is_taken and _is_written(info), True
        else:
            has_data = has_data or type(node) is PersistentId or is_array(node)
            todo += (*nodes.held(node), *([node.func] if type(node) is Call else ()))
    return is_taken, has_data


def _is_plain(info: TensorInfo) -> bool:
    """Return whether safetensors can store a tensor."""
    return info.layout == "strided" and info.storage is not None and info.dtype.safetensors is not None


def _is_written(info: TensorInfo) -> bool:
    """Return whether a tensor can be written as ``torch.save`` does, without its class."""
    if info.storage is not None:
        return info.layout == "strided" or info.layout.startswith("per_")
    return info.layout.startswith("sparse_") or (info.layout, info.location) == ("strided", "meta")
