"""What the libraries themselves write is known, with its blocks; tests are skipped where their library is not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool import CkptoolError
from ckptool.fleet import row
from tests.scale import in_turn


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 128), nn.LayerNorm(128)).to(torch.bfloat16)


def both(state: dict[str, Any], folder: Path, metadata: dict[str, str] | None = None) -> list[Path]:
    """Write a state dict by torch and by safetensors."""
    torch.save(state, folder / "model.pth")
    save_file({name: one.contiguous() for name, one in state.items()}, folder / "model.safetensors", metadata)
    return [folder / "model.pth", folder / "model.safetensors"]


def is_known(path: Path, says: str, folder: Path) -> None:
    """Assert that a file is known, and that a cast of it is refused, or leaves its weights and scales as they are."""
    assert row(path)["quantized"] == says
    for dtype in ("bfloat16", "float64"):
        target = folder / f"cast-{dtype}{path.suffix or '.safetensors'}"
        target.unlink(missing_ok=True)
        try:
            ckptool.migrate(path, target, dtype=dtype)
        except CkptoolError:
            assert not target.exists()
        else:
            assert row(target)["quantized"] == says


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("nf4", "bitsandbytes NF4 in blocks of 64"),
        ("fp4", "bitsandbytes FP4 in blocks of 64"),
        ("int8", "bitsandbytes (int8) per row"),
    ],
)
@pytest.mark.parametrize("twice", [False, True])
def test_bitsandbytes(kind: str, says: str, twice: bool, tmp_path: Path) -> None:
    layers = pytest.importorskip("bitsandbytes").nn
    if kind == "int8":
        layer = layers.Linear8bitLt(128, 128, has_fp16_weights=False)
    else:
        layer = layers.Linear4bit(128, 128, quant_type=kind, compress_statistics=twice)
    model = nn.Sequential(layer).to("cpu")
    for path in both(model.state_dict(), tmp_path):
        is_known(path, says, tmp_path)
    torch.save(model, tmp_path / "whole.pth")

    assert row(tmp_path / "whole.pth")["quantized"] == f"bitsandbytes {type(layer).__name__}"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("qint8", "quanto (int8) per row"),
        ("qint4", "quanto, 4 bits, in groups of 128"),
        ("qint2", "quanto, 2 bits, in groups of 128"),
        ("qfloat8", "quanto (e4m3) per row"),
    ],
)
def test_quanto(kind: str, says: str, tmp_path: Path) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    model = net()
    quanto.quantize(model, weights=getattr(quanto, kind))
    quanto.freeze(model)
    for path in both(model.state_dict(), tmp_path):
        is_known(path, says, tmp_path)
    torch.save(model, tmp_path / "whole.pth")

    assert str(row(tmp_path / "whole.pth")["quantized"]).startswith("quanto ")


@pytest.mark.parametrize(
    ("kind", "says", "cls"),
    [
        ("Int8WeightOnlyConfig", "torchao (int8) per row", "Int8Tensor"),
        ("Float8WeightOnlyConfig", "torchao (e4m3) per row", "Float8Tensor"),
        ("Int8DynamicActivationInt8WeightConfig", "torchao (int8) per row", "Int8Tensor"),
        ("Int8DynamicActivationIntxWeightConfig", "torchao (int8) in groups of 32", "IntxUnpackedToInt8Tensor"),
        ("NVFP4WeightOnlyConfig", "torchao", "NVFP4Tensor"),
        ("MXDynamicActivationMXWeightConfig", "torchao", "MXTensor"),
    ],
)
def test_torchao(kind: str, says: str, cls: str, tmp_path: Path) -> None:
    kinds = pytest.importorskip("torchao.quantization")
    mx = pytest.importorskip("torchao.prototype.mx_formats")
    flatten = pytest.importorskip("torchao.prototype.safetensors.safetensors_support").flatten_tensor_state_dict
    model = net()
    kinds.quantize_(model, getattr(mx if hasattr(mx, kind) else kinds, kind)())
    torch.save(model.state_dict(), tmp_path / "model.pth")
    is_known(tmp_path / "model.pth", f"torchao {cls}", tmp_path)
    with pytest.raises(CkptoolError, match=f"an object of a class in a pickle, torchao {cls}"):
        ckptool.load(tmp_path / "model.pth", dequantize=True)
    flat, metadata = flatten(model.state_dict())
    save_file(flat, tmp_path / "model.safetensors", metadata)

    is_known(tmp_path / "model.safetensors", says, tmp_path)


SAYS = {
    "W4A16": "compressed-tensors",
    "W4A16_ASYM": "compressed-tensors, 4 bits, in groups of 128",
    "W8A16": "compressed-tensors",
    "W8A8": "integers (int8) per row",
    "W4A8": "integers (int8) in groups of 128",
    "FP8": "FP8 (e4m3) per tensor",
    "FP8_DYNAMIC": "FP8 (e4m3) per row",
    "FP8_BLOCK": "FP8 (e4m3) in blocks of 128×128",
    "NVFP4": "compressed-tensors NVFP4 in groups of 16",
    "NVFP4A16": "compressed-tensors NVFP4 in groups of 16",
    "MXFP4": "compressed-tensors MXFP4 in groups of 32",
    "MXFP6A16": "compressed-tensors MXFP6 in groups of 32",
    "MXFP8": "FP8 (e4m3) in groups of 32",
}


@pytest.mark.parametrize("preset", SAYS)
def test_compressed_tensors(preset: str, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = net()
    scheme = library.preset_name_to_scheme(preset, ["Linear"])
    library.apply_quantization_config(model, library.QuantizationConfig(config_groups={"group_0": scheme}))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name.endswith("_scale"):
                one.fill_(120 if one.dtype == torch.uint8 else 0.01)
    compressors.ModelCompressor.from_pretrained_model(model).compress_model(model)
    for path in both(model.state_dict(), tmp_path):
        is_known(path, SAYS[preset], tmp_path)
    if preset == "W4A16":
        settings = json.loads(library.QuantizationConfig(config_groups={"group_0": scheme}).model_dump_json())
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
        is_known(tmp_path / "model.safetensors", "compressed-tensors, 4 bits, in groups of 128", tmp_path)


def test_hqq(tmp_path: Path) -> None:
    library = pytest.importorskip("hqq.core.quantize")
    settings = library.BaseQuantizeConfig(nbits=4, group_size=64)
    layer = library.HQQLinear(nn.Linear(256, 128), settings, compute_dtype=torch.float32, device="cpu")
    for path in both(nn.Sequential(layer, nn.LayerNorm(128)).state_dict(), tmp_path):
        is_known(path, "HQQ", tmp_path)
    layer.encoded_state_dict = False
    torch.save({"layers.0": layer.state_dict()}, tmp_path / "model.pth")
    is_known(tmp_path / "model.pth", "HQQ", tmp_path)


def test_aqlm(tmp_path: Path) -> None:
    layer = pytest.importorskip("aqlm").QuantizedLinear(256, 128, 8, 1, 2, 8)
    for path in both(nn.Sequential(layer, nn.LayerNorm(128)).state_dict(), tmp_path):
        is_known(path, "AQLM", tmp_path)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("NVFP4_DEFAULT_CFG", "integers with scales (uint8)"),
        ("FP8_DEFAULT_CFG", "FP8 (e4m3), with scales under other names"),
        ("INT4_AWQ_CFG", "integers with scales (uint8)"),
        ("INT8_DEFAULT_CFG", "integers with scales (int8)"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_modelopt(kind: str, says: str, tmp_path: Path) -> None:
    library = pytest.importorskip("modelopt.torch.quantization")
    inputs = torch.randn(4, 256).bfloat16()
    model = library.quantize(net()[:1], getattr(library, kind), lambda one: one(inputs))
    library.compress(model)
    for path in both(model.state_dict(), tmp_path):
        is_known(path, says, tmp_path)


def _bitsandbytes(library: Any, **options: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return library.BitsAndBytesConfig(**options)


def _torchao(library: Any, kind: str) -> Any:
    return library.TorchAoConfig(getattr(pytest.importorskip("torchao.quantization"), kind)())


PRETRAINED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "4 bits": (
        lambda library: _bitsandbytes(library, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "bitsandbytes NF4 in blocks of 64",
    ),
    "4 bits, twice, as bfloat16": (
        lambda library: _bitsandbytes(
            library,
            load_in_4bit=True,
            bnb_4bit_quant_type="fp4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_storage=torch.bfloat16,
        ),
        "bitsandbytes FP4 in blocks of 64",
    ),
    "8 bits": (lambda library: _bitsandbytes(library, load_in_8bit=True), "bitsandbytes (int8) per row"),
    "torchao": (lambda library: _torchao(library, "Int8WeightOnlyConfig"), "torchao (int8) per row"),
    "torchao, 8 bits of floats": (
        lambda library: _torchao(library, "Float8WeightOnlyConfig"),
        "torchao (e4m3) per row",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sharded", "name"), in_turn([False, True], PRETRAINED))
def test_transformers(name: str, sharded: bool, tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    make, says = PRETRAINED[name]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    library.LlamaForCausalLM(library.LlamaConfig(vocab_size=64, **sizes)).to(torch.bfloat16).save_pretrained(
        tmp_path / "base"
    )
    model = library.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=make(library), dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB" if sharded else "1GB")

    assert row(tmp_path / "base")["quantized"] is None
    is_known(tmp_path / "model", says, tmp_path)
    message = next(one.message for one in ckptool.check(tmp_path / "model").findings if one.code == "CK506")
    assert message.startswith(f"quantised: {says}, 14 of 14 weights have a scale; config.json says ")


def test_peft_on_a_quantised_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    layers = pytest.importorskip("bitsandbytes").nn
    base = nn.Sequential(layers.Linear4bit(128, 128, quant_type="nf4")).to("cpu")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], r=4))
    model.save_pretrained(tmp_path / "adapter")
    torch.save(model.state_dict(), tmp_path / "all.pth")

    assert row(tmp_path / "adapter")["quantized"] is None
    is_known(tmp_path / "all.pth", "bitsandbytes NF4 in blocks of 64", tmp_path)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (96, 80), (8, 1000)])
def test_bitsandbytes_of_4_bits_is_dense(kind: str, twice: bool, shape: tuple[int, int], tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    own = pytest.importorskip("bitsandbytes.backends.default.ops")
    torch.manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        values, state = functional.quantize_4bit(
            torch.randn(shape).to(dtype), quant_type=kind, compress_statistics=twice
        )
        largest = state.absmax
        if twice:
            largest = functional.dequantize_blockwise(largest, state.state2) + state.offset
        flat = values.reshape(-1)
        want = own._dequantize_4bit_compute(flat, largest, state.code, state.blocksize, state.shape, state.dtype)
        tensors = {f"m.weight.{name}": one for name, one in state.as_dict(packed=True).items()}
        save_file({"m.weight": values, **tensors}, tmp_path / "x.safetensors")

        found = ckptool.load(tmp_path / "x.safetensors", dequantize=True)["m.weight"]
        assert found.dtype == dtype
        assert torch.equal(found, want)  # -0.0 is 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("form", "weights", "blocks"),
    [
        *(("pack-quantized", {"num_bits": bits, "type": "int", "group_size": 32}, 3) for bits in (2, 3, 4, 8)),
        ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, 1),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, 1),
        ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, 6),
        ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": torch.uint8}, 3),
        ("mxfp6-pack-quantized", {"num_bits": 6, "type": "float", "group_size": 32, "scale_dtype": torch.uint8}, 3),
        ("mxfp8-quantized", {"num_bits": 8, "type": "float", "group_size": 32, "scale_dtype": torch.uint8}, 3),
    ],
)
def test_compressed_tensors_is_dense(
    form: str, weights: dict[str, Any], blocks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    compressor = pytest.importorskip("compressed_tensors.compressors.base").BaseCompressor
    torch.manual_seed(0)
    scheme = library.QuantizationScheme(targets=["Linear"], weights=library.QuantizationArgs(**weights))
    state = {"weight": (torch.randn(40, 96) / 10).to(dtype), "weight_scale": (torch.rand(40, blocks) / 20).to(dtype)}
    if "mxfp" in form or "nvfp4" in form:
        state["weight_scale"] = 2.0 ** torch.randint(-6, 0, (40, blocks))
    if "nvfp4" in form:
        state["weight_global_scale"] = torch.tensor([9.0])
    packed = compressor.get_value_from_registry(form).compress(state, scheme)
    want = compressor.get_value_from_registry(form).decompress(dict(packed), scheme)["weight"]
    save_file({f"m.{name}": one.contiguous() for name, one in packed.items()}, tmp_path / "x.safetensors")
    says = {"config_groups": {"group_0": {"weights": {"num_bits": weights["num_bits"]}}}, "quant_method": form}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": says}))

    found = ckptool.load(tmp_path / "x.safetensors", dequantize=True)["m.weight"]
    assert torch.equal(found, want.to(found.dtype))


@pytest.mark.parametrize("kind", ["qint8", "qfloat8"])
def test_quanto_is_dense(kind: str, tmp_path: Path) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 16)).to(torch.bfloat16)
    quanto.quantize(model, weights=getattr(quanto, kind))
    quanto.freeze(model)
    save_file(model.state_dict(), tmp_path / "x.safetensors")

    found = ckptool.load(tmp_path / "x.safetensors", dequantize=True)
    for name, layer in model.named_children():
        assert torch.equal(found[f"{name}.weight"], layer.weight.dequantize())


def test_quanto_with_activations_is_dense(tmp_path: Path) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    model = net().float()
    plain = set(model.state_dict())
    quanto.quantize(model, weights=quanto.qint8, activations=quanto.qint8)
    with quanto.Calibration():
        model(torch.randn(3, 256))
    quanto.freeze(model)
    save_file(model.state_dict(), tmp_path / "x.safetensors")

    found = ckptool.load(tmp_path / "x.safetensors", dequantize=True)
    assert found.keys() == plain
    assert torch.equal(found["0.weight"], model[0].weight.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
def test_gpt2_of_bitsandbytes_is_loaded_again_as_a_plain_model(bits: int, tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    layers = pytest.importorskip("bitsandbytes").nn
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    config = library.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=32)
    library.GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    asked = library.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    auto = library.AutoModelForCausalLM
    auto.from_pretrained(tmp_path / "base", quantization_config=asked, device_map="cpu").save_pretrained(tmp_path / "q")

    ckptool.migrate(
        tmp_path / "q", tmp_path / "d", dequantize=True, max_shard_size="1GB", config_from=str(tmp_path / "q")
    )
    plain = auto.from_pretrained(tmp_path / "d", dtype=torch.bfloat16)
    found = 0
    for name, layer in auto.from_pretrained(tmp_path / "q", device_map="cpu").named_modules():
        if isinstance(layer, layers.Linear4bit):
            want = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        elif isinstance(layer, layers.Linear8bitLt):
            want = layer.weight.data.float() * layer.weight.SCB.float()[:, None] * 7.874015718698502e-3
        else:
            continue
        found += 1
        assert torch.equal(plain.get_submodule(name).weight, want.bfloat16().T)
    assert found == 8


def test_mxfp4_and_awq_are_dense(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    awq = pytest.importorskip("awq.utils.packing_utils")
    blocks, scales = (torch.randint(*ends, (2, 96, 5, 16)).byte() for ends in ((0, 256), (110, 140)))
    words, zeros = (torch.randint(-(1 << 31), (1 << 31) - 1, (rows, 5), dtype=torch.int32) for rows in (256, 2))
    factors = (torch.rand(2, 40) / 50).half()
    tensors = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales[..., 0].contiguous()}
    tensors |= {"m.qweight": words, "m.qzeros": zeros, "m.scales": factors}
    save_file(tensors, tmp_path / "x.safetensors")

    found = ckptool.load(tmp_path / "x.safetensors", dequantize=True)
    assert torch.equal(found["e.down_proj"], mxfp4.convert_moe_packed_tensors(blocks, scales[..., 0]))
    assert torch.equal(found["m.weight"], awq.dequantize_gemm(words, zeros, factors, 4, 128).T)
