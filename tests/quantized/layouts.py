"""Quantised weights as libraries lay them out, small, by hand: the names, types and shapes that their files have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptool
from tests import build

State = dict[str, Tensor]


class Layout(NamedTuple):
    """The tensors of one module ``m``, what is to be said of them, and the name of the scale."""

    says: str
    state: State
    scale: str
    settings: Mapping[str, object] | None = None

    def tensors(self) -> State:
        """Return them by name."""
        return dict(self.state)


def layout(says: str, scale: str, settings: Mapping[str, object] | None = None, **of_module: Tensor) -> Layout:
    """Return a layout by the names of its tensors in their module."""
    return Layout(says, {f"m.{name}": one for name, one in of_module.items()}, scale, settings)


def fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn, divisor: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) / divisor).to(dtype)


def whole(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """Return integers of both signs."""
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def said(path: Path) -> list[str]:
    """Return what is said of quantised weights."""
    return [one.message for one in ckptool.check(path).findings if one.code in ("CK506", "CK507")]


def shards(folder: Path, *parts: State) -> list[Path]:
    """Write shards with their index."""
    folder.mkdir()
    paths = [folder / f"model-0000{one + 1}-of-0000{len(parts)}.safetensors" for one in range(len(parts))]
    for part, path in zip(parts, paths, strict=True):
        save_file(part, path)
    files = {name: path.name for part, path in zip(parts, paths, strict=True) for name in part}
    (folder / "model.safetensors.index.json").write_bytes(build.index_of_shards(files))
    return paths


def bytes_of(*shape: int) -> Tensor:
    return whole(*shape, dtype=torch.uint8)


def four_bits(kind: str, scale: str = "absmax", *, twice: bool = False, storage: torch.dtype = torch.uint8) -> Layout:
    found = {
        "m.weight": torch.zeros(4096 // storage.itemsize, 1, dtype=storage),
        "m.weight.absmax": torch.ones(128, dtype=torch.uint8 if twice else torch.float32),
        "m.weight.quant_map": torch.linspace(-1, 1, 16),
        f"m.weight.quant_state.bitsandbytes__{kind}": bytes_of(77),
    }
    nested = {"m.weight.nested_absmax": torch.ones(1), "m.weight.nested_quant_map": torch.ones(256)} if twice else {}
    return Layout(f"bitsandbytes {kind.upper()} in blocks of 64", found | nested, f"m.weight.{scale}")


FP8, NVFP4, HALVES = "FP8 (e4m3)", "NVFP4 in groups of 16", torch.full((2, 64), 0.01, dtype=torch.float16)
GPTQ, PACKED = "GPTQ, 4 bits, in groups of 128", "compressed-tensors, 4 bits, in groups of 128"
OF_GPTQ = {"qweight": whole(32, 64), "qzeros": whole(2, 8), "scales": HALVES}
OF_PACKED = {
    "weight_packed": whole(64, 32),
    "weight_scale": torch.ones(64, 2, dtype=torch.bfloat16),
    "weight_shape": torch.tensor([64, 256]),
}
IN_ROWS = {"weight": whole(8, 16, dtype=torch.int8)}
GROUP = {"input_activations": {"num_bits": 8}, "weights": {"group_size": 128, "num_bits": 4}}
OF_GROUP = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}}
OF_MLX = {"quantization": {"group_size": 64, "bits": 4}}
MLX = {"weight": torch.zeros(8, 16, dtype=torch.uint32), "scales": HALVES[:, :2].mT.repeat(4, 1)}
# fmt: off
LAYOUTS = {
    "fp8 per tensor": layout(f"{FP8} per tensor", "m.weight_scale", weight=fp8(8, 8),
                             weight_scale=torch.tensor(0.01), input_scale=torch.tensor(0.5)),
    "fp8 per row": layout("FP8 (e5m2) per row", "m.weight_scale", weight=fp8(8, 16, dtype=torch.float8_e5m2),
                          weight_scale=torch.ones(8, 1)),
    "fp8 in blocks": layout(f"{FP8} in blocks of 128×128", "m.weight_scale_inv", weight=fp8(192, 256),
                            weight_scale_inv=torch.ones(2, 2)),
    "fp8 with activations": layout(f"{FP8} per tensor", "m.scale_weight", weight=fp8(8, 8),
                                   scale_weight=torch.ones(1), scale_input=torch.ones(1)),
    "fp8 experts": layout(f"{FP8} per row", "m.up_proj_scale", up_proj=fp8(2, 8, 16),
                          up_proj_scale=torch.ones(2, 8, 1)),
    "mxfp8": layout(f"{FP8} in groups of 32", "m.weight_scale", weight=fp8(8, 64), weight_scale=bytes_of(8, 2)),
    "nf4": four_bits("nf4"),
    "nf4 twice": four_bits("nf4", twice=True),
    "nf4 as bfloat16": four_bits("nf4", "quant_map", storage=torch.bfloat16),
    "fp4": four_bits("fp4"),
    "bitsandbytes int8": layout("bitsandbytes (int8) per row", "m.SCB", **IN_ROWS, SCB=torch.ones(8),
                                weight_format=torch.tensor(0, dtype=torch.uint8)),
    "gptq": layout(GPTQ, "m.scales", **OF_GPTQ, g_idx=whole(256)),
    "gptq in order": layout(GPTQ, "m.qzeros", **OF_GPTQ),
    "awq": layout("AWQ, 4 bits, in groups of 128", "m.scales", **OF_GPTQ | {"qweight": whole(256, 8)}),
    "compressed-tensors": layout(PACKED, "m.weight_scale", OF_GROUP, **OF_PACKED),
    "compressed-tensors with zeros": layout(PACKED, "m.weight_zero_point", **OF_PACKED,
                                            weight_zero_point=whole(8, 2)),
    "nvfp4": layout(f"compressed-tensors {NVFP4}", "m.weight_global_scale", weight_packed=bytes_of(8, 16),
                    weight_scale=fp8(8, 2), weight_global_scale=torch.ones(1)),
    "nvfp4 of modelopt": layout(f"ModelOpt {NVFP4}", "m.weight_scale_2", weight=bytes_of(8, 16),
                                weight_scale=fp8(8, 2), weight_scale_2=torch.tensor(0.1)),
    "mxfp4": layout("MXFP4 in groups of 32", "m.up_scales", up_blocks=bytes_of(2, 8, 3, 16),
                    up_scales=bytes_of(2, 8, 3), up_bias=torch.ones(2, 8)),
    "torchao": layout("torchao (int8) per row", "m._weight_scale", _weight_qdata=whole(8, 16, dtype=torch.int8),
                      _weight_scale=torch.ones(8, 1), _weight_zero_point=whole(8, 1, dtype=torch.int8)),
    "quanto int8": Layout("quanto (int8) per row", {
        "m.weight._data": whole(8, 16, dtype=torch.int8), "m.weight._scale": torch.ones(8, 1, dtype=torch.bfloat16),
        "m.input_scale": torch.ones(()), "m.output_scale": torch.ones(()),
    }, "m.output_scale"),
    "quanto int4": Layout("quanto, 4 bits, in groups of 128", {
        "m.weight._data._data": bytes_of(8, 128), "m.weight._scale": torch.ones(16, 1),
        "m.weight._shift": torch.ones(16, 1),
    }, "m.weight._shift"),
    "mlx": layout("MLX, 4 bits, in groups of 64", "m.biases", OF_MLX, **MLX, biases=MLX["scales"] + 1),
    "integers": layout("integers (int8) per row", "m.weight_scale", **IN_ROWS, weight_scale=torch.ones(8, 1)),
}
# fmt: on


def known_by_names(*values: tuple[str, torch.dtype, State, str]) -> dict[str, Layout]:
    """Return layouts of which the names alone, and the types of what holds the values, say what they are."""
    found = {}
    for label, dtype, others, scale in values:
        name, _, end = label.partition(": ")
        state = {f"m.{end}": bits(16, 8, dtype=dtype), **{f"m.{one}": tensor for one, tensor in others.items()}}
        found[label] = Layout(name, state, f"m.{scale}")
    return found


def bits(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return values that take all bits, as packed ones do."""
    many = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (many,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return data.view(dtype).reshape(shape)


HALF = torch.full((1, 8), 0.5, dtype=torch.float16)
LAYOUTS |= known_by_names(
    ("AQLM: codes", torch.int16, {"codebooks": HALF, "scales": HALF + 1}, "scales"),
    ("Marlin: B", torch.int32, {"s": HALF, "workspace": whole(16)}, "s"),
    ("Marlin: B_24", torch.int32, {"B_meta": whole(8, dtype=torch.int16), "s": HALF}, "s"),
    ("EXL2: q_weight", torch.int32, {"q_scale": whole(2, 8), "q_scale_max": HALF, "q_groups": whole(4)}, "q_scale_max"),
    ("EXL3: trellis", torch.int16, {"suh": HALF, "svh": HALF + 1}, "svh"),
    ("QTIP: trellis", torch.int32, {"SU": HALF, "SV": HALF + 1, "tlut": HALF + 2}, "tlut"),
    ("QuIP#: Qidxs", torch.int64, {"codebook_id": torch.tensor(0), "SU": HALF, "SV": HALF + 1}, "SU"),
    ("HIGGS: weight", torch.int16, {"scales": HALF, "tables": HALF + 1, "tables2": HALF + 2}, "tables2"),
    ("VPTQ: indices", torch.int32, {"centroids.weight": HALF, "weight_bias": HALF + 1}, "centroids.weight"),
    ("product quantisation: assignments", torch.int64, {"centroids": HALF}, "centroids"),
    ("SVDQuant: qweight", torch.int8, {"wscales": HALF, "smooth": HALF + 1, "proj_down": HALF + 2}, "proj_down"),
    ("HQQ: W_q", torch.uint8, {"scale": HALF, "zero": HALF + 1, "nbits": torch.tensor(4)}, "zero"),
    ("HQQ: l.W_q", torch.uint8, {"l.meta.scale": HALF, "l.meta.zero": HALF + 1}, "l.meta.zero"),
    ("TransformerEngine (uint8) per tensor: w._data", torch.uint8, {"w._scale_inv": HALF[:, :1]}, "w._scale_inv"),
    ("integers with scales (int32): qweight", torch.int32, {"lookup_table": HALF}, "lookup_table"),
    ("integers with scales (uint8): weight_idx", torch.uint8, {"weight_lut": HALF}, "weight_lut"),
    ("integers with scales (int8): weight", torch.int8, {"a": HALF, "b": HALF + 1}, "b"),
    ("integers with scales (int16): packed_weight", torch.int16, {"alpha": HALF, "mu": HALF + 1}, "mu"),
)


def indices(dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(64, dtype=dtype).reshape(8, 8)


WEIGHT = {"m.weight": torch.randn(8, 8), "norm.weight": torch.ones(8)}
ONE, EIGHT = torch.ones(1), torch.ones(8)
# fmt: off
PLAIN: dict[str, State] = {
    "a weight_scale": WEIGHT | {"m.weight_scale": ONE, "m.input_scale": ONE},
    "scales and biases": WEIGHT | {"m.scales": torch.ones(8, 2), "m.biases": torch.ones(8, 2)},
    "an absmax": WEIGHT | {"m.weight.absmax": torch.ones(4), "m.SCB": EIGHT},
    "blocks": {"up_blocks": torch.ones(2, 3, 16), "up_scales": torch.ones(2, 3)},
    "qweight of floats": {"m.qweight": torch.ones(8, 8), "m.scales": torch.ones(1, 8), "m.qzeros": torch.ones(1, 1)},
    "integers without scales": {
        "m.weight": whole(8, 8, dtype=torch.int8), "m.bias": EIGHT, "n.qweight": whole(8, 8, dtype=torch.int16),
        "n.scaled.weight": torch.ones(5),
    },
    "buffers": WEIGHT | {"position_ids": whole(1, 64), "m.mask": bytes_of(8, 8), "m.scale": ONE},
    "tables of indices": {
        "m.codes": indices(torch.int32), "m.blocks": indices(torch.int16), "m.scale": ONE,
        "n.kernel": indices(torch.uint8), "n.gain": EIGHT, "p.sample_weight": indices(torch.int32), "p.gamma": EIGHT,
    },
    "clusters and meshes": {
        "m.labels": indices(), "m.centroids": torch.ones(8, 3), "n.lbs_weights": torch.ones(8, 3), "n.scale": ONE,
        "n.faces": torch.arange(30, dtype=torch.int32).reshape(10, 3),
        "o.A": torch.ones(8, 8), "o.B": indices(), "o.s": ONE,
    },
    "a pruned layer": {"m.weight_orig": torch.ones(8, 8), "m.weight_mask": bytes_of(8, 8), "m.bias": EIGHT},
    "8 bits without any scale": {"m.weight": fp8(8, 8), "n.weight": fp8(8, 8), "m.bias": EIGHT},
    "masks, positions and images": {
        "m.position_ids": torch.arange(64)[None], "m.steps": indices(torch.uint8),
        "m.tril": torch.ones(8, 8, dtype=torch.uint8).tril(), "m.table": indices(torch.int32).flip(0, 1),
        "m.image": bits(3, 8, 8, dtype=torch.uint8), "m.frames": bits(4, 3, 8, 8, dtype=torch.uint8),
        "m.rng": bits(5056, dtype=torch.uint8), "m.weight": torch.randn(8, 8), "n.bias": EIGHT,
    },
    "buckets": {"m.boundaries": torch.rand(8), "m.hash_weight": indices()},
    "groups of data": {"labels": torch.arange(64) % 4, "centroids": torch.rand(4, 3)},
    "classes": {"m.types": indices().to(torch.int8), "m.gain": EIGHT},
    "a parameter in a net of 8 bits": {
        **{f"blocks.{one}.weight": fp8(8, 8) for one in range(4)}, "cell.A": fp8(8, 8), "cell.a": torch.rand(8),
        "pos_embed": fp8(1, 8, 8), "cls_token": torch.rand(1, 1, 8),
    },
    "weight norm of 8 bits": {"m.weight_v": fp8(8, 8), "m.weight_g": torch.ones(8, 1)},
}
# fmt: on
"""Nets that are not quantised, whatever they call their tensors."""
