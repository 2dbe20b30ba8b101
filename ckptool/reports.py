"""The types of what reports are made of, for annotations: the reports themselves, and everything in their fields."""

from __future__ import annotations

from ckptool.checking.check import CheckReport
from ckptool.checking.explain.keys import Explanation
from ckptool.checking.finding import Finding
from ckptool.checking.torch_load import GlobalUse
from ckptool.diffing.report import DiffedFile, DiffReport, OrderChange, ShapeChange
from ckptool.diffing.trees import Change as Difference
from ckptool.diffing.values import ValueDiff
from ckptool.formats.runnable.acts import Act
from ckptool.migration.casting import Cast
from ckptool.migration.report import FileFacts, MigrationReport, WrittenFile
from ckptool.names.matching import Rename
from ckptool.torch_ops.differences import Likeness

__all__ = [
    "Act",
    "Cast",
    "CheckReport",
    "DiffReport",
    "DiffedFile",
    "Difference",
    "Explanation",
    "FileFacts",
    "Finding",
    "GlobalUse",
    "Likeness",
    "MigrationReport",
    "OrderChange",
    "Rename",
    "ShapeChange",
    "ValueDiff",
    "WrittenFile",
]
