"""
DeepSpeed's universal checkpoints: a folder for each parameter, whatever the number of ranks was.

    zero/<name of a parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
    zero/optimizer_state.pt        settings of the optimizer
    mp_rank_00_model_states.pt     as an engine saved it: buffers, shapes, the engine's state

Each file is ``{"param": tensor, …}``; those made from stage 3 are only the flat tensor, padded at its end. See
checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from posixpath import join
from typing import Final

from ckptool.checkpoints.parsed import Parsed, Remark
from ckptool.errors import FileUnavailable, MalformedFile
from ckptool.formats.directories import beside
from ckptool.formats.directories.deepspeed import TRAITS, Reader
from ckptool.formats.directories.deepspeed.states import MODEL_FILE, ModelStates, state_dict
from ckptool.formats.probe import Probe
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Dict, PairList, Pairs
from ckptool.sources.folder import FolderSource
from ckptool.tensors.tensor import TensorInfo, row_major

NAME: Final = "deepspeed_universal"
_POINTER: Final = "latest_universal"
_ZERO: Final = "zero"
_MASTER: Final = "fp32.pt"
_OPTIMIZER: Final = "optimizer_state.pt"
_FLOATS: Final = ("float", "bfloat")


def sniff(folder: FolderSource) -> bool:
    """Return whether the folder has a folder for each parameter, or names a folder that has."""
    return _has_parameters(folder, "") or (_POINTER in folder.files and bool(_saves(folder)))


def _saves(folder: FolderSource) -> list[str]:
    return [name for name in folder.folders if _has_parameters(folder, name)]


def _has_parameters(folder: FolderSource, inside: str) -> bool:
    zero = join(inside, _ZERO)
    return any(folder.has(f"{zero}/{name}/{_MASTER}") for name in folder.names(zero)[1])


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the files of all parameters; no tensor is read.

    Raises:
        FileUnavailable: The folder that is named, or the file of a parameter, is missing.
        MalformedFile: A file holds no tensor, or one of another size.
    """
    inside = "" if _has_parameters(folder, "") else beside.place(folder, _POINTER, _saves(folder))
    zero = join(inside, _ZERO)
    tree = Reader(folder, probe, NAME, TRAITS)
    models = [join(inside, name) for name in folder.names(inside)[0] if MODEL_FILE.fullmatch(name)]
    model = tree.model(models[0]) if models else None
    shapes = {name: shape for group in (model.groups if model else None) or [] for name, shape in group.items()}
    weights: dict[str, TensorInfo] = {}
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
                weights[name] = found
        if name not in weights:
            raise FileUnavailable(f"no {_MASTER!r} in {zero}/{name!r}", kind="missing-shards")
        state.append((name, Dict(own)))
    remarks: list[Remark] = []
    module = model.module or {} if model is not None else {}
    if model is not None:
        weights |= _others(model, weights, models, remarks)
        buffers = {name: info for name, info in module.items() if name in model.buffers}
        # Those that have a folder were converted to float32 for it.
        weights |= {name: info for name, info in buffers.items() if not info.dtype.name.startswith(_FLOATS)}
    root: PairList = [("", state_dict(tree, weights, None, []))]
    settings: Pairs = []
    if folder.has(f"{zero}/{_OPTIMIZER}"):
        parsed = tree.open(f"{zero}/{_OPTIMIZER}")
        groups = nodes.item(parsed.root, "param_groups")
        settings = [("param_groups", tree.transplant(groups, parsed.rebuilder))] if groups is not None else []
    root.append(("optimizer", Dict([("state", Dict(state)), *settings])))
    if model is not None:
        root += tree.client(model, [key for key, _ in root])
    return tree.finished(root, remarks)._replace(absent=tuple(name for name in module if name not in weights))


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


def _others(
    model: ModelStates, weights: Mapping[str, TensorInfo], models: list[str], remarks: list[Remark]
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
        remarks.append(Remark("CK154", what, f"Those of {model.name!r} are taken."))
    return found | rest
