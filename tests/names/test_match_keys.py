"""Names of a checkpoint against those of a model: what is paired is certain, what is guessed is marked as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptool.names import renaming
from ckptool.names.matching import KeyMatch, Shape, match
from ckptool.names.suggestions import guess_renames
from tests.each import each

EXPECTED: dict[str, Shape] = {
    "conv1.weight": (6, 1, 3, 3),
    "conv1.bias": (6,),
    "norm.weight": (6,),
    "norm.bias": (6,),
    "norm.num_batches_tracked": (),
    "head.weight": (10, 6),
    "head.bias": (10,),
}


def under(prefix: str, shapes: dict[str, Shape] = EXPECTED) -> dict[str, Shape]:
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def options(matched: KeyMatch) -> list[str]:
    return [word for change in matched.changes for word in change.arguments]


@each(
    ("prefix", "expected"),
    [
        ("module.", ["--strip-module"]),
        ("module.module.", ["--strip-module"]),
        ("module._orig_mod.", ["--strip-wrappers"]),
        ("_forward_module.", ["--strip-wrappers"]),
        ("_module.", ["--strip-wrappers"]),
        ("model.", ["--strip-prefix", "model"]),
        ("model.net.", ["--strip-prefix", "model.net"]),
        ("module.encoder_q.", ["--strip-prefix", "module.encoder_q"]),
    ],
)
def test_what_stands_in_front_of_every_name_is_named_as_migrate_calls_it(prefix: str, expected: list[str]) -> None:
    matched = match(EXPECTED, under(prefix))

    assert matched.exact
    assert options(matched) == expected
    assert matched.pairs == {name: f"{prefix}{name}" for name in EXPECTED}


def test_old_spellings_are_recognised_under_a_prefix() -> None:
    old = {
        name.replace("norm.weight", "norm.gamma").replace("norm.bias", "norm.beta"): shape
        for name, shape in EXPECTED.items()
    }
    matched = match(EXPECTED, under("bert.", old))

    assert matched.exact
    assert matched.pairs["norm.weight"] == "bert.norm.gamma"


def test_parts_of_a_component_are_no_prefix() -> None:
    shapes = {"submodule.weight": (1,), "module_x.weight": (2,)}
    matched = match({"weight": (1,), "x.weight": (2,)}, shapes)

    assert "submodule.weight" in matched.unexpected or matched.pairs == {"weight": "submodule.weight"}
    assert "x.weight" in matched.missing


def test_a_guess_that_would_touch_what_fits_is_not_made() -> None:
    expected: dict[str, Shape] = {"a.x.weight": (2,), "b.y.weight": (3,)}
    found: dict[str, Shape] = {"a.x.weight": (2,), "b.x.weight": (3,)}
    guesses = guess_renames(expected, found)

    renamed = renaming.rename(list(found), [change.rule for change in guesses])
    assert "a.x.weight" in renamed
    assert set(renamed) == set(expected)


def test_the_numbers_of_layers_are_never_exchanged() -> None:
    expected: dict[str, Shape] = {f"layers.{i}.attn.q.weight": (4, 4) for i in range(200)}
    found: dict[str, Shape] = {f"layers.{i}.attn.query.weight": (4, 4) for i in range(200)}
    matched = match(expected, found)

    assert not matched.pairs
    guesses = guess_renames(expected, found)
    renamed = renaming.rename(list(found), [change.rule for change in guesses])
    assert renamed == list(expected)


COMPONENT = st.sampled_from(["module", "submodule", "model", "conv", "0", "1", "weight", "bias", "mlp_module", "net"])
NAMES = st.lists(st.lists(COMPONENT, min_size=1, max_size=4).map(".".join), min_size=1, max_size=12, unique=True)
SHAPES = NAMES.flatmap(
    lambda names: st.lists(
        st.tuples(st.integers(0, 3)), min_size=len(names), max_size=len(names)
    ).map(lambda shapes: dict(zip(names, shapes, strict=True)))
)  # fmt: skip
WRAPPERS = st.lists(
    st.sampled_from(["module", "_orig_mod", "_forward_module", "model", "net"]), min_size=1, max_size=3
).map(lambda parts: "".join(f"{part}." for part in parts))


@given(SHAPES, WRAPPERS)
def test_any_nest_of_wrappers_is_undone(shapes: dict[str, Shape], prefix: str) -> None:
    matched = match(shapes, under(prefix, shapes))

    assert len(matched.pairs) == len(shapes)
    assert not matched.missing


@given(SHAPES, SHAPES)
def test_every_name_is_accounted_for_once(expected: dict[str, Shape], found: dict[str, Shape]) -> None:
    matched = match(expected, found)
    reshaped = {one.name: one.found_name for one in matched.reshaped}

    assert sorted([*matched.pairs, *matched.missing, *reshaped]) == sorted(expected)
    assert sorted([*matched.pairs.values(), *matched.unexpected, *reshaped.values()]) == sorted(found)
    assert all(expected[name] == found[old] for name, old in matched.pairs.items())
    renamed = dict(zip(found, renaming.rename(list(found), [c.rule for c in matched.changes]), strict=True))
    if not matched.target_wrapped:
        assert all(renamed[old] == name for name, old in matched.pairs.items())
