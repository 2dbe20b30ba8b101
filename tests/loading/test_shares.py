"""``shard``: the part of one rank, as torch would cut it; of rows, no others are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.sources import files
from tests.each import each
from tests.loading.same import assert_same, saved

CUTS = {"*.q.weight": (0, 1, 4), "*.o.weight": (1, 1, 4), "*.t": (-1, 2, 4), "embed": (0, 0, 2), "*.b": (0, 3, 4)}


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    embed = torch.randn(6, 8)
    return {
        "embed": embed,
        "head.weight": embed,
        "l.q.weight": torch.randn(64, 48).bfloat16(),
        "l.o.weight": torch.randn(48, 64),
        "l.t": torch.randn(16, 24).t(),  # its columns lie together
        "l.b": torch.arange(8).to(torch.uint8),
        "l.norm": torch.ones(5),
    }


def cut(tensor: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    return tensor.chunk(world, dim)[rank]


@each("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"dtype": "bf16"}, {"verify": True}], ids=str)
def test_a_rank_gets_what_torch_would_cut(
    suffix: str, options: Any, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "x.pth")
    path = tmp_path / f"x{suffix}"
    if suffix != ".pth":
        ckptool.migrate(tmp_path / "x.pth", path)

    found = ckptool.load(path, shard=CUTS, **options)

    whole = ckptool.load(path, **options)
    names = {"l.q.weight": "*.q.weight", "l.o.weight": "*.o.weight", "l.t": "*.t", "embed": "embed", "l.b": "*.b"}
    expected = {name: cut(one, *CUTS[names[name]]) if name in names else one for name, one in whole.items()}
    assert list(found) == list(whole)
    for name, one in expected.items():
        assert torch.equal(found[name], one), name
        assert found[name].dtype == one.dtype
    columns = found["l.o.weight"]
    assert columns.is_contiguous()
    assert columns.untyped_storage().nbytes() == columns.nbytes


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors", "folder"])
@pytest.mark.parametrize("dim", [0, 1])  # along the second, a rank has a run of each expert in the stack
def test_a_rank_of_four_reads_a_quarter(name: str, dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = {f"{number}.w": torch.randn(16, 256, 128) for number in range(4)}
    path = tmp_path / name
    ckptool.save(stacks, path, **({"form": "dcp"} if name == "folder" else {}))
    read: list[int] = []
    for call, size in (("preadv", int), ("pread", len)):
        given = getattr(files.os, call)

        def counted(*arguments: Any, given: Any = given, size: Any = size) -> Any:
            found = given(*arguments)
            read.append(size(found))
            return found

        monkeypatch.setattr(files.os, call, counted)
    shares = [ckptool.load(path, shard={"*": (dim, rank, 4)}, mmap=False) for rank in range(4)]

    assert sum(read) == pytest.approx(8 << 20, rel=0.15)  # together they read all once, and each the index
    assert_same({name: torch.cat([one[name] for one in shares], dim) for name in stacks}, stacks)
    assert ckptool.predict_memory(path, mmap=False, shard={"*": (dim, 1, 4)}).host_nbytes == 2 << 20


def test_pieces_of_a_folder_are_cut_too(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    ckptool.save(state, tmp_path / "folder", form="dcp")
    cuts = {"*.q.weight": (0, 1, 4), "*.o.weight": (1, 1, 4)}
    found = ckptool.load(tmp_path / "folder", shard=cuts)
    for name in ("q", "o"):
        assert torch.equal(found[f"l.{name}.weight"], cut(state[f"l.{name}.weight"], *cuts[f"*.{name}.weight"]))


def test_what_is_tied_stays_tied(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "x.pth")
    found = ckptool.load(tmp_path / "x.pth", shard={"embed": (0, 1, 2), "head.weight": (0, 1, 2)}, mmap=False)
    assert found["embed"].data_ptr() == found["head.weight"].data_ptr()


@each(
    ("shard", "error", "says"),
    [
        (
            {"embed": (0, 0, 4)},
            ckptool.UnsupportedFeature,
            r"\[6, 8\] has no 4 equal parts along .* 0: 6 = 4 \* 1 \+ 2",
        ),
        ({"l.norm": (1, 0, 4)}, ckptool.UnsupportedFeature, r"'l.norm' has no dimension 1: its shape is \[5\]"),
        ({"*": (0, 4, 4)}, ValueError, "rank 4 of 4"),
        ({"l.q*": (0, 0, 4), "*.weight": (1, 0, 4)}, ValueError, "shard says .* of 'l.q.weight'"),
        ({"q_proj": (0, 0, 4)}, ckptool.WeightsNotFound, "shard 'q_proj' matches none of 7 names"),
        ({"*": (0, 4)}, TypeError, "shard takes"),
    ],
)
def test_what_cannot_be_cut_is_an_error_with_numbers(
    shard: Any, error: type[Exception], says: str, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "x.pth")
    with pytest.raises(error, match=says):
        ckptool.load(tmp_path / "x.pth", shard=shard)


def test_a_part_is_not_made_dense(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "x.pth")
    with pytest.raises(ValueError, match="cannot be combined with shard="):
        ckptool.load(tmp_path / "x.pth", shard={"*": (0, 0, 1)}, dequantize=True)


def test_a_lazy_tensor_gives_boxes(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "x.pth")
    with ckptool.open_checkpoint(tmp_path / "x.pth") as checkpoint:
        lazy = checkpoint.tensors["l.o.weight"]
        assert repr(lazy[:, 2:10]) == "<LazyTensor 'l.o.weight[:, 2:10]' float32 [48, 8] cpu>"
        for box in ((slice(3, 9), slice(None, None, 7)), (slice(0),), (slice(-2, None), slice(5, 5))):
            assert torch.equal(lazy[box].torch(), state["l.o.weight"][box])
        for wrong in (3, (), (slice(1), 2), (slice(1),) * 3):
            with pytest.raises(TypeError, match="a slice of each dimension"):
                lazy[wrong]


def test_ranks_may_be_numbers_of_numpy() -> None:
    data = saved({"w": torch.arange(400)})
    cut: Any = (np.int8(0), np.uint8(1), np.uint8(2))  # 400 is no uint8
    assert ckptool.load(data, shard={"w": cut})["w"].tolist() == list(range(200, 400))
