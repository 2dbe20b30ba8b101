"""Two names for one thing: whatever is advised, nothing that the other side wants is lost by running it."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import torch.distributed.checkpoint as saving
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool import check, explain
from tests.each import each
from tests.program import invoke, run
from tests.scale import in_turn, some

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def changed(shapes: Shapes, *pairs: tuple[str, str]) -> Shapes:
    """Return other names for the same tensors, by regular expressions in order."""
    names = {}
    for name, shape in shapes.items():
        for pattern, replacement in pairs:
            name = re.sub(pattern, replacement, name)
        names[name] = shape
    return names


def layers(count: int, template: str, **parts: tuple[int, ...]) -> Shapes:
    return {
        template.format(index, part.replace("__", ".")): shape
        for index in range(count)
        for part, shape in parts.items()
    }


CONV: Shapes = {
    **layers(3, "enc.{}.{}", weight_g=(4, 1, 1), weight_v=(4, 4, 3), bias=(4,)),
    "out.weight": (2, 4),
    "lstm.weight_hh_l0_g": (16, 1),
    "lstm.weight_hh_l0_v": (16, 4),
}
NEW_CONV = changed(
    CONV, (r"\b(\w+)_g$", r"parametrizations.\1.original0"), (r"\b(\w+)_v$", r"parametrizations.\1.original1")
)
ONE_CONV: Shapes = {name: shape for name, shape in CONV.items() if not name.startswith("lstm")}
NEW_ONE_CONV: Shapes = {name: shape for name, shape in NEW_CONV.items() if not name.startswith("lstm")}
SPECTRAL = layers(2, "{}.{}", weight_orig=(4, 3), weight_u=(4,), weight_v=(3,), bias=(4,))
NEW_SPECTRAL = changed(
    SPECTRAL,
    (r"\bweight_orig$", "parametrizations.weight.original"),
    (r"\bweight_([uv])$", r"parametrizations.weight.0._\1"),
)
BERT: Shapes = {
    "embeddings.word.weight": (30, 8),
    "embeddings.LayerNorm.weight": (8,),
    "embeddings.LayerNorm.bias": (8,),
    **layers(
        4,
        "encoder.layer.{}.{}",
        attention__query__weight=(8, 8),
        attention__key__weight=(8, 8),
        attention__value__weight=(8, 8),
        attention__LayerNorm__weight=(8,),
        attention__LayerNorm__bias=(8,),
        output__dense__weight=(8, 16),
        output__LayerNorm__weight=(8,),
        output__LayerNorm__bias=(8,),
    ),
}
OLD_BERT = changed(BERT, (r"LayerNorm\.weight", "LayerNorm.gamma"), (r"LayerNorm\.bias", "LayerNorm.beta"))
LLAMA: Shapes = {
    "model.embed_tokens.weight": (40, 8),
    **layers(3, "model.layers.{}.{}", self_attn__q_proj__weight=(8, 8), mlp__up__weight=(16, 8), norm__weight=(8,)),
    "model.norm.weight": (8,),
    "lm_head.weight": (40, 8),
}
VISION = layers(2, "visual.blocks.{}.{}", attn__qkv__weight=(12, 4), mlp__weight=(4, 4))
TOWERS: Shapes = {
    **layers(4, "text.layers.{}.{}", w=(3,)),
    **layers(2, "image.blocks.{}.{}", w=(5,)),
    "out.weight": (7,),
}
EQUAL_TOWERS = layers(3, "text.{}.{}", w=(3, 3)) | layers(3, "image.{}.{}", w=(3, 3)) | {"out.weight": (3,)}
RESNET: Shapes = {
    "conv1.weight": (8, 3, 3, 3),
    "bn1.weight": (8,),
    "bn1.bias": (8,),
    **{
        f"layer{stage}.{block}.{part}.weight": (8 * stage, 8 * stage, 3, 3)
        for stage in (1, 2)
        for block in (0, 1)
        for part in ("conv1", "conv2")
    },
    "fc.weight": (10, 16),
    "fc.bias": (10,),
}
DENSE: Shapes = {
    f"features.denseblock{block}.denselayer{layer}.{part}{index}.weight": (4, index) if part == "conv" else (4,)
    for block in (1, 2)
    for layer in (1, 2, 3)
    for part in ("norm", "conv")
    for index in (1, 2)
} | {"features.conv0.weight": (4, 3, 7), "features.norm5.weight": (4,)}

COVERED: dict[str, tuple[Shapes, Shapes]] = {
    "weight_norm, new file": (ONE_CONV, NEW_ONE_CONV),
    "weight_norm, old file": (NEW_ONE_CONV, ONE_CONV),
    "weight_norm of other parameters, new file": (CONV, NEW_CONV),
    "spectral_norm, new file": (SPECTRAL, NEW_SPECTRAL),
    "LayerNorm, old file": (BERT, OLD_BERT),
    "LayerNorm, old model": (OLD_BERT, BERT),
    "LayerNorm, under a prefix": (OLD_BERT, changed(BERT, ("^", "bert."))),
    "a norm alone": ({"weight": (4,), "bias": (4,)}, {"gamma": (4,), "beta": (4,)}),
    "two prefixes": (TOWERS, changed(TOWERS, ("^text", "core.text_model"), ("^image", "core.image"))),
    "two prefixes of equal towers": (EQUAL_TOWERS, changed(EQUAL_TOWERS, ("^(text|image)", r"core.\1_model"))),
    "three prefixes": (
        TOWERS,
        changed(TOWERS, ("^text", "a.text"), ("^image", "vision_image"), ("^out", "head.out")),
    ),
    "a multimodal model": (
        LLAMA | VISION,
        changed(LLAMA | VISION, (r"^model\.", "model.language_model."), (r"^visual\.", "model.visual.")),
    ),
    "all but the head has a prefix": (LLAMA, changed(LLAMA, (r"^model\.", ""))),
    "all but the head has none": (changed(LLAMA, (r"^model\.", "")), LLAMA),
    "wrapped in part": (TOWERS, changed(TOWERS, (r"^text\.", "module.text."))),
    "wrapped inside": (TOWERS, changed(TOWERS, (r"^text\.", "text.module."), (r"^image\.", "image._orig_mod."))),
    "a wrapped model, a file wrapped otherwise": (
        changed(TOWERS, (r"^text\.", "text._checkpoint_wrapped_module."), ("^", "_orig_mod.")),
        changed(TOWERS, ("^", "module.")),
    ),
    "attention by other names": (
        BERT,
        changed(OLD_BERT, ("query", "to_q"), ("key", "to_k"), ("value", "to_v"), (r"encoder\.layer", "h")),
    ),
    "another head": (RESNET, changed(RESNET, (r"^fc\.", "head."))),
    "stages from zero": (RESNET, changed(RESNET, ("^layer1", "stages.0"), ("^layer2", "stages.1"))),
    "numbers apart": (DENSE, changed(DENSE, (r"(denselayer\d\.\w+?)(\d)", r"\1.\2"))),
    "numbers for names": (
        {"conv1.weight": (6, 1, 5), "conv1.bias": (6,), "conv2.weight": (16, 6, 5), "fc1.weight": (9, 16)},
        {"net.0.weight": (6, 1, 5), "net.0.bias": (6,), "net.3.weight": (16, 6, 5), "cls.1.weight": (9, 16)},
    ),
    "an adapter's name": (
        layers(4, "base_model.model.layers.{}.q_proj.{}", lora_A__weight=(2, 8), lora_B__weight=(8, 2)),
        layers(
            4, "base_model.model.layers.{}.q_proj.{}", lora_A__default__weight=(2, 8), lora_B__default__weight=(8, 2)
        ),
    ),
    "an old encoder": (
        layers(3, "encoder.down.{}.{}", q__weight=(4, 4), proj_out__weight=(4, 5)),
        layers(3, "encoder.down_blocks.{}.{}", to_q__weight=(4, 4), to_out__0__weight=(4, 5)),
    ),
}
"""What a model wants, and what a file has: all of it, under other names."""

PLAIN_CONV: Shapes = {**layers(3, "enc.{}.{}", weight=(4, 4, 3), bias=(4,)), "out.weight": (2, 4)}
OTHERS: dict[str, tuple[Shapes, Shapes]] = {
    "weights before their norm": (PLAIN_CONV, ONE_CONV),
    "weights that a model norms": (ONE_CONV, PLAIN_CONV),
    "a layer is missing": (TOWERS, {n: s for n, s in TOWERS.items() if n != "out.weight"}),
    "as many are left over as are missing": (RESNET, changed(RESNET, ("^fc.weight", "other.scale"))),
    "the shape of one that is left over": (
        RESNET,
        {**changed(RESNET, (r"^fc\.bias", "zzz")), "conv1.weight": (8, 1, 3, 3)},
    ),
    "another shape, and one of that shape": (RESNET, {**RESNET, "fc.weight": (11, 16), "old_fc.weight": (10, 16)}),
    "prefixed in part, and missing": (
        TOWERS,
        changed({n: s for n, s in TOWERS.items() if n != "out.weight"}, ("^text", "core.text"), ("^image", "v")),
    ),
    "towers that nobody can tell": (
        layers(3, "x.{}.{}", w=(3,)) | layers(3, "y.{}.{}", w=(3,)),
        layers(3, "a.{}.{}", w=(3,)) | layers(3, "b.{}.{}", w=(3,)),
    ),
    "norms by names that are like the other's": (
        layers(3, "stages.{}.{}", input_layernorm__weight=(8,), post_attention_layernorm__weight=(8,)),
        layers(3, "stages.{}.{}", attention_norm__weight=(8,), ffn_norm__weight=(8,)),
    ),
    "shifted layers": (layers(5, "h.{}.{}", w=(3,)), changed(layers(5, "h.{}.{}", w=(3,)), (r"h\.4", "h.9"))),
    "rows in another order": (
        LLAMA | {"model.layers.0.self_attn.k_proj.weight": (8, 8)},
        changed(LLAMA, (r"self_attn\.q_proj", "attention.wq")) | {"model.layers.0.attention.wk.weight": (8, 8)},
    ),
    "more than it wants": (RESNET, {**RESNET, "extra.weight": (3,)}),
    "state of FP8 that it lacks": ({**RESNET, "fc._extra_state": (3,)}, RESNET),
    "buffers that models compute": ({**RESNET, "bn1.num_batches_tracked": ()}, changed(RESNET, ("^", "module."))),
    "nothing in common": (TOWERS, layers(3, "q.{}.{}", scale=(11, 2))),
}

EVERY = {**COVERED, **OTHERS}


def saved(shapes: Shapes, path: Path) -> Path:
    """Save tensors whose values tell which they are."""
    state = {name: torch.full(shape, float(number)) for number, (name, shape) in enumerate(shapes.items())}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


def model_of(shapes: Shapes) -> nn.Module:
    model = nn.Module()
    for name, shape in shapes.items():
        module, (*path, last) = model, name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    return model


def message(want: Shapes, have: Shapes) -> str:
    """Return what torch says of these names."""
    with pytest.raises(RuntimeError) as caught:
        model_of(want).load_state_dict({name: torch.zeros(shape) for name, shape in have.items()})
    return str(caught.value)


def failure(action: Callable[[], object]) -> ckptool.WeightsMismatch | None:
    try:
        action()
    except ckptool.WeightsMismatch as error:
        return error
    return None


def migrated(command: str) -> dict[str, torch.Tensor]:
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("ckptool", "migrate")
    result = invoke([verb, *words, "--force", "--json"])
    if "mixed-prefix" in result.output:
        pytest.skip("refused: who saw no file could not know that")
    assert result.exit_code == 0, (command, result.output)
    loaded: dict[str, torch.Tensor] = torch.load(json.loads(result.output)["target"])
    return loaded


def is_spare(name: str) -> bool:
    return name.rpartition(".")[2] in ("num_batches_tracked", "_extra_state")


def assert_nothing_is_lost(command: str, want: Shapes, have: Shapes) -> None:
    """Assert that a result has all that is wanted, but for what the file has in another shape under that name."""
    found = {name: tuple(tensor.shape) for name, tensor in migrated(command).items()}
    reshaped = {name for name, shape in want.items() if have.get(name, shape) != shape}
    assert {n: s for n, s in want.items() if not is_spare(n) and n not in reshaped} == {
        name: shape for name, shape in found.items() if name in want and not is_spare(name) and name not in reshaped
    }, command


def commands_about(path: Path, like: Path) -> Iterator[str]:
    for one in check(path, like=like).findings:
        if one.command is not None and one.code.startswith("CK6"):
            yield one.command


@pytest.mark.parametrize(("suffix", "pair"), some(in_turn([".pth", ".safetensors"], EVERY), 3))
def test_no_command_of_check_loses_what_the_other_side_wants(pair: str, suffix: str, tmp_path: Path) -> None:
    want, have = EVERY[pair]
    like = saved(want, tmp_path / f"want{suffix}")
    commands = list(commands_about(saved(have, tmp_path / f"have{suffix}"), like))

    for command in commands:
        assert_nothing_is_lost(command, want, have)
    assert commands or pair not in COVERED


@pytest.mark.parametrize("pair", some(COVERED, 3))
def test_names_that_all_have_another_become_one_file_of_the_wanted_names(pair: str, tmp_path: Path) -> None:
    want, have = COVERED[pair]
    like = saved(want, tmp_path / "want.pth")
    (command,) = set(commands_about(saved(have, tmp_path / "have.pth"), like))
    loaded = migrated(command)

    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == want
    assert command.count("--rename") <= 6
    # Each tensor is the one that it was: what was renamed here keeps its place in the order.
    assert [float(loaded[name].flatten()[0]) for name in want] == list(map(float, range(len(want))))


def test_likeness_that_the_order_denies_is_no_rename(tmp_path: Path) -> None:
    want, have = OTHERS["norms by names that are like the other's"]
    report = check(saved(have, tmp_path / "have.pth"), like=saved(want, tmp_path / "want.pth"))

    assert [one.command for one in report.findings if one.code.startswith("CK6")] == [None, None]


@pytest.mark.parametrize("pair", some(OTHERS, 3))
def test_nothing_is_left_out_while_something_is_missing(pair: str, tmp_path: Path) -> None:
    want, have = OTHERS[pair]
    report = check(saved(have, tmp_path / "have.pth"), like=saved(want, tmp_path / "want.pth"))
    is_missing = any(one.code == "CK603" and one.severity == "warning" for one in report.findings)

    for one in report.findings:
        said = f"{one.hint} {one.command}"
        if is_missing:
            assert "--exclude" not in said
            assert "--include" not in said
            assert "strict" not in said
        assert not re.search(r"\b([\w.]+) \(like \1\?\)", one.message)
        assert not re.match("0 of", one.message)


@pytest.mark.parametrize("pair", some(EVERY, 3))
def test_no_command_of_explain_loses_what_the_model_wants(pair: str, tmp_path: Path) -> None:
    want, have = EVERY[pair]
    path = saved(have, tmp_path / "have.pth")
    text = message(want, have)
    for said in (explain(text, path), explain(text)):  # what is said without the file, last
        for one in said:
            command = (one.command or "").replace("FILE", shlex.quote(str(path)))
            if command.startswith("ckptool migrate"):
                assert_nothing_is_lost(command, want, have)
            if any(not is_spare(name) for name in want.keys() - have.keys()):
                assert "strict" not in (one.hint or "")
                assert "--exclude" not in command


@pytest.mark.parametrize("pair", some(COVERED, 3))
def test_explain_finds_the_names_of_a_message_in_its_file(pair: str, tmp_path: Path) -> None:
    want, have = COVERED[pair]
    if pair in ("stages from zero", "numbers for names"):  # which a message without shapes does not tell
        return
    found = explain(message(want, have), saved(have, tmp_path / "have.pth"))

    assert found[0].command is not None
    assert found[0].command.startswith("ckptool migrate"), found[0]


@pytest.mark.parametrize("pair", some(EVERY, 3))
def test_what_load_into_says_loses_nothing(pair: str, tmp_path: Path) -> None:
    want, have = EVERY[pair]
    path, model = saved(have, tmp_path / "have.pth"), model_of(want)
    error = failure(lambda: ckptool.load_into(model, path))
    if error is None:
        values = [float(value.flatten()[0]) for name, value in model.state_dict().items() if not is_spare(name)]
        assert len(set(values)) == len(values)
        return
    hint = error.hint or ""
    assert not error.missing or "strict" not in hint
    options = re.search(r"after (--.*)\.$", hint)
    if options is not None:
        assert_nothing_is_lost(f"ckptool migrate {shlex.quote(str(path))} --form state_dict {options[1]}", want, have)
    assert options is not None or pair not in COVERED


def state(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(2) for name in names}


@each(
    ("text", "content", "meaning", "command"),
    [
        ('Missing key(s) in state_dict: "fc1._extra_state".', state("fc1.weight"), "1 missing", "inspect"),
        (
            'Missing key(s) in state_dict: "_extra_state", "b._extra_state".',
            state("weight", "b.weight"),
            "2 missing",
            "inspect",
        ),
        (
            'Unexpected key(s) in state_dict: "l.0.attn._extra_state".',
            state("l.0.attn._extra_state", "l.0.w"),
            "1 unexpected",
            "--exclude '*._extra_state'",
        ),
        (
            "Unexpected key(s) in state_dict: \"_extra_state\", 'a._extra_state'.",
            state("_extra_state", "a._extra_state", "a.w"),
            "2 unexpected",
            "--exclude '*_extra_state'",
        ),
        ("Missing key in checkpoint state_dict: a._extra_state/shard_0_16.", state("a.w"), "1 missing", "inspect"),
    ],
)
def test_extra_state_is_no_weight(
    text: str, content: dict[str, torch.Tensor], meaning: str, command: str, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "x.pth")
    for one in (*explain(text), *explain(text, tmp_path / "x.pth")):
        assert one.kind == "extra-state"
        assert meaning in one.meaning
        assert command in (one.command or "")
    if "exclude" in command:
        left = migrated(explain(text, tmp_path / "x.pth")[0].command or "")
        assert list(left) == [name for name in content if not is_spare(name)]


MISMATCH = (
    "size mismatch for a.w: copying a param with shape torch.Size({}) from checkpoint, "
    "the shape in current model is torch.Size({})."
)


@each(
    ("text", "kind"),
    [
        (MISMATCH.format([0], [8, 2]), "stub"),
        ('Trying to set a tensor of shape torch.Size([0]) in "weight" (which has shape torch.Size([3]))', "stub"),
        (MISMATCH.format([8, 2], [0]), "model-stub"),
        (MISMATCH.format([10], [20]), "shape"),
    ],
)
def test_a_size_of_nothing_is_a_stub(text: str, kind: str, tmp_path: Path) -> None:
    torch.save({f"{name}.lora_A.weight": torch.empty(0) for name in "ab"}, tmp_path / "x.bin")

    assert [one.kind for one in explain(text)] == [kind]
    (one,) = explain(text, tmp_path / "x.bin")
    if kind == "stub":
        assert one.in_file == "2 of its 2 tensors have no elements: a.lora_A.weight, b.lora_A.weight"
        assert "classes" not in one.meaning


def test_a_file_without_a_framework_is_written_with_one(tmp_path: Path) -> None:
    text = "AttributeError: 'NoneType' object has no attribute 'get'"
    save_file(state("a.w"), tmp_path / "x.safetensors")
    (one,) = explain(text, tmp_path / "x.safetensors")
    result = invoke([*shlex.split(one.command or "")[1:], "--json"])

    with ckptool.open_checkpoint(json.loads(result.output)["target"]) as written:
        assert written.metadata["format"] == "pt"
    save_file(state("a.w"), tmp_path / "y.safetensors", metadata={"format": "pt"})
    (other,) = explain(text, tmp_path / "y.safetensors")
    assert "nothing in it explains this" in (other.in_file or "")


def dcp(folder: Path, content: dict[str, object]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saving.save(content, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize(
    ("key", "change"),
    in_turn(["model", ""], [("^", "_orig_mod."), (r"\.w$", "._checkpoint_wrapped_module.w"), ("^", "net.")]),
)
def test_what_torch_misses_in_a_distributed_checkpoint_is_renamed_there(
    key: str, change: tuple[str, str], tmp_path: Path
) -> None:
    wanted = {f"layers.{number}.w": torch.full((2,), float(number)) for number in range(3)}
    names = changed(dict.fromkeys(wanted, ()), change)
    held = dict(zip(names, wanted.values(), strict=True))
    content: dict[str, object] = {key: held, "step": torch.tensor(3)} if key else dict(held)
    folder = dcp(tmp_path / "saved", content)
    head = f"{key}." if key else ""
    (one,) = explain(f"Missing key in checkpoint state_dict: {head}layers.0.w.", folder)

    assert "--form dcp" in (one.command or "")
    result = run(*shlex.split(one.command or "")[1:], "--json")
    asked = {name: torch.zeros(2) for name in wanted}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saving.load({key: asked} if key else asked, checkpoint_id=json.loads(result.output)["target"], no_dist=True)
    assert {name: float(tensor[0]) for name, tensor in asked.items()} == {f"layers.{n}.w": float(n) for n in range(3)}


@pytest.mark.parametrize(
    "text",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: '/here/checkpoint-20/.metadata'",
        "    assert metadata is not None\nAssertionError",
    ],
)
def test_the_folder_below_that_has_the_index_is_named(text: str, tmp_path: Path) -> None:
    below = dcp(tmp_path / "checkpoint-20" / "model_0", dict(state("w")))
    (one,) = explain(text, tmp_path / "checkpoint-20")

    assert one.in_file == f"its index is {below}/.metadata"
    assert str(below) in (one.command or "")


@each(
    ("prefix", "option"),
    [
        ("model.", "--strip-prefix model"),
        ("net.", "--strip-prefix net"),
        ("module.", "--strip-wrappers"),
        ("_orig_mod.", "--strip-wrappers"),
    ],
)
def test_a_prefix_that_is_left_is_told_with_the_option_that_takes_it_off(
    prefix: str, option: str, tmp_path: Path
) -> None:
    weights = {f"{prefix}fc.{name}": torch.ones(2) for name in ("weight", "bias")}
    torch.save({"state_dict": weights, "pytorch-lightning_version": "2.0", "epoch": 1}, tmp_path / "last.ckpt")
    found = [one for one in check(tmp_path / "last.ckpt").findings if one.code == "CK301"]
    assert [one.severity for one in found] == ["info"]
    assert list(migrated(found[0].command or "")) == ["fc.weight", "fc.bias"] or "--strip-wrap" in option
    for words, said in (
        ([tmp_path / "x.safetensors"], option),
        (["--to", "cpu"], f"every name begins with '{prefix}': for a model without it, {option}"),
    ):
        run = ["migrate", tmp_path / "last.ckpt", *words]
        result = invoke(run).output
        assert f"every name begins with '{prefix}'" in result
        assert said in result
        assert "every name begins" not in invoke([*run, *option.split(), "--force"]).output
    with ckptool.open_checkpoint(tmp_path / "last.cpu.ckpt") as written:
        assert list(written.weights or ()) == ["fc.weight", "fc.bias"]
    torch.save(weights, tmp_path / "own.ckpt")  # of no framework: a module of the user's own is not told of
    own = invoke(["migrate", tmp_path / "own.ckpt", "--to", "cpu"])
    assert ("every name begins" in own.output) is (option == "--strip-wrappers")


def test_one_layer_of_lightning_is_no_prefix(tmp_path: Path) -> None:
    torch.save({"state_dict": state("fc.weight", "fc.bias"), "pytorch-lightning_version": "2.0"}, tmp_path / "x.ckpt")

    assert [one for one in check(tmp_path / "x.ckpt").findings if one.code == "CK301"] == []


@each("beside", [{}, {"disc": state("w", "v")}, {"w": torch.ones(2)}])
def test_what_plain_torch_load_will_still_refuse_is_noted_with_the_command_that_helps(
    beside: dict[str, object], tmp_path: Path
) -> None:
    content = beside if "w" in beside else {"model": state("w"), **beside}
    torch.save({**content, "args": argparse.Namespace(lr=1)}, tmp_path / "a.pth")
    result = invoke(["migrate", str(tmp_path / "a.pth"), "--to", "cpu"])

    assert "plain torch.load() refuses it, for argparse.Namespace; to write the weights alone" in result.output
    (command,) = re.findall("Run: (ckptool migrate .*)", result.output)
    written = json.loads(invoke([*shlex.split(command)[1:], "--json"]).output)["target"]
    assert list(torch.load(written)) == ["w"]

    torch.save({"model": state("w"), "epoch": 1}, tmp_path / "b.pth")
    result = invoke(["migrate", str(tmp_path / "b.pth"), "--to", "cpu"])
    assert "refuses" not in result.output


@each(("form", "value"), [([], "hi"), (["--form", "state_dict"], "hi"), ([], 3), ([], [1, 2])])
def test_an_entry_that_is_no_tensor_is_said_to_be_left_out(form: list[str], value: object, tmp_path: Path) -> None:
    torch.save({**state("a.w"), "note": value}, tmp_path / "a.pth")
    run = ["migrate", str(tmp_path / "a.pth"), str(tmp_path / "b.pth"), "--exclude", "note", *form]

    assert re.search(r"left out +note", invoke(run).output)
    assert list(torch.load(tmp_path / "b.pth")) == ["a.w"]


def test_a_folder_may_have_the_name_of_the_form_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": state("w"), "epoch": 1}, "full.pt")

    assert invoke(["migrate", "full.pt", "dcp"]).exit_code == 1
    assert invoke(["migrate", "full.pt", "dcp", "--form", "dcp"]).exit_code == 0
