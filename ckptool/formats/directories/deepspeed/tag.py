"""
Read the states in one folder as one checkpoint.

Experts of a mixture, which DeepSpeed keeps in files of their own, are put back among the other weights:

    layer_0_expert_2_mp_rank_00_model_states.pt     a state dict, under the names of a model with all experts
    mp_rank_00_model_states.pt                      the rest of the model, and how many experts each layer has

See ``_save_moe_checkpoint`` in runtime/engine.py. Masters of experts are partitioned among those ranks alone that have
copies of them, so the weights are those that the model computed with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ckptool.checkpoints.companions import Remark
from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import FileUnavailable, MalformedFile
from ckptool.formats.directories import side_by_side
from ckptool.formats.directories.deepspeed import merged, pipeline, states
from ckptool.formats.directories.deepspeed.reader import NAME, TRAITS, Files, Reader, find, finished, missing_files
from ckptool.formats.directories.deepspeed.states import ModelStates
from ckptool.formats.directories.side_by_side import ANOTHER_SAVE
from ckptool.formats.directories.tree import TreeBuilder
from ckptool.formats.probe import Probe
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, PairList, Pairs
from ckptool.sources.folder import FolderSource
from ckptool.tensors.tensor import is_size

_AUTOEP: Final = "ds_autoep_layers"
_OF_EXPERT: Final = re.compile(r".*\.deepspeed_experts\.(\d{1,6})\..*")
_MOST: Final = 1 << 20


def read_tag(folder: FolderSource, probe: Probe, inside: str) -> Parsed:
    """Return what the states in a folder are, below the one that was opened; see the package."""
    files = find(folder, inside)
    reader = Reader(folder, probe)
    if files.layers:
        return pipeline.read(reader, files)
    if not files.models:
        raise missing_files(inside, "*_model_states.pt", 1, 0, "Saving was not finished, or they were not copied.")
    ranks = sorted(files.models)
    first = reader.model(files.models[ranks[0]][min(files.models[ranks[0]])])
    world = first.number("mp_world_size") or 1
    if missing := [rank for rank in range(world) if rank not in files.models]:
        raise missing_files(
            inside, "files of model-parallel ranks", world, world - len(missing), f"Not there: {missing[:8]}."
        )
    found = read(reader, files, first) if files.experts and len(ranks) == 1 else None
    if found is not None:
        return found
    if len(ranks) > 1 or files.experts:
        return _apart(reader, files)
    engine, remarks = reader.engine(inside, files.models[0], files.optims.get(0, {}))
    return whole(reader, engine, remarks)


def whole(reader: Reader, engine: merged.Engine, remarks: list[Remark]) -> Parsed:
    """Return the states of an engine as one checkpoint."""
    model = engine.models[0]
    files = [(name, parsed) for name, parsed in reader.read.items()]
    if engine.partitions is None:  # it is in one file
        one = side_by_side.of_file(reader.folder, reader.probe, NAME, TRAITS, *files[0])
        return one._replace(remarks=tuple(remarks))
    weights = merged.Weights(reader.folder, engine)
    builder = TreeBuilder(reader.probe.limits)
    module = model.module or {}
    own = merged.state_dict(builder, weights.tensors(module), model.field("module"), _entries(model))
    pairs: PairList = [("", own)]
    if not engine.of_stage_3:
        pairs.append(("module", builder.transplant(model.field("module"), model.rebuilder)))
    pairs.append(("optimizer", merged.optimizer(builder, engine, remarks)))
    client = [(key, builder.transplant(value, model.rebuilder)) for key, value in model.client()]
    pairs += merged.beside(iter(client), [key for key, _ in pairs])
    return finished(reader, Dict(pairs), builder, files, remarks)._replace(absent=tuple(weights.absent))


def _entries(model: ModelStates) -> Pairs:
    """Return the entries of ``module`` that are no tensors, and hold none."""
    bare = {path for path, _ in model.parsed.contents.extras}
    pairs = nodes.mapping_pairs(model.field("module")) or []
    return [(name, node) for name, node in pairs if type(name) is str and f"module.{name}" in bare]


def _apart(reader: Reader, files: Files) -> Parsed:
    """Return the files of model-parallel ranks, or of experts, side by side."""
    names = [path for ranks in files.models.values() for path in ranks.values()] + files.experts
    found = {path.rpartition("/")[2].removesuffix("_model_states.pt"): (path, reader.open(path)) for path in names}
    if files.experts:
        why = f"{counted(len(files.experts), 'file')} of experts beside the model, which are listed file by file"
    else:
        why = (
            f"{len(files.models):,} model-parallel ranks, listed rank by rank: along which dimension the parts of a "
            "tensor are joined is not in the files"
        )
    return side_by_side.of_files(reader.folder, reader.probe, NAME, TRAITS, found, why)


def read(reader: Reader, files: Files, model: ModelStates) -> Parsed | None:
    """
    Return a model with its experts; None where names do not say which expert a tensor is of.

    Raises:
        FileUnavailable: Files of experts are missing.
        MalformedFile: A file holds another expert than its name says, or a tensor that the model has already.
    """
    numbers = {_number(path): path for path in files.experts}
    _refuse_missing(model, numbers)
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
    builder = TreeBuilder(reader.probe.limits)
    whole = Call(Global("collections", "OrderedDict"), ())
    module = builder.transplant(model.field("module"), model.rebuilder)
    whole.pairs = list(nodes.mapping_pairs(module) or [])
    for number, parsed in found.items():
        if parsed.rebuilder is not None:
            whole.pairs += [(name, builder.transplant(node, parsed.rebuilder)) for name, node in pairs[number]]
    root: PairList = [("module", whole)]
    client = [(key, builder.transplant(value, model.rebuilder)) for key, value in model.client()]
    root += merged.beside(iter(client), ["module"])
    parsed = side_by_side.of_tree(
        reader.folder, reader.probe, NAME, TRAITS, Dict(root), builder, list(reader.read.items())
    )
    return parsed._replace(remarks=tuple(_remarks(files)))


def _number(path: str) -> tuple[int, int]:
    """Return the number of the layer, among those with experts, and of the expert."""
    match = states.EXPERT_FILE.fullmatch(path.rpartition("/")[2])
    assert match is not None  # it was found so
    return int(match[1] or 0), int(match[2])


def _refuse_missing(model: ModelStates, there: Mapping[tuple[int, int], str]) -> None:
    said = model.field("num_experts")
    counts = said if isinstance(said, list) and said and all(map(is_size, said)) else []
    if not counts or sum(counts) > _MOST:
        last = max(layer for layer, _ in there)
        counts = [1 + max((number for one, number in there if one == layer), default=0) for layer in range(last + 1)]
    layers = range(len(counts) if len(counts) > 1 else 1 + max(layer for layer, _ in there))
    needed = [(layer, number) for layer in layers for number in range(counts[min(layer, len(counts) - 1)])]
    missing = [f"expert {number} of layer {layer}" for layer, number in needed if (layer, number) not in there]
    if missing:
        fact = f"{len(missing):,} of {counted(len(needed), 'file')} of experts not there: {some(missing)}"
        raise FileUnavailable.of_set(fact, "Get the files of these experts.", len(needed), len(needed) - len(missing))


def _remarks(files: Files) -> list[Remark]:
    if not files.optims:
        return []
    what = "the float32 weights that the optimizer keeps are not put together where there are experts"
    return [Remark("CK151", what, "The weights are as the model computed with them.")]
