"""What migrating 20,000 small tensors needs of memory, in a process of its own, with all that Python itself has."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.scale import exhaustive, scale

MOST = 112  # MiB
PROGRAM = """
import os, sys
def end(code):  # the command line leaves without more ado
    from tests.process import peak_nbytes  # which takes memory, too: only now
    print(code, peak_nbytes() >> 10, flush=True)
    leave(code)
leave, os._exit = os._exit, end
from ckptool.__main__ import main
main()
"""
PAIRS = [("dcp", "safetensors"), ("safetensors", "dcp"), ("zip", "dcp"), ("dcp", "dcp"), ("dcp", "zip")]
ENDINGS = {"dcp": "", "safetensors": ".safetensors", "zip": ".pt"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("small")
    found = {form: folder / f"small{ending}" for form, ending in ENDINGS.items()}
    state = {f"layers.{number}.weight": torch.full((4, 4), float(number)) for number in range(20_000)}
    if scale > 1:
        save_file(state, found["safetensors"])
        torch.save(state, found["zip"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=found["dcp"], no_dist=True)
    return found


@exhaustive
@pytest.mark.parametrize(("before", "after"), PAIRS if scale > 1 else PAIRS[:1])
def test_small_tensors_take_little(sources: dict[str, Path], tmp_path: Path, before: str, after: str) -> None:
    form = ["--form", "dcp"] if after == "dcp" else []
    target = tmp_path / f"out{ENDINGS[after]}"
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, "migrate", *form, sources[before], target],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    code, peak = map(int, found.stdout.split()[-2:])

    assert target.exists()
    assert code == 0
    assert peak / 1024 <= MOST, peak
