"""``load_model``: the one call that unpickles a file, and with it runs whatever the file says. Only when trusted."""

from __future__ import annotations

import os
import pickle
import tempfile

import torch

from ckptool import modules
from ckptool.errors import UnsafePickle, UnsupportedFeature
from ckptool.formats import open_checkpoint
from ckptool.migration import migrate
from ckptool.torch_bridge.placement import MapLocation, placement


def load_model(
    path: str | os.PathLike[str], *, trust: bool, map_location: MapLocation = "cpu", unwrap: bool = True
) -> torch.nn.Module:
    """
    Unpickle a whole model, **running the code that the file names**. Its classes must be importable.

    Only for files of people whose code you would run: pass ``trust=True`` to say so. ``load`` gives the weights of the
    same file without running anything. ``map_location`` is what ``torch.load`` takes. ``unwrap`` gives the model inside
    a DataParallel or DistributedDataParallel, which needs neither a GPU nor a process group.

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
    placement(map_location)
    with open_checkpoint(path) as checkpoint:
        form, is_script = checkpoint.form, checkpoint.format == "torchscript"
        is_wrapped = bool(checkpoint.state_dicts) and checkpoint.state_dicts[0].class_name in modules.WRAPPERS
    if form != "model" and not is_script:
        raise UnsupportedFeature(
            f"holds a {form} and no whole model", path=name, hint="Build the model, and use ckptool.load_into."
        )
    if is_script:
        script: torch.nn.Module = torch.jit.load(name, map_location=map_location)  # type: ignore[no-untyped-call]
        return script
    if not (unwrap and is_wrapped):
        return _unpickled(name, name, map_location)
    with tempfile.TemporaryDirectory(prefix="ckptool-") as folder:
        inner = os.path.join(folder, "model.pth")  # noqa: PTH118
        migrate(path, inner, form="same", strip_module=True, verify=False)
        return _unpickled(inner, name, map_location)


def _unpickled(path: str, shown: str, map_location: MapLocation) -> torch.nn.Module:
    try:
        model = torch.load(path, map_location=map_location, weights_only=False)  # type: ignore[arg-type]
    except (AttributeError, ImportError, pickle.UnpicklingError, RuntimeError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedFeature(
            f"cannot be unpickled here: {reason}",
            kind="class-missing",
            path=shown,
            hint="Import the module that defines its classes first, or take its weights with ckptool.load.",
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedFeature(f"holds a {type(model).__name__} and no whole model", path=shown)
    return model
