"""Read the states in one folder as one checkpoint."""

from __future__ import annotations

from ckptool.checkpoints.companions import Remark
from ckptool.checkpoints.parsed import Parsed
from ckptool.formats.directories import side_by_side
from ckptool.formats.directories.deepspeed import experts, merged, pipeline
from ckptool.formats.directories.deepspeed.reader import NAME, TRAITS, Files, Reader, find, finished, missing_files
from ckptool.formats.directories.deepspeed.states import ModelStates
from ckptool.formats.directories.tree import TreeBuilder
from ckptool.formats.probe import Probe
from ckptool.messages import counted
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Dict, PairList, Pairs
from ckptool.sources.folder import FolderSource


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
    found = experts.read(reader, files, first) if files.experts and len(ranks) == 1 else None
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
