"""Messages of many programs, with the files that people had: what is said of the names in them, and that it works."""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from ckptool.checking.explain import entries, explain
from tests.checking.test_explain import CHECKPOINT, CONV, NO_ENTRY, ONES, SGD, message_of, two_groups
from tests.each import each
from tests.program import VALID, invoke

LLAMA = [
    "model.embed_tokens.weight",
    *(f"model.layers.{n}.{m}.weight" for n in (0, 1) for m in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")),
    "model.norm.weight",
    "lm_head.weight",
]
PEFT = [f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{x}.weight" for n in (0, 1) for x in "AB"]
FLUX = [f"base_model.model.transformer_blocks.{n}.attn.to_q.lora_{x}.weight" for n in (0, 1) for x in "AB"]
EXTRA = "l.0.core_attention._extra_state"
TIED = {"tie_word_embeddings": True}


def saved(folder: Path, names: Iterable[str], name: str = "model.safetensors", **config: object) -> Path:
    """Write tensors of these names, each with values of its own, and settings beside them."""
    tensors = {one: torch.full((2, 2), float(number)) for number, one in enumerate(names)}
    save_file(tensors, folder / name, metadata={"format": "pt"})
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / name


def pickled(folder: Path, content: object, name: str = "x.pth") -> Path:
    torch.save(content, folder / name)
    return folder / name


def distributed(folder: Path, content: dict[str, object]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def quantized(folder: Path, **tensors: torch.Tensor) -> Path:
    named = {f"model.layers.0.mlp.down_proj.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return folder / "model.safetensors"


def nf4(folder: Path) -> Path:
    weight = torch.zeros(512, 1, dtype=torch.uint8)
    parts = {"weight.absmax": torch.ones(16), "weight.quant_map": torch.linspace(-1, 1, 16)}
    state = {"weight.quant_state.bitsandbytes__nf4": torch.zeros(77, dtype=torch.uint8)}
    return quantized(folder, weight=weight, **parts, **state)


def mxfp4(folder: Path) -> Path:
    blocks, scales = torch.zeros(2, 8, 2, 16, dtype=torch.uint8), torch.zeros(2, 8, 2, dtype=torch.uint8)
    names = {f"model.layers.{n}.mlp.experts.down_proj_{x}": one.clone() for n in (0, 1, 2) for x, one in
             (("blocks", blocks), ("scales", scales))}  # fmt: skip
    save_file({**names, "model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    return folder


def beside(folder: Path) -> Path:
    saved(folder, ["layers.0.attention.wk.weight"], "consolidated.safetensors")
    return saved(folder, LLAMA)


def shards(folder: Path) -> Path:
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    halves = LLAMA[:4], LLAMA[4:]
    for name, half in zip(files, halves, strict=True):
        saved(folder, half, name)
    index = {one: name for name, half in zip(files, halves, strict=True) for one in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder / files[0]


def tied(folder: Path) -> Path:
    path = saved(folder, LLAMA, **TIED)
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    return folder


def lightning(folder: Path, **more: object) -> Path:
    weights = {"model.w": torch.ones(3), "model.b": torch.ones(3)}
    return pickled(folder, {"state_dict": weights, "pytorch-lightning_version": "2.0", **more}, "last.ckpt")


def table(**rows: Iterable[str]) -> str:
    """Return what transformers prints since version 5."""
    lines = [f"{name}  | {kind}    | " for kind, names in rows.items() for name in names]
    return "\n".join(["\x1b[1mX LOAD REPORT\x1b[0m from: /m", "Key | Status | ", "----+--------+-", *lines])


MISSING = "Missing key(s) in state_dict: {}."
ASKED = message_of(lambda: CONV.load_state_dict(CHECKPOINT))
WRAPPED = {f"module.{name}": tensor for name, tensor in CONV.state_dict().items()}
HALVES = {name: tensor.half() for name, tensor in CONV.state_dict().items()}
OTHER_SIZES = nn.Sequential(nn.Conv2d(3, 2, 3))


class Net(nn.Sequential):
    """A model of the user's."""


def of(content: object) -> Callable[[Path], Path]:
    """Return what writes this to a file whose name has to be quoted."""
    return lambda folder: pickled(folder, content, "file of mine.pth")


CASES: dict[str, tuple[Any, ...]] = {
    "the weights are an entry": (ASKED, of(CHECKPOINT), "all 6 names are under 'state_dict'", "--form state_dict",
                                 "model.load_state_dict(checkpoint['state_dict'])"),
    "the weights are deeper": (ASKED, of({"a": {"b": CONV.state_dict()}, "epoch": 1}), "all 6 names are under 'a.b'",
                               "--form state_dict", "checkpoint['a']['b']"),
    "one of two": (ASKED, of({"G": CONV.state_dict(), "D": nn.Linear(90, 90).state_dict()}),
                   "all 6 names are under 'G'", "--key G", "checkpoint['G']"),
    "an entry, wrapped": (ASKED, of({"net": WRAPPED}), "all 6 names are under 'net', under other", "--strip-module"),
    "wrapped": (message_of(lambda: CONV.load_state_dict(WRAPPED)), of(WRAPPED), "other names", "--strip-module"),
    "another file": (ASKED, of(CONV.state_dict()), "at its top, as they are", "inspect"),
    "another model": (ASKED, of(nn.Linear(2, 2).state_dict()), "not there: it has weight, bias", "inspect"),
    "no such entry": ("KeyError: 'model'", of(CHECKPOINT), "weights are under 'state_dict'", "--form state_dict",
                      "checkpoint['state_dict']"),
    "no entries": (NO_ENTRY, of(CONV.state_dict()), "it is the state_dict itself, 7 tensors", "inspect",
                   "without taking"),
    "a tensor of another name": ("KeyError: '0.weight'", of(WRAPPED), "'module.0.weight' is", "--strip-module"),
    "other sizes in torch's words": (message_of(lambda: OTHER_SIZES.load_state_dict({"0.weight": ONES}, strict=False)),
                                     of(CONV.state_dict()), "in it, 0.weight is [2, 3, 1, 1]", "--exclude 0.weight",
                                     "strict=False"),
    "which convolution": (message_of(lambda: nn.Conv2d(3, 2, 1)(torch.ones(1, 1, 2, 2))), of(CHECKPOINT),
                          "0.weight has this size in it", "inspect"),
    "halves": ("expected scalar type Half but found Float", of(HALVES), "float16 (7)", "--dtype float32"),
    "an optimizer of one group": (message_of(lambda: two_groups().load_state_dict(SGD.state_dict())), of(CHECKPOINT),
                                  "'optimizer' has 1 group of 4 parameters; the weights have 7 tensors",
                                  "--form state_dict"),
    "misspelt": (message_of(lambda: torch.load(VALID / "lenet-state-dict-cpu-zip.pth", map_location="gpu")),
                 of(CHECKPOINT), "no tensor in it is tagged 'gpu' (cpu (7)): it is map_location that is misspelt", "",
                 "'cuda:0'"),
    "classes": ("Weights only load failed. GLOBAL pathlib.PosixPath was not an allowed global by default.",
                of({"model": CONV.state_dict(), "args": Path("/x")}), "it asks for pathlib.", "--form state_dict"),
    "not installed": ("ModuleNotFoundError: No module named 'pathlib._local'",
                      of({"model": nn.Sequential(nn.Linear(2, 2)), "args": Path("/x")}), "it asks for pathlib.",
                      "--form state_dict"),
    "no optimizer": ("KeyError: 'optimizer'", of(CONV.state_dict()), "the state_dict itself", "inspect",
                     "another file was"),
    "damage": ("PytorchStreamReader failed reading file data/7: file read failed", of(CONV.state_dict()), "it opens",
               "--deep"),
    "not a model": ("'dict' object has no attribute 'eval'", of(CONV.state_dict()), "a state_dict of 7 tensors",
                    "inspect"),
    "how much is weights": ("CUDA out of memory", of(CHECKPOINT), "of which the weights are", "--to cpu",
                            "map_location"),
    "a whole model": ("TypeError: 'Net' object is not subscriptable", of(Net(*CONV)), ".Net, with 7 tensors",
                      "--form state_dict", ".state_dict() for its weights"),
    "as it is": ("no 'lm_head.weight'", lambda d: saved(d, LLAMA), "names: Not a message", "inspect"),
    "under a prefix": (
        "RuntimeError: Tensor ln_f.bias required but not present in model /m",
        lambda d: saved(d, ["transformer.ln_f.bias", "transformer.ln_f.weight"]),
        "'transformer.ln_f.bias' is: every name begins with 'transformer.'",
        r"--form safetensors --rename '^transformer\.='",
    ),
    "in another file": (
        "KeyError: 'layers.0.attention.wk.weight'",
        beside,
        "layers.0.attention.wk.weight is in ",
        "consolidated.safetensors",
    ),
    "in one of several checkpoints": (
        f"lora key not loaded: {PEFT[0]}",
        lambda d: (saved(d, LLAMA), saved(d, PEFT, "adapter_model.safetensors"))[0].parent,
        "adapter_model.safetensors",
        "adapter_model.safetensors",
    ),
    "in another shard": (
        "KeyError: 'model.norm.weight'",
        shards,
        "model.norm.weight is in ",
        "inspect",
    ),
    "4 bits, without the prefix": (
        "KeyError: 'layers.0.mlp.down_proj.weight.absmax'",
        nf4,
        "of its quantised weights: bitsandbytes NF4",
        "inspect",
    ),
    "experts in 4 bits": (
        table(
            UNEXPECTED=[f"model.layers.{{0...2}}.mlp.experts.down_proj_{x}" for x in ("blocks", "scales")],
            MISSING=["model.layers.{0...2}.mlp.experts.down_proj"],
        ),
        mxfp4,
        "6 names (model.layers.*.mlp.experts.down_proj_blocks, model.layers.*.mlp.experts.down_proj_scales) are of its",
        "--dequantize",
    ),
    "not in 8 bits": (
        MISSING.format('"blocks.0._checkpoint_wrapped_module.q.int8_weight"'),
        lambda d: saved(d, ["blocks.0.q.weight", "blocks.0.q.bias"]),
        "there in another form: 'blocks.0.q.weight'",
        "inspect",
    ),
    "joined by a server": (
        "Following weights were not initialized from checkpoint: {'model.layers.1.mlp.gate_up_proj.weight'}",
        lambda d: saved(d, LLAMA),
        "there in another form: 'model.layers.1.mlp.gate_proj.weight'",
        "inspect",
    ),
    "tied": (
        "ValueError: There is no module or parameter named 'lm_head' in Gemma2ForCausalLM",
        tied,
        "lm_head.weight is there, equal to model.embed_tokens.weight, and config.json says that the output layer is",
        "--form safetensors --exclude lm_head.weight",
    ),
    "said to be tied, and is not": (
        "KeyError: 'lm_head.weight'",
        lambda d: saved(d, LLAMA, **TIED),
        "has other values than model.embed_tokens.weight",
        "inspect",
    ),
    "tied and left out": (
        "There were missing keys in the checkpoint model loaded: ['lm_head.weight'].",
        lambda d: saved(d, LLAMA[:-1], **TIED),
        "lm_head.weight is not there, model.embed_tokens.weight is, and config.json says that the output layer is tied",
        "",
    ),
    "of an adapter": (
        "KeyError: 'model.layers.0.mlp.down_proj.weight'",
        lambda d: saved(d, PEFT),
        "it is an adapter (LoRA, r 2, on q_proj), without the weights of its base",
        "",
    ),
    "missed by an adapter": (
        "Found missing adapter keys while loading the checkpoint: "
        + str([name.replace("layers", "language_model.layers").replace(".weight", ".default.weight") for name in PEFT]),
        lambda d: saved(d, PEFT, "adapter_model.safetensors"),
        "all 4 names are at its top, under other names",
        "language_model.layers.",
    ),
    "more than lora_A and lora_B": (
        "ValueError: base_model.model.lm_head.weight is unsupported LoRA weight",
        lambda d: saved(d, [*PEFT, "base_model.model.lm_head.weight"]),
        "1 tensor of another kind: base_model.model.lm_head.weight",
        "inspect",
    ),
    "peft's names for ComfyUI": (
        "\n".join(f"lora key not loaded: {name}" for name in FLUX),
        lambda d: saved(d, FLUX),
        "its names begin with base_model.model (4)",
        "base_model",
    ),
    "a part of a pipeline": (
        "ERROR: Could not detect model type of: /m/flux.safetensors",
        lambda d: saved(d, ["double_blocks.0.img_attn.qkv.weight", "img_in.weight"]),
        "it has a diffusion model, no text encoder, no VAE",
        "inspect",
    ),
    "extra state": (
        f'Unexpected key(s) in state_dict: "{EXTRA}".',
        lambda d: pickled(d, {EXTRA: torch.ones(3), "l.0.w": torch.ones(2)}),
        "state of FP8, and no weight",
        "--exclude '*._extra_state'",
    ),
    "extra state of another size": (
        f"Size mismatch between saved torch.Size([9]) and current: torch.Size([4]) for {EXTRA}",
        lambda d: distributed(d / "s", {EXTRA: torch.ones(9), "l.0.w": torch.ones(2)}),
        "state of FP8, and no weight",
        "--form dcp --exclude '*._extra_state'",
    ),
    "old weight_norm": (
        "KeyError: 'c.weight_g'",
        lambda d: pickled(d, {f"c.parametrizations.weight.original{n}": torch.ones(2) for n in (0, 1)}),
        "c.weight_g is there under other names",
        "original0$",
    ),
    "attention of older diffusers": (
        "Cannot load x because the following keys are missing: \n a.query.weight, a.proj_attn.bias. \n Please",
        lambda d: saved(d, [f"a.{m}.{x}" for m in ("to_q", "to_out.0") for x in ("weight", "bias")]),
        "all 2 names are at its top, under other names",
        "to_q",
    ),
    "TensorFlow's norms": (
        "ValueError: Can not map tensor 'bert.LayerNorm.beta'",
        lambda d: pickled(d, {f"bert.LayerNorm.{x}": torch.ones(2) for x in ("gamma", "beta")}),
        "in one of two spellings",
        "beta$=bias",
    ),
    "the inner model": (
        "ValueError: Can not map tensor 'embed_tokens.weight'",
        lambda d: saved(d, [name.removeprefix("model.") for name in LLAMA[:-1]], **TIED),
        "no name begins with 'model.': it is the inner model",
        "--add-prefix model",
    ),
    "a module around all": (
        "There is no module or parameter named 'language_model' in Gemma3ForCausalLM",
        lambda d: saved(d, [f"language_model.{name}" for name in LLAMA]),
        "every name begins with 'language_model.'",
        "--strip-prefix language_model",
    ),
    "renamed layers": (
        table(
            MISSING=[name.replace(".0.", ".{0, 1}.") for name in LLAMA[:-1] if ".1." not in name],
            UNEXPECTED=[
                name.replace(".0.", ".{0, 1}.").replace("model.", "model.text.")
                for name in LLAMA[:-1]
                if ".1." not in name
            ],
        ),
        lambda d: saved(d, [name.replace("model.", "model.text.") for name in LLAMA]),
        "under other names",
        "--rename",
    ),
    "other sizes": (
        f"{table()}\nlm_head.weight | MISMATCH | Reinit due to size mismatch - ckpt: torch.Size([9])",
        lambda d: saved(d, LLAMA, **TIED),
        "in it, lm_head.weight is [2, 2]",
        "--exclude lm_head.weight",
    ),
    "another rank": (
        (f"size mismatch for {PEFT[0].replace('.weight', '.default.weight')}: copying a param with shape"
        " torch.Size([2, 2]) from checkpoint, the shape in current model is torch.Size([4, 2])."),
        lambda d: saved(d, PEFT),
        f"in it, {PEFT[0]} is [2, 2]",
        "",
    ),
    "as fvcore lists them": (
        "parameters or buffers are not found in the checkpoint:\na.b.attn.{rel_pos_h, rel_pos_w}\nc.d.{bias, w}",
        lambda d: saved(d, ["a.b.attn.qkv.weight"]),
        "a.b.attn.rel_pos_h, a.b.attn.rel_pos_w, c.d.bias and 1 more are not there",
        "inspect",
    ),
    "no space before the next sentence": (
        "No param a.layers.4.update_attn.in_proj_weight.If you see this, …",
        lambda d: saved(d, ["a.layers.4.self_attn.in_proj_weight"]),
        "'a.layers.4.update_attn.in_proj_weight' is not there",
        "inspect",
    ),
    "buffers": (
        'Unexpected key(s) in state_dict: "h.0.attn.bias", "h.0.attn.masked_bias".',
        lambda d: pickled(d, {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.ones(()),
                              "h.0.w": torch.ones(2)}),
        "models compute such buffers themselves",
        "",
    ),
    "nowhere": ("KeyError: 'model.x.weight'", lambda d: saved(d, LLAMA), "'model.x.weight' is not there", "inspect"),
    "another entry": (
        "KeyError: 'config'",
        lambda d: pickled(d, {"model": {"dec.w": torch.ones(2)}, "iteration": 3}),
        "at its top it has 'model', 'iteration'",
        "",
    ),
    "beside pieces": (
        "KeyError: 'model'",
        lambda d: pickled(
            distributed(d / "s", {"w": torch.ones(2)}), {"args": 1, "checkpoint_version": 3.0}, "common.pt"
        ),
        "it is what Megatron-core keeps beside the pieces of tensors",
        "inspect",
    ),
    "a state of training": (
        "OSError: Error no file named model.safetensors, or pytorch_model.bin, found in directory /c.",
        lambda d: distributed(d / "pytorch_model_fsdp_0", {"model": {"w": torch.ones(2)}}),
        "it is dcp",
        "--form safetensors",
    ),
    "arguments of Lightning": (
        "TypeError: __init__() missing 1 required positional argument: 'width'",
        lambda d: lightning(d, hyper_parameters={"depth": 3}),
        "it has hyper_parameters; the arguments in it are depth",
        "inspect",
    ),
    "weights alone": (
        "KeyError: 'Trying to restore optimizer state but checkpoint contains only the model. …'",
        lightning,
        "it has none of hyper_parameters, optimizer_states",
        "inspect",
    ),
    "types": (
        "unsupported safetensor dtype F8_E4M3",
        lambda d: quantized(d, weight=torch.ones(128, 128).to(torch.float8_e4m3fn)),
        "its tensors are float8_e4m3fn (1)",
        "inspect",
    ),
}  # fmt: skip


def done(command: str) -> None:
    """Run what a message is answered with."""
    program, verb, *words = shlex.split(command)
    assert program == "ckptool"
    result = invoke([verb, *words, *(["--force"] if verb == "migrate" else [])])
    assert result.exit_code in ((0, 1) if verb == "check" else (0,)), (command, result.output)


@each("case", CASES)
def test_the_names_of_a_message_are_found_in_a_file(case: str, tmp_path: Path) -> None:
    text, make, fact, command, *hint = CASES[case]
    path = make(tmp_path)
    first, *_ = found = explain(text, path)

    assert fact in (first.in_file or "") or fact in f"{first.kind}: {first.meaning}"
    assert command in (first.command or "")
    assert bool(first.command) == bool(command)
    assert "FILE" not in (first.command or "")
    assert all(one in str(first.hint) for one in hint)
    for one in (one for one in found if one.command):
        done(str(one.command))
    assert len(str(first.in_file)) < 1000


def test_what_a_command_for_names_writes_has_them(tmp_path: Path) -> None:
    for case in ("tied", "the inner model", "a module around all", "renamed layers"):
        text, make, *_ = CASES[case]
        (tmp_path / case).mkdir()
        command = explain(text, make(tmp_path / case))[0].command or ""
        result = invoke([*shlex.split(command)[1:], "--json"])
        names = [one for one in LLAMA if case != "tied" or one != "lm_head.weight"]
        if case == "the inner model":
            names.remove("lm_head.weight")
        assert sorted(load_file(json.loads(result.output)["target"])) == sorted(names), case


COMMANDS = sorted({one.do.partition(" $ ")[2] for one in entries()} - {""})


@each("command", COMMANDS)
def test_each_command_of_the_table_works_on_a_file(command: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes((VALID / "checkpoint-ddp-forged-cuda0-zip.pth").read_bytes())
    words = {"FILE": str(path), "OUT.safetensors": str(tmp_path / "o"), "package.module:Class": "torch.nn:Identity"}
    done(shlex.join(words.get(word, word) for word in shlex.split(command)))


@pytest.mark.parametrize("text", ["hello 'world'", "torch.nn.Linear at self.weight.data", "see model.safetensors"])
def test_a_message_without_names_is_not_known(text: str, tmp_path: Path) -> None:
    assert explain(text, saved(tmp_path, LLAMA)) == ()


def test_many_names_in_a_long_text_take_little_time(tmp_path: Path) -> None:
    text = " ".join(f"'model.layers.{number}.mlp.w{number}.weight'" for number in range(9_000))
    (one,) = explain(text, saved(tmp_path, LLAMA))

    assert "and 8,997 more are not there" in (one.in_file or "")


@pytest.mark.parametrize(
    "text",
    [
        "size mismatch for model.layers.0.mlp.experts.down_proj_blocks: copying a param with shape torch.Size([2, 8])",
        'Unexpected key(s) in state_dict: "model.layers.0.mlp.experts.down_proj_scales".',
        "self and mat2 must have the same dtype, but got Float and Byte",
        "Using `bitsandbytes` 4-bit quantization requires bitsandbytes: `pip install -U bitsandbytes>=0.46.1`",
    ],
)
def test_what_quantised_weights_cause_is_mended_by_plain_ones(text: str, tmp_path: Path) -> None:
    (found,) = explain(text, mxfp4(tmp_path))

    assert "quantised" in str(found.in_file)
    assert "--dequantize" in str(found.command)
    done(str(found.command))


NO_RENAME = {
    "a layer is missing": (
        [name for name in LLAMA if "layers.1.mlp" not in name],
        "Net LOAD REPORT from: /m\nKey | Status |\nmodel.layers.1.mlp.{gate_proj, up_proj}.weight | MISSING |",
    ),
    "a part is missing": (
        ["down.conv.weight", *(f"up.1.{name}" for name in ("conv.weight", "conv.bias", "out.weight"))],
        "Some weights of Net were not initialized and are newly initialized: ['mid.conv.weight', 'mid.conv.bias']",
    ),
    "a head of another task": (
        LLAMA,
        "Net LOAD REPORT from: /m\nKey | Status |\nlm_head.weight | UNEXPECTED |\nscore.weight | MISSING |",
    ),
    "a head with a bias": (
        ["bert.x.weight", "qa_outputs.weight", "qa_outputs.bias"],
        "LOAD REPORT from: /m\nqa_outputs.{weight, bias} | UNEXPECTED |\nclassifier.{weight, bias} | MISSING |",
    ),
}


@each("case", NO_RENAME)
def test_what_the_file_lacks_is_not_taken_for_renamed(case: str, tmp_path: Path) -> None:
    names, text = NO_RENAME[case]
    (found,) = explain(text, saved(tmp_path, names))

    assert "migrate" not in (found.command or ""), found
    assert "under other names" not in (found.in_file or ""), found


def test_a_package_that_the_code_needs_is_not_looked_for_in_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path, LLAMA)
    (of_code,) = explain("ModuleNotFoundError: No module named 'einops'", path)
    assert of_code.in_file == "it asks for no class or package: the code that loads it does"
    assert "einops" in of_code.meaning
    (of_weights,) = explain("ModuleNotFoundError: No module named 'optimum.gptq'", path)
    assert of_weights.kind == "quantized"


WITH_FACTS = {
    "AttributeError: 'Net' object has no attribute 'module'": "its names begin with conv (1), embed (1)",
    "Some weights of Net are newly initialized because missing from the checkpoint: ['x.weight']": "is not there",
    "because conv.weight expected shape torch.Size([2, 9]), but got torch.Size([2, 2]).": "conv.weight is [2, 2]",
    "Attempted to load weight (torch.Size([2, 2])) into parameter (torch.Size([3, 2]))": "conv.weight, embed.weight",
    "IndexError: index out of range in self": "embed.weight is [2, 2]",
    "FileNotFoundError: File not found: /m/tokenizer.model": "the message is about '/m/tokenizer.model'",
}


@each("text", WITH_FACTS)
def test_the_fact_of_the_file_that_a_message_is_about_is_said(text: str, tmp_path: Path) -> None:
    (found,) = explain(text, saved(tmp_path, ["conv.weight", "embed.weight"]))

    assert WITH_FACTS[text] in (found.in_file or ""), found
