"""Changes are passed whole or as keywords, and made of nothing but public names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from ckptool import Changes, migrate

STATE = {"module.conv.weight": torch.ones(2, 2), "module.norm.bias": torch.zeros(3)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "a.pth")
    return tmp_path / "a.pth"


def test_changes_whole_and_as_keywords_do_the_same(source: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strip_module": True, "dtype": "float16", "exclude": ["*.bias"]}
    (given,) = get_args(get_type_hints(migrate)["options"])
    assert get_type_hints(given) == get_type_hints(Changes)
    whole = migrate(source, tmp_path / "b.pth", Changes(**options))
    keywords = migrate(source, tmp_path / "c.pth", **options)

    assert (tmp_path / "b.pth").stat().st_size == (tmp_path / "c.pth").stat().st_size
    assert whole == keywords._replace(target=whole.target)
    assert list(torch.load(tmp_path / "b.pth")) == ["conv.weight"]


def test_one_object_serves_for_many_files(source: Path, tmp_path: Path) -> None:
    changes = Changes(rename=[("^module", "net"), ("nothing", "x")], allow_unmatched=True)
    first, second = (migrate(source, tmp_path / name, changes) for name in ("b.pth", "c.pth"))

    assert first.notes == second.notes == ("rename 'nothing=x' changes no name",)
    assert list(torch.load(tmp_path / "c.pth")) == ["net.conv.weight", "net.norm.bias"]


def test_both_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="as keywords to, dtype"):
        migrate(source, tmp_path / "b.pth", Changes(), to="cpu", dtype="float16")

    assert not (tmp_path / "b.pth").exists()


def test_a_keyword_that_there_is_not_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"migrate\(\) got an unexpected keyword argument 'device': did you mean 'to'\?"
    ):
        migrate(source, tmp_path / "b.pth", device="cpu")  # type: ignore[call-arg]


def test_names_change_by_pairs_and_by_functions_in_order(source: Path, tmp_path: Path) -> None:
    def shout(names: Sequence[str]) -> list[str]:
        return [name.upper() for name in names]

    migrate(source, tmp_path / "b.pth", rename=[(r"^module\.", ""), shout, ("^", "net."), (r"(\w+)$", r"last_\1")])

    assert list(torch.load(tmp_path / "b.pth")) == ["net.CONV.last_WEIGHT", "net.NORM.last_BIAS"]
