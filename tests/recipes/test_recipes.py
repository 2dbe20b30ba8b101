"""Recipes at the public face: what torch makes in memory, they make in files, there and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from tests.program import invoke
from tests.scale import times

State = dict[str, torch.Tensor]


def written(folder: Path, text: str, name: str = "own.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def migrated(folder: Path, state: State, recipe: Any, target: str = "out.safetensors", **options: Any) -> State:
    torch.save(state, folder / "in.pth")
    ckptool.migrate(folder / "in.pth", folder / target, recipe=recipe, force=True, **options)
    return ckptool.load(folder / target)


def assert_equal(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


MOE = """
[[rule]]
from = ["{p}.experts.{e*}.w1.weight", "{p}.experts.{e*}.w3.weight"]
to = "{p}.experts.gate_up"
steps = [{ op = "stack" }, { op = "concat", dim = 1 }, { op = "transpose", dims = [1, 2] }]

[[rule]]
from = "{p}.experts.{e*}.w2.weight"
to = "{p}.experts.down"
op = "stack"
dim = -1
"""


@pytest.mark.parametrize("target", ["out.safetensors", "out.pth", "shards", "dcp"])
def test_experts_are_stacked_and_apart_again_in_every_form(target: str, tmp_path: Path) -> None:
    state = {f"m.experts.{e}.w{n}.weight": rows(*((5, 8) if n != 2 else (8, 5))) for e in range(11) for n in (1, 2, 3)}
    recipe = written(tmp_path, MOE)
    options = {"shards": {"max_shard_size": 2000}, "dcp": {"form": "dcp"}}.get(target, {})
    found = migrated(tmp_path, state, recipe, target, **options)
    gate, up, down = (
        torch.stack([state[f"m.experts.{e}.w{n}.weight"] for e in range(11)], -1 if n == 2 else 0) for n in (1, 3, 2)
    )
    assert_equal(found, {"m.experts.gate_up": torch.cat([gate, up], 1).transpose(1, 2), "m.experts.down": down})
    ckptool.migrate(tmp_path / target, tmp_path / "back.pth", recipe=recipe, reverse=True)
    assert_equal(torch.load(tmp_path / "back.pth"), state)


def test_heads_are_turned_as_transformers_turns_them(tmp_path: Path) -> None:
    recipe = written(tmp_path, '[[rule]]\nfrom = "wq.{x:weight|bias}"\nto = "q.{x}"\nop = "rope"\nheads = "heads"\n')
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"heads": 2}}))
    state = {"wq.weight": rows(16, 6, dtype=torch.bfloat16), "wq.bias": rows(16)}
    found = migrated(tmp_path, state, recipe)
    turned = state["wq.weight"].view(2, 4, 2, 6).transpose(1, 2).reshape(16, 6)
    assert_equal(found, {"q.weight": turned, "q.bias": state["wq.bias"].view(2, 4, 2).transpose(1, 2).reshape(16)})
    ckptool.migrate(tmp_path / "out.safetensors", tmp_path / "back.pth", recipe=recipe, reverse=True)
    assert_equal(torch.load(tmp_path / "back.pth"), state)


def test_a_model_of_the_other_layout_is_loaded(tmp_path: Path) -> None:
    recipe = written(tmp_path, '[[rule]]\nfrom = ["a.weight", "b.weight"]\nto = "weight"\nop = "concat"\n')
    state = {"module.a.weight": rows(2, 3), "module.b.weight": rows(2, 3)}
    torch.save(state, tmp_path / "apart.pth")
    for device in ("cpu", "meta"):
        model = torch.nn.Linear(3, 4, bias=False, device=device)
        ckptool.load_into(model, tmp_path / "apart.pth", recipe=recipe)
        assert torch.equal(model.weight, torch.cat(list(state.values())))


def test_what_is_tied_and_only_renamed_stays_tied(tmp_path: Path) -> None:
    recipe = written(tmp_path, '[[rule]]\nfrom = "{i}.w"\nto = "of.{i}"\n')
    one = rows(4, 4)
    found = migrated(tmp_path, {"a.w": one, "b.w": one}, recipe, "out.pth")
    assert found["of.a"].data_ptr() == found["of.b"].data_ptr()


def test_what_a_recipe_leaves_alone_is_in_the_report(tmp_path: Path) -> None:
    torch.save({"fc.weight": rows(2), **{f"layers.{i}.weight": rows(2) for i in range(9)}}, tmp_path / "in.pth")
    recipe = written(tmp_path, 'rest = "keep"\n[[rule]]\nfrom = "fc.{x}"\nto = "head.{x}"\n')
    report = ckptool.migrate(tmp_path / "in.pth", tmp_path / "out.safetensors", recipe=recipe)
    said = "recipe 'own' leaves 9 names alone: layers.0.weight, layers.1.weight, layers.2.weight and 6 more"
    assert said in report.notes


def test_diff_compares_two_layouts(tmp_path: Path) -> None:
    recipe = written(tmp_path, '[[rule]]\nfrom = ["a", "b"]\nto = "ab"\nop = "concat"\ndim = 1\n')
    state = {"a": rows(2, 3), "b": rows(2, 3)}
    torch.save(state, tmp_path / "a.pth")
    torch.save({"ab": torch.cat(list(state.values()), 1)}, tmp_path / "b.pth")
    arguments = ["diff", str(tmp_path / "a.pth"), str(tmp_path / "b.pth"), "--recipe", str(recipe)]
    assert invoke(arguments).exit_code == 0
    torch.save({"ab": torch.cat([*state.values()][::-1], 1)}, tmp_path / "b.pth")
    assert invoke(arguments).exit_code == 1


def test_parts_in_another_order_and_steps_of_some_of_them(tmp_path: Path) -> None:
    recipe = written(
        tmp_path,
        """
[[rule]]
from = "halves.{r+}"
to = "swapped.{r}"
steps = [{ op = "chunk", parts = 2 }, { op = "concat", order = [1, 0] }]

[[rule]]
from = "qkv"
to = ["q", "k", "v"]
steps = [{ op = "chunk" }, { op = "rope", heads = 2, of = [0, 1] }]

[[rule]]
from = "rope.freqs"
op = "drop"
only = "forward"

[[rule]]
each = [[{ a = "in", b = "down" }, { a = "out", b = "up" }], [{ c = "0", d = "norm" }, { c = "2", d = "conv" }]]
from = "<a>.{i}.<c>.{x:weight|bias}"
to = "<b>.{i}.<d>.{x}"
""",
    )
    state = {"halves.a.b": rows(6, 2), "qkv": rows(24, 3), "in.1.0.weight": rows(1), "out.4.2.bias": rows(2)}
    found = migrated(tmp_path, {**state, "rope.freqs": rows(4)}, recipe)
    q, k, v = state["qkv"].chunk(3)
    turned = {name: one.view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3) for name, one in (("q", q), ("k", k))}
    halves = state["halves.a.b"].chunk(2)[::-1]
    moved = {"down.1.norm.weight": state["in.1.0.weight"], "up.4.conv.bias": state["out.4.2.bias"]}
    assert_equal(found, {"swapped.a.b": torch.cat(halves), **turned, "v": v, **moved})
    ckptool.migrate(tmp_path / "out.safetensors", tmp_path / "back.pth", recipe=recipe, reverse=True)
    assert_equal(torch.load(tmp_path / "back.pth"), state)


# What is refused, by name

WRONG = {
    "a name that no rule takes": ('[[rule]]\nfrom = "a.w"\nto = "x"\n', "and not b.w", {}),
    "two rules for one": (
        '[[rule]]\nfrom = "{i}.w"\nto = "x.{i}"\n[[rule]]\nfrom = "a.w"\nto = "y"\n',
        "a.w",
        {},
    ),
    "a missing part": ('[[rule]]\nfrom = ["{i}.w", "{i}.v"]\nto = "{i}"\nop = "concat"\n', "'a.v', which is not", {}),
    "parts that are not equal": ('[[rule]]\nfrom = ["a.w", "b.w"]\nto = "x"\nop = "concat"\n', "[2, 3] along 0", {}),
    "a wrong size": (
        'rest = "keep"\n[[rule]]\nfrom = "a.w"\nto = ["x", "y"]\nop = "split"\nsizes = [1, 2]\n',
        "a.w",
        {},
    ),
    "a number that nothing says": (
        'rest = "keep"\n[[rule]]\nfrom = "a.w"\nto = "x"\nop = "rope"\nheads = "n"\n',
        "needs 'n'",
        {},
    ),
    "a number that it has not": ('[[rule]]\nfrom = "{i}.w"\nto = "x.{i}"\n', "no number 'n'", {"n": 3}),
    "one name for two": ('[[rule]]\nfrom = "a.w"\nto = "x"\n[[rule]]\nfrom = "b.w"\nto = "x"\n', "both be called", {}),
    "about nothing": ('[[rule]]\nfrom = "c.{i}"\nto = "x.{i}"\n', "about none of the 2 names", {}),
    "a misspelled name": (
        '[[rule]]\nfrom = "a.w"\nto = "x"\n[[rule]]\nfrom = "bb.w"\nto = "y"\n',
        "Is 'bb.w' meant",
        {},
    ),
    "a step": (
        'rest = "keep"\n[[rule]]\nfrom = "a.w"\nto = ["x", "y", "z"]\nsteps = [{op = "transpose"}, {op = "chunk"}]\n',
        "step 2, 'chunk 0', of the rule a.w -> x + y + z",
        {},
    ),
    "no dim": (
        'rest = "keep"\n[[rule]]\nfrom = "a.w"\nto = "x"\nop = "transpose"\ndims = [0, 2]\n',
        "no dim",
        {},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_a_checkpoint_is_refused_by_name(name: str, tmp_path: Path) -> None:
    text, said, numbers = WRONG[name]
    with pytest.raises(ckptool.MigrationRefused) as caught:
        migrated(tmp_path, {"a.w": rows(2, 4), "b.w": rows(3, 4)}, written(tmp_path, text), recipe_arguments=numbers)
    assert said in f"{caught.value} {caught.value.hint}"
    assert not (tmp_path / "out.safetensors").exists()


def test_a_hole_in_a_list_is_refused(tmp_path: Path) -> None:
    recipe = written(tmp_path, '[[rule]]\nfrom = "e.{e*}.w"\nto = "e"\nop = "stack"\n')
    with pytest.raises(ckptool.MigrationRefused, match=r"needs 'e\.1\.w', which is not there"):
        migrated(tmp_path, {f"e.{number}.w": rows(2) for number in (0, 2)}, recipe)


def test_what_is_quantised_can_only_be_renamed(tmp_path: Path) -> None:
    state: State = {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)}
    turned = written(tmp_path, 'rest = "keep"\n[[rule]]\nfrom = "a.weight"\nto = "b.weight"\nop = "transpose"\n')
    with pytest.raises(ckptool.MigrationRefused, match="quantised"):
        migrated(tmp_path, state, turned)
    renamed = written(tmp_path, '[[rule]]\nfrom = "a.{x}"\nto = "b.{x}"\n')
    assert set(migrated(tmp_path, state, renamed)) == {"b.weight", "b.weight_scale"}


BAD = {
    "no table": "rule = 3",
    "no rules": 'about = "nothing"',
    "an unknown key": '[[rules]]\nfrom = "a"\nto = "b"',
    "an unknown operation": '[[rule]]\nfrom = "a"\nto = "b"\nop = "add"',
    "a parameter of another": '[[rule]]\nfrom = "a"\nto = "b"\nop = "rope"\nheads = 2\ndim = 1',
    "other variables": '[[rule]]\nfrom = "a.{i}"\nto = "b.{j}"',
    "an open brace": '[[rule]]\nfrom = "a.{i"\nto = "b"',
    "variables that touch": '[[rule]]\nfrom = "a.{i}{j}"\nto = "b.{i}.{j}"',
    "two lists": '[[rule]]\nfrom = "a.{e*}.{f*}"\nto = "b"\nop = "stack"',
    "too few names": '[[rule]]\nfrom = "a"\nto = "b"\nop = "concat"',
    "too many names": '[[rule]]\nfrom = ["a", "b"]\nto = ["c", "d"]\nop = "concat"',
    "a list that stays": '[[rule]]\nfrom = "a.{e*}"\nto = "b"',
    "no way back": '[[rule]]\nfrom = "a.{e*}"\nto = "b"\nop = "concat"',
    "a drop that gives": '[[rule]]\nfrom = "a"\nto = "b"\nop = "drop"',
    "a circle": '[let]\na = "b + 1"\nb = "a - 1"\n[[rule]]\nfrom = "a"\nto = "b"',
    "code for a number": '[let]\na = "__import__(\'os\')"\n[[rule]]\nfrom = "a"\nto = "b"',
    "a power": '[let]\na = "9 ** 9"\n[[rule]]\nfrom = "a"\nto = "b"',
    "no order": '[[rule]]\nfrom = "a"\nto = "b"\nop = "permute"\ndims = [0, 2]',
    "an order with text": '[[rule]]\nfrom = "a"\nto = "b"\nop = "permute"\ndims = [0, "1"]',
}


@pytest.mark.parametrize("name", BAD)
def test_a_recipe_that_is_wrong_is_said_to_be_without_a_checkpoint(name: str, tmp_path: Path) -> None:
    done = invoke(["recipe", "check", str(written(tmp_path, BAD[name]))])
    assert done.exit_code == 1
    assert "own.toml" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recipe_that_drops_has_no_way_back(tmp_path: Path) -> None:
    recipe = written(tmp_path, '[[rule]]\nfrom = "a"\nop = "drop"\n[[rule]]\nfrom = "b"\nto = "c"\n')
    state = {"a": rows(2), "b": rows(2)}
    assert_equal(migrated(tmp_path, state, recipe), {"c": state["b"]})
    with pytest.raises(ckptool.MigrationRefused, match="no way back"):
        migrated(tmp_path, state, recipe, reverse=True)


def test_every_recipe_that_comes_with_it_is_right() -> None:
    listed = json.loads(invoke(["recipe", "list", "--json"]).stdout)
    assert not listed["errors"]
    assert all(one["about"] and one["source"] and one["from"] and one["to"] for one in listed["recipes"])
    assert invoke(["recipe", "show", *(one["name"] for one in listed["recipes"]), "--reverse"]).exit_code == 0


# Random recipes, against torch doing the same in memory

Move = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, State, State]:
    """Return a rule, and what it makes of what, as torch makes it."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]))
    op = draw(st.sampled_from(["concat", "split", "chunk", "stack", "unstack", "transpose", "permute", "reshape"]))
    dim = draw(st.integers(0, len(sizes) - 1))
    count = draw(st.integers(2, 4))

    def tensor(*shape: int) -> torch.Tensor:
        whole = (torch.randn(*shape) * 9).to(dtype)
        if draw(st.booleans()):  # as a view, not in its own order
            whole = whole.transpose(0, -1).contiguous().transpose(0, -1)
        return whole

    if op in ("concat", "split"):
        parts = [draw(st.integers(1, 4)) for _ in range(count)]
        pieces = [tensor(*sizes[:dim], part, *sizes[dim + 1 :]) for part in parts]
        given = f'op = "{op}"\ndim = {dim}\nsizes = {parts}'
        one = torch.cat(pieces, dim)
    elif op == "chunk":
        pieces = [tensor(*sizes) for _ in range(count)]
        given, one = f'op = "chunk"\ndim = {dim}', torch.cat(pieces, dim)
    elif op in ("stack", "unstack"):
        pieces = [tensor(*sizes) for _ in range(count)]
        given, one = f'op = "{op}"\ndim = {dim}', torch.stack(pieces, dim)
    else:
        whole = tensor(*sizes)
        order = list(range(len(sizes)))
        if op == "transpose":
            order[0], order[dim] = order[dim], order[0]
            dim = dim or 1
            order = list(range(len(sizes)))
            order[0], order[dim] = order[dim], order[0]
            given, made = f'op = "transpose"\ndims = [0, {dim}]', whole.permute(order)
        elif op == "permute":
            order = draw(st.permutations(order))
            given, made = f'op = "permute"\ndims = {list(order)}', whole.permute(*order)
        else:
            given, made = f'op = "reshape"\nwas = {sizes}\nshape = [-1]', whole.reshape(-1)
        return f'[[rule]]\nfrom = "x.{{i}}"\nto = "y.{{i}}"\n{given}\n', {"x.0": whole}, {"y.0": made}
    names = [f"x.{{i}}.{letter}" for letter in "abcd"[:count]]
    apart = {name.replace("{i}", "0"): piece for name, piece in zip(names, pieces, strict=True)}
    joins = op in ("concat", "stack")
    sides = (json.dumps(names), '"y.{i}"') if joins else ('"y.{i}"', json.dumps(names))
    rule = f"[[rule]]\nfrom = {sides[0]}\nto = {sides[1]}\n{given}\n"
    return (rule, apart, {"y.0": one}) if joins else (rule, {"y.0": one}, apart)


@settings(max_examples=times(20, 100), deadline=None)
@given(cases())
def test_random_recipes_make_what_torch_makes_and_back(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[str, State, State]
) -> None:
    text, before, after = case
    folder = tmp_path_factory.mktemp("random")
    recipe = written(folder, text)
    for target in ("out.safetensors", "out.pth"):
        assert_equal(migrated(folder, before, recipe, target), after)
        ckptool.migrate(folder / target, folder / "back.pth", recipe=recipe, reverse=True, force=True)
        assert_equal(torch.load(folder / "back.pth"), before)
