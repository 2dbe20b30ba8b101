"""The files of states in a folder: which belong together, whether they are all there, and what each says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Final, NamedTuple

from ckptool.checkpoints.companions import Remark
from ckptool.checkpoints.parsed import Parsed, Traits
from ckptool.errors import FileUnavailable, MalformedFile
from ckptool.formats.directories import side_by_side
from ckptool.formats.directories.deepspeed import states
from ckptool.formats.directories.deepspeed.merged import NARROW, Engine, Partitions
from ckptool.formats.directories.deepspeed.states import ModelStates, OptimStates
from ckptool.formats.directories.side_by_side import agree
from ckptool.formats.directories.tree import TreeBuilder
from ckptool.formats.probe import Probe
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Dict
from ckptool.sources.folder import FolderSource

NAME: Final = "deepspeed"
TRAITS: Final = Traits(has_tree=True, tree_is_made=True, loader="deepspeed.DeepSpeedEngine.load_checkpoint")


class Files(NamedTuple):
    """The names of the files in a folder of states, each by the ranks or the layer in it."""

    models: dict[int, dict[int, str]]
    """By model-parallel rank, and by data-parallel rank; 0 where the name has none."""
    optims: dict[int, dict[int, str]]
    layers: dict[int, dict[int, str]]
    """By tensor-parallel rank, and by layer."""
    experts: list[str]


def find(folder: FolderSource, inside: str) -> Files:
    """
    Return what is in a folder of states, going by names.

    Raises:
        MalformedFile: Two files are of one rank.
    """
    found = Files({}, {}, {}, [])
    head = f"{inside}/" if inside else ""
    for name in folder.names(inside)[0]:
        path = head + name
        if match := states.MODEL_FILE.fullmatch(name):
            _add(found.models, int(match[2]), int(match[1] or 0), path)
        elif match := states.OPTIM_FILE.fullmatch(name):
            _add(found.optims, int(match[2]), int(match[1]), path)
        elif match := states.LAYER_FILE.fullmatch(name):
            _add(found.layers, int(match[2] or 0), int(match[1]), path)
        elif states.EXPERT_FILE.fullmatch(name):
            found.experts.append(path)
    return found


def _add(kind: dict[int, dict[int, str]], outer: int, inner: int, path: str) -> None:
    other = kind.setdefault(outer, {}).setdefault(inner, path)
    if other is not path:
        raise MalformedFile(
            f"{other!r} and {path!r} are of one rank", kind="mixed-saves", hint="Take away the one of another run."
        )


class Reader:
    """Reads files of states, and keeps what it read."""

    def __init__(self, folder: FolderSource, probe: Probe) -> None:
        self.folder = folder
        self.probe = probe
        self.read: dict[str, Parsed] = {}

    def open(self, name: str) -> Parsed:
        """Return what a file holds."""
        known = self.read.get(name)
        if known is None:
            known = self.read[name] = side_by_side.opened(self.folder, self.probe, name)
        return known

    def model(self, name: str) -> ModelStates:
        """Return what a file of model states says."""
        return ModelStates(name, self.open(name))

    def optim(self, name: str) -> OptimStates:
        """Return what a file of optimizer states says."""
        return OptimStates(name, self.open(name))

    def engine(self, inside: str, models: Mapping[int, str], optims: Mapping[int, str]) -> tuple[Engine, list[Remark]]:
        """
        Return the states of the data-parallel ranks of one model-parallel rank.

        Raises:
            FileUnavailable: Some are missing.
            MalformedFile: They are of different saves.
        """
        model = self.model(models[min(models)])
        remarks: list[Remark] = []
        if not optims:
            if _is_partitioned(model):
                world = model.number("dp_world_size") or 1
                raise missing_files(inside, "*_optim_states.pt", world, 0, "The values of the parameters are in them.")
            if model.groups is not None:
                remarks.append(_without_masters(inside, model))
            return Engine([model], [], None), remarks
        first = self.optim(optims[min(optims)])
        world = max(first.counts) if first.counts else max(optims) + 1
        missing = [rank for rank in range(world) if rank not in optims]
        if missing:
            hint = f"Not there: rank {some(list(map(str, missing)))}."
            if model.module is not None and not first.of_stage_3:
                hint += f" The weights as the model computed with them are whole in {model.name!r}: open that file."
            raise missing_files(inside, "*_optim_states.pt", world, world - len(missing), hint)
        said = model.number("dp_world_size")
        if said is not None and said != world and not _shards_in_groups(model):
            fact = f"{model.name!r} is of {counted(said, 'data-parallel rank')}, the optimizer is in {world:,} parts"
            raise MalformedFile(fact, kind="mixed-saves", hint=side_by_side.ANOTHER_SAVE)
        extra = [optims[rank] for rank in sorted(optims) if rank >= world]
        files = [self.optim(optims[rank]) for rank in range(world)]
        agree("releases of DeepSpeed", [(one.name, one.version) for one in (model, *files)])
        agree("stages of ZeRO", [(one.name, one.stage) for one in files])
        agree("numbers of partitions", [(one.name, one.counts or None) for one in files])
        states.steps_agree(files)
        remarks += _other_settings(model, first)
        found = [model]
        if first.of_stage_3:
            found = [self.model(models[rank]) for rank in range(world) if rank in models]
            agree("param_shapes", [(one.name, one.groups) for one in found])
            agree("steps", [(one.name, one.number("global_steps")) for one in found])
            if len(found) < world:
                remarks.append(_without_models(models, world))
        extra += [models[rank] for rank in sorted(models) if rank >= (world if first.of_stage_3 else 1)]
        if extra:
            what = f"{counted(len(extra), 'file')} of ranks that this run has not, {world:,} are its: {some(extra)}"
            remarks.append(Remark("CK150", what, "They are of a run with more ranks that was saved here before."))
        partitions = Partitions(self.folder, model, files)
        remarks += _of_other_ranks(files, partitions)
        return Engine(found, files, partitions), remarks


def finished(
    reader: Reader, root: Dict, builder: TreeBuilder, files: Sequence[tuple[str, Parsed]], remarks: Sequence[Remark]
) -> Parsed:
    """Return a tree as a checkpoint: its ``module`` is there to be asked for, and is not the weights."""
    parsed = side_by_side.of_tree(reader.folder, reader.probe, NAME, TRAITS, root, builder, list(files))
    for group in parsed.contents.groups:
        if not group.key and group.kind == "loose":
            group.kind = "mapping"
        elif group.key == "module" or group.key.startswith("module."):
            group.kind = "loose"
    return parsed._replace(remarks=tuple(remarks))


def _is_partitioned(model: ModelStates) -> bool:
    """Say whether ``module`` has stubs where the parameters were, as stage 3 leaves them."""
    module = model.module or {}
    shapes = [(name, shape) for group in (*(model.groups or []), model.frozen) for name, shape in group.items()]
    return any(name in module and not module[name].numel and prod(shape) for name, shape in shapes)


def _shards_in_groups(model: ModelStates) -> bool:
    """Say whether parameters were partitioned among some of the ranks alone, the others having copies (MiCS)."""
    zero = nodes.lookup(nodes.mapping_pairs(model.field("ds_config")) or [], "zero_optimization")
    return nodes.lookup(nodes.mapping_pairs(zero) or [], "mics_shard_size") is not None


def _other_settings(model: ModelStates, optim: OptimStates) -> Iterator[Remark]:
    """Say in what the settings of the engine differ between two files, which one process writes one after the other."""
    one, other = model.settings, optim.settings
    differing = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]
    if one and other and differing:
        what = f"settings of the engine differ between {model.name!r} and {optim.name!r}: {some(differing)}"
        yield Remark("CK148", what, side_by_side.ANOTHER_SAVE)


def _of_other_ranks(files: Sequence[OptimStates], partitions: Partitions) -> Iterator[Remark]:
    """
    Compare the parameters that each rank says it has parts of with those that lie in its place.

    Raises:
        MalformedFile: A file is that of another rank.
    """
    if any(one.slices is None for one in files):
        return
    expected = [partitions.names_of(rank) for rank in range(len(files))]
    wrong = [rank for rank, one in enumerate(files) if one.slices != expected[rank]]
    for rank in wrong:
        other = next((one for one in range(len(files)) if files[rank].slices == expected[one]), None)
        if other is not None:
            raise MalformedFile(
                f"{files[rank].name!r} holds the parameters of rank {other}, not of rank {rank}",
                kind="mixed-saves",
                hint="Its name is that of another file: get the folder again.",
            )
    if wrong:
        what = f"{files[wrong[0]].name!r} names other parameters than those whose place is in it"
        yield Remark("CK148", what, side_by_side.ANOTHER_SAVE)


def _without_masters(inside: str, model: ModelStates) -> Remark:
    there = f" in {inside!r}" if inside else f" beside {model.name!r}"
    whose = f"those of module in {model.name!r}" if model.module is not None else "as the files of the layers have them"
    what = f"no *_optim_states.pt{there}: the weights are {whose}"
    narrow = {info.dtype.name for info in (model.module or {}).values()}.intersection(NARROW)
    if not narrow:
        return Remark("CK166", f"{what}; training cannot go on as it was", "Copy the folder again, if it is to.")
    hint = "Copy the folder again, with these files; or take what the model computed with, `weights='module'`."
    return Remark("CK159", f"{what}, rounded to {some(sorted(narrow))}", hint)


def _without_models(models: Mapping[int, str], world: int) -> Remark:
    missing = [str(rank) for rank in range(world) if rank not in models]
    what = f"{len(missing):,} of {counted(world, 'file')} *_model_states.pt not there: rank {some(missing)}"
    return Remark("CK157", what, "No trained weight is in them; frozen ones would be.")


def missing_files(inside: str, what: str, needed: int, actual: int, hint: str) -> FileUnavailable:
    fact = f"{needed - actual:,} of {needed:,} {what} not there" + (f", in {inside!r}" if inside else "")
    return FileUnavailable.of_set(fact, hint, needed, actual)
