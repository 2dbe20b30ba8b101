"""Writes the fixture set: trains three nets briefly, saves them in every way, says what must be found."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ckptool.errors import FileUnavailable
from ckptool.reference import trainer
from ckptool.reference.nets import CLASSES, MLP, LeNet, TiedReader
from ckptool.reference.trainer import Recipe, Trained, process_group, train
from tests.fixture_set import everyday, exports, oddities
from tests.fixture_set.places import relative_places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fixture_set.cases import Case

_FORGED = "cuda:0"
_INTRODUCTION = """\
# Fixtures

Checkpoints that `python -m tests.fixture_set fixtures` writes, in `valid/`. Beside each stands a JSON of the same
name with what must be found in it: every tensor's name, shape, dtype, device as saved, and SHA-256. It was taken
from the live model when the file was written, not read from the file.

*Forged* means that the tensors were on a CPU and `torch.save` was made to write another device's tag; such a
file opens everywhere that a real one opens, and shows the same tag. *Real* means that they were where the
file says.

Whole models in the old format (`-legacy`) hold the source text of their classes and where it lay, as that
format does; torch's part of the text is under BSD-3-Clause. All such places, here and in programs, are told
from the folder of the package: no file names a folder of the machine that wrote it.

Write them again with `python -m tests.fixture_set fixtures` (needs `pip install ".[train]"`). On a machine with
CUDA the same command writes real files for those that are forged here as `cuda:0`.

| file | shows | torch | device | |
|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class _Nets:
    tied: Trained
    mlp: Trained
    lenet: Trained


def write_fixtures(folder: Path, device: torch.device, tell: Callable[[Case], None] = lambda _: None) -> int:
    """
    Write the set for this device into ``folder/valid`` with a README above it; return the number of files.

    Files of the same name are replaced, others stay and keep their line in the README. The same device and
    torch give the same tensors every time.

    Raises:
        FileUnavailable: The folder cannot be made or written.
        CkptoolError: scikit-learn, whose digits are trained on, is not installed.
    """
    valid = folder / "valid"
    written = 0
    try:
        valid.mkdir(parents=True, exist_ok=True)
        # torch warns of everything here that is old, new or odd, which is what a fixture set is made of.
        with warnings.catch_warnings(), process_group(device), relative_places():
            warnings.simplefilter("ignore")
            for case in cases(_trained(device), device):
                case.write(valid / case.filename)
                (valid / f"{case.name}.json").write_text(case.as_json(), encoding="utf-8")
                tell(case)
                written += 1
        (folder / "README.md").write_text(readme(valid), encoding="utf-8")
    except OSError as error:
        raise FileUnavailable(
            f"fixtures cannot be written here: {error.strerror or error}",
            path=str(folder),
            hint="Name a folder that is yours to write.",
        ) from error
    return written


def cases(nets: _Nets, device: torch.device) -> Iterator[Case]:
    """Yield the whole set: from the CPU, and from CUDA, really or forged."""
    cpu = torch.device("cpu")
    yield from everyday.every_habit(nets.tied, cpu)
    if device.type == "cuda":
        yield from everyday.every_habit(nets.tied, device)
        yield from everyday.lenet(nets.lenet, device)
    else:
        if device != cpu:
            yield from everyday.every_habit(nets.tied, device)
        yield from everyday.every_habit(nets.tied, cpu, forge=_FORGED)
        yield from everyday.lenet(nets.lenet, cpu, forge=_FORGED)
    for trained in (nets.tied, nets.mlp):
        trained.model.cpu()
    yield from everyday.nested_model(nets.tied)
    yield from everyday.every_protocol(nets.mlp)
    yield from everyday.every_precision(nets.mlp)
    yield from exports.other_formats(nets.tied, nets.mlp)
    yield from oddities.odd_tensors(nets.tied.model)
    yield from oddities.every_device(nets.mlp.model)


def readme(valid: Path) -> str:
    """Return a line for every file that has a JSON beside it."""
    rows = []
    for path in sorted(valid.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        truth = "forged" if found["forged"] else "real"
        rows.append(f"| `{found['file']}` | {found['shows']} | {found['torch']} | {found['device']} | {truth} |\n")
    return _INTRODUCTION + "".join(rows)


def _trained(device: torch.device) -> _Nets:
    def briefly(build: Callable[[], nn.Module], side: int) -> Trained:
        return train(build, trainer.digits(side, seed=0), Recipe(epochs=2), device)

    return _Nets(
        tied=briefly(lambda: TiedReader(16), 28),
        mlp=briefly(lambda: MLP(16, 3, inputs=64, outputs=CLASSES), 8),
        lenet=briefly(LeNet, 28),
    )
