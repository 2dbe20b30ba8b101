"""
What a pipeline of DeepSpeed saved: a file for each layer, and the optimizer's parts by stage of the pipeline.

The names of the model are the number of the layer and the name in it: ``3.weight``. Masters of the optimizer stand
under these names, too. What it has not (buffers, layers that are used twice) is as the layer's file has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ckptool.checkpoints.companions import Remark
from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import FileUnavailable, MalformedFile
from ckptool.formats.directories import side_by_side
from ckptool.formats.directories.deepspeed import merged
from ckptool.formats.directories.deepspeed.reader import NAME, TRAITS, Files, Reader, finished
from ckptool.formats.directories.tree import TreeBuilder
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, Inert, PairList, Pairs
from ckptool.tensors.tensor import TensorInfo

_LONGEST: Final = 7
"""Digits of the number of a layer."""


def read(reader: Reader, files: Files) -> Parsed:
    """
    Return the layers as one model; with tensor parallelism, one state dict of each rank.

    Raises:
        FileUnavailable: A layer is missing, or a file of the optimizer.
        MalformedFile: The files are of different saves.
    """
    last = max(max(layers) for layers in files.layers.values())
    for rank, layers in files.layers.items():
        _refuse_gaps(rank, layers, last)
    builder = TreeBuilder(reader.probe.limits)
    parts = {rank: _layers(reader, builder, files.layers[rank]) for rank in sorted(files.layers)}
    if len(parts) > 1:
        pairs: PairList = [(f"model_{rank:02}", part) for rank, part in parts.items()]
        why = (
            f"{len(parts):,} tensor-parallel ranks, listed rank by rank: along which dimension the parts of a tensor "
            "are joined is not in the files"
        )
        parsed = side_by_side.of_tree(
            reader.folder, reader.probe, NAME, TRAITS, Dict(pairs), builder, list(reader.read.items())
        )
        return parsed._replace(unmerged=why)
    (module,) = parts.values()
    return _merged(reader, builder, module, files)


def _refuse_gaps(rank: int, layers: dict[int, str], last: int) -> None:
    """Raise FileUnavailable where the numbers of the layers have a gap, up to the last one of any rank."""
    missing = [str(number) for number in range(last + 1) if number not in layers]
    if missing:
        fact = f"{len(missing):,} of {last + 1:,} layers not there: {some(missing)}" + (
            f" of tensor-parallel rank {rank}" if rank else ""
        )
        raise FileUnavailable.of_set(fact, "Get the files of these layers.", last + 1, len(layers))


def _layers(reader: Reader, builder: TreeBuilder, layers: dict[int, str]) -> Call:
    """Return the state dict of layers, under the names that the pipeline has."""
    found = Call(Global("collections", "OrderedDict"), ())
    found.pairs = []
    for number in sorted(layers):
        parsed = reader.open(layers[number])
        for name, node in nodes.mapping_pairs(parsed.root) or []:
            if type(name) is str and parsed.rebuilder is not None:
                found.pairs.append((f"{number}.{name}", builder.transplant(node, parsed.rebuilder)))
    return found


def _merged(reader: Reader, builder: TreeBuilder, module: Call, files: Files) -> Parsed:
    """Return the layers with the optimizer's masters in their place, and what else the stages saved."""
    remarks: list[Remark] = []
    engines = []
    for rank in sorted(files.models):
        engine, own = reader.engine("", files.models[rank], files.optims.get(rank, {}))
        remarks += own
        engines.append(engine)
    _refuse_missing(engines, files)
    pairs = module.pairs or []
    _refuse_others(builder, engines, pairs)
    remarks += _missing_stages(files)
    names = [name for name, _ in pairs]
    masters = {
        name: engine.partitions.master(name)
        for engine in engines
        if engine.partitions is not None
        for name in engine.partitions.places
    }
    root: PairList = []
    if not masters:
        root.append(("", module))
    else:
        root += [("", _with(builder, module, masters)), ("module", module)]
        _note_rounded(builder, pairs, masters, remarks)
    trained = [engine for engine in engines if engine.partitions is not None]
    if trained:
        root.append(("optimizer", _optimizers(builder, trained, remarks)))
    if engines:
        model = engines[0].models[0]
        client = [(key, builder.transplant(value, model.rebuilder)) for key, value in model.client()]
        root += merged.beside(iter(client), ["", "module", "optimizer", *names])
    return finished(reader, Dict(root), builder, list(reader.read.items()), remarks)


def _refuse_missing(engines: list[merged.Engine], files: Files) -> None:
    """Raise FileUnavailable where stages of the pipeline have parameters of layers without a file."""
    named = {name.partition(".")[0] for engine in engines for group in engine.models[0].groups or [] for name in group}
    numbers = {int(one) for one in named if one.isdecimal() and len(one) < _LONGEST}
    there = {number for layers in files.layers.values() for number in layers}
    if missing := sorted(numbers - there):
        fact = (
            f"{counted(len(missing), 'layer')} not there, of which the optimizer has parameters: "
            f"{some([str(number) for number in missing])}"
        )
        raise FileUnavailable.of_set(fact, "Get the files of these layers.", len(numbers | there), len(there))


def _refuse_others(builder: TreeBuilder, engines: list[merged.Engine], pairs: Pairs) -> None:
    """Raise MalformedFile where the file of a layer has not the parameters that the optimizer has of it."""
    infos = {name: builder.rebuilder.tensor(node) for name, node in pairs}
    for name, shape in (item for one in engines for group in one.models[0].groups or [] for item in group.items()):
        info = infos.get(name)
        if not name.partition(".")[0].isdecimal() or (info is not None and info.shape == shape):
            continue
        there = "not in the file of its layer" if info is None else f"{list(info.shape)} in the file of its layer"
        fact = f"{name!r} is {list(shape)} by param_shapes, and {there}"
        raise MalformedFile(fact, kind="mixed-saves", hint=side_by_side.ANOTHER_SAVE)


def _missing_stages(files: Files) -> Iterator[Remark]:
    """Say which stages of the pipeline have no file of the engine, of which others have one."""
    last = max((*files.models, *files.optims), default=-1)
    if files.models and (missing := [str(rank) for rank in range(last + 1) if rank not in files.models]):
        what = f"no mp_rank_*_model_states.pt of {counted(len(missing), 'stage')}: {some(missing)}"
        yield Remark("CK153", what, "Without it, the weights are as the files of the layers have them.")


def _with(builder: TreeBuilder, module: Call, masters: dict[str, TensorInfo]) -> Inert:
    made = Call(module.func, ())
    made.pairs = [
        (name, builder.tensor(masters[name]) if name in masters else node) for name, node in module.pairs or []
    ]
    return made


def _note_rounded(builder: TreeBuilder, pairs: Pairs, masters: dict[str, TensorInfo], remarks: list[Remark]) -> None:
    infos = ((name, builder.rebuilder.tensor(node)) for name, node in pairs if name not in masters)
    rounded = [name for name, info in infos if info is not None and info.dtype.name in ("bfloat16", "float16")]
    if rounded:
        what = f"{counted(len(rounded), 'tensor')} without a float32 master under its name: {some(rounded)}"
        code = "CK159" if any(code == "CK166" for code, _, _ in remarks) else "CK151"  # of stages without an optimizer
        remarks.append(Remark(code, what, "They are as the model computed with them: maybe of layers used twice."))


def _optimizers(builder: TreeBuilder, engines: list[merged.Engine], remarks: list[Remark]) -> Inert:
    """Return the states of the optimizers of all stages as one."""
    state: PairList = []
    groups: list[Inert] = []
    for engine in engines:
        one = nodes.mapping_pairs(merged.optimizer(builder, engine, remarks)) or []
        state += nodes.mapping_pairs(nodes.lookup(one, "state")) or []
        said = nodes.lookup(one, "param_groups")
        groups += said if isinstance(said, list) else []
    return Dict([("state", Dict(state)), ("param_groups", groups)])
