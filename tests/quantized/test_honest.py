"""Files that are not quantised though they have tensors of integers, which no cast breaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptool
from ckptool import MigrationRefused
from tests.each import each
from tests.program import invoke
from tests.quantized.layouts import PLAIN, bits, codes, fp8, said
from tests.scale import scaled, step

NET = {"fc.weight": torch.randn(64, 64), "fc.bias": torch.ones(64), "norm.weight": torch.ones(64)}
WINDOW = torch.arange(49)
INDEX = (WINDOW[:, None] // 7 - WINDOW // 7 + 6) * 13 + WINDOW[:, None] % 7 - WINDOW % 7 + 6
GRID = torch.arange(8)
SIGNED = GRID[:, None] - GRID
HAAR = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 0, 0], [0, 0, 1, -1]])
SOBEL = torch.tensor([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
LAPLACE = torch.tensor([[0, 1, 0], [1, -4, 1], [0, 1, 0]])
HADAMARD = torch.tensor([[1, 1], [1, -1]]).kron(torch.tensor([[1, 1], [1, -1]])).kron(torch.tensor([[1, 1], [1, -1]]))
TREE = torch.tensor([[1, 2], [3, 4], [-1, -1], [-1, -1], [-1, -1]])
SIGNS = torch.where(codes(64, 32) < 0, -1, 1)


def swin(heads: int, entries: int, index: Tensor) -> dict[str, Tensor]:
    return {"attn.relative_position_bias_table": torch.randn(entries, heads), "attn.relative_position_index": index}


IN_A_NET: dict[str, dict[str, Tensor]] = {
    "Swin": swin(4, 169, INDEX),
    "Swin of 32 bits": swin(3, 169, INDEX.int()) | {"attn.logit_scale": torch.ones(3, 1, 1)},
    "BEiT": swin(12, 732, bits(197, 197, dtype=torch.int64) % 732),
    "MaxViT": {"attn.rel_pos.relative_position_bias_table": torch.randn(8, 13, 13), "attn.rel_pos.index": INDEX},
    "a table of 2^k entries": swin(4, 256, bits(64, 64, dtype=torch.uint8).long()),
    "neighbours": {"mesh.neighbours": TREE, "mesh.scale": torch.ones(1)},
    "children of a tree": {"tree.children": TREE.int(), "tree.threshold": torch.rand(5)},
    "kintree": {"smpl.kintree_table": torch.tensor([[-1, 0, 0, 1], [0, 1, 2, 3]]), "smpl.betas": torch.rand(4)},
    "a remap": {"head.remap": codes(8, 8, dtype=torch.int64), "head.scale": torch.ones(8)},
    "signed relative positions": {"attn.relative": SIGNED, "attn.scale": torch.ones(8)},
    "voxels": {"vox.coords": codes(100, 3, dtype=torch.int32), "vox.voxel_size": torch.ones(3)},
    "anchors": {"head.anchors": codes(9, 4, dtype=torch.int16), "head.stride": torch.ones(9)},
    "Haar": {"haar.weight": HAAR.to(torch.int8), "haar.gain": torch.ones(4)},
    "Sobel": {"sobel.weight": SOBEL[None, None], "sobel.gain": torch.ones(1)},
    "Laplace": {"edge.kernel": LAPLACE.to(torch.int8)[None, None], "edge.scale": torch.ones(1)},
    "Hadamard": {"rot.H": HADAMARD.to(torch.int8), "rot.scale": torch.ones(8)},
    "codes of one and minus one": {"hash.codes": SIGNS.to(torch.int8), "hash.scale": torch.ones(64)},
    "BLOSUM": {"align.blosum": codes(24, 24) % 12 - 4, "align.scale": torch.ones(24)},
    "a grid of a spline": {"kan.grid": codes(8, 12, dtype=torch.int16), "kan.scale_base": torch.ones(8)},
    "minhash": {"hash.a": bits(128, 2, dtype=torch.int64), "hash.scale": torch.ones(1)},
    "a table of bytes": {"tok.bytes": bits(256, 8, dtype=torch.uint8), "tok.embed_scale": torch.ones(1)},
    "a palette": {"seg.palette": bits(256, 3, dtype=torch.uint8), "seg.scale": torch.ones(3)},
    "a palette of floats": {"seg.palette": torch.rand(256, 3), "seg.example": bits(28, 28, dtype=torch.uint8)},
    "ALiBi": {"attn.dist": -SIGNED.abs(), "attn.slopes": torch.rand(8)},
    "a permutation": {"perm.perm_matrix": torch.eye(8, dtype=torch.int8).flip(0), "perm.scale": torch.ones(8)},
    "an image of a digit": {"example": bits(28, 28, dtype=torch.uint8)},
    "a board": {"board": codes(8, 8)},
    "clusters": {"km.labels": bits(64, 16, dtype=torch.uint8) % 8, "km.centroids": torch.rand(8, 3)},
    "classes": {"head.class_map": codes(10, 10, dtype=torch.int32), "head.table": torch.rand(16)},
    "two of them": {"a.lookup": codes(32, 32), "a.scale": torch.ones(32), "b.blosum": codes(24, 24)},
    "an index of an index": {"moe.experts": codes(16, 4, dtype=torch.int16), "moe.quant_levels": torch.rand(16)},
}
ALONE: dict[str, Any] = {
    "Swin alone": swin(4, 169, INDEX),
    "a table of 2^k entries alone": IN_A_NET["a table of 2^k entries"],
    "BEiT alone": swin(12, 732, bits(197, 197, dtype=torch.int64) % 732),
    "ALiBi alone": {"dist": -SIGNED.abs(), "slopes": torch.rand(8)},
    "a permutation alone": {"perm_matrix": torch.eye(8, dtype=torch.int8).flip(0), "scale": torch.ones(1)},
    "an image alone": {"example": bits(28, 28, dtype=torch.uint8)},
    "neighbours alone": {"mesh.neighbours": TREE, "mesh.scale": torch.ones(1)},
    "a tree alone": {"children": TREE, "value": torch.rand(5)},
    "audio outside": {"model": NET, "example_audio": codes(1, 16000, dtype=torch.int16)},
    "an image outside": {"model": NET, "image": bits(28, 280, dtype=torch.uint8), "scale": 0.5},
    "boards outside": {"net": NET, "data": {"x": codes(80, 80), "y": codes(80, 80)}},
}
HONEST = {name: NET | one for name, one in IN_A_NET.items()} | ALONE | PLAIN


@scaled
@each("name", list(HONEST)[:: step(4)])
def test_what_no_cast_breaks_is_cast(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    torch.save(HONEST[name], path)
    inspected = json.loads(invoke(["inspect", "--json", str(path)]).output)

    assert (said(path), inspected["quantization"]) == ([], None)
    ckptool.migrate(path, tmp_path / "o.pth", dtype="bfloat16", force=True)
    loaded = ckptool.load(path, dtype=torch.bfloat16)
    assert {one.dtype for one in loaded.values() if one.dtype.is_floating_point} <= {torch.bfloat16}
    ckptool.migrate(path, tmp_path / "o.pth", exclude=["*[a-z]scale", "*scale"], allow_unmatched=True, force=True)


@pytest.mark.parametrize("name", ["Swin", "neighbours", "Hadamard", "BLOSUM"])
def test_a_model_of_half_the_size_takes_it(name: str, tmp_path: Path) -> None:
    state, model = NET | IN_A_NET[name], nn.Module()
    torch.save(state, tmp_path / "m.pth")
    for path, value in state.items():
        head, last = path.split(".")
        model.add_module(head, getattr(model, head, nn.Module()))
        model.get_submodule(head).register_buffer(last, torch.zeros_like(value))
    ckptool.load_into(model.half(), tmp_path / "m.pth")

    assert torch.equal(model.state_dict()["fc.weight"], NET["fc.weight"].half())


@each("name", ["norms.json", "lr_mult.json"])
def test_other_numbers_beside_floats_of_8_bits(name: str, tmp_path: Path) -> None:
    torch.save({"fc.weight": fp8(64, 32), "fc.bias": torch.ones(64)}, tmp_path / "m.pth")
    (tmp_path / name).write_text('{"fc.weight": 3.5, "fc.bias": 1.0}')

    assert said(tmp_path / "m.pth") == []
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16", force=True)


EMBEDDING = {"tok.weight": torch.randn(100, 64)}
QUANTISED: dict[str, dict[str, Tensor]] = {
    "one layer in the place of a weight": NET | {"q.weight": codes(32, 32), "q.descale": torch.ones(32)},
    "one layer beside a bias": NET | {"q.w": codes(32, 64), "q.bias": torch.ones(32), "q.s_scale": torch.ones(1)},
    "the bulk beside a float that fits": {"a.w": codes(64, 64), "b.w": codes(64, 64), "a.s": torch.ones(64)},
    "the bulk without scales": {"norm.g": torch.ones(8), "a.x": codes(64, 64), "b.x": codes(64, 64)},
    "more weights than floats": NET | {f"{one}.weight": codes(8, 8) for one in "ab"} | {"a.s": torch.ones(8)},
    "signs and a factor of each row": EMBEDDING | {"q.weight": SIGNS.to(torch.int8), "q.alpha": torch.ones(64)},
    "two in a byte and their bounds": EMBEDDING
    | {"q.packed": bits(64, 16, dtype=torch.uint8), "q.mn": torch.zeros(64, 1), "q.mx": torch.ones(64, 1)},
    "places in a book": {"a.idx": bits(64, 64, dtype=torch.uint8) % 16, "a.codebook": torch.rand(16)},
}


@each("name", QUANTISED)
def test_integers_that_are_the_weights_are_not_cast(name: str, tmp_path: Path) -> None:
    torch.save(QUANTISED[name], tmp_path / "m.pth")

    assert said(tmp_path / "m.pth")[0].startswith("quantised: ")
    with pytest.raises(MigrationRefused, match="quantised weight"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16")
