"""Globs to include and to exclude, the same for every command that has them."""

from __future__ import annotations

import pytest

from ckptool.names.renaming import Filter

NAMES = ["conv.weight", "conv.bias", "head.conv.weight", "Head.bias"]


@pytest.mark.parametrize(
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
    include: tuple[str, ...], exclude: tuple[str, ...], left: list[str]
) -> None:
    chosen = Filter(include, exclude)

    assert [name for name in NAMES if chosen.takes(name)] == left
    assert chosen.takes_all == (left == NAMES)
