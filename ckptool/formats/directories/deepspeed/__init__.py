"""
Folders of DeepSpeed at every stage of ZeRO: files of ranks, merged.

    latest                                          text: the tag, which is a folder beside it
    <tag>/mp_rank_00_model_states.pt                stages 0 to 2; of stage 3, one for each rank
    <tag>/zero_pp_rank_0_mp_rank_00_optim_states.pt stages 1 to 3: one for each data-parallel rank
    <tag>/layer_03-model_states.pt                  pipelines: one for each layer

Only the files of states are read, not the scripts that are beside them. See runtime/engine.py.

Pipelines have a file for each layer, and the optimizer's parts by stage. The names of the model are the number of the
layer and the name in it: ``3.weight``. Masters of the optimizer have these names, too. What it lacks (buffers, layers
that are used twice) is taken from the layer's file.

Experts of a mixture, which DeepSpeed keeps in files of their own, are put back among the other weights:

    layer_0_expert_2_mp_rank_00_model_states.pt     a state dict, under the names of a model with all experts
    mp_rank_00_model_states.pt                      the rest of the model, and how many experts each layer has

See ``_save_moe_checkpoint`` in runtime/engine.py. Masters of experts are partitioned among those ranks alone that have
copies of them, so the weights are those that the model computed with.

A universal checkpoint has a folder for each parameter, whatever the number of ranks was.

    zero/<name of a parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
    zero/optimizer_state.pt        settings of the optimizer
    mp_rank_00_model_states.pt     as an engine saved it: buffers, shapes, the engine's state

Each file is ``{"param": tensor, …}``; those made from stage 3 are only the flat tensor, padded at its end. See
checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from posixpath import join
from typing import Final, NamedTuple

from ckptool.checkpoints.parsed import Parsed, Remark, Traits
from ckptool.errors import FileUnavailable, MalformedFile
from ckptool.formats import filenames
from ckptool.formats.directories import beside
from ckptool.formats.directories.deepspeed import states
from ckptool.formats.directories.deepspeed.states import (
    NARROW,
    Engine,
    ModelStates,
    OptimStates,
    optimizer,
    ordered_dict,
    state_dict,
    weights,
)
from ckptool.formats.directories.side_by_side import (
    ANOTHER_SAVE,
    FolderTree,
    TreeBuilder,
    agree,
    of_larger_run,
)
from ckptool.formats.probe import Probe
from ckptool.formats.sharded import refuse_missing
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Dict, PairList, Pairs
from ckptool.sources.folder import FolderSource
from ckptool.tensors.tensor import TensorInfo, is_size, row_major

NAME: Final = "deepspeed"
TRAITS: Final = Traits(has_tree=True, tree_is_made=True, loader="deepspeed.DeepSpeedEngine.load_checkpoint")
_LATEST: Final = "latest"
_AUTOEP: Final = "ds_autoep_layers"
_OF_EXPERT: Final = re.compile(r".*\.deepspeed_experts\.(\d{1,6})\..*")
_NOT_JOINED: Final = "listed rank by rank: along which dimension the parts of a tensor are joined is not in the files"
_MOST: Final = 1 << 20
_LONGEST: Final = 7
"""Most digits of the number of a layer."""
_UNIVERSAL: Final = "deepspeed_universal"
_POINTER: Final = "latest_universal"
_ZERO: Final = "zero"
_MASTER: Final = "fp32.pt"
_OPTIMIZER: Final = "optimizer_state.pt"
_FLOATS: Final = ("float", "bfloat")


def sniff(folder: FolderSource) -> bool:
    """Return whether an engine saved into the folder, or into folders in it, of which ``latest`` names one."""
    if _has_states(folder, ""):
        return True
    # A trainer has the model's weights there, and the engine's states beside.
    return _LATEST in folder.files and bool(_tags(folder)) and not filenames.has_weights(folder.files)


def _tags(folder: FolderSource) -> list[str]:
    return [name for name in folder.folders if _has_states(folder, name)]


def _has_states(folder: FolderSource, inside: str) -> bool:
    kinds = (states.MODEL_FILE, states.OPTIM_FILE, states.LAYER_FILE, states.EXPERT_FILE)
    return any(kind.fullmatch(name) for name in folder.names(inside)[0] for kind in kinds)


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the states of all ranks, and join what was partitioned; no tensor is read.

    Raises:
        FileUnavailable: ``latest`` names a folder that is not there, or files of ranks are missing.
        MalformedFile: The files are of different saves, or do not fit together.
    """
    inside = "" if _has_states(folder, "") else beside.place(folder, _LATEST, _tags(folder))
    files = _find(folder, inside)
    reader = Reader(folder, probe, NAME, TRAITS)
    if files.layers:
        return _pipeline(reader, files)
    if not files.models:
        raise _missing_files(inside, "*_model_states.pt", 1, 0, "Saving was not finished, or they were not copied.")
    ranks = sorted(files.models)
    first = reader.model(files.models[ranks[0]][min(files.models[ranks[0]])])
    world = first.number("mp_world_size") or 1
    if missing := [rank for rank in range(world) if rank not in files.models]:
        what, actual = "files of model-parallel ranks", world - len(missing)
        raise _missing_files(inside, what, world, actual, f"Not there: {missing[:8]}.")
    if len(ranks) == 1 and not files.experts:
        return _whole(reader, reader.engine(inside, files.models[0], files.optims.get(0, {})))
    found = _mixture(reader, files, first) if len(ranks) == 1 else None
    if found is not None:
        return found
    names = [path for of_rank in files.models.values() for path in of_rank.values()] + [*files.experts]
    for name in names:
        reader.open(name)
    why = f"{len(files.models):,} model-parallel ranks, {_NOT_JOINED}"
    if files.experts:
        why = f"{counted(len(files.experts), 'file')} of experts beside the model, which are listed file by file"
    return reader.side_by_side({path.rpartition("/")[2].removesuffix("_model_states.pt"): path for path in names}, why)


class Files(NamedTuple):
    """The names of the files in a folder of states, by the ranks or the layer in them."""

    models: dict[int, dict[int, str]]
    """By model-parallel rank, then by data-parallel rank, which is 0 if the name has none."""
    optims: dict[int, dict[int, str]]
    layers: dict[int, dict[int, str]]
    """By tensor-parallel rank, then by layer."""
    experts: dict[str, tuple[int, int]]
    """The number of the layer, among the layers with experts, and of the expert, by path."""


def _find(folder: FolderSource, inside: str) -> Files:
    """
    Return the files in a folder of states, by their names.

    Raises:
        MalformedFile: Two files are of one rank.
    """
    found = Files({}, {}, {}, {})
    of_ranks = (found.models, states.MODEL_FILE), (found.optims, states.OPTIM_FILE), (found.layers, states.LAYER_FILE)
    for name in folder.names(inside)[0]:
        path = join(inside, name)
        if match := states.EXPERT_FILE.fullmatch(name):
            found.experts[path] = int(match[1] or 0), int(match[2])
        for kind, pattern in of_ranks:
            if match := pattern.fullmatch(name):
                other = kind.setdefault(int(match[2] or 0), {}).setdefault(int(match[1] or 0), path)
                if other is not path:
                    fact = f"{other!r} and {path!r} are of one rank"
                    raise MalformedFile(fact, kind="mixed-saves", hint="Take away the one of another run.")
    return found


class Reader(FolderTree):
    """Reads files of states, and makes a tree of them."""

    def model(self, name: str) -> ModelStates:
        """Return the content of a file of model states."""
        return ModelStates(name, self.open(name))

    def engine(self, inside: str, models: Mapping[int, str], optims: Mapping[int, str]) -> Engine:
        """
        Return the states of the data-parallel ranks of one model-parallel rank.

        Raises:
            FileUnavailable: Some are missing.
            MalformedFile: They are of different saves.
        """
        model = self.model(models[min(models)])
        if not optims:
            self.remarks += _without_optims(inside, model)
            return Engine(self.folder.cancellation, [model], [])
        first = OptimStates(optims[min(optims)], self.open(optims[min(optims)]))
        world = max(first.counts) if first.counts else max(optims) + 1
        missing = [rank for rank in range(world) if rank not in optims]
        if missing:
            hint = f"Not there: rank {some(list(map(str, missing)))}."
            if model.module is not None and not first.of_stage_3:
                hint += f" The weights as the model computed with them are whole in {model.name!r}: open that file."
            raise _missing_files(inside, "*_optim_states.pt", world, world - len(missing), hint)
        said = model.number("dp_world_size")
        zero = nodes.item(model.field("ds_config"), "zero_optimization")
        # MiCS partitions parameters among some of the ranks only: the others have copies.
        if said is not None and said != world and nodes.item(zero, "mics_shard_size") is None:
            fact = f"{model.name!r} is of {counted(said, 'data-parallel rank')}, the optimizer is in {world:,} parts"
            raise MalformedFile(fact, kind="mixed-saves", hint=ANOTHER_SAVE)
        extra = [optims[rank] for rank in sorted(optims) if rank >= world]
        files = [OptimStates(optims[rank], self.open(optims[rank])) for rank in range(world)]
        agree("releases of DeepSpeed", [(one.name, one.version) for one in (model, *files)])
        agree("stages of ZeRO", [(one.name, one.stage) for one in files])
        agree("numbers of partitions", [(one.name, one.counts or None) for one in files])
        states.steps_agree(files)
        self.remarks += _other_settings(model, first)
        found = [model]
        if first.of_stage_3:
            found = [self.model(models[rank]) for rank in range(world) if rank in models]
            agree("param_shapes", [(one.name, one.groups) for one in found])
            agree("steps", [(one.name, one.number("global_steps")) for one in found])
            if len(found) < world:
                gone = [str(rank) for rank in range(world) if rank not in models]
                what = f"{len(gone):,} of {counted(world, 'file')} *_model_states.pt not there: rank {some(gone)}"
                self.remarks.append(Remark("CK157", what, "No trained weight is in them; frozen ones would be."))
        extra += [models[rank] for rank in sorted(models) if rank >= (world if first.of_stage_3 else 1)]
        if extra:
            self.remarks.append(of_larger_run(extra, world))
        engine = Engine(self.folder.cancellation, found, files)
        self.remarks += _of_other_ranks(engine)
        return engine

    def client(self, model: ModelStates, taken: Iterable[str]) -> Pairs:
        """Return the engine's state, and what the client added to it; a name that is ``taken`` gets a mark."""
        used = set(taken)
        found: PairList = []
        for key, value in model.pairs:
            if type(key) is str and key not in states.STRUCTURE and value is not None:
                while key in used:
                    key += "_"
                used.add(key)
                found.append((key, self.transplant(value, model.rebuilder)))
        return found

    def finished(self, root: PairList) -> Parsed:
        """Return a tree as a checkpoint; its ``module`` can be requested, but is not the weights."""
        parsed = self.parsed(Dict(root))
        for group in parsed.contents.groups:
            if not group.key and group.kind == "loose":
                group.kind = "mapping"
            elif group.key == "module" or group.key.startswith("module."):
                group.kind = "loose"
        return parsed


def _without_optims(inside: str, model: ModelStates) -> Iterator[Remark]:
    """
    Yield a remark on the weights where the files of the optimizer are missing.

    Raises:
        FileUnavailable: The weights were in them.
    """
    module = model.module or {}
    empty = {name for name, info in module.items() if not info.numel}  # stubs that stage 3 leaves of parameters
    groups = (*(model.groups or []), model.frozen)
    if any(name in empty and prod(shape) for group in groups for name, shape in group.items()):
        world = model.number("dp_world_size") or 1
        raise _missing_files(inside, "*_optim_states.pt", world, 0, "The values of the parameters are in them.")
    there = f" in {inside!r}" if inside else f" beside {model.name!r}"
    whose = f"those of module in {model.name!r}" if model.module is not None else "as the files of the layers have them"
    what = f"no *_optim_states.pt{there}: the weights are {whose}"
    narrow = {info.dtype.name for info in module.values()}.intersection(NARROW)
    if model.groups is not None and narrow:
        hint = "Copy the folder again, with these files; or take what the model computed with, `weights='module'`."
        yield Remark("CK159", f"{what}, rounded to {some(sorted(narrow))}", hint)
    elif model.groups is not None:
        yield Remark("CK166", f"{what}; training cannot go on as it was", "Copy the folder again, if it is to.")


def _other_settings(model: ModelStates, optim: OptimStates) -> Iterator[Remark]:
    """Yield a remark on settings of the engine that differ in two files, which one process writes in turn."""
    one, other = model.settings, optim.settings
    differing = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]
    if one and other and differing:
        what = f"settings of the engine differ between {model.name!r} and {optim.name!r}: {some(differing)}"
        yield Remark("CK148", what, ANOTHER_SAVE)


def _of_other_ranks(engine: Engine) -> Iterator[Remark]:
    """
    Compare the parameters that the file of each rank names with those in its place.

    Raises:
        MalformedFile: A file is that of another rank.
    """
    files = engine.optims
    if any(one.slices is None for one in files):
        return
    expected = [engine.names_of(rank) for rank in range(len(files))]
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
        yield Remark("CK148", what, ANOTHER_SAVE)


def _missing_files(inside: str, what: str, needed: int, actual: int, hint: str) -> FileUnavailable:
    fact = f"{needed - actual:,} of {needed:,} {what} not there" + (f", in {inside!r}" if inside else "")
    return FileUnavailable.of_set(fact, hint, needed, actual)


def _whole(reader: Reader, engine: Engine) -> Parsed:
    model = engine.models[0]
    if not engine.optims:  # it is in one file
        return reader.parsed(reader.root_of(model.name))
    tensors, absent = weights(engine)
    bare = {path for path, _ in model.parsed.contents.extras}  # entries of ``module`` that hold no tensor
    pairs = nodes.mapping_pairs(model.field("module")) or []
    others = [(name, node) for name, node in pairs if type(name) is str and f"module.{name}" in bare]
    root: PairList = [("", state_dict(reader, tensors, model.field("module"), others))]
    if not engine.of_stage_3:
        root.append(("module", reader.transplant(model.field("module"), model.rebuilder)))
    state, groups = optimizer(reader, engine)
    first = engine.optims[0]
    kept = [(key, value) for key, value in first.inner if type(key) is str and key not in states.OF_PARTITION]
    others = [(key, reader.transplant(value, first.rebuilder)) for key, value in kept]
    root.append(("optimizer", Dict([("state", Dict(state)), ("param_groups", groups), *others])))
    root += reader.client(model, [key for key, _ in root])
    return reader.finished(root)._replace(absent=tuple(absent))


def _mixture(reader: Reader, files: Files, model: ModelStates) -> Parsed | None:
    """
    Return a model with its experts; None where names do not say which expert a tensor is of.

    Raises:
        FileUnavailable: Files of experts are missing.
        MalformedFile: A file holds another expert than its name says, or a tensor that the model has already.
    """
    numbers = {number: path for path, number in files.experts.items()}
    _refuse_missing_experts(model, numbers)
    found = {number: reader.open(path) for number, path in sorted(numbers.items())}
    pairs = {number: nodes.mapping_pairs(parsed.root) or [] for number, parsed in found.items()}
    names = {name: number for number, own in pairs.items() for name, _ in own if type(name) is str}
    if model.field(_AUTOEP) is not None or not all(map(_OF_EXPERT.fullmatch, names)):
        return None
    for name, number in names.items():
        match = _OF_EXPERT.fullmatch(name)
        if match is None or int(match[1]) != number[1] or name in (model.module or {}):
            fact = f"{numbers[number]!r} holds {name!r}, which is not of its expert"
            raise MalformedFile(fact, kind="mixed-saves", hint=ANOTHER_SAVE)
    module = reader.transplant(model.field("module"), model.rebuilder)
    joined = list(nodes.mapping_pairs(module) or [])
    for number, parsed in found.items():
        joined += [(name, reader.transplant(node, parsed.rebuilder)) for name, node in pairs[number]]
    root: PairList = [("module", ordered_dict(joined)), *reader.client(model, ["module"])]
    if files.optims:
        what = "the float32 weights that the optimizer keeps are not put together where there are experts"
        reader.remarks.append(Remark("CK151", what, "The weights are as the model computed with them."))
    return reader.parsed(Dict(root))


def _refuse_missing_experts(model: ModelStates, there: Mapping[tuple[int, int], str]) -> None:
    said = model.field("num_experts")
    counts = said if isinstance(said, list) and said and all(map(is_size, said)) else []
    if not counts or sum(counts) > _MOST:
        last = max(layer for layer, _ in there)
        counts = [1 + max((number for one, number in there if one == layer), default=0) for layer in range(last + 1)]
    layers = range(len(counts) if len(counts) > 1 else 1 + max(layer for layer, _ in there))
    needed = [(layer, number) for layer in layers for number in range(counts[min(layer, len(counts) - 1)])]
    missing = [f"expert {number} of layer {layer}" for layer, number in needed if (layer, number) not in there]
    what = f"{counted(len(needed), 'file')} of experts"
    refuse_missing(missing, len(needed), what, "Get the files of these experts.")


def _pipeline(reader: Reader, files: Files) -> Parsed:
    """
    Return the layers as one model; with tensor parallelism, one state dict of each rank.

    Raises:
        FileUnavailable: A layer is missing, or a file of the optimizer.
        MalformedFile: The files are of different saves.
    """
    count = 1 + max(max(layers) for layers in files.layers.values())
    parts: dict[int, PairList] = {}
    for rank, layers in sorted(files.layers.items()):
        missing = [str(number) for number in range(count) if number not in layers]
        what = f"{count:,} layers" + (f" of tensor-parallel rank {rank}" if rank else "")
        refuse_missing(missing, count, what, "Get the files of these layers.")
        found = {number: reader.open(layers[number]) for number in sorted(layers)}
        parts[rank] = [
            (f"{number}.{name}", reader.transplant(node, parsed.rebuilder))
            for number, parsed in found.items()
            for name, node in (nodes.mapping_pairs(parsed.root) or [])
            if type(name) is str and parsed.rebuilder is not None
        ]
    if len(parts) > 1:
        why = f"{len(parts):,} tensor-parallel ranks, {_NOT_JOINED}"
        ranks: PairList = [(f"model_{rank:02}", ordered_dict(part)) for rank, part in parts.items()]
        return reader.parsed(Dict(ranks))._replace(unmerged=why)
    return _stages(reader, next(iter(parts.values())), files)


def _stages(reader: Reader, pairs: PairList, files: Files) -> Parsed:
    """Return the layers with the optimizer's masters in their place, and what else the stages saved."""
    engines = [reader.engine("", files.models[rank], files.optims.get(rank, {})) for rank in sorted(files.models)]
    _refuse_others(reader, engines, files, pairs)
    last = max((*files.models, *files.optims), default=-1)
    if files.models and (missing := [str(rank) for rank in range(last + 1) if rank not in files.models]):
        what = f"no mp_rank_*_model_states.pt of {counted(len(missing), 'stage')}: {some(missing)}"
        hint = "Without it, the weights are as the files of the layers have them."
        reader.remarks.append(Remark("CK153", what, hint))
    names = [name for name, _ in pairs]
    masters = {name: engine.master(name) for engine in engines for name in engine.places}
    root: PairList = [("", ordered_dict(pairs))]
    if masters:
        trained = [(name, reader.tensor(masters[name]) if name in masters else node) for name, node in pairs]
        root = [("", ordered_dict(trained)), ("module", ordered_dict(pairs))]
        _note_rounded(reader, pairs, masters)
    parted = [optimizer(reader, engine) for engine in engines if engine.optims]
    if parted:
        state = [pair for own, _ in parted for pair in own]
        groups = [group for _, own in parted for group in own]
        root.append(("optimizer", Dict([("state", Dict(state)), ("param_groups", groups)])))
    if engines:
        root += reader.client(engines[0].models[0], ["", "module", "optimizer", *names])
    return reader.finished(root)


def _refuse_others(builder: TreeBuilder, engines: list[Engine], files: Files, pairs: Pairs) -> None:
    """Raise FileUnavailable or MalformedFile if files of layers lack parameters that the optimizer has."""
    shapes = [item for one in engines for group in one.models[0].groups or [] for item in group.items()]
    named = {name.partition(".")[0] for name, _ in shapes}
    numbers = {int(one) for one in named if one.isdecimal() and len(one) < _LONGEST}
    there = {number for layers in files.layers.values() for number in layers}
    missing = [str(number) for number in sorted(numbers - there)]
    what = f"{counted(len(numbers), 'layer')} of which the optimizer has parameters"
    refuse_missing(missing, len(numbers), what, "Get the files of these layers.")
    infos = {name: builder.rebuilder.tensor(node) for name, node in pairs}
    for name, shape in shapes:
        info = infos.get(name)
        if name.partition(".")[0].isdecimal() and (info is None or info.shape != shape):
            found = "not in the file of its layer" if info is None else f"{list(info.shape)} in the file of its layer"
            fact = f"{name!r} is {list(shape)} by param_shapes, and {found}"
            raise MalformedFile(fact, kind="mixed-saves", hint=ANOTHER_SAVE)


def _note_rounded(reader: Reader, pairs: Pairs, masters: dict[str, TensorInfo]) -> None:
    infos = ((name, reader.rebuilder.tensor(node)) for name, node in pairs if name not in masters)
    rounded = [name for name, info in infos if info is not None and info.dtype.name in ("bfloat16", "float16")]
    if rounded:
        what = f"{counted(len(rounded), 'tensor')} without a float32 master under its name: {some(rounded)}"
        hint = "They are as the model computed with them: maybe of layers used twice."
        code = "CK159" if any(one.code == "CK166" for one in reader.remarks) else "CK151"  # of stages without optimizer
        reader.remarks.append(Remark(code, what, hint))


def sniff_universal(folder: FolderSource) -> bool:
    """Return whether the folder has a folder for each parameter, or names a folder that has."""
    return _has_parameters(folder, "") or (_POINTER in folder.files and bool(_universal_saves(folder)))


def _universal_saves(folder: FolderSource) -> list[str]:
    return [name for name in folder.folders if _has_parameters(folder, name)]


def _has_parameters(folder: FolderSource, inside: str) -> bool:
    zero = join(inside, _ZERO)
    return any(folder.has(f"{zero}/{name}/{_MASTER}") for name in folder.names(zero)[1])


def read_universal(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the files of all parameters; no tensor is read.

    Raises:
        FileUnavailable: The folder that is named, the file of a parameter, or that of the model, is missing.
        MalformedFile: A file holds no tensor, or one of another size.
    """
    inside = "" if _has_parameters(folder, "") else beside.place(folder, _POINTER, _universal_saves(folder))
    zero = join(inside, _ZERO)
    tree = Reader(folder, probe, _UNIVERSAL, TRAITS)
    models = [join(inside, name) for name in folder.names(inside)[0] if states.MODEL_FILE.fullmatch(name)]
    if not models:  # buffers and ties are nowhere else
        raise _missing_files(inside, "*_model_states.pt", 1, 0, "Copy the folder again, with all of its files.")
    model = tree.model(models[0])
    shapes = {name: shape for group in model.groups or [] for name, shape in group.items()}
    found_weights: dict[str, TensorInfo] = {}
    state: PairList = []
    for name in folder.names(zero)[1]:
        own: PairList = []
        for file in [one for one in folder.names(f"{zero}/{name}")[0] if one.endswith(".pt")]:
            path = f"{zero}/{name}/{file}"
            parsed = tree.open(path)
            found = _tensor(path, parsed, shapes.get(name))
            if file != _MASTER:
                own.append((file.removesuffix(".pt"), parsed.root if found is None else tree.tensor(found)))
            elif found is None:
                hint = "Convert the checkpoint again."
                raise MalformedFile(f"{path!r} holds no tensor", kind="malformed-states", hint=hint)
            else:
                found_weights[name] = found
        if name not in found_weights:
            raise FileUnavailable(f"no {_MASTER!r} in {zero}/{name!r}", kind="missing-shards")
        state.append((name, Dict(own)))
    module = model.module or {}
    found_weights |= _without_folder(tree, model, found_weights, models)
    buffers = {name: info for name, info in module.items() if name in model.buffers}
    # Those that have a folder were converted to float32 for it.
    found_weights |= {name: info for name, info in buffers.items() if not info.dtype.name.startswith(_FLOATS)}
    root: PairList = [("", state_dict(tree, found_weights, None, []))]
    settings: Pairs = []
    if folder.has(f"{zero}/{_OPTIMIZER}"):
        parsed = tree.open(f"{zero}/{_OPTIMIZER}")
        groups = nodes.item(parsed.root, "param_groups")
        settings = [("param_groups", tree.transplant(groups, parsed.rebuilder))] if groups is not None else []
    root.append(("optimizer", Dict([("state", Dict(state)), *settings])))
    root += tree.client(model, [key for key, _ in root])
    return tree.finished(root)._replace(absent=tuple(name for name in module if name not in found_weights))


def _tensor(path: str, parsed: Parsed, shape: tuple[int, ...] | None) -> TensorInfo | None:
    """Return the tensor in the file of a parameter, with the shape that it has in the model."""
    if parsed.rebuilder is None:
        return None
    bare = parsed.rebuilder.tensor(parsed.root)
    if bare is None:
        return parsed.rebuilder.tensor(nodes.item(parsed.root, "param"))
    if shape is None or len(bare.shape) != 1 or bare.shape == shape or not bare.is_contiguous or not bare.numel:
        return bare
    if bare.numel < prod(shape):
        fact = f"{path!r} has {bare.numel:,} elements, its parameter {prod(shape):,}"
        raise MalformedFile(fact, kind="malformed-states", needed=prod(shape), actual=bare.numel)
    return bare._replace(shape=shape, stride=row_major(shape))


def _without_folder(
    tree: Reader, model: ModelStates, weights: Mapping[str, TensorInfo], models: list[str]
) -> dict[str, TensorInfo]:
    """Return what has no folder: buffers and frozen parameters, and names of parameters that are shared."""
    found = {name: weights[kept] for name, kept in model.shared.items() if kept in weights and name not in weights}
    rest = {
        name: info
        for name, info in (model.module or {}).items()
        if name not in weights and name not in found and (info.numel or name in model.buffers)
    }
    if rest and len(models) > 1:
        what = f"{counted(len(rest), 'tensor')} of {counted(len(models), 'model-parallel rank')}: {some(list(rest))}"
        tree.remarks.append(Remark("CK154", what, f"Those of {model.name!r} are taken."))
    return found | rest
