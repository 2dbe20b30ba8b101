"""Open any PyTorch checkpoint without running it, say what is in it, and write it again in another form."""

from __future__ import annotations

# Nothing is imported before it is used: the command line starts here, and must handle an interrupt from the first
# moment on.
TYPE_CHECKING = False  # not from ``typing``, which takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    # isort: off
    from ckptool import errors as errors
    from ckptool import fleet as fleet
    from ckptool.cancellation import Cancellation as Cancellation
    from ckptool.checking.check import CheckReport as CheckReport, check as check
    from ckptool.checking.explain import explain as explain
    from ckptool.checking.scan import scan as scan
    from ckptool.checking.value_survey import stat as stat
    from ckptool.checkpoints.checkpoint import Checkpoint as Checkpoint, StateDict as StateDict
    from ckptool.checkpoints.parsed import ClassSource as ClassSource, Member as Member
    from ckptool.cli.page.report import report as report
    from ckptool.diffing.diff import diff as diff
    from ckptool.diffing.report import DiffReport as DiffReport
    from ckptool.errors import AmbiguousWeights as AmbiguousWeights, Cancelled as Cancelled
    from ckptool.errors import CkptoolError as CkptoolError, DamagedFile as DamagedFile, KeyMismatch as KeyMismatch
    from ckptool.errors import MigrationRefused as MigrationRefused, MissingPackage as MissingPackage
    from ckptool.errors import OutOfMemory as OutOfMemory, ShapeMismatch as ShapeMismatch
    from ckptool.errors import TruncatedFile as TruncatedFile, UnreadableFile as UnreadableFile
    from ckptool.errors import WeightsNotFound as WeightsNotFound
    from ckptool.formats import open_checkpoint as open_checkpoint
    from ckptool.inspecting.inspect import InspectReport as InspectReport, inspect as inspect
    from ckptool.limits import Limits as Limits
    from ckptool.loading.load import load as load, predict_memory as predict_memory
    from ckptool.loading.load_into import load_into as load_into
    from ckptool.loading.load_model import load_model as load_model
    from ckptool.loading.memory.assembly import Cost as Cost
    from ckptool.loading.report import LoadReport as LoadReport
    from ckptool.loading.serving.live_model import LiveModel as LiveModel, Reload as Reload, Serving as Serving
    from ckptool.merging.merge import merge as merge
    from ckptool.migration.changes import Changes as Changes
    from ckptool.migration.migrate import migrate as migrate
    from ckptool.migration.output.editing import recover as recover
    from ckptool.migration.report import MigrationReport as MigrationReport
    from ckptool.migration.save import save as save
    from ckptool.pickles.nodes import Global as Global
    from ckptool.sources.address import Remote as Remote
    from ckptool.sources.source import Source as Source
    from ckptool.tensors.dtypes import DType as DType
    from ckptool.tensors.reading import LazyTensor as LazyTensor
    from ckptool.tensors.tensor import StorageRef as StorageRef, TensorInfo as TensorInfo

__version__ = "0.1.0"

_MODULES = {
    "ckptool.cancellation": ("Cancellation",),
    "ckptool.checking.check": ("CheckReport", "check"),
    "ckptool.checking.explain": ("explain",),
    "ckptool.checking.scan": ("scan",),
    "ckptool.checking.value_survey": ("stat",),
    "ckptool.checkpoints.checkpoint": ("Checkpoint", "StateDict"),
    "ckptool.checkpoints.parsed": ("ClassSource", "Member"),
    "ckptool.cli.page.report": ("report",),
    "ckptool.diffing.diff": ("diff",),
    "ckptool.diffing.report": ("DiffReport",),
    "ckptool.errors": (
        *("AmbiguousWeights", "Cancelled", "CkptoolError", "DamagedFile", "KeyMismatch"),
        *("MigrationRefused", "MissingPackage", "OutOfMemory", "ShapeMismatch"),
        *("TruncatedFile", "UnreadableFile", "WeightsNotFound"),
    ),
    "ckptool.formats": ("open_checkpoint",),
    "ckptool.inspecting.inspect": ("InspectReport", "inspect"),
    "ckptool.limits": ("Limits",),
    "ckptool.loading.load": ("load", "predict_memory"),
    "ckptool.loading.load_into": ("load_into",),
    "ckptool.loading.load_model": ("load_model",),
    "ckptool.loading.memory.assembly": ("Cost",),
    "ckptool.loading.report": ("LoadReport",),
    "ckptool.loading.serving.live_model": ("LiveModel", "Reload", "Serving"),
    "ckptool.merging.merge": ("merge",),
    "ckptool.migration.changes": ("Changes",),
    "ckptool.migration.migrate": ("migrate",),
    "ckptool.migration.report": ("MigrationReport",),
    "ckptool.migration.save": ("save",),
    "ckptool.migration.output.editing": ("recover",),
    "ckptool.pickles.nodes": ("Global",),
    "ckptool.sources.address": ("Remote",),
    "ckptool.sources.source": ("Source",),
    "ckptool.tensors.dtypes": ("DType",),
    "ckptool.tensors.reading": ("LazyTensor",),
    "ckptool.tensors.tensor": ("StorageRef", "TensorInfo"),
}
"""The public names, by the module that defines them. ``ckptool.errors`` has more errors, which few callers catch."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)  # type checkers go by the imports above
_MADE_OF_TORCH = "ckptool.loading."
_MEANT = {
    "ckptool.open_checkpoint(path) gives what is in a file, tensor by tensor": ("open", "read", "safe_open", "Reader"),
    "ckptool.inspect(path) says what is in a file": ("info", "ls", "list", "summary", "describe", "show", "keys"),
    "ckptool.migrate(source, target) converts": ("convert", "export", "rename", "cast", "to_safetensors"),
    "ckptool.diff(a, b) compares": ("compare", "equal", "allclose"),
    "ckptool.check(path) looks for what is wrong": ("verify", "validate", "is_safe", "lint"),
    "ckptool.load(path) gives a state dict": ("load_file", "load_checkpoint", "load_weights", "torch_load"),
    "ckptool.load_into(model, path) fills a model": ("load_state_dict", "load_into_model", "restore"),
    "ckptool.save(state_dict, path) writes a state dict": ("save_file", "dump", "write"),
    "ckptool.stat(path) says what the values are like": ("stats", "statistics", "describe_values"),
    "it is a verb of the command line alone": ("devices", "fixtures"),
}
"""Answers to names that people try and that are not there: the text of the error, and the names it is for."""


def _numpy(tensor: LazyTensor, limits: Limits) -> Any:
    from ckptool.torch_ops.statistics import as_numpy

    return as_numpy(tensor, limits)


def _torch(tensor: LazyTensor) -> Any:
    from ckptool.torch_ops import needed

    needed()
    from ckptool.loading.memory.assembly import as_torch

    return as_torch(tensor)


def _report(checkpoint: Checkpoint) -> InspectReport:
    from ckptool.inspecting.inspect import InspectReport

    return InspectReport(checkpoint)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("errors", "fleet", "reports"):
        return import_module(f"ckptool.{name}")
    module = _MODULE_OF.get(name)
    if module is None:
        from ckptool.errors import CkptoolError

        found = getattr(import_module("ckptool.errors"), name, None) if name[0] != "_" else None
        if not (isinstance(found, type) and issubclass(found, CkptoolError)):
            meant = [said for said, names in _MEANT.items() if name in names]
            if not meant and name[0] != "_":
                from difflib import get_close_matches

                meant = [f"ckptool.{near} is there" for near in get_close_matches(name, __all__, 1, 0.75)]
            raise AttributeError(": ".join([f"module {__name__!r} has no attribute {name!r}", *meant]))
        return found
    if module.startswith(_MADE_OF_TORCH):
        import_module("ckptool.torch_ops").needed()
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    from importlib.util import find_spec

    # help() gets every name that is listed here, so names that need torch are listed only if torch is installed.
    there = find_spec("torch") is not None
    names = (name for name in __all__ if there or not _MODULE_OF.get(name, "").startswith(_MADE_OF_TORCH))
    return [*names, "__version__", "errors", "fleet", "reports"]
