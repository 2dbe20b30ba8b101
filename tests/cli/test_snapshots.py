"""What people see, as it is kept: a change of output is a change of design."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from ckptool import migrate
from tests.missing import lead_to
from tests.program import invoke

FIXTURES = Path(__file__).parents[2] / "fixtures"
SNAPSHOTS = Path(__file__).parent / "snapshots"

GPU = "checkpoint-ddp-forged-cuda0-zip.pth"
CPU = "checkpoint-plain-cpu-zip.pth"
MODEL = "lenet-model-forged-cuda0-legacy.pth"
WEIGHTS = "lenet-state-dict-data-parallel-forged-cuda0-zip.pth"

CASES: dict[str, tuple[int, list[str]]] = {
    "state-dict": (0, ["inspect", WEIGHTS]),
    "checkpoint": (0, ["inspect", GPU, "--all"]),
    "model": (0, ["inspect", MODEL]),
    "tree": (0, ["inspect", GPU, "--tree"]),
    "quantised": (0, ["inspect", "quantised-cpu-zip.pth"]),
    "sparse": (0, ["inspect", "sparse-cpu-zip.pth", "--columns", "name,shape,dtype,stride,size"]),
    "views": (
        0,
        ["inspect", "views-cpu-zip.pth", "--columns", "name,shape,stride,storage_offset,storage,shared_with"],
    ),
    "globals": (0, ["inspect", GPU, "--globals"]),
    "github": (0, ["inspect", WEIGHTS, "--table", "github"]),
    "csv": (0, ["inspect", WEIGHTS, "--table", "csv", "--columns", "name,numel,nbytes"]),
    "check-checkpoint": (1, ["check", GPU, "--globals"]),
    "check-deep": (0, ["check", WEIGHTS, "--deep"]),
    "check-like": (1, ["check", WEIGHTS, "--like", "lenet-state-dict-cpu-zip.pth"]),
    "check-truncated": (2, ["check", "../invalid/truncated-zip.pth"]),
    "diff-same": (0, ["diff", MODEL, WEIGHTS, "--ignore-wrappers"]),
    "diff-training": (1, ["diff", GPU, CPU]),
    "diff-training-ignored": (0, ["diff", GPU, CPU, "--ignore-wrappers", "--ignore-device"]),
    "diff-values": (1, ["diff", "weights.pth", "tuned.pth"]),
    "diff-tolerance": (1, ["diff", "weights.pth", "tuned.pth", "--atol", "0.01"]),
    "diff-types": (1, ["diff", "weights.pth", "half.pth"]),
    "diff-safetensors": (0, ["diff", WEIGHTS, "weights.safetensors"]),
    "diff-no-values": (0, ["diff", "weights.pth", "tuned.pth", "--no-values", "--quiet", "--ignore-order"]),
    "migrate-dry-run": (0, ["migrate", GPU, "--to", "cpu", "--strip-module", "--dry-run"]),
    "migrate-safetensors": (0, ["migrate", GPU, "out.safetensors", "--strip-module"]),
    "migrate-cast": (0, ["migrate", WEIGHTS, "--dtype", "float16", "--keep-dtype", "bias"]),
    "migrate-cast-dry-run": (0, ["migrate", WEIGHTS, "dry.pth", "--dtype", "float16", "--dry-run"]),
    "migrate-model": (0, ["migrate", MODEL, "--to", "cpu"]),
}


def write_variants(folder: Path) -> None:
    """Write weights beside the fixture that has them, and others that differ from them in some way."""
    weights = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)
    torch.save(weights, folder / "weights.pth")
    migrate(folder / "weights.pth", folder / "weights.safetensors")
    tuned = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)
    tuned["module.conv1.weight"][2, 0, 1, 3] += 0.5
    tuned["module.fc1.weight"] += 0.001
    tuned["module.out.bias"][4] = math.nan
    tuned["module.conv2.bias"][1] = 7
    torch.save(tuned, folder / "tuned.pth")
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    half["module.out.weight"] = half["module.out.weight"][:5]
    half["module.head.weight"] = half.pop("module.fc2.weight")
    torch.save(half, folder / "half.pth")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the fixtures and such variants."""
    made = tmp_path_factory.mktemp("fixtures")
    lead_to(FIXTURES / "invalid", made / "invalid")
    folder = made / "valid"
    folder.mkdir()
    for path in (FIXTURES / "valid").iterdir():
        (folder / path.name).symlink_to(path)
    write_variants(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_output_is_the_snapshot(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a change, then write it with CKPTOOL_WRITE_SNAPSHOTS=1."""
    monkeypatch.chdir(folder)
    code, arguments = CASES[case]
    result = invoke(arguments)
    assert result.exit_code == code, result.output
    snapshot = SNAPSHOTS / f"{case}.txt"
    if os.environ.get("CKPTOOL_WRITE_SNAPSHOTS"):
        snapshot.write_text(result.stdout, encoding="utf-8")

    assert result.stdout == snapshot.read_text(encoding="utf-8")


def test_there_is_a_case_for_each_snapshot() -> None:
    assert {path.stem for path in SNAPSHOTS.iterdir()} == CASES.keys()
