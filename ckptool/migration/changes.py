"""What a caller wants to be different in a migrated file, and which wishes exclude each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from ckptool.checkpoints.weights import Which
from ckptool.errors import MigrationRefused
from ckptool.migration.targets import TargetForm
from ckptool.names import renaming


class Changes(NamedTuple):
    """What is to be different in the target. Everything else stays as it is."""

    form: TargetForm | None = None
    """None goes by the target's suffix."""
    to: str | None = None
    """The device tag that every storage gets."""
    key: str | None = None
    """Which state dict to take, by its path in the source."""
    weights: Which = "auto"
    strip_module: bool = False
    strip_wrappers: bool = False
    rules: tuple[renaming.Rule, ...] = ()
    """Changes of names, applied in order; the wrappers are stripped before."""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    """Globs: which names of the weights to take, as they were before."""
    drop: tuple[str, ...] = ()
    """Paths or roles (``optimizer``, ``ema``) to leave out."""
    dtype: str | None = None
    """Floating type that weights are cast to, averaged ones too; an optimizer's state is not."""
    keep_dtype: tuple[str, ...] = ()
    saturate: bool = False
    expand_tied: bool = False
    drop_unsupported: bool = False
    allow_empty: bool = False
    """Globs may match nothing, and no tensor, or none with elements, may be left."""
    model: str | None = None
    """``package.module:Class`` to build for form ``model``; imported because the caller named it."""
    model_arguments: Mapping[str, object] = {}


def refuse_contradictions(form: TargetForm, changes: Changes, *, picks: bool) -> None:
    """Raise MigrationRefused where one thing asked for would make another have no effect."""
    if changes.model is not None and form != "model":
        _refuse(f"form {form!r} builds no model", "Leave out `form=`, or `model=`.")
    if changes.model is not None and changes.to not in (None, "cpu"):
        _refuse("a model that is built is saved from the CPU", "Migrate what comes out once more, with `to=`.")
    if form == "same" and picks:
        _refuse("form 'same' takes everything", "Leave out `form=` to take those weights alone.")
    if (changes.keep_dtype or changes.saturate) and changes.dtype is None:
        _refuse("nothing is cast", "Say to which type with `dtype=`.")
    if changes.model_arguments and changes.model is None:
        _refuse("no model is built", "Name its class with `model='package.module:Class'`.")


def _refuse(fact: str, hint: str) -> NoReturn:
    raise MigrationRefused(fact, kind="contradiction", hint=hint)
