"""Memory that verbs take for each byte of a file that have its tree twice: that write it again, or compare two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.growth import SHAPES, on_linux, pickle_of, shapes, too_large
from tests.scale import some, times

VERBS: dict[str, tuple[str, ...]] = {
    "migrate": ("migrate", "{}", "{}.pth"),
    "migrate --form same": ("migrate", "--form", "same", "--keep-calls", "{}", "{}.same.pth"),
    "migrate --form state_dict": ("migrate", "--form", "state_dict", "{}", "{}.weights.pth"),
    "migrate --form safetensors": ("migrate", "--form", "safetensors", "{}", "{}.safetensors"),
    "diff": ("diff", "{}", "{}"),
}


@on_linux
@pytest.mark.parametrize("nbytes", [500_000, 4_000_000][: times(1, 1)])  # the larger with --scale 2
@pytest.mark.parametrize("shape", some(shapes(), 3))
def test_a_pickle_of_small_objects_is_written_and_compared_within_its_memory(
    shape: str, nbytes: int, tmp_path: Path
) -> None:
    data = pickle_of(SHAPES[shape] * (nbytes // len(SHAPES[shape])))
    assert too_large(VERBS, tmp_path, data) == {}
