"""The report of a migration, done or planned, with the facts of the file before and of the file after."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint, walk_of
from ckptool.checkpoints.modules import unwrapped
from ckptool.checkpoints.quantized import within
from ckptool.checkpoints.roles import NO_WEIGHTS, is_of_training
from ckptool.checkpoints.summary import candidates, count, lightning_attribute, wrapper_prefixes_of
from ckptool.checkpoints.training import BUFFERS, names_in, parameter_count, states
from ckptool.checkpoints.weights import Weights, by_name, left_beside, prepare
from ckptool.errors import Failure, MigrationRefused
from ckptool.formats.filenames import ADAPTER
from ckptool.formats.safetensors import ORDER_KEY
from ckptool.messages import FORMS, counted, counts, cut, grouped, no_values, not_cast, show, show_nbytes, some
from ckptool.migration import selection
from ckptool.migration.casting import Cast
from ckptool.migration.changes import Changes, DeviceTags, TargetForm, new_tag, retagged
from ckptool.migration.plan import Plan
from ckptool.names.wrappers import COMPONENTS, DATA_PARALLEL, is_averaged_pair, prefix_facts, prefixes_of
from ckptool.pickles import nodes
from ckptool.pickles.weights_only import why_refused
from ckptool.sections import Fact, Section, Sides, as_json, completed, html_of, text_of
from ckptool.sources.paths import command_line, is_remote, is_same_file, shown_path
from ckptool.tensors.tensor import TensorInfo

if TYPE_CHECKING:
    from ckptool.recipes.apply import Move

SCHEMA: Final = "ckptool.migrate/2"


class FileFacts(NamedTuple):
    """What ``inspect`` reports about one of the two files; for the target, known before it is written."""

    format: str
    form: str
    file_nbytes: int
    tensors: int
    tied: int
    numel: int
    devices: dict[str, int]
    dtypes: dict[str, int]
    prefixes: tuple[str, ...]


class WrittenFile(NamedTuple):
    """One file of a folder."""

    name: str
    nbytes: int


class MigrationReport(NamedTuple):
    """What a migration did, or would do."""

    source: str
    target: str
    form: TargetForm
    tensors: int
    nbytes: int
    """Size of what was written, in bytes; also known for a dry run, unless torch is to save a model that it builds."""
    retagged: dict[str, int]
    """How many storages and devices got a new device tag, by their old tag."""
    location: DeviceTags | None
    """The new tag of everything, or new tags by old ones; None if tags stay."""
    renamed: tuple[tuple[str, str], ...]
    metadata: dict[str, str]
    """Metadata that is set, by key."""
    moved: tuple[Move, ...]
    """What a recipe does to the tensors that it does not only rename."""
    dropped: tuple[str, ...]
    """Entries that the source has and the target has not."""
    dropped_at_root: tuple[str, ...]
    """The weights under no key among ``dropped``, where other weights were taken."""
    casts: tuple[Cast, ...]
    """Tensors that got another type, and the largest error of each."""
    tied: dict[str, str]
    """Names that a safetensors file leaves out, to the name under which their tensor is stored."""
    loses_training: bool
    """The source holds an optimizer's state and the target does not: training cannot be resumed from it."""
    weights_key: str | None
    """The path in the source of the weights that were taken; None if everything was."""
    verified: bool
    read_back_by: tuple[str, ...]
    """What read the result back: ``ckptool``; for safetensors, its library too if numpy or torch is installed."""
    written: bool
    """False for a dry run."""
    before: FileFacts
    after: FileFacts
    notes: tuple[str, ...]
    """What cannot be done with the target any more, and options that had no effect."""
    assumed: tuple[str, ...] = ()
    """The notes on assumptions about values that no file confirms. They are printed even if nothing else is."""
    calls: tuple[str, ...] = ()
    """Classes and functions that unpickling the target calls, beyond what makes data; with ``form`` same or model."""
    files: tuple[WrittenFile, ...] = ()
    """The files in the target, where it is a folder."""
    how: Literal["copy", "clone", "in place"] = "copy"
    """``clone``: the bytes of the tensors are those of the source, on a file system where files can share them."""
    written_nbytes: int = 0
    """Bytes that were written, or would be: for a clone, those that differ; in place, with the journal."""
    unused_nbytes: int = 0
    """Bytes of tensors that are left out, and stay in a file that is edited in place."""

    def __dir__(self) -> list[str]:
        return completed(self)

    def __str__(self) -> str:
        return "\n".join(text_of((show(self.target), *sections_of(self))))

    def __repr__(self) -> str:
        return f"<MigrationReport {self.target!r}: {_result(self)}>"

    def _repr_html_(self) -> str:
        return html_of(f"{self.target}: {_result(self)}", sections_of(self))

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, as the command line prints it."""
        fields = as_json(self)
        del fields["dropped_at_root"], fields["assumed"]  # they are among those that are dropped, and the notes
        for name in ("metadata", "moved"):  # few migrations have any
            if not fields[name]:
                del fields[name]
        head = {name: fields.pop(name) for name in ("source", "target", "form")}
        return {"schema": SCHEMA, **head, "source_format": self.before.format, **fields}


def planned(checkpoint: Checkpoint, plan: Plan, changes: Changes, nbytes: int | None = None) -> MigrationReport:
    """Return the report of a migration that is planned, and not carried out yet, to a file or folder of ``nbytes``."""
    nbytes = plan.nbytes if nbytes is None else nbytes
    key = None if plan.weights is None else plan.weights.state_dict.key
    dropped = [(plan.weights.state_dict.head if plan.weights else "") + name for name in plan.dropped]
    outside = [] if plan.weights is None else list(_outside_of(checkpoint, plan.weights))
    dropped += outside
    at_root: Collection[str] = next((one for one in checkpoint.state_dicts if not one.key), ())
    optimizers = [one for one in checkpoint.state_dicts if one.role == "optimizer"]
    paths = {f"{path}." for one in optimizers for path in one.own_keys or [one.key]}
    gone = [f"{path}." for path in dropped]
    is_lost = any(path.startswith(head) or head.startswith(path) for path in paths for head in gone)
    loses_training = bool(optimizers) and (plan.weights is not None or is_lost)
    infos = [tensor.info for tensor in checkpoint.tensors.values()]
    counts = count(infos, cancellation=checkpoint.source.cancellation)
    prefixes = prefixes_of(checkpoint.weights or ())
    whole = sum(file.nbytes for file in plan.files if file.base is None)
    written = whole + sum(len(run.data) for file in plan.files if file.base is not None for run in file.edits)
    return MigrationReport(
        source=f"{checkpoint.path}::{checkpoint.member}" if checkpoint.member else checkpoint.path,
        target=shown_path(plan.target),
        form=plan.form,
        tensors=len(plan.expected),
        nbytes=nbytes,
        written_nbytes=written,
        retagged=plan.retagged,
        location=plan.location if plan.location is None or isinstance(plan.location, str) else dict(plan.location),
        renamed=plan.renamed,
        metadata=dict(plan.metadata),
        moved=tuple(plan.moves),
        dropped=tuple(dropped),
        dropped_at_root=tuple(name for name in outside if name in at_root),
        casts=plan.casting.casts if plan.casting else (),
        tied=plan.tied,
        loses_training=loses_training,
        weights_key=key,
        verified=False,
        written=False,
        read_back_by=(),
        before=FileFacts(checkpoint.format, checkpoint.form, checkpoint.file_nbytes, *counts, prefixes),
        after=_planned_facts(checkpoint, plan, nbytes),
        notes=tuple(_notes(checkpoint, plan, changes, loses_training=loses_training)),
        files=tuple(WrittenFile(one.name, one.nbytes) for one in plan.files if plan.is_folder),
    )


def _outside_of(checkpoint: Checkpoint, weights: Weights) -> Iterator[str]:
    """Yield the full paths of entries outside the weights, which are left out, too."""
    extras = (path for path, _ in checkpoint.extras if path.rpartition(".")[2] != "_metadata")
    outside = [path for path in (*checkpoint.tensors, *extras) if path]
    key = weights.state_dict.key
    if key:
        yield from (path for path in outside if not path.startswith(f"{key}."))
    elif weights.state_dict.class_name is None:
        # At the root, names tell which entries are weights; what is nested in an entry goes where the entry goes.
        taken = {one for parts in weights.made_of.values() for one in parts}
        inside = {name for name, _ in within(outside, {*weights.old_names.values(), *taken, *weights.dropped})}
        yield from (path for path in outside if path not in inside)


def _planned_facts(checkpoint: Checkpoint, plan: Plan, nbytes: int) -> FileFacts:
    """Return what ``inspect`` will report about the target."""
    weights, infos = plan.weights, [info for _, info in plan.expected]
    if plan.form == "safetensors":
        form, names = "state_dict" if infos else "data", [name for name, _ in plan.expected if name is not None]
    elif weights is not None:
        names = list(weights.tensors)
        form = "checkpoint" if (weights.others and plan.form == "dcp") or len(infos) != len(names) else "state_dict"
        form = "model" if plan.builds_model else form
    else:
        form = "model" if plan.form == "model" else checkpoint.form
        names = _new_names(checkpoint, plan)
    layout = {"safetensors": "safetensors", "dcp": "dcp"}.get(plan.form, "torch_zip")
    layout = checkpoint.format if plan.keeps_layout else layout
    tags = ["cpu" if name in (plan.packed or ()) else retagged(info, plan.location) for name, info in plan.expected]
    counts = count(infos, tags)
    if plan.packed is not None:  # what is tied is written under each name, or under one
        counts = counts._replace(tied=0, numel=sum(info.numel for info in infos))
    return FileFacts(layout, form, nbytes, *counts, prefixes_of(names))


def _new_names(checkpoint: Checkpoint, plan: Plan) -> list[str]:
    """Return the names that the weights have in a result that holds everything but what is dropped."""
    chosen, new, dropped = checkpoint.weights, dict(plan.renamed), set(plan.dropped)
    head = chosen.head if chosen is not None else ""
    kept = (head + name for name in chosen or () if head + name not in dropped)
    return [new.get(path, path).removeprefix(head) for path in kept]


def _notes(checkpoint: Checkpoint, plan: Plan, changes: Changes, *, loses_training: bool) -> Iterator[str]:
    weights = plan.weights
    if loses_training:
        yield "training cannot be resumed from it: the optimizer's state is left out"
    if weights is not None and not plan.builds_model:
        if checkpoint.traits.program is not None:
            yield f"it holds weights alone: the program in the {checkpoint.format} file is left out"
        elif weights.state_dict.class_name is not None:
            yield from _without_class(weights, changes)
    yield from _prefixes(checkpoint, plan)
    yield from _refused(checkpoint, plan)
    if checkpoint.member:
        yield "the other files of the archive are left out"
    yield from (remark.what for remark in checkpoint.remarks)
    if checkpoint.class_sources and not plan.keeps_layout:
        classes = len(checkpoint.class_sources)
        yield f"the source of {classes:,} class{'es' * (classes > 1)} is left out: 'ckptool inspect' can print it"
    yield from plan.notes
    yield from _left_in_folder(checkpoint, plan, changes)
    if empty := [str(name) for name, info in plan.expected if info.location == "meta" and info.storage is None]:
        yield no_values(empty)
    if changes.to is None and plan.form in ("same", "state_dict") and not plan.builds_model:
        found = dict.fromkeys(info.location for name, info in plan.expected if name not in (plan.packed or ()))
        if tags := [tag for tag in found if tag.partition(":")[0] not in ("cpu", "meta")]:
            fact = f"tensors stay on {some(tags)}: loading asks for that device, unless map_location says otherwise"
            yield f"{fact}; for a machine without it, `to='cpu'`"
    yield from _without_effect(checkpoint, plan, changes)
    yield from _of_optimizers(checkpoint, plan, changes)
    yield from _of_versions(checkpoint, plan)
    yield from _beside(checkpoint, plan, changes)
    yield from selection.notes(checkpoint, plan, changes)
    kept = sum(info.location == "meta" for _, info in plan.expected)
    if kept and (changes.to or changes.dtype):
        yield f"{counted(kept, 'tensor')} on the meta device, without values: they stay as they are"
    if plan.keeps_layout and checkpoint.recorded.order and ORDER_KEY.encode() not in plan.header:
        yield "no room is left to record the order of names: it is that of the header alone"
    for said, many in Counter(one.said for one in plan.made).items():
        yield f"{counted(many, 'weight')}: {said}"
    if changes.break_quantized and (broken := selection.broken(checkpoint, plan)):
        yield broken


def _left_in_folder(checkpoint: Checkpoint, plan: Plan, changes: Changes) -> Iterator[str]:
    """Yield notes on the settings of a model, or of an adapter, that stay in the source's folder."""
    path, target = checkpoint.path, plan.target
    if is_remote(path) or not os.path.exists(path):
        return
    place = path if os.path.isdir(path) else os.path.dirname(path) or os.curdir
    if plan.form == "safetensors" and plan.is_folder and changes.config_from is None:
        from ckptool.migration.safetensors_plan import left_behind  # most write one file

        yield from left_behind(place)
    is_adapter = place == path or os.path.basename(path).startswith("adapter_model.")
    to = target if plan.is_folder else os.path.dirname(target) or os.curdir
    if (
        is_adapter
        and os.path.exists(os.path.join(place, ADAPTER))
        and (is_remote(target) or not is_same_file(place, to))
    ):
        yield f"{ADAPTER!r} beside the source stays there, and says how strong the adapter is: copy it, too"


def _without_class(weights: Weights, changes: Changes) -> Iterator[str]:
    """Yield notes on the class of a model, inside wrappers that were stripped, and on the versions that are assumed."""
    node, name = weights.state_dict.node, weights.state_dict.class_name
    classes = frozenset(COMPONENTS if changes.strip_wrappers else DATA_PARALLEL.classes)
    strips = changes.strip_wrappers or changes.strip_module
    while strips and weights.renamed and (inside := unwrapped(node, classes)) is not None:
        node, name = inside, nodes.class_name(inside)
    yield f"it holds weights alone: to load them, build {name} first"
    if assumed := list(dict.fromkeys(weights.assumed.values())):
        yield (
            f"the file does not say of which version {some(assumed)} was: it is written as 1, the oldest, and a newer "
            f"class may convert the weights when it loads them"
        )


def _beside(checkpoint: Checkpoint, plan: Plan, changes: Changes) -> Iterator[str]:
    """Yield notes on what is left beside the weights: other weights, tensors of a whole model, averages."""
    if plan.weights is None:
        return
    chosen = plan.weights.state_dict
    yield from filter(None, [left_beside(checkpoint, changes.key, chosen)])
    if chosen.class_name is not None and (
        names := [name for name in checkpoint.attributes if name.startswith(chosen.head)]
    ):
        many, walk = counted(len(names), "tensor"), walk_of(checkpoint, chosen)
        foreign = walk.foreign_classes if walk is not None else []
        more = f"; {some(foreign)} may save more in code" if foreign else ""
        yield f"{many} outside the state_dict() {'is' if len(names) == 1 else 'are'} left out: {some(names)}{more}"
    if not chosen.parts and all(one is not chosen for one in checkpoint.state_dicts):
        averaged = "averaged weights are under the names of those that they are averages of; the rest is not averaged"
        yield averaged if chosen.role == "ema" else "averaged weights among the others are left out"


def _without_effect(checkpoint: Checkpoint, plan: Plan, changes: Changes) -> Iterator[str]:
    """Yield notes on options that have no effect."""
    if plan.form in ("safetensors", "dcp") and changes.to is not None and not plan.retagged:
        yield f"{'safetensors' if plan.form == 'safetensors' else 'DCP'} keeps no device tags: there is none to set"
    elif isinstance(changes.to, str) and not (plan.retagged or plan.builds_model):
        yield "no device tag is changed: nothing in it was saved on another device"
    elif any(new_tag(changes.to, old) == "meta" for old in plan.retagged):
        yield "torch.load gives a tensor on meta no values: it needs map_location='cpu' here"
    if (changes.strip_module or changes.strip_wrappers) and not plan.renamed:
        yield "no name begins with what a wrapper adds: nothing was stripped"
    elif plan.names.rules and plan.weights is None and not plan.renamed and not by_name(checkpoint):
        yield "no name is changed: it holds no weights, and only their names are"
    if plan.casting is not None:
        yield from (f"keep_dtype {pattern!r} keeps the type of no tensor" for pattern in plan.casting.keeps_nothing)
        if kept := [f"{name}, tied to {other}" for name, other in plan.casting.kept_with.items()]:
            yield f"what is tied to what keeps its type keeps its own: {some(kept)}"
        if plan.casting.leaves:
            yield not_cast(plan.casting.leaves)
        elif not plan.casting.casts:
            yield "nothing is cast: the weights have no tensor of another floating-point type that can be cast"
        if plan.casting.casts and (beside := plan.casting.passed_over(_beside_weights(checkpoint, plan))):
            many = (
                "is not part of the weights keeps its" if len(beside) == 1 else "are not part of the weights keep their"
            )
            yield f"{counted(len(beside), 'tensor')} that {many} type: {some(beside)}"


def _beside_weights(checkpoint: Checkpoint, plan: Plan) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors that are written beside the weights, by new full path; without those of an optimizer."""
    known = {one.head + name for one in checkpoint.state_dicts if one.role in NO_WEIGHTS for name in one}
    dropped = tuple(f"{path}." for path in plan.dropped)
    if plan.form == "model":  # all of it is cast
        return
    names: Iterable[str] = checkpoint.tensors
    if plan.weights is not None:  # tensors inside values go with these
        head, old_names = plan.weights.state_dict.head, plan.weights.old_names
        names = [name for name, _ in within(names, {head + old_names[name] for name in plan.weights.others})]
    renamed = dict(plan.renamed)
    for name in names:
        if name not in known and not is_of_training(name, [name]) and not f"{name}.".startswith(dropped or "\0"):
            yield renamed.get(name, name), checkpoint.tensors[name].info


def _of_optimizers(checkpoint: Checkpoint, plan: Plan, changes: Changes) -> Iterator[str]:
    """Yield notes on optimizers that stay although their parameters are left out, or have other names now."""
    if plan.weights is not None or not (plan.dropped or plan.renamed):
        return
    gone = tuple(f"{path}." for path in plan.dropped)
    weights = checkpoint.weights
    paths = {name: f"{weights.head}{name}." for name in weights} if weights is not None else {}
    lost = [name for name, path in paths.items() if path.startswith(gone) and not name.endswith(BUFFERS)]
    heads = {one.head for one in by_name(checkpoint)}
    old = {name.removeprefix(one) for name, _ in plan.renamed for one in heads}
    for path, _, pairs, role in states(checkpoint):
        if role != "optimizer" or f"{path}.".startswith(gone):
            continue
        if lost:
            count = counted(parameter_count(nodes.lookup(pairs, "param_groups")), "parameter")
            yield (
                f"{path!r} stays, with states for {count}, while weights are left out: {some(lost)}; no optimizer of "
                f"the others can load it: leave it out with `drop={path!r}`"
            )
        if not changes.optimizer_names and (kept := old.intersection(names_in(pairs))):
            yield f"{path!r} names its parameters, and keeps the old names of {len(kept):,}: {some(sorted(kept))}"


def _of_versions(checkpoint: Checkpoint, plan: Plan) -> Iterator[str]:
    """Yield notes on modules whose version is lost; version 1 does not matter."""
    taken = [plan.weights] if plan.weights is not None else []
    for state_dict in by_name(checkpoint) if plan.weights is None and (plan.form == "dcp" or plan.renamed) else ():
        with suppress(MigrationRefused):  # of those beside the weights, some keep their names
            taken.append(prepare(checkpoint, state_dict, plan.names))
    for weights in taken:
        versions = {path: facts["version"] for path, facts in weights.modules.items() if facts.get("version", 1) != 1}
        if versions and plan.form == "dcp":
            fact = f"DCP has no place for the versions of {counted(len(versions), 'module')}: {some(list(versions))}"
            yield f"{fact}; load it with torch.distributed.checkpoint.load() into the model's own state_dict()"
        homes = {(old.rpartition(".")[0], new.rpartition(".")[0]): None for old, new in weights.renamed}
        lost = [f"{old} (now {new})" for old, new in homes if old in versions and new not in weights.modules]
        if lost and plan.form != "dcp":
            yield f"not all names of a module have one new name, and the version of its class is lost: {some(lost)}"


def _refused(checkpoint: Checkpoint, plan: Plan) -> Iterator[str]:
    """Yield why plain ``torch.load(path)`` will refuse a result with everything in it, and the command that helps."""
    weights = checkpoint.weights or next(iter(candidates(checkpoint)), None)
    if plan.form == "same" and checkpoint.traits.loader == "torch.load" and weights is not None:
        try:
            found = [*map(why_refused, filter(None, plan.pickles))]
        except Failure:
            return  # it is not a valid pickle: reading it back raises the error
        for one in filter(None, found):
            yield f"plain torch.load() refuses it, for {one}; to write the weights alone, which it opens:"
            key = "" if checkpoint.weights is not None else weights.key
            drop = not weights.key and weights.class_name is None  # what is refused is among them
            command = command_line(plan.target, "migrate", form="state_dict", key=key, drop_unsupported=drop)
            yield f"Run: {command}"


def _prefixes(checkpoint: Checkpoint, plan: Plan) -> Iterator[str]:
    """Yield a note on the option that removes the prefix of a wrapper, or of Lightning, from every name."""
    is_renamed = bool(plan.weights.renamed if plan.weights is not None else plan.renamed)
    names = list(plan.weights.tensors) if plan.weights is not None else _new_names(checkpoint, plan)
    prefixes = prefixes_of(names)
    if plan.weights is None and is_averaged_pair(names):
        return  # the averaged ones have to be taken alone
    wrapped = wrapper_prefixes_of(checkpoint, prefixes)
    attribute = "" if wrapped or is_renamed else lightning_attribute(checkpoint)
    if wrapped or attribute:
        option = "strip_wrappers=True" if wrapped else f"strip_prefix={attribute!r}"
        yield f"every name begins with {prefixes[0]!r}: for a model without it, `{option}`"


def sections_of(report: MigrationReport) -> Iterator[Section]:
    """Yield the file before and after, then every change."""
    yield Fact("result", [_result(report)])
    yield Fact("source", [show(report.source)])
    built = ", into a model that is built" if report.form == "model" else ""
    weights = f"the weights{f' under {show(report.weights_key)}' if report.weights_key else ''}{built}"
    everything = "the model" if report.form == "model" else "everything"
    yield Fact("content", [everything if report.weights_key is None else weights])
    yield Sides(("before", "after"), list(_rows(report.before, report.after)))
    tags = report.retagged.items()
    yield Fact("device", [f"{show(tag)} -> {new_tag(report.location, tag)}: {count:,}" for tag, count in tags])
    yield Fact("renamed", [f"{show(old)} -> {show(new)}" for old, new in report.renamed])
    if report.moved:
        from ckptool.recipes.apply import moves_shown  # few move any

        yield Fact("moved", list(moves_shown(report.moved)))
    yield Fact("cast", list(_casts(report)))
    yield Fact("tied", [f"{show(name)} is {show(kept)}" for name, kept in report.tied.items()])
    yield Fact("metadata", [f"{show(key)}: {show(cut(text))}" for key, text in report.metadata.items()])
    at_root = set(report.dropped_at_root) if len(report.dropped_at_root) > 1 else set()  # whose names share nothing
    rest = [name for name in report.dropped if name not in at_root]
    under_none = [f"the weights under no key: {len(at_root):,} entries"] if at_root else []
    yield Fact("left out", [*under_none, *grouped(rest, "entries")])
    yield Fact("calls", [show(name) for name in report.calls])
    yield Fact("files", [f"{show(file.name)}, {show_nbytes(file.nbytes)}" for file in report.files])
    yield Fact("note", [show(note) for note in report.notes])


def _result(report: MigrationReport) -> str:
    if not report.written:
        same = report.how == "in place" and not report.written_nbytes
        return "not written: nothing that was asked for changes the file" if same else "not written: a dry run"
    done = "written"
    if report.how != "copy":
        shared = "edited in place" if report.how == "in place" else "a clone that shares its tensors with the source"
        done = f"{shared}, {show_nbytes(report.written_nbytes)} written"
    if not report.verified:
        return f"{done}, not verified"
    return f"{done}, and read back by {' and '.join(report.read_back_by)}"


def _rows(*files: FileFacts) -> Iterator[tuple[str, ...]]:
    yield "format", *(f"{file.format}, {show_nbytes(file.file_nbytes)}" for file in files)
    yield "form", *(FORMS[file.form] for file in files)
    yield "tensors", *(f"{file.tensors:,}" + (f", {file.tied:,} of them tied" if file.tied else "") for file in files)
    yield "elements", *(f"{file.numel:,}" for file in files)
    yield "devices", *(counts(_most_first(file.devices)) or "-" for file in files)
    yield "dtypes", *(counts(_most_first(file.dtypes)) or "-" for file in files)
    yield from prefix_facts(*(file.prefixes for file in files))


def _casts(report: MigrationReport) -> Iterator[str]:
    """Yield what was cast: all together, then one by one, the largest error first."""
    by_types: dict[tuple[str, str], list[Cast]] = {}
    for cast in report.casts:
        by_types.setdefault((cast.source, cast.target), []).append(cast)
    for (source, target), casts in by_types.items():
        many = f"{len(casts):,} tensor{'s' * (len(casts) > 1)}: {source} -> {target}"
        if not report.written:
            yield many
            continue
        casts.sort(key=lambda cast: -cast.max_error)
        lines = [(f"{many}, off by at most", casts[0].max_error, sum(cast.overflowed for cast in casts))]
        lines += [(f"{show(cast.name)}:", cast.max_error, cast.overflowed) for cast in casts]
        for what, error, overflowed in lines:
            yield f"{what} {error:.3g}" + (f", {overflowed:,} cut to the largest value" if overflowed else "")


def _most_first(found: Mapping[str, int]) -> dict[str, int]:
    """Return counts, the largest first, then by name, so that equal counts of two files look equal."""
    return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))
