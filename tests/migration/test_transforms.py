"""Names out of any nest of wrappers and back, as torch has them; nothing that only looks like a prefix is touched."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ckptool.errors import MigrationRefused
from ckptool.names import renaming
from ckptool.names.wrappers import ANYWHERE, HEADS
from tests.each import each

WRAPPERS = (*HEADS, *ANYWHERE)

# Of the model's own: words like the wrappers', and "module" itself, which a model may use too.
COMPONENTS = st.sampled_from(["submodule", "mlp_module", "module_", "modules", "orig_mod", "conv", "0", "weight"])
DEEPER = st.lists(COMPONENTS | st.sampled_from(HEADS), max_size=4)


@st.composite
def names_of_models(draw: st.DrawFn) -> list[str]:
    """Return names of one model: not all below a child called ``module``, for nobody could tell that from a wrapper."""
    first = draw(COMPONENTS) + draw(st.sampled_from(["", ".module.weight", ".weight"]))
    others = draw(st.lists(st.tuples(DEEPER, COMPONENTS), max_size=6))
    return list(dict.fromkeys(draw(st.permutations([first, *(".".join((*head, tail)) for head, tail in others)]))))


def starts_mixed(names: Sequence[str]) -> bool:
    return any(name.startswith(tuple(f"{head}." for head in HEADS)) for name in names)


@given(names_of_models(), st.integers(1, 3))
@example(["module.weight", "conv.weight"], 1)
@example(["submodule.x", "mlp_module.x", "module", "a.module.x"], 2)
def test_names_come_back_out_of_any_number_of_data_parallels(names: list[str], count: int) -> None:
    assert renaming.strip_module(["module." * count + name for name in names]) == names


@given(names_of_models(), st.lists(st.sampled_from(WRAPPERS), min_size=1, max_size=5))
@example(["module.weight", "conv.weight"], ["_orig_mod"])
@example(["module.weight", "conv.weight"], ["_orig_mod", "module", "_fsdp_wrapped_module"])
@example(["module.weight", "_module.weight"], ["_module", "module", "_module"])
def test_names_come_back_out_of_any_nest_of_wrappers(names: list[str], nest: list[str]) -> None:
    assert renaming.strip_wrappers([".".join((*nest, name)) for name in names]) == names


@given(names_of_models(), st.data())
def test_marked_wrappers_go_wherever_they_stand(names: list[str], data: st.DataObject) -> None:
    wrapped = []
    for name in names:
        parts = name.split(".")
        for wrapper in data.draw(st.lists(st.sampled_from(ANYWHERE), max_size=2)):
            parts.insert(data.draw(st.integers(1, len(parts) - 1)) if len(parts) > 1 else 0, wrapper)
        wrapped.append(".".join(("module", *parts)))

    assert renaming.strip_wrappers(wrapped) == names


@given(names_of_models().filter(lambda names: not starts_mixed(names)))
def test_names_without_a_wrapper_stay_as_they_are(names: list[str]) -> None:
    assert renaming.strip_module(names) == names
    assert renaming.strip_wrappers(names) == names


@pytest.mark.parametrize("strip", [renaming.strip_module, renaming.strip_wrappers])
def test_a_prefix_that_only_some_have_is_refused_with_both_names(strip: Callable[[list[str]], list[str]]) -> None:
    with pytest.raises(MigrationRefused) as caught:
        strip(["n_averaged", "module.conv.weight", "head.weight"])

    assert caught.value.kind == "mixed-prefix"
    assert "'module.conv.weight'" in caught.value.message
    assert "'head.weight'" in caught.value.message


@pytest.mark.parametrize("strip", [renaming.strip_module, renaming.strip_wrappers])
def test_what_a_wrapper_counts_beside_its_model_goes_with_it(strip: renaming.Rule) -> None:
    assert strip(["n_averaged", "module.a", "module.b"]) == [None, "a", "b"]
    assert strip(["module.n_averaged", "module.module.a"]) == [None, "a"]
    assert strip(["n_averaged", "module.module.a"]) == [None, "a"]
    assert strip(["n_averaged", "a"]) == ["n_averaged", "a"]  # a model's own
    assert strip(["n_averaged"]) == ["n_averaged"]
    rules = [strip, renaming.add_prefix("net")]
    assert renaming.rename(["n_averaged", "module.a"], rules) == [None, "net.a"]


def test_a_data_parallel_inside_another_wrapper_is_not_taken_for_the_first() -> None:
    assert renaming.strip_module(["_module.module.a", "_module.module.b"]) == ["_module.module.a", "_module.module.b"]


@given(names_of_models(), st.lists(COMPONENTS, min_size=1, max_size=3), st.booleans())
def test_a_prefix_that_was_added_can_be_taken_away(names: list[str], prefix: list[str], dot: bool) -> None:
    given_as = ".".join(prefix) + "." * dot
    added = renaming.add_prefix(given_as)(names)

    assert added == [".".join((*prefix, name)) for name in names]
    assert renaming.strip_prefix(given_as)(added) == names


def refused(kind: str, rule: Callable[..., object], *given: object) -> None:
    with pytest.raises(MigrationRefused) as caught:
        rule(*given)
    assert caught.value.kind == kind


def test_a_prefix_is_whole_components() -> None:
    assert renaming.strip_prefix("net")(["net.a", "net.net.b", "net.network"]) == ["a", "net.b", "network"]
    for other in ("network.b", "net", "a.net.c"):
        refused("mixed-prefix", renaming.strip_prefix("net"), ["net.a", other])
    for prefix in ("ne", "et", "net.a.b", "other"):
        refused("no-such-prefix", renaming.strip_prefix(prefix), ["net.a", "net.b"])


@given(st.lists(st.text("ab.01", min_size=1, max_size=8), unique=True))
def test_a_pattern_replaces_as_the_re_module_does(names: list[str]) -> None:
    rule = renaming.substitute(r"^a\.(\d)", r"layers.\1")

    assert rule(names) == [re.sub(r"^a\.(\d)", r"layers.\1", name) for name in names]


def test_what_is_no_pattern_or_leaves_no_name_is_refused() -> None:
    for pattern, replacement in (("(", ""), ("a", r"\2"), ("a", r"\g<no>"), ("[", "x")):
        refused("bad-pattern", renaming.substitute, pattern, replacement)
    for text in ("a==b", "a=>b", "(a)=x$1"):
        refused("bad-pattern", renaming.substitution, text)
    for text in ("^ab$=", "^a=", "b$=", "a=a..b", "a=."):
        refused("empty-name", renaming.rename, ["ab", "a.b"], [renaming.substitution(text)])
    assert renaming.rename(["a.b"], [renaming.substitution("^a="), renaming.substitution(r"^\.=")]) == ["b"]
    assert renaming.rename(["a..b"], [renaming.substitution("^a=c")]) == ["c..b"]  # as it was


def test_a_pattern_that_may_match_nothing_changes_a_name_once() -> None:
    for text, renamed in (
        (r"(.*)=m.\1", "m.net.weight"),
        (r"^(net\.)?=m.", "m.weight"),
        (r"^(gen\.)?=m.", "m.net.weight"),
        ("^=m.", "m.net.weight"),
        ("$=.m", "net.weight.m"),
        (r"(\.weight)?$=.m", "net.m"),
    ):
        assert renaming.substitution(text)(["net.weight"]) == [renamed], text
    for text in ("x*=y", "n*=m", "(net)?=m", r"\d?=m"):
        refused("bad-pattern", renaming.substitution(text), ["net.weight"])


@given(names_of_models())
def test_no_rule_changes_the_order(names: list[str]) -> None:
    numbered = [f"{name}.{number:03}" for number, name in enumerate(names)]
    wrapped = [f"module._orig_mod.{name}" for name in numbered]

    renamed = renaming.rename(wrapped, [renaming.strip_wrappers, renaming.add_prefix("x.y")])

    assert renamed == [f"x.y.{name}" for name in numbered]


# Metadata: torch's own function for the same job is the judge.


class Own(nn.Module):
    """A model that has what wrappers have: children called module, at the head and deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.submodule = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU(), nn.Sequential())
        self.deeper = nn.ModuleDict({"module": nn.Linear(1, 1), "mlp_module": nn.Identity()})


class Wrapped(nn.Module):
    """What DataParallel does to names, without its device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


def consumed(state: OrderedDict[str, torch.Tensor], prefix: str) -> dict[str, int]:
    """Return module versions after torch stripped the prefix."""
    consume_prefix_in_state_dict_if_present(state, prefix)
    return {path: entry["version"] for path, entry in state._metadata.items()}  # type: ignore[attr-defined]


def renamed_metadata(state: OrderedDict[str, torch.Tensor], rules: Sequence[renaming.Rule]) -> dict[str, int]:
    metadata = state._metadata  # type: ignore[attr-defined]
    new = renaming.rename_metadata(list(metadata), rules, list(state))
    return {key: entry["version"] for key, entry in zip(new, metadata.values(), strict=True) if key is not None}


@each("rule", [renaming.strip_module, renaming.strip_wrappers, renaming.strip_prefix("module")])
@each("make", [Own, lambda: nn.Sequential(nn.Linear(1, 1)), lambda: nn.BatchNorm1d(2)])
def test_metadata_follows_as_torch_has_it(rule: renaming.Rule, make: Callable[[], nn.Module]) -> None:
    model = make()
    ours = renamed_metadata(Wrapped(model).state_dict(), [rule])  # type: ignore[arg-type]
    theirs = consumed(Wrapped(model).state_dict(), "module.")  # type: ignore[arg-type]

    real = {path: entry["version"] for path, entry in model.state_dict()._metadata.items()}  # type: ignore[attr-defined]
    assert ours == theirs == real


def test_metadata_follows_out_of_two_wrappers() -> None:
    model = Own()
    real = {path: entry["version"] for path, entry in model.state_dict()._metadata.items()}  # type: ignore[attr-defined]

    assert renamed_metadata(Wrapped(Wrapped(model)).state_dict(), [renaming.strip_module]) == real  # type: ignore[arg-type]


def test_metadata_follows_every_rule_even_where_one_does_not_concern_it() -> None:
    keys = ["", "backbone", "backbone.a", "head"]
    rules = [renaming.substitute(r"^backbone\.", ""), renaming.add_prefix("net")]

    found = renaming.rename_metadata(keys, rules, ["backbone.a.w", "head.w"])

    assert found == [None, "net", "net.a", "net.head"]


def test_metadata_goes_where_a_pattern_sends_it() -> None:
    rules = [renaming.substitute(r"^layer(\d)\.", r"layers.\1.")]

    found = renaming.rename_metadata(["", "layer1", "layer1.0", "fc"], rules, ["layer1.0.weight", "fc.weight"])

    assert found == ["", "layers.1", "layers.1.0", "fc"]
