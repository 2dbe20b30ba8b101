"""``load_model``: ``torch.load`` of a whole model, which runs the file's code; only with ``trust=True``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ckptool.arguments import checked
from ckptool.errors import UnsafePickle, UnsupportedFeature, first_line
from ckptool.formats import open_checkpoint
from ckptool.loading.memory.placement import CPU, MapLocation, Placement, placement
from ckptool.migration.migrate import migrate
from ckptool.names.wrappers import COMPONENTS


@checked("trust")
def load_model(
    path: str | os.PathLike[str],
    *,
    trust: bool,
    map_location: MapLocation = "cpu",
    device: str | torch.device | None = None,
    unwrap: bool = True,
) -> torch.nn.Module:
    """
    Unpickle a whole model, **running the code that the file names**. Its classes must be importable.

    Only for files of people whose code you would run: pass ``trust=True`` to say so. ``load`` gives the weights of the
    same file without running anything. ``map_location`` is what ``torch.load`` takes, and ``device`` another word for
    it. ``unwrap`` takes the model, and those inside it, out of what training wraps them in (DataParallel,
    DistributedDataParallel, torch.compile, FSDP, activation checkpointing), before anything is unpickled: it needs
    neither a GPU nor a process group.

    Raises:
        UnsafePickle: ``trust`` is not True.
        UnsupportedFeature: The file holds weights and no model, or its classes cannot be imported or unpickled.
        CkptoolError: The file cannot be read.
    """
    name = os.fspath(path)
    if trust is not True:
        raise UnsafePickle(
            "a whole model can only be made by running the code that the file names",
            path=name,
            hint="Take its weights with ckptool.load, or pass trust=True if you know where the file is from.",
        )
    place = placement(map_location, device)
    with open_checkpoint(path) as checkpoint:
        form, is_packed = checkpoint.form, checkpoint.member is not None
        is_script = checkpoint.traits.loader == "torch.jit.load"
        is_wrapped = any(cls in COMPONENTS for _, walk in checkpoint.walks for _, cls in walk.modules)
        inside = next((one.key for one in checkpoint.state_dicts if one.class_name is not None), None)
    if is_script:
        return _made(name, partial(torch.jit.load, name, map_location=place.everywhere or CPU))
    if form != "model":
        holds = "no whole model" if inside is None else f"a whole model as one part of it alone, {inside!r}"
        raise UnsupportedFeature(
            f"holds a {form} and {holds}", path=name, hint="Build the model, and use ckptool.load_into."
        )
    if not (is_packed or (unwrap and is_wrapped)):
        return _unpickled(name, name, place)
    with tempfile.TemporaryDirectory(prefix="ckptool-") as folder:
        inner = os.path.join(folder, "model.pth")
        migrate(path, inner, form="same", strip_wrappers=unwrap and is_wrapped, verify=False)
        return _unpickled(inner, name, place)


def _unpickled(path: str, shown: str, place: Placement) -> torch.nn.Module:
    return _made(shown, partial(torch.load, path, map_location=partial(_placed, place), weights_only=False))


def _made(shown: str, make: Callable[[], Any]) -> torch.nn.Module:
    try:
        model = make()
    except Exception as error:  # code of the file may raise anything
        raise UnsupportedFeature(
            f"cannot be unpickled here: {first_line(error)}",
            kind="class-missing",
            path=shown,
            hint="Import the module that defines its classes first, or take its weights with ckptool.load.",
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedFeature(f"holds a {type(model).__name__} and no whole model", path=shown)
    return model


def _placed(place: Placement, storage: torch.UntypedStorage, tag: str) -> Any:
    """Return a storage moved to its device. If the mover returns None, torch moves it, as ``place`` says."""
    moved = place.mover(storage, tag) if place.mover is not None else None
    if moved is None:
        moved = torch.serialization.default_restore_location(storage, str(place.device(tag)))  # type: ignore[no-untyped-call]
    return moved
