"""Where no planner is asked before a command is advised: it would have said the same."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.checking import advice
from ckptool.errors import CkptoolError
from tests.corpus.test_corpus import FOLDER, ROWS
from tests.scale import step

FIXTURES = Path(__file__).parents[2] / "fixtures" / "valid"


class Planned:
    """Whether commands were advised without a planner, and how often a planner would not have agreed."""

    def __init__(self) -> None:
        self.quick = 0
        self.wrong: list[str] = []

    def look(self, path: Path) -> None:
        try:
            checkpoint = ckptool.open_checkpoint(path)
        except CkptoolError:
            return
        options = {"form": "state_dict"}
        with checkpoint:
            if advice._is_all_plain(checkpoint, options, ()):
                self.quick += 1
                if not advice._opens(advice._plan(checkpoint, options, ())):
                    self.wrong.append(str(path))


def test_what_is_advised_without_a_planner_is_what_it_would_advise() -> None:
    found = Planned()
    for path in [*sorted(FIXTURES.glob("*.p*")), *(FOLDER / row["file"] for row in ROWS)][:: step(3)]:
        found.look(path)

    assert found.wrong == []
    assert found.quick > 50 // step(3)


def with_state(value: torch.Tensor, **state: Any) -> nn.Parameter:
    made = nn.Parameter(value)
    made.__dict__.update(state)
    return made


def metadata(value: Any) -> OrderedDict[str, Any]:
    made = OrderedDict(a=torch.ones(2))
    made._metadata = value  # type: ignore[attr-defined]
    return made


ODD: dict[str, Callable[[], Any]] = {
    "numbers as names": lambda: {1: torch.ones(2), "1": torch.zeros(2)},
    "a name of three": lambda: {("a", 1): torch.ones(2)},
    "no name": lambda: {"": torch.ones(2)},
    "half a pair": lambda: {"\ud800": torch.ones(2)},
    "nested": lambda: {"a": {"b": torch.ones(2)}, "a.b": torch.ones(2)},
    "a view of much": lambda: {"a": torch.ones(1000)[:1]},
    "tied": lambda: dict.fromkeys("ab", torch.ones(2)),
    "sparse": lambda: {"a": torch.eye(2).to_sparse()},
    "quantised": lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)},
    "empty": lambda: {"a": torch.ones(0)},
    "conjugate": lambda: {"a": torch.ones(2, dtype=torch.complex64).conj()},
    "with a state": lambda: {"a": with_state(torch.ones(2), path=Path("x"))},
    "metadata that runs": lambda: metadata({"": {"version": Path("x")}}),
    "metadata of a class": lambda: metadata(Path("x")),
    "a class beside": lambda: {"a": torch.ones(2), "b": Path("x")},
    "a model": lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    "a wrapped model": lambda: nn.DataParallel(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_odd_weights_are_no_exception(
    make: Callable[[], Any], save: Callable[[Any, Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "odd.pth"
    save(make(), path)
    found = Planned()

    found.look(path)

    assert found.wrong == []


@pytest.mark.parametrize(
    "names", [("gen", "disc"), ("student", "teacher"), ("netG", "netD"), ("actor", "critic")], ids="-".join
)
def test_no_command_takes_one_of_several_state_dicts(names: tuple[str, str], tmp_path: Path) -> None:
    models = {name: {"0.weight": torch.ones(2, at), "0.bias": torch.ones(at)} for at, name in enumerate(names, 3)}
    torch.save({**models, "args": Namespace(lr=0.1)}, tmp_path / "x.pth")
    report = ckptool.check(tmp_path / "x.pth")

    assert not [one.command for one in report.findings if one.command and "--key" in one.command]
    assert [one.hint for one in report.findings if one.hint and "It holds 2 state dicts: take one" in one.hint]
