"""Globs to include and to exclude, the same for every command that has them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.each import each
from tests.program import invoke

NAMES = ["conv.weight", "conv.bias", "head.conv.weight", "Head.bias"]


@each(
    ("include", "exclude", "left"),
    [
        ((), (), NAMES),
        (("conv.*",), (), ["conv.weight", "conv.bias"]),
        (("conv.*", "*.bias"), (), ["conv.weight", "conv.bias", "Head.bias"]),
        ((), ("*.bias",), ["conv.weight", "head.conv.weight"]),
        (("*conv*",), ("head.*",), ["conv.weight", "conv.bias"]),
        (("head.?ias",), (), []),
        ((), ("*",), []),
    ],
)
def test_a_name_is_taken_if_a_glob_includes_it_and_none_excludes_it(
    include: tuple[str, ...], exclude: tuple[str, ...], left: list[str], tmp_path: Path
) -> None:
    torch.save({name: torch.ones(1) for name in NAMES}, tmp_path / "x.pth")
    globs = [f"--{option}={glob}" for option, all_of in (("include", include), ("exclude", exclude)) for glob in all_of]
    found = invoke(["stat", str(tmp_path / "x.pth"), "--allow-unmatched", "--json", *globs])

    assert [row["name"] for row in json.loads(found.stdout)["rows"]] == left
