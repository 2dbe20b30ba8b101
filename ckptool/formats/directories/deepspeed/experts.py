"""
Experts of a mixture, which DeepSpeed keeps in files of their own, put back among the other weights.

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
from ckptool.formats.directories.deepspeed import merged, states
from ckptool.formats.directories.deepspeed.reader import NAME, TRAITS, Files, Reader
from ckptool.formats.directories.deepspeed.states import ModelStates
from ckptool.formats.directories.side_by_side import ANOTHER_SAVE
from ckptool.formats.directories.tree import TreeBuilder
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, PairList
from ckptool.tensors.tensor import is_size

_AUTOEP: Final = "ds_autoep_layers"
_OF_EXPERT: Final = re.compile(r".*\.deepspeed_experts\.(\d{1,6})\..*")
_MOST: Final = 1 << 20


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
            raise MalformedFile(
                f"{numbers[number]!r} holds {name!r}, which is not of its expert",
                kind="mixed-saves",
                hint=ANOTHER_SAVE,
            )
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
        raise FileUnavailable(
            f"{len(missing):,} of {counted(len(needed), 'file')} of experts not there: {some(missing)}",
            kind="missing-shards",
            hint="Get the files of these experts.",
            needed=len(needed),
            actual=len(needed) - len(missing),
        )


def _remarks(files: Files) -> list[Remark]:
    if not files.optims:
        return []
    what = "the float32 weights that the optimizer keeps are not put together where there are experts"
    return [Remark("CK151", what, "The weights are as the model computed with them.")]
