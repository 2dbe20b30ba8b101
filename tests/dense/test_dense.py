"""Quantised weights become the plain ones that they stand for, in ``migrate`` and ``load``, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool import CkptoolError, MigrationRefused
from tests.program import invoke
from tests.scale import scale

Tensors: TypeAlias = dict[str, torch.Tensor]
Case: TypeAlias = tuple[Tensors, torch.Tensor, dict[str, Any]]
NORM = torch.arange(4.0).to(torch.bfloat16)


def ints(*shape: int, bits: int = 32) -> torch.Tensor:
    low, high = (-(1 << 31), (1 << 31) - 1) if bits == 32 else (0, 1 << bits)
    return torch.randint(low, high, shape, dtype=torch.int32)


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers in each row as words of 32 bits: one stream, the lowest bits first."""
    rows = []
    for row in values.tolist():
        stream = sum(one << (bits * at) for at, one in enumerate(row))
        many = -(-bits * len(row) // 32)
        words = [(stream >> (32 * at)) & 0xFFFFFFFF for at in range(many)]
        rows.append([one - (1 << 32) if one >> 31 else one for one in words])
    return torch.tensor(rows, dtype=torch.int32)


def fp8_blocks() -> Case:
    scale = torch.rand(2, 3) / 100
    spread = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    values = (torch.randn(200, 300) / spread).to(torch.float8_e4m3fn)
    dense = (values.float() * spread).to(torch.bfloat16)
    return {"m.weight": values, "m.weight_scale_inv": scale}, dense, {"weight_block_size": [128, 128]}


def fp8_tensor() -> Case:
    scale, values = torch.tensor(0.01), torch.randn(6, 8).to(torch.float8_e5m2)
    beside = {"m.weight_scale": scale, "m.input_scale": torch.tensor(2.0)}
    return {"m.weight": values, **beside}, (values.float() * scale).to(torch.bfloat16), {}


def fp8_powers() -> Case:
    values, scale = torch.randn(4, 64).to(torch.float8_e4m3fn), torch.randint(120, 130, (4, 2), dtype=torch.uint8)
    spread = (2.0 ** (scale.float() - 127)).repeat_interleave(32, 1)
    return {"m.weight": values, "m.weight_scale": scale}, (values.float() * spread).to(torch.bfloat16), {}


def int8_rows() -> Case:
    values, scale = torch.randint(-128, 128, (6, 8), dtype=torch.int8), (torch.rand(6, 1) / 9).half()
    zero = torch.randint(-9, 9, (6, 1), dtype=torch.int8)
    tensors = {"m.weight": values, "m.weight_scale": scale, "m.weight_zero_point": zero}
    return tensors, (values.half() - zero.half()) * scale, {}


def gptq(bits: int, *, is_new: bool, in_order: bool = False) -> Case:
    inputs, outputs, groups = 64, 32, 2
    values, zero = ints(inputs, outputs, bits=bits), ints(groups, outputs, bits=bits)
    scale, order = (torch.rand(groups, outputs) / 9).half(), torch.randint(0, groups, (inputs,), dtype=torch.int32)
    order = torch.arange(inputs) // 32 if in_order else order
    true = (zero + (not is_new)) % (1 << bits)
    dense = (scale[order].float() * (values - true[order]).float()).half().T.contiguous()
    tensors = {"m.qweight": pack(values.T, bits).T, "m.qzeros": pack(zero, bits), "m.scales": scale, "m.g_idx": order}
    return tensors, dense, {"bits": bits, "quant_method": "gptq", "checkpoint_format": "gptq_v2" if is_new else "gptq"}


def awq() -> Case:
    values, zero, scale = ints(64, 16, bits=4), ints(2, 16, bits=4), (torch.rand(2, 16) / 9).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # which column of eight each place of a word has
    placed = [one.reshape(len(one), -1, 8)[:, :, order].reshape(len(one), -1) for one in (values, zero)]
    dense = ((values - zero.repeat_interleave(32, 0)).half() * scale.repeat_interleave(32, 0)).T.contiguous()
    tensors = {"m.qweight": pack(placed[0], 4), "m.qzeros": pack(placed[1], 4), "m.scales": scale}
    return tensors, dense, {"quant_method": "awq", "bits": 4, "version": "gemm"}


def packed(bits: int) -> Case:
    values, zero, scale = ints(8, 96, bits=bits), ints(8, 3, bits=bits), (torch.rand(8, 3) / 9).to(torch.bfloat16)
    dense = (values - zero.repeat_interleave(32, 1)).to(torch.bfloat16) * scale.repeat_interleave(32, 1)
    shape = torch.tensor([8, 96])
    tensors = {"m.weight_packed": pack(values, bits), "m.weight_scale": scale, "m.weight_shape": shape}
    tensors["m.weight_zero_point"] = pack(zero.T, bits).T
    says = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": bits}}}}
    return tensors, dense, says


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4() -> Case:
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 6, 3), dtype=torch.uint8)
    values = FP4[torch.stack((blocks & 15, blocks >> 4), -1).long()].reshape(2, 6, 3, 32)
    dense = (values * 2.0 ** (scales.float() - 127)[..., None]).reshape(2, 6, 96).transpose(1, 2)
    return {"m.weight_blocks": blocks, "m.weight_scales": scales}, dense.to(torch.bfloat16).contiguous(), {}


def nvfp4() -> Case:
    data = torch.randint(0, 256, (4, 16), dtype=torch.uint8)
    scale, whole = (torch.rand(4, 2) * 99).to(torch.float8_e4m3fn), torch.tensor([900.0])
    values = FP4[torch.stack((data & 15, data >> 4), -1).long()].reshape(4, 32)
    dense = (values * (scale.float() / whole).repeat_interleave(16, 1)).to(torch.bfloat16)
    return {"m.weight_packed": data, "m.weight_scale": scale, "m.weight_global_scale": whole}, dense, {}


def nf4(*, twice: bool) -> Case:
    data, table = torch.randint(0, 256, (96, 1), dtype=torch.uint8), torch.linspace(-1, 1, 16)
    state: dict[str, Any] = {"blocksize": 64, "shape": [4, 48], "dtype": "float16", "quant_type": "nf4"}
    tensors, largest = {"m.weight": data, "m.weight.quant_map": table}, torch.rand(3)
    tensors["m.weight.absmax"] = largest
    if twice:
        codes, inner, small = torch.randint(0, 256, (3,), dtype=torch.uint8), torch.linspace(-1, 1, 256), torch.rand(1)
        tensors |= {"m.weight.absmax": codes, "m.weight.nested_quant_map": inner, "m.weight.nested_absmax": small}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        largest = inner[codes.long()] * small + 0.25
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["m.weight.quant_state.bitsandbytes__nf4"] = text
    values = table[torch.stack((data >> 4, data & 15), -1).long()].reshape(3, 64)
    return tensors, (values * largest[:, None]).reshape(4, 48).half(), {}


def bnb8() -> Case:
    values, largest = torch.randint(-127, 128, (6, 8), dtype=torch.int8), torch.rand(6)
    dense = (values.float() * largest[:, None] * 7.874015718698502e-3).to(torch.bfloat16)
    return {"m.weight": values, "m.SCB": largest, "m.weight_format": torch.tensor(0, dtype=torch.uint8)}, dense, {}


def convolution(*ones: int) -> Case:
    values, scale = torch.randn(6, 4, 3, 3).to(torch.float8_e4m3fn), torch.rand(6, *ones)
    dense = (values.float() * scale.reshape(6, 1, 1, 1)).to(torch.bfloat16)
    return {"m.weight": values, "m.weight_scale": scale}, dense, {}


def comfy() -> Case:
    values, text = torch.randn(6, 8).to(torch.float8_e4m3fn), json.dumps({"format": "float8_e4m3fn"})
    tensors = {"m.weight": values, "m.scale_weight": torch.tensor(0.5), "m.scale_input": torch.tensor(2.0)}
    tensors["m.comfy_quant"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return tensors, (values.float() / 2).to(torch.bfloat16), {}


def with_group(of: Case, **weights: Any) -> Case:
    """Return a case whose settings have groups of compressed-tensors, this one last."""
    tensors, dense, says = of
    first = {"num_bits": 3, "group_size": 24, "block_structure": [32, 32]}
    groups = {"group_0": {"weights": first}, "group_1": {"weights": weights}}
    return tensors, dense, {**says, "quant_method": "compressed-tensors", "config_groups": groups}


def blocks() -> Case:
    values, scale = torch.randn(192, 96).to(torch.float8_e4m3fn), torch.rand(2, 2)
    spread = scale.repeat_interleave(128, 0)[:192].repeat_interleave(64, 1)[:, :96]
    tensors = {"m.weight": values, "m.weight_scale": scale}
    return with_group((tensors, (values.float() * spread).to(torch.bfloat16), {}), block_structure=[128, 64])


def gptq_without_order() -> Case:
    """The last of the groups, each of 64 inputs, has half of them."""
    values, zero, scale = ints(96, 32, bits=4), ints(2, 32, bits=4), (torch.rand(2, 32) / 9).half()
    order = torch.arange(96) // 64
    dense = (scale[order].float() * (values - (zero + 1)[order] % 16).float()).half().T.contiguous()
    tensors = {"m.qweight": pack(values.T, 4).T, "m.qzeros": pack(zero, 4), "m.scales": scale}
    return tensors, dense, {"bits": 4, "quant_method": "gptq", "group_size": 64}


def of_auto_round(layout: str, bits: int) -> Case:
    """AutoRound's zeros are those of GPTQ, or one more, as its layout says; it has any number of bits."""
    tensors, dense, _ = gptq(bits, is_new=layout != "auto_round:auto_gptq", in_order=True)
    del tensors["m.g_idx"]
    return tensors, dense, {"quant_method": "auto-round", "bits": bits, "group_size": 32, "packing_format": layout}


CASES: dict[str, Callable[[], Case]] = {
    **{f"{name}, 5 bits": lambda name=name: of_auto_round(name, 5) for name in ("auto_round", "auto_round:auto_gptq")},  # type: ignore[misc]
    "a convolution": lambda: convolution(1, 1, 1),
    "a convolution, its scales a vector": convolution,
    "ComfyUI": comfy,
    "blocks that only settings tell": blocks,
    "bits of another group": lambda: with_group(packed(4), num_bits=4),
    "GPTQ without the order of columns": gptq_without_order,
    "FP8 in blocks": fp8_blocks,
    "FP8 of a tensor, with a scale of activations": fp8_tensor,
    "FP8 with powers of two": fp8_powers,
    "integers with zeros": int8_rows,
    **{f"GPTQ of {bits} bits": lambda bits=bits: gptq(bits, is_new=bits == 3) for bits in (2, 3, 4, 8)},  # type: ignore[misc]
    "AWQ": awq,
    **{f"compressed-tensors of {bits} bits": lambda bits=bits: packed(bits) for bits in (3, 4, 8)},  # type: ignore[misc]
    "MXFP4": mxfp4,
    "NVFP4": nvfp4,
    "NF4": lambda: nf4(twice=False),
    "NF4, scales quantised": lambda: nf4(twice=True),
    "bitsandbytes of 8 bits": bnb8,
}


def written(tensors: Tensors, says: dict[str, Any], folder: Path, **texts: str) -> Path:
    path = folder / "model.safetensors"
    whole = {name: one.contiguous() for name, one in tensors.items()}
    save_file({**whole, "n.weight": NORM}, path, {"format": "pt", **texts})
    if says:
        (folder / "config.json").write_text(json.dumps({"dtype": "float32", "quantization_config": says}))
    return path


@pytest.mark.parametrize("name", CASES)
def test_what_was_quantised_is_dense(name: str, tmp_path: Path) -> None:
    torch.manual_seed(len(name))
    tensors, dense, says = CASES[name]()
    path = written(tensors, says, tmp_path)

    report = ckptool.migrate(path, tmp_path / "dense.safetensors", dequantize=True)
    for found in (load_file(report.target), ckptool.load(path, dequantize=True), ckptool.load(report.target)):
        assert found.keys() == {"m.weight", "n.weight"}
        assert found["m.weight"].dtype == dense.dtype
        assert torch.equal(found["m.weight"], dense)
        assert torch.equal(found["n.weight"], NORM)
    assert "dense now" in str(report)
    assert report.verified


def test_a_type_is_reached_in_one_rounding_and_others_are_cast(tmp_path: Path) -> None:
    tensors, _, says = fp8_blocks()
    path = written(tensors, says, tmp_path)
    spread = tensors["m.weight_scale_inv"].repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]

    for dtype in (torch.float32, torch.float16, torch.float64):
        want = (tensors["m.weight"].float() * spread).to(dtype)
        name = str(dtype).removeprefix("torch.")
        target = ckptool.migrate(path, tmp_path / f"{name}.pth", dequantize=True, dtype=name).target
        for found in (torch.load(target), ckptool.load(path, dequantize=True, dtype=dtype)):
            assert torch.equal(found["m.weight"], want)
            assert found["n.weight"].dtype == dtype


@pytest.mark.parametrize("scales", ["one tensor", "copies", "others"])
def test_names_that_are_tied_stay_so(scales: str, tmp_path: Path) -> None:
    values, scale = torch.randn(8, 16).to(torch.float8_e4m3fn), torch.rand(8, 1)
    other = {"one tensor": scale, "copies": scale.clone(), "others": scale * 2}[scales]
    state = {
        "embed.weight": values,
        "embed.weight_scale": scale,
        "lm_head.weight": values,
        "lm_head.weight_scale": other,
    }
    torch.save(state, tmp_path / "a.pth")
    is_tied = scales != "others"
    ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", dequantize=True)
    report = ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.safetensors", dequantize=True)
    assert report.tied == ({"lm_head.weight": "embed.weight"} if is_tied else {})
    for found in (torch.load(tmp_path / "b.pth"), ckptool.load(tmp_path / "a.pth", dequantize=True)):
        head, embedding = found["lm_head.weight"], found["embed.weight"]
        assert (head.data_ptr() == embedding.data_ptr()) == is_tied
        assert torch.equal(embedding, (values.float() * scale).bfloat16())
        assert torch.equal(head, (values.float() * other).bfloat16())


@pytest.mark.parametrize("model", ["gpt2", "gpt_bigcode", None])
def test_layers_of_gpt2_come_out_as_the_plain_model_has_them(model: str | None, tmp_path: Path) -> None:
    values, scale = torch.randint(-127, 128, (6, 4), dtype=torch.int8), torch.rand(6)
    head = torch.randint(-127, 128, (6, 4), dtype=torch.int8)
    state = {"transformer.h.0.attn.c_attn.weight": values, "transformer.h.0.attn.c_attn.SCB": scale}
    save_file(state | {"head.weight": head, "head.SCB": scale.clone()}, tmp_path / "model.safetensors")
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))

    report = ckptool.migrate(tmp_path, tmp_path / "out.safetensors", dequantize=True, dtype="float32")
    found = load_file(tmp_path / "out.safetensors")
    plain, own = (one.float() * scale[:, None] * 7.874015718698502e-3 for one in (values, head))
    assert torch.equal(found["transformer.h.0.attn.c_attn.weight"], plain.T if model == "gpt2" else plain)
    assert torch.equal(found["head.weight"], own)
    assert ("no config.json says which model it is" in str(report)) == (model is None)


def test_scales_of_activations_of_norms_are_left_out(tmp_path: Path) -> None:
    one = torch.tensor(0.5)
    linear = {"l.weight._data": torch.ones(4, 4, dtype=torch.int8), "l.weight._scale": torch.rand(4, 1)}
    scales = {f"{module}.{name}": one.clone() for module in ("l", "norm") for name in ("input_scale", "output_scale")}
    own = {"norm.weight": torch.ones(4), "mine.input_scale": one}  # a parameter that is called so
    save_file(linear | scales | own, tmp_path / "x.safetensors")
    found = ckptool.load(tmp_path / "x.safetensors", dequantize=True)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "l.weight": torch.float32,  # as all else
        "norm.weight": torch.float32,
        "mine.input_scale": torch.float32,
    }


def test_names_folders_and_settings(tmp_path: Path) -> None:
    tensors, dense, says = gptq(4, is_new=False)
    path = written({f"model.{name}": one for name, one in tensors.items()}, says, tmp_path)

    options = ["--dequantize", "--max-shard-size", "4KB", "--strip-prefix", "model", "--include", "model.*"]
    options += ["--config-from", tmp_path, "--dtype", "float16", *(["--jobs", "2"] if scale else [])]
    done = invoke(["migrate", path, tmp_path / "out", *options])
    assert done.exit_code == 0, done.output
    assert torch.equal(ckptool.load(tmp_path / "out")["m.weight"], dense)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "float16"}


def test_a_whole_training_checkpoint_gives_its_weights(tmp_path: Path) -> None:
    tensors, dense, _ = nf4(twice=True)
    torch.save({"model": {**tensors, "n.weight": NORM}, "epoch": 3}, tmp_path / "x.pth")
    target = ckptool.migrate(tmp_path / "x.pth", tmp_path / "y.pth", dequantize=True).target

    assert torch.equal(torch.load(target)["m.weight"], dense)


def without(case: Case, name: str) -> Tensors:
    return {key: one for key, one in case[0].items() if key != name}


def changed(case: Case, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return {key: change(one).contiguous() if key == name else one for key, one in case[0].items()}


def of_comfy(form: str) -> Tensors:
    text = torch.tensor(list(json.dumps({"format": form}).encode()), dtype=torch.uint8)
    return {**fp8_powers()[0], "m.comfy_quant": text}


def in_a_header() -> Tensors:
    values, scale = torch.zeros(128, 32, dtype=torch.uint8), torch.ones(128, 4).to(torch.float8_e4m3fn)
    return {"m.weight": values, "m.weight_scale": scale, "m.weight_scale_2": torch.tensor(0.5)}


def with_extra(**extra: torch.Tensor) -> Tensors:
    return without(int8_rows(), "m.weight_zero_point") | {name.replace("__", "."): one for name, one in extra.items()}


REFUSED: dict[str, Callable[[], Tensors]] = {
    "zeros of another name": lambda: with_extra(m__zero_point=torch.ones(6, 1, dtype=torch.int8)),
    "a scale of what comes in": lambda: with_extra(m__pre_quant_scale=torch.ones(8)),
    "8 bits beside it": lambda: with_extra(m__bias=torch.ones(8).to(torch.float8_e4m3fn)),
    "columns in a group below 0": lambda: {**gptq(4, is_new=False)[0], "m.g_idx": torch.full((64,), -2).int()},
    "columns in a group above all": lambda: {**gptq(4, is_new=False)[0], "m.g_idx": torch.full((64,), 9).int()},
    "a layout that the header names": in_a_header,
    "no zeros, and settings that say some": lambda: without(packed(4), "m.weight_zero_point"),
    "no zeros of rows, and settings that say some": lambda: without(int8_rows(), "m.weight_zero_point"),
    "no order of columns, and settings that say one": lambda: without(gptq(4, is_new=False), "m.g_idx"),
    "settings of other bits": lambda: gptq_without_order()[0],
    "settings of other groups": lambda: awq()[0],
    "another layout of ComfyUI": lambda: of_comfy("mxfp8"),
    "an order of columns that is not there": lambda: without(gptq_without_order(), "m.g_idx"),
    "floats of 5 bits": lambda: {
        "m.weight_packed": torch.zeros(4, 20, dtype=torch.uint8), "m.weight_scale": torch.zeros(4, 1).byte()
    },
    "scales of torchao in the order of a kernel": lambda: {
        "m._weight_qdata": torch.zeros(128, 128).to(torch.float8_e4m3fn),
        "m._weight_scale": torch.zeros(32, 16).to(torch.float8_e8m0fnu),
    },
    "no scale": lambda: without(fp8_blocks(), "m.weight_scale_inv") | {"o.weight": fp8_tensor()[0]["m.weight"],
                                                                    "o.weight_scale": torch.tensor(1.0)},
    "a scale turned round": lambda: changed(fp8_blocks(), "m.weight_scale_inv", torch.Tensor.t),
    "a scale too many": lambda: changed(fp8_blocks(), "m.weight_scale_inv", lambda one: torch.rand(2, 4)),
    "scales of columns": lambda: changed(int8_rows(), "m.weight_scale", lambda one: torch.rand(8).half()),
    "zeros of another shape": lambda: changed(gptq(4, is_new=False), "m.qzeros", lambda one: one[:1]),
    "no zeros": lambda: without(awq(), "m.qzeros"),
    "scales of rows turned round": lambda: changed(int8_rows(), "m.weight_scale", lambda one: one.t()),
    "no shape": lambda: without(packed(4), "m.weight_shape"),
    "another shape": lambda: changed(packed(4), "m.weight_shape", lambda one: torch.tensor([8, 97])),
    "no state": lambda: without(nf4(twice=False), "m.weight.quant_map"),
    "no inner scale": lambda: without(nf4(twice=True), "m.weight.nested_quant_map"),
    "no scale of scales": lambda: without(nvfp4(), "m.weight_global_scale"),
    "fewer largest": lambda: changed(nf4(twice=False), "m.weight.absmax", lambda one: one[:2]),
    "blocks of which nobody knows the length": lambda: {
        "m.weight": torch.zeros(192, 4, dtype=torch.float8_e4m3fn), "m.weight_scale": torch.ones(2, 1)
    },
    "scales of GPTQ that are not floats": lambda: changed(gptq(4, is_new=False), "m.scales", torch.Tensor.byte),
    "scales of AWQ of fewer columns": lambda: changed(awq(), "m.scales", lambda one: one[:, :-1]),
    "MXFP4 in groups of 30": lambda: changed(mxfp4(), "m.weight_blocks", lambda one: one[..., :-1]),
    "scales of NVFP4 for 32 each": lambda: changed(nvfp4(), "m.weight_scale", lambda one: one[:, :1]),
    "powers of two turned round": lambda: changed(fp8_powers(), "m.weight_scale", torch.Tensor.t),
    "an order of columns in two dimensions": lambda: changed(gptq(4, is_new=False), "m.g_idx", lambda one: one[None]),
    "numbers of a code book that are not floats": lambda: changed(
        nf4(twice=False), "m.weight.quant_map", torch.Tensor.byte
    ),
    "a layout that is not known": lambda: {"m.codes": ints(4, 4), "m.codebooks": torch.rand(1, 4, 4, 4)},
    "nothing quantised": lambda: {"m.weight": torch.rand(4, 4)},
}  # fmt: skip


SAYS: dict[str, dict[str, Any]] = {
    "another shape": {"bits": 4, "quant_method": "x"},
    "no shape": {"bits": 4, "quant_method": "x"},
    "columns in a group below 0": {"bits": 4},
    "columns in a group above all": {"bits": 4},
    "no zeros, and settings that say some": {**packed(4)[2], "symmetric": False},
    "no zeros of rows, and settings that say some": {"symmetric": False},
    "no order of columns, and settings that say one": {"quant_method": "gptq", "bits": 4, "desc_act": True},
    "settings of other bits": {"quant_method": "gptq", "bits": 8, "group_size": 64},
    "settings of other groups": {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 64},
}
"""What the settings beside them say; nothing of the others."""
FACTS = {
    "zeros of another name": r"m\.zero_point",
    "a scale of what comes in": r"m\.pre_quant_scale",
    "8 bits beside it": r"m\.bias",
    "columns in a group below 0": "columns in groups",
    "columns in a group above all": "columns in groups",
    "a layout that the header names": "'nvfp4', of ComfyUI",
    "nothing quantised": "nothing in it",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_dense_is_refused_by_name(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = json.dumps({"format_version": "1.0", "layers": {"m": {"format": "nvfp4"}}})
    texts = {"_quantization_metadata": text} if "header" in name else {}
    path = written(REFUSED[name](), SAYS.get(name, {}), tmp_path, **texts)

    with pytest.raises(CkptoolError, match=FACTS.get(name, r"'m\.")):
        ckptool.migrate(path, tmp_path / "dense.safetensors", dequantize=True)
    assert not (tmp_path / "dense.safetensors").exists()
    with pytest.raises(CkptoolError, match=FACTS.get(name, r"'m\.")):
        ckptool.load(path, dequantize=True)


def test_a_name_that_does_not_end_as_its_layout_says_is_refused(tmp_path: Path) -> None:
    path = written(gptq(4, is_new=False)[0], {"bits": 4, "quant_method": "gptq"}, tmp_path)

    with pytest.raises(MigrationRefused, match="is called"):
        ckptool.migrate(path, tmp_path / "x.safetensors", dequantize=True, rename=r"qweight$=w")


def test_values_that_are_too_large_are_refused(tmp_path: Path) -> None:
    tensors = {"m.weight": torch.full((4, 4), 400.0).to(torch.float8_e4m3fn), "m.weight_scale": torch.tensor(999.0)}
    path = written(tensors, {}, tmp_path)

    with pytest.raises(MigrationRefused, match="too large for float16"):
        ckptool.migrate(path, tmp_path / "x.safetensors", dequantize=True, dtype="float16")
    report = ckptool.migrate(path, tmp_path / "x.safetensors", dequantize=True, dtype="float16", saturate=True)
    assert load_file(report.target)["m.weight"].unique().tolist() == [65504.0]


def test_a_model_takes_it_in_its_own_type(tmp_path: Path) -> None:
    tensors, _, says = fp8_blocks()
    path = written(tensors, says, tmp_path)
    spread = tensors["m.weight_scale_inv"].repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]

    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.ModuleDict(
            {"m": torch.nn.Linear(300, 200, bias=False), "n": torch.nn.Linear(4, 1, bias=False)}
        )
        model["n"].weight = torch.nn.Parameter(torch.zeros(4))
        report = ckptool.load_into(model.to(dtype), path, dequantize=True)
        assert report.loaded == 2
        assert torch.equal(model["m"].weight, (tensors["m.weight"].float() * spread).to(dtype))


@pytest.mark.parametrize("name", ["FP8 in blocks", "GPTQ of 4 bits", "NF4", "bitsandbytes of 8 bits"])
def test_a_plain_model_is_told_how_it_takes_quantised_weights(name: str, tmp_path: Path) -> None:
    tensors, dense, says = CASES[name]()
    path = written(tensors, says, tmp_path)
    (rows, columns), layers = dense.shape, [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    model = torch.nn.ModuleDict(zip(("m", "n"), layers, strict=True))
    layers[0].weight, layers[1].weight = torch.nn.Parameter(torch.zeros(rows, columns)), torch.nn.Parameter(NORM)

    with pytest.raises(CkptoolError) as caught:
        ckptool.load_into(model, path)
    assert caught.value.hint is not None
    assert "load_into(model, path, dequantize=True)" in caught.value.hint
    assert ckptool.load_into(model, path, dequantize=True).loaded == 2


def test_weights_without_values_are_refused(tmp_path: Path) -> None:
    state = {
        "q.weight": torch.zeros(8, 8, device="meta", dtype=torch.float8_e4m3fn),
        "q.weight_scale": torch.ones(8, 1),
    }
    torch.save(state, tmp_path / "x.pth")

    with pytest.raises(CkptoolError, match="meta"):
        ckptool.load(tmp_path / "x.pth", dequantize=True)


def test_parameters_that_are_called_like_scales_stay(tmp_path: Path) -> None:
    tensors, dense, says = fp8_tensor()
    path = written({**tensors, "attn.q_scale": torch.ones(8, 1, 8)}, says, tmp_path)

    found = ckptool.load(path, dequantize=True)
    assert found.keys() == {"m.weight", "n.weight", "attn.q_scale"}
    assert torch.equal(found["m.weight"], dense)


def test_settings_with_what_is_no_number_are_read(tmp_path: Path) -> None:
    tensors, dense, says = gptq(3, is_new=True)
    path = written(tensors, says, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"limit": float("inf"), "quantization_config": says}))

    assert torch.equal(ckptool.load(path, dequantize=True)["m.weight"], dense)


def test_large_weights_are_read_as_a_whole(tmp_path: Path) -> None:
    names, scales = [f"{number}.weight" for number in range(3)], torch.rand(1500, 1)
    weights = {name: torch.randn(1500, 1500).to(torch.float8_e4m3fn) for name in names}
    path = written(weights | {f"{name}_scale": scales.clone() for name in names}, {}, tmp_path)
    want = {name: (one.float() * scales).to(torch.bfloat16) for name, one in weights.items()}

    model = torch.nn.ModuleList(torch.nn.Linear(1500, 1500, bias=False, dtype=torch.bfloat16) for _ in names)
    ckptool.load_into(model, path, dequantize=True, strict=False)
    for found in (ckptool.load(path, dequantize=True), model.state_dict()):
        assert all(torch.equal(found[name], one) for name, one in want.items())
    target = ckptool.migrate(path, tmp_path / "out", max_shard_size="5MB", dequantize=True).target
    assert all(torch.equal(ckptool.load(target)[name], one) for name, one in want.items())
