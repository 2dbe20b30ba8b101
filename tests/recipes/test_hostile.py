"""Recipes and names that would take hours, or all memory, are refused at once; nothing steers a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from tests.program import invoke


def recipe(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text, encoding="utf-8")
    return path


def rule(before: str, after: str, more: str = "") -> str:
    return f"[[rule]]\nfrom = {json.dumps(before)}\nto = {json.dumps(after)}\n{more}\n"


def test_a_name_that_a_pattern_can_stand_for_in_too_many_ways_is_refused(tmp_path: Path) -> None:
    before = "_".join(f"{{{one}}}" for one in "abcdefghij") + "_Q_{k}.end"
    own = recipe(tmp_path, f'rest = "keep"\n{rule(before, before + "s")}')
    source, out = tmp_path / "source.pth", tmp_path / "out.safetensors"
    torch.save({"_".join("abcdefghij") + "_Q_1.end": torch.ones(1), "x_x.end": torch.ones(1)}, source)
    ckptool.migrate(source, out, recipe=own)
    assert set(load_file(out)) == {"_".join("abcdefghij") + "_Q_1.ends", "x_x.end"}
    torch.save({"_".join("x" * 60) + "_Q_1.end": torch.ones(1)}, source)
    with pytest.raises(ckptool.LimitExceeded, match="in more than 100,000 ways"):
        ckptool.migrate(source, tmp_path / "no.safetensors", recipe=own)
    assert not (tmp_path / "no.safetensors").exists()


@pytest.mark.parametrize("operation", ['op = "unstack"', 'op = "chunk"\nparts = 1_000_000_000'])
def test_a_view_of_one_element_does_not_become_billions_of_tensors(operation: str, tmp_path: Path) -> None:
    source = tmp_path / "source.pth"
    torch.save({"w": torch.zeros(1).expand(10**9)}, source)
    with pytest.raises(ckptool.MigrationRefused, match="would become 1,000,000,000 tensors, and 65,536 are allowed"):
        ckptool.migrate(source, tmp_path / "out.pth", recipe=recipe(tmp_path, rule("w", "e.{e*}.w", operation)))


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (
            "[let]\n" + "".join(f'a{n} = "a{n + 1}"\n' for n in range(5000)) + "a5000 = 1\n",
            "let is not a table of at most 100 numbers",
        ),
        (
            "[[rule]]\neach = [{"
            + ", ".join(f"a{n} = '{f'<a{n + 1}>' * 10}'" for n in range(9))
            + "}]\nfrom = '<a0>'\nto = 'b'\n",
            "each makes a name of more than 2,000 characters",
        ),
    ],
)
def test_what_grows_without_end_is_no_recipe(text: str, fact: str, tmp_path: Path) -> None:
    done = invoke(["recipe", "check", str(recipe(tmp_path, text + rule("w", "w")))])
    assert done.exit_code == 1
    assert fact in done.stderr


def test_nothing_in_a_recipe_steers_a_terminal(tmp_path: Path) -> None:
    own = recipe(tmp_path, 'about = "\\u001b]0;x\\u0007"\n' + rule("a\x1b[31m", "b\u202e"))
    done = invoke(["recipe", "show", str(own)])
    assert done.exit_code == 0
    assert not {"\x1b", "\x07", "\u202e"} & set(done.stdout)
