"""``DiffReport``: where two checkpoints differ, as ``diff`` returns it."""

from __future__ import annotations

from typing import NamedTuple

from ckptool.diffing.sides import Scope
from ckptool.diffing.trees import Change
from ckptool.diffing.values import ValueDiff


class ShapeChange(NamedTuple):
    """A tensor of another shape."""

    name: str
    a: tuple[int, ...]
    b: tuple[int, ...]


class OrderChange(NamedTuple):
    """The first place, among the names that both have, where the order is another, and the names there."""

    position: int
    a: str
    b: str


class DiffedFile(NamedTuple):
    """One of the two files."""

    path: str
    format: str
    form: str
    key: str | None
    """The path of the weights that were compared; None if everything was."""


class DiffReport(NamedTuple):
    """Where two checkpoints differ. What was to be ignored, and what a format does not record, is not in it."""

    a: DiffedFile
    b: DiffedFile
    scope: Scope
    tensors: int
    """Names that both have; a tied tensor counts under each."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    order: OrderChange | None
    shapes: tuple[ShapeChange, ...]
    dtypes: tuple[Change, ...]
    devices: tuple[Change, ...]
    layouts: tuple[Change, ...]
    """Sparse or quantised otherwise, another tensor class, or no bytes."""
    ties_a: tuple[tuple[str, ...], ...]
    """Names of one tensor in A that are not, or not just these, one in B."""
    ties_b: tuple[tuple[str, ...], ...]
    metadata: tuple[Change, ...]
    """Facts of modules (``_metadata``), classes of models, and safetensors' ``__metadata__``."""
    others: tuple[Change, ...]
    """Values that are no tensors; a thousand at most."""
    values: tuple[ValueDiff, ...]
    close: tuple[ValueDiff, ...]
    """Tensors whose values differ within the tolerance: no difference."""
    values_compared: bool
    not_compared: tuple[str, ...]
    """What could not be compared, though it was not asked to be left out, in words."""
    wrapped: bool
    """More names would be the same without what training wrappers added to them."""

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not any(self.counts.values())

    @property
    def counts(self) -> dict[str, int]:
        """How many differences there are of each kind."""
        return {
            "names": len(self.only_a) + len(self.only_b),
            "order": int(self.order is not None),
            "shapes": len(self.shapes),
            "dtypes": len(self.dtypes),
            "devices": len(self.devices),
            "layouts": len(self.layouts),
            "ties": len(self.ties_a) + len(self.ties_b),
            "metadata": len(self.metadata),
            "others": len(self.others),
            "values": len(self.values),
        }
