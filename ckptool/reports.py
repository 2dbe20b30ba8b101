"""The types of reports and of everything in their fields, for annotations."""

from __future__ import annotations

from ckptool.checking.check import CheckReport
from ckptool.checking.explain import Explanation
from ckptool.checking.finding import Finding
from ckptool.checking.torch_load import GlobalUse
from ckptool.checking.value_survey import ValueRow
from ckptool.checkpoints.summary import Summary
from ckptool.diffing.report import DiffedFile, DiffReport, OrderChange, ShapeChange
from ckptool.diffing.trees import Change as Difference
from ckptool.diffing.values import ValueDiff
from ckptool.formats.runnable import Act
from ckptool.inspecting.inspect import InspectReport
from ckptool.migration.casting import Cast
from ckptool.migration.report import FileFacts, MigrationReport, WrittenFile
from ckptool.names.matching import Rename
from ckptool.recipes.apply import Move
from ckptool.torch_ops.differences import Likeness
from ckptool.torch_ops.statistics import Statistics

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
    "InspectReport",
    "Likeness",
    "MigrationReport",
    "Move",
    "OrderChange",
    "Rename",
    "ShapeChange",
    "Statistics",
    "Summary",
    "ValueDiff",
    "ValueRow",
    "WrittenFile",
]
