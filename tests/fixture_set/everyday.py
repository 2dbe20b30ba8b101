"""The files that people really have: trained weights in every form, wrapper, protocol and format."""

from __future__ import annotations

import argparse
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from ckptool.reference.trainer import HABITS, Parts, Trained, ema_average, parts_of, wrap
from tests.against_torch import oracle
from tests.fixture_set.cases import CONTAINERS, Case, Place, torch_cases
from tests.fixture_set.forging import pretend, tagged

if TYPE_CHECKING:
    from collections.abc import Iterator

_WRAPPERS = {
    "none": ("plain", ""),
    "data-parallel": ("data-parallel", " in DataParallel"),
    "ddp": ("ddp", " in DistributedDataParallel"),
    "compile": ("compiled", " through torch.compile"),
}
_HABITS = {
    "state_dict": ("state_dict", "the state_dict"),
    "model": ("model", "the whole model"),
    "checkpoint": (
        "checkpoint",
        "a training checkpoint: model, optimizer, scheduler, epoch, an argparse.Namespace, a numpy scalar",
    ),
    "ema": ("state_dict", "the state_dict of an AveragedModel"),
    "list": ("checkpoint", "a list of two modules, the model and its AveragedModel"),
    "method": ("model", "the mistake of saving model.state_dict, the method"),
}
"""The form of a file that is saved so, and what it shows."""
_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def every_habit(trained: Trained, device: torch.device, *, forge: str | None = None) -> Iterator[Case]:
    """
    Yield each habit of saving, in each wrapper, from a device.

    With ``forge`` the tensors stay where they are and claim to be on that device, and wrappers claim it too.
    On a CPU, and on MPS, there is nothing to be parallel over: plain models only.
    """
    tag = forge or str(device)
    for how, (slug, words) in _WRAPPERS.items():
        if how != "none" and not tag.startswith("cuda"):
            continue
        parts = _parts(trained, how, device, tag)
        place = Place(tag, forged=True, tag_of=tagged(tag, on_cpu=_left_on_cpu(parts))) if forge else Place(tag)
        if forge:
            pretend(parts.wrapped, torch.device(forge))
            pretend(parts.ema, torch.device(forge))
        for habit_name, (form, what) in _HABITS.items():
            name = f"{habit_name.replace('_', '-')}-{slug}"
            shows = f"{what}; {type(trained.model).__name__}{words}"
            # The old format copies the source of every class into the file: 100 KB a time for a wrapper.
            only_zip = how != "none" and habit_name in ("list", "method")
            yield from torch_cases(
                name,
                HABITS[habit_name](parts),
                form=form,
                shows=shows,
                place=place,
                containers=["zip"] if only_zip else CONTAINERS,
            )


def lenet(trained: Trained, device: torch.device, *, forge: str | None = None) -> Iterator[Case]:
    """Yield the worked example: LeNet from a CPU, and from a GPU as it is and in DataParallel."""
    tag = forge or str(device)
    place = Place(tag, forged=True, tag_of=tagged(tag)) if forge else Place(tag)
    model = deepcopy(trained.model)
    parallel = wrap(deepcopy(trained.model).to(device), "data-parallel", device)
    if forge:
        pretend(parallel, torch.device(forge))
    shown = "the state_dict; LeNet"
    on_cpu = model.cpu().state_dict()
    yield from torch_cases("lenet-state-dict", on_cpu, form="state_dict", shows=shown, containers=["zip"])
    yield from torch_cases("lenet-model", parallel.module, form="model", shows="the whole model; LeNet", place=place)
    yield from torch_cases(
        "lenet-state-dict-data-parallel",
        parallel.state_dict(),
        form="state_dict",
        shows=f"{shown} in DataParallel",
        place=place,
        containers=["zip"],
    )


def nested_model(trained: Trained) -> Iterator[Case]:
    """Yield the checkpoint of detection trainers: a whole model, in half precision, inside a dictionary."""
    content = {"epoch": -1, "model": deepcopy(trained.model).half(), "ema": None, "optimizer": None}
    shows = "a dictionary with a whole model in float16 inside; TiedReader"
    yield from torch_cases("checkpoint-whole-model", content, form="checkpoint", shows=shows)


def every_protocol(trained: Trained) -> Iterator[Case]:
    """Yield the pickle protocols after 2, which every other file of the set has."""
    for protocol in (3, 4, 5):
        for name in ("state_dict", "model"):
            yield from torch_cases(
                f"{name.replace('_', '-')}-protocol{protocol}",
                HABITS[name](parts_of(trained, argparse.Namespace())),
                form=name,
                shows=f"{_HABITS[name][1]}; MLP, pickle protocol {protocol}",
                protocol=protocol,
            )


def every_precision(trained: Trained) -> Iterator[Case]:
    """Yield the same weights in the element types that people cast them to; the other files hold float32."""
    for dtype in _DTYPES:
        cast_to = {name: tensor.to(getattr(torch, dtype)) for name, tensor in trained.model.state_dict().items()}
        # torch.save writes float8 in the old format, and torch.load then trips over it.
        loads = ("zip",) if dtype.startswith("float8") else ("zip", "legacy")
        shows = f"the state_dict; MLP in {dtype}"
        name = f"state-dict-{dtype.replace('_', '-')}"
        yield from torch_cases(name, cast_to, form="state_dict", shows=shows, torch_loads=loads)
    for dtype in _DTYPES[:2]:
        model = deepcopy(trained.model).to(getattr(torch, dtype))
        yield from torch_cases(
            f"model-{dtype}",
            model,
            form="model",
            shows=f"the whole model; MLP in {dtype}",
            containers=["zip"],
        )


def _parts(trained: Trained, how: str, device: torch.device, tag: str) -> Parts:
    """Return what a script would hold that trained in this wrapper; copies, the trained model stays bare."""
    averaged = deepcopy(trained.ema.module).to(device)
    ema = AveragedModel(wrap(averaged, how, device), avg_fn=ema_average)
    ema.n_averaged.copy_(trained.ema.n_averaged)
    plain = parts_of(trained, argparse.Namespace(net="tied", lr=trained.recipe.learning_rate, device=torch.device(tag)))
    return replace(
        plain,
        wrapped=wrap(deepcopy(trained.model).to(device), how, device),
        ema=ema,
        optimizer=_moved(plain.optimizer, device),
    )


def _moved(value: Any, device: torch.device) -> Any:
    """Copy an optimizer's state to a device, except what AdamW keeps on the CPU whatever the model does."""
    if isinstance(value, Tensor):
        return value.to(device) if value.dim() else value
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value


def _left_on_cpu(parts: Parts) -> list[Tensor]:
    """The tensors that stay on the CPU when a model trains on a GPU: AdamW's steps and the EMA's count."""
    steps = [tensor for name, tensor in oracle.named_tensors(parts.optimizer) if name.endswith(".step")]
    return [*steps, parts.ema.n_averaged]
