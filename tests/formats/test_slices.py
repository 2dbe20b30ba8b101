"""Slices of tensor parallelism, and other parts of models: none is taken for a model, and no series for slices."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool import IncompleteWeights
from tests.formats.said import refused, run, said

Tensors = dict[str, torch.Tensor]
ALONG = {"emb.weight": 0, "layers.0.wq.weight": 0, "layers.0.wo.weight": 1}


def full() -> Tensors:
    torch.manual_seed(0)
    return {
        "emb.weight": torch.randn(16, 8),
        "layers.0.wq.weight": torch.randn(8, 8),
        "layers.0.wo.weight": torch.randn(8, 8),
        "layers.0.norm.weight": torch.randn(8),
        "layers.0.wo.bias": torch.randn(8),
        "rope.freqs": torch.arange(4.0),
    }


def slice_of(rank: int, world: int = 2) -> Tensors:
    """Return what one rank of tensor parallelism has: norms, and biases of what is cut by rows, are copies."""
    return {
        name: (whole.chunk(world, ALONG[name])[rank] if name in ALONG else whole).clone()
        for name, whole in full().items()
    }


def trained(step: int, *frozen: str) -> Tensors:
    """Return a whole model at some time of its training."""
    before = full()  # which sets the seed, too
    torch.manual_seed(step + 1)
    return {
        name: whole.clone() if name in frozen or name == "rope.freqs" else whole + torch.randn(whole.shape) / 8
        for name, whole in before.items()
    }


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        assert isinstance(value, dict)
        save_file(value, path)
    else:
        torch.save(value, path)


Written = Callable[[Path], list[Path]]
"""Writes files into a folder, and returns their paths."""


def files(names: Sequence[str], of: Callable[[int], object]) -> Written:
    """Write files of these names, of which each has what is ``of`` its number."""

    def write_all(folder: Path) -> list[Path]:
        for number, name in enumerate(names):
            write(folder / name, of(number))
        return [folder / name for name in names]

    return write_all


def sliced(*names: str, wrap: Callable[[Tensors], object] = dict) -> Written:
    return files(names, lambda rank: wrap(slice_of(rank, len(names))))


def counted(pattern: str, ranks: int = 2, start: int = 0) -> list[str]:
    return [pattern.format(start + rank) for rank in range(ranks)]


def _vllm(folder: Path) -> list[Path]:
    paths = []
    for rank in range(2):
        names = list(slice_of(rank))
        for part, own in enumerate((names[:3], names[3:])):
            paths.append(folder / f"model-rank-{rank}-part-{part}.safetensors")
            write(paths[-1], {name: slice_of(rank)[name] for name in own})
    return paths


def stage(rank: int, world: int = 2, seed: int = 0) -> Tensors:
    """Return the layers of one stage of a pipeline of a net with six, with what comes before the first and last."""
    torch.manual_seed(seed)
    whole = {"emb.weight": torch.randn(8, 8)}
    whole |= {f"layers.{layer}.{part}.weight": torch.randn(8, 8) for layer in range(6) for part in ("qkv", "mlp")}
    whole |= {"head.weight": torch.randn(8, 8)}
    each = len(whole) // 2 // world
    starts = [0, *(1 + 2 * each * one for one in range(1, world)), len(whole)]
    return dict(list(whole.items())[starts[rank] : starts[rank + 1]])


def staged(*names: str) -> Written:
    return files(names, lambda rank: stage(rank, len(names)))


def flat(name: str, *names: str) -> Written:
    return files(names, lambda _: {name: torch.randn(99), "step": torch.ones(1)})


def experts(rank: int) -> Tensors:
    own = {f"0.experts.{one}.weight": torch.randn(4, 4) for one in (2 * rank, 2 * rank + 1)}
    return own | {"0.router.weight": torch.ones(4, 4)}


def of_positive(rank: int) -> Tensors:
    whole = torch.arange(64.0).reshape(8, 8)
    halves = {"wq.weight": whole.chunk(2)[rank].clone(), "wo.weight": whole.chunk(2, 1)[rank].clone()}
    return halves | {"norm.weight": torch.linspace(1, 2, 8)}


def uneven(rank: int) -> Tensors:
    torch.manual_seed(0)
    cut = torch.tensor_split(torch.randn(33, 8), 2)[rank]
    return slice_of(rank) | {"emb.weight": cut, "head.weight": cut + 1}


def of_grid(rank: int) -> Tensors:
    """Return what one of two tensor-parallel ranks of two stages has."""
    return {f"{rank % 2}.{name}": one for name, one in slice_of(rank // 2).items()}


def of_fsdp(rank: int, world: int = 2, *, flat: bool = False) -> Tensors:
    """Return what one rank of FSDP has of each tensor: a part of the first dimension, of norms, too."""
    whole = {name: one.flatten() if flat else one for name, one in full().items() if name != "rope.freqs"}
    return {name: one.chunk(world)[rank].clone() for name, one in whole.items()}


def cut_first(*names: str, flat: bool = False) -> Written:
    return files(names, lambda rank: of_fsdp(rank, len(names), flat=flat))


def mlp(rank: int, *, biased: bool = True) -> Tensors:
    """Return what one of two ranks has of a net without norms: half of what one layer gives, and of what one takes."""
    torch.manual_seed(0)
    whole = {"up.weight": torch.randn(32, 8), "up.bias": torch.randn(32)}
    whole |= {"down.weight": torch.randn(8, 32), "down.bias": torch.randn(8)}
    along = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    kept = [name for name in whole if biased or not name.endswith("bias")]
    return {name: (whole[name].chunk(2, along[name])[rank] if name in along else whole[name]).clone() for name in kept}


def cut_lora(rank: int, *modules: str) -> Tensors:
    """Return what one of two ranks has of an adapter: the second factors are cut, and the first ones of ``o_proj``."""
    torch.manual_seed(0)
    made = {}
    for at in range(2):
        for module in modules:
            a, b = torch.randn(4, 16), torch.randn(16, 4)
            a, b = (a.chunk(2, 1)[rank], b) if module == "o_proj" else (a, b.chunk(2)[rank])
            made[f"layers.{at}.{module}.lora_A.weight"] = a.clone()
            made[f"layers.{at}.{module}.lora_B.weight"] = b.clone()
    return made


def table(rank: int) -> Tensors:
    """Return what one of two ranks has of an embedding and a head."""
    torch.manual_seed(0)
    return {f"{name}.weight": torch.randn(40, 16).chunk(2)[rank].clone() for name in ("embed", "head")}


SLICED: dict[str, Written] = {
    "by letters": sliced("model_a.pth", "model_b.pth"),
    "by letters, in folders": sliced("a/net.pth", "b/net.pth"),
    "by Roman numerals": sliced("part_i.pth", "part_ii.pth", "part_iii.pth"),
    "by words": sliced("net-one.pth", "net-two.pth"),
    "by hundreds": sliced("m_100.pth", "m_200.pth"),
    "by their first rows": sliced("m_0.pth", "m_4096.pth", "m_8192.pth"),
    "without norms": files(counted("m_{}.pth"), mlp),
    "without norms and biases": files(counted("net.tp{}.pth"), lambda rank: mlp(rank, biased=False)),
    "of an adapter": files(counted("adapter_{}.safetensors"), lambda rank: cut_lora(rank, "q_proj", "o_proj")),
    "of an adapter without inputs that are cut": files(counted("tp_{}.pt"), lambda rank: cut_lora(rank, "q_proj")),
    "of an embedding": files(counted("model_parallel-{}.pt"), table),
    "with eight digits": sliced(*counted("rank{:08}.pth")),
    "the first without a number": sliced("model.pth", "model2.pth"),
    "downloaded under one name": sliced("model.pth", "model (1).pth", "model (2).pth"),
    "FSDP's without a word": cut_first(*counted("model_{}.pt")),
    "FSDP's, one of which is not there": files(["model_0.pt", "model_2.pt"], lambda rank: of_fsdp(2 * rank, 3)),
    "FSDP's with the count": cut_first(*counted("model-{}-2.pt")),
    "FSDP's below hosts": cut_first("host0/dev0/w.pt", "host0/dev1/w.pt", "host1/dev0/w.pt", "host1/dev1/w.pt"),
    "below a host": sliced(*counted("host0/dev{}/w.pt")),
    "one below each host": sliced(*counted("host{}/dev0/w.safetensors")),
    "FSDP's": cut_first(*counted("rank{}.pt")),
    "FSDP's, flat": cut_first(*counted("rank{}.pt"), flat=True),
    "FSDP's, cut unevenly": cut_first(*counted("model_shard_{}.safetensors", 3)),
    "Meta's": sliced(*counted("consolidated.{:02}.pth")),
    "metaseq's": sliced(*counted("reshard-model_part-{}.pt"), wrap=lambda own: {"cfg": {"layers": 1}, "model": own}),
    "vLLM's": _vllm,
    "DeepSpeed's": sliced(*counted("mp_rank_{:02}_model_states.pt"), wrap=lambda own: {"module": own}),
    "Megatron's": sliced(*counted("mp_rank_{:02}/model_optim_rng.pt"), wrap=lambda own: {"model": own, "iteration": 1}),
    "with a word and a number": sliced(*counted("pytorch_model.tp{}.bin")),
    "with a word, from one": sliced(*counted("weights-shard_{}.safetensors", 2, 1)),
    "with two numbers": sliced(*counted("tp_rank_{:02}_pp_rank_00.pt")),
    "of stages": files([f"dp_rank_00_tp_rank_{tp:02}_pp_rank_{pp:02}.pt" for tp in (0, 1) for pp in (0, 1)], of_grid),
    "in folders of ranks": sliced(*counted("rank_{}/model.pt", 4)),
    "in folders, from one": sliced(*counted("out.tp_rank_{:02}/pytorch_model.bin", 2, 1)),
    "with capitals": sliced(*counted("TP{}.pt")),
    "with hyphens": sliced(*counted("tensor-parallel-{}.pt")),
    "partitions": sliced(*counted("partition_{}.pt")),
    "with a number alone": sliced(*counted("model_{}.pt")),
    "called by numbers": sliced(*counted("{}.pt")),
    "called by numbers in folders": sliced(*counted("{}/model.safetensors", 2, 1)),
    "after a size": sliced(*counted("llama2_7b_{}.pt")),
    "of float16": sliced(*counted("net-{:02}.pth"), wrap=lambda own: {name: one.half() for name, one in own.items()}),
    "at one step": sliced(*counted("step100_{}.pt")),
    "in training": sliced(*counted("checkpoint_{}.pt"), wrap=lambda own: {"model": own, "step": 3}),
    "of three": sliced(*counted("model_{}_of_3.pt", 3, 1)),
    "of two, in short": sliced(*counted("w.{}of2.safetensors", 2, 1)),
    "cut unevenly": files(counted("worker{}.safetensors"), uneven),
    "of positive numbers": files(counted("{}.pt"), of_positive),
}


def numbered(names: Sequence[str], *layers: tuple[int, ...], ends: bool = True) -> Written:
    """Write stages with these numbers of layers, with what comes before the first of them and after the last."""

    def of(number: int) -> Tensors:
        held = {f"h.{one}.{part}.weight": torch.randn(6, 6) for one in layers[number] for part in ("qkv", "mlp")}
        held |= {"wte.weight": torch.randn(9, 6)} if ends and number == 0 else {}
        return held | ({"lm_head.weight": torch.randn(9, 6)} if ends and number == len(layers) - 1 else {})

    return files(names, of)


def all_from_zero(names: Sequence[str], layer: str, first: Sequence[str], last: Sequence[str]) -> Written:
    """Write stages whose layers are numbered from 0 in each."""

    def of(number: int) -> Tensors:
        torch.manual_seed(number)
        held = {name: torch.randn(100, 64) for name in first} if number == 0 else {}
        for at in range(4):
            held |= {f"{layer}.{at}.{part}.weight": torch.randn(64, 64) for part in ("q", "o")}
            held[f"{layer}.{at}.norm.weight"] = torch.ones(64) if number % 2 else torch.randn(64)
        return held | ({name: torch.randn(100, 64) for name in last} if number == len(names) - 1 else {})

    return files(names, of)


_LM = ("layers", ("embed_tokens.weight",), ("norm.weight", "lm_head.weight"))
_VIT = ("blocks", ("cls_token", "patch_embed.proj.weight"), ("fc_norm.weight", "classifier.weight"))
PARTS: dict[str, Written] = {
    "stages by letters": numbered(["model_a.pt", "model_b.pt"], (0, 1), (2, 3)),
    "stages by words": numbered(["first_half.pt", "second_half.pt"], (0, 1), (2, 3)),
    "stages by hundreds": numbered(["m_100.pt", "m_200.pt"], (0, 1), (2, 3), ends=False),
    "stages by their first layers": numbered(["h_0.pt", "h_12.pt"], (0, 1), (12, 13)),
    "ranges of layers": staged("layers_0-2.pt", "layers_3-5.pt"),
    "ranges with a gap": files(["layers_0-2.pt", "layers_5-7.pt"], lambda rank: stage(2 * rank, 3)),
    "ranges from one": staged("h1to3.pt", "h4to6.pt"),
    "stages from zero in each": numbered(counted("stage_{}.pt"), (0, 1), (0, 1)),
    "from zero in each, without ends": numbered(counted("part{}/model.pt"), (0, 1), (0, 1), ends=False),
    "three, all from zero": all_from_zero(counted("m{}.pth", 3), *_LM),
    "three of a transformer for images": all_from_zero(counted("m{}.pth", 3), *_VIT),
    "the first of stages without a number": all_from_zero(["model.pth", "model2.pth"], *_LM),
    "with a gap": numbered(counted("stage{}.pt"), (0, 1), (4, 5)),
    "of one layer": numbered(counted("model_{}.pt", 3), (0,), (1,), (2,)),
    "stages": staged(*counted("stage_{}.pt")),
    "stages without a word": staged(*counted("model_{}.pt")),
    "stages from one": staged(*counted("{}.pth", 3, 1)),
    "experts": files(counted("model_{}.pt"), experts),
    "flat parameters": flat("_flat_param", "weights.pt"),
    "flat parameters of a layer": flat("layers.3._fsdp_wrapped_module._flat_param", "model_0.pt", "model_1.pt"),
    "flat parameters of fairscale": flat("_fpw_module.flat_param_0", "a.pt", "b.pt"),
}
LONE = ["model_rank3.pt", "rank1.safetensors", "net.tp2.pt", "shard_3.pt", "model_world_size_4_rank_0.pt", "2_of_4.pt"]


@pytest.mark.parametrize("pattern", ["stage_{}.pt", "pp_rank_{}.pt", "part{}.safetensors"])
def test_a_stage_that_is_missing_is_named(pattern: str, tmp_path: Path) -> None:
    _, second, _ = numbered(counted(pattern, 3), (0,), (1,), (2,))(tmp_path)
    second.unlink()

    for place in (tmp_path, tmp_path / pattern.format(2)):
        found = [one for one in ckptool.check(place).findings if one.code in ("CK155", "CK160")]
        assert "number 1 not there" in found[0].message


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Meta's", "zip"),
        ("FSDP's", "tar"),
        ("stages", "gztar"),
        ("of one layer", "tar"),
        ("in folders of ranks", "zip"),
    ],
)
def test_parts_in_an_archive_are_parts(name: str, kind: str, tmp_path: Path) -> None:
    paths = (SLICED | PARTS)[name](tmp_path / "model")
    archive = Path(shutil.make_archive(str(tmp_path / "packed"), kind, tmp_path / "model"))
    member = f"{archive}::{'./' * (kind != 'zip')}{paths[-1].relative_to(tmp_path / 'model')}"

    for path, code in ((archive, "CK155"), (member, "CK160")):
        assert said(Path(path))[code] == "warning"
        assert run("check", path).exit_code == 1
        assert run("migrate", path, tmp_path / "whole.safetensors").exit_code == 1
        refused(path, by=ckptool.load)
    (finding,) = [one for one in ckptool.check(member).findings if one.code == "CK160"]
    assert finding.command is not None
    assert "CK155" in run(*shlex.split(finding.command)[1:]).output
    assert "CK155" in json.loads(run("scan", archive).stdout)["findings"]
    assert run("migrate", member, tmp_path / "whole.safetensors", "--allow-missing").exit_code == 0


@pytest.mark.parametrize("name", ["consolidated.01.pth", "in/model_rank3.pt", "net_2_of_4.safetensors"])
def test_a_part_alone_in_an_archive_is_none(name: str, tmp_path: Path) -> None:
    write(tmp_path / "model" / name, slice_of(1))
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "model")

    for path in (archive, f"{archive}::{name}"):
        assert said(Path(path))["CK160"] == "warning"
        refused(path, IncompleteWeights, by=ckptool.load)


@pytest.mark.parametrize("file", LONE)
def test_a_part_whose_name_says_so_is_none_where_the_others_are_not_there(file: str, tmp_path: Path) -> None:
    write(tmp_path / "in" / file, slice_of(1))

    for path in (tmp_path / "in", tmp_path / "in" / file):
        assert said(path)["CK160"] == "warning"
        assert run("migrate", path, tmp_path / "whole.safetensors").exit_code == 1


def later(first: int, count: int, name: str = "layers.{}.mlp.weight", *more: str) -> Tensors:
    """Return layers of a stack from one on."""
    torch.manual_seed(first)
    made = {name.format(at): torch.randn(8, 8) for at in range(first, first + count)}
    return made | {one: torch.randn(16, 8) for one in more}


LATER = {
    "a stage": ("stage_1.pth", later(12, 12)),
    "the last stage": ("stage_3.safetensors", later(6, 6, "model.layers.{}.attn.weight", "lm_head.weight")),
    "a net": ("net.pth", later(6, 6)),
    "in training": ("last.ckpt", {"model": later(4, 6), "optimizer": {"state": {}, "param_groups": []}, "epoch": 3}),
    "experts": ("ep.pt", later(0, 3, "h.{}.experts.4.w.weight") | later(0, 3, "h.{}.experts.5.w.weight")),
    "beside an earlier save": ("model_2.pt", later(12, 12)),
}


@pytest.mark.parametrize("name", LATER)
def test_layers_without_those_before_are_no_model(name: str, tmp_path: Path) -> None:
    file, value = LATER[name]
    path = tmp_path / "in" / file
    write(path, value)
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "in")
    if "beside" in name:
        write(tmp_path / "in" / "model_1.pt", later(12, 12))

    for place in (path, f"{archive}::{file}", *([] if "beside" in name else [path.parent, archive])):
        report = ckptool.check(place)
        found = [one.message for one in report.findings if one.code == "CK160"]
        assert len(found) == 1, (place, report.findings, report.error)
        assert "without those before" in found[0]
        done = run("migrate", place, tmp_path / "whole.safetensors")
        assert done.exit_code == 1
        assert "--allow-missing" in done.output
        refused(place, IncompleteWeights, by=ckptool.load)
    assert "CK160" in run("inspect", path).output
    assert run("migrate", path, tmp_path / "part.safetensors", "--allow-missing").exit_code == 0


WHOLE = {
    "counted from one": later(1, 12),
    "behind a layer without tensors": {f"{at}.weight": torch.randn(8, 8) for at in (2, 4, 6, 8)},
    "blocks of other shapes": {f"blocks.{at}.weight": torch.randn(2**at, 8) for at in (2, 3, 4, 5)},
    "gates of an adapter": {f"layers.{at}.attention.gate.weight": torch.randn(1, 32) for at in range(2, 32)},
    "LoRA of later layers": later(12, 12, "layers.{}.q.lora_A.weight") | later(12, 12, "layers.{}.q.lora_B.weight"),
    "adapters of later layers": later(8, 8, "layers.{}.adapter.down.weight"),
    "probes of later layers": later(12, 12, "probes.{}.weight"),
    "names of many numbers": {"1." * 30_000 + "weight": torch.ones(2, 2), f"{'9' * 5_000}.weight": torch.ones(2, 2)},
    "one later layer": later(61, 1, "layers.{}.a.weight", "a.weight", "b.weight", "c.weight"),
    "a few later layers": later(4, 4) | {f"{one}.weight": torch.randn(2, 2) for one in "abcde"},
    "two stacks": later(0, 6, "text.layers.{}.weight") | later(0, 3, "image.layers.{}.weight"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_begins_with_a_later_number_may_be_whole(name: str, tmp_path: Path) -> None:
    write(tmp_path / "net.pth", WHOLE[name])

    for path in (tmp_path, tmp_path / "net.pth"):
        assert "CK160" not in said(path)
        assert ckptool.load(path).keys() == WHOLE[name].keys()


@pytest.mark.parametrize(
    "file",
    [
        "model_0.pt",
        "model_1.pt",
        "0.pt",
        "worker_3.pt",
        "gpu1.pt",
        "fold_2_of_5.pt",
        "rank_0.pt",
        "net_mp4.pt",
        "mp3_1.pt",
    ],
)
def test_a_model_that_is_alone_is_whole_whatever_its_number(file: str, tmp_path: Path) -> None:
    write(tmp_path / file, full())

    for path in (tmp_path, tmp_path / file):
        assert not {"CK145", "CK155", "CK160"} & said(path).keys()
        assert ckptool.load(path).keys() == full().keys()


@pytest.mark.parametrize("name", SLICED | PARTS)
def test_parts_are_no_models_together_and_alone(name: str, tmp_path: Path) -> None:
    paths = (SLICED | PARTS)[name](tmp_path / "model")

    for path in (tmp_path / "model", paths[0], paths[-1]):
        (found,) = [one for one in ckptool.check(path).findings if one.code in ("CK155", "CK160")]
        assert found.severity == "warning"
        refused(path, by=ckptool.load)


@pytest.mark.parametrize("name", ["Meta's", "FSDP's below hosts", "called by numbers", "ranges of layers", "experts"])
def test_no_verb_takes_parts_for_a_model(name: str, tmp_path: Path) -> None:
    paths = (SLICED | PARTS)[name](tmp_path / "model")
    folder, target = tmp_path / "model", tmp_path / "whole.safetensors"

    assert run("check", folder).exit_code == 1
    assert "CK155" in run("inspect", folder).output
    for done in (run("migrate", folder, target), run("migrate", folder, tmp_path / "a.pth", "--form", "state_dict")):
        assert done.exit_code == 1
        assert "Pick one" not in done.output
        remedy = {"Meta's": "with --join meta-llama", "called by numbers": "with --join, and rules that say"}
        assert remedy.get(name, "save the model whole") in done.output
    assert "Pick one" not in str(refused(folder, by=ckptool.load).hint)

    first = paths[-1]
    (finding,) = [one for one in ckptool.check(first).findings if one.code == "CK160"]
    assert finding.command is not None
    shown = run(*shlex.split(finding.command)[1:])
    assert shown.exit_code == 0
    assert "CK155" in shown.output
    for done in (run("migrate", first, target), run("migrate", first, tmp_path / f"a{first.suffix}")):
        assert done.exit_code == 1
        assert "--allow-missing" in done.output
    model = torch.nn.Linear(2, 2)
    for load in (lambda: ckptool.load(first), lambda: ckptool.load_into(model, first)):
        with pytest.raises(IncompleteWeights):
            load()
    assert list(tmp_path.iterdir()) == [folder]

    assert run("migrate", first, target, "--allow-missing").exit_code == 0
    kept = ckptool.load(target, allow_missing=True)  # folders of tests are numbered, too
    assert kept.keys() == ckptool.load(first, allow_missing=True).keys()
    rows = [json.loads(line) for line in run("scan", folder).stdout.splitlines()]
    assert rows
    assert all({"CK155", "CK160"} & row["findings"].keys() for row in rows)


@pytest.mark.parametrize(
    "pattern", ["rank{}.safetensors", "consolidated.{:02}.pth", "tp_rank_{:02}/model.pt", "model_rank{}.pt"]
)
def test_slices_with_a_gap_say_which_is_missing(pattern: str, tmp_path: Path) -> None:
    paths = [tmp_path / "in" / pattern.format(rank) for rank in (0, 2, 3)]
    for rank, path in zip((0, 2, 3), paths, strict=True):
        write(path, slice_of(rank, 4))

    for path in (*paths, tmp_path / "in"):
        found = [one for one in ckptool.check(path).findings if one.code in ("CK155", "CK160")]
        assert "number 1 not there" in found[0].message
        assert run("migrate", path, tmp_path / "a.safetensors").exit_code == 1
    refused(paths[1], IncompleteWeights, by=ckptool.load)


def test_the_folder_of_a_rank_is_seen_as_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        write(tmp_path / f"shard{rank}/model.pt", slice_of(rank))
        write(tmp_path / f"runs/gpu{rank}/model.pt", trained(rank))

    assert said(tmp_path / "shard1")["CK160"] == "warning"
    refused(tmp_path / "shard1", IncompleteWeights, by=ckptool.load)
    assert run("check", "-b", "-r", tmp_path / "shard0").exit_code == 1
    assert run("check", "-b", "-r", tmp_path / "runs/gpu0").exit_code == 0
    monkeypatch.chdir(tmp_path / "shard1")
    for place in ("model.pt", "."):
        assert said(Path(place))["CK160"] == "warning"
    assert "CK160" not in said(tmp_path / "runs/gpu1/model.pt")


def test_what_is_compared_with_a_slice_is_said_to_be_a_part(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"consolidated.{rank:02}.pth", slice_of(rank))

    report = ckptool.diff(tmp_path / "consolidated.00.pth", tmp_path / "consolidated.01.pth")

    assert "one of 2 files that each hold a slice" in report.not_compared[0]
    done = run("diff", tmp_path, tmp_path / "consolidated.00.pth")
    assert done.exit_code == 2
    assert "slices of one model" in done.output


@pytest.mark.parametrize("pattern", ["net_{:02}.pt", "run_12/net-{:03}.pt", "part1/{:02}/net.pt"])
def test_a_folder_is_listed_once_for_all_its_files(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "in" / pattern.format(number) for number in range(40)]
    for number, path in enumerate(paths):
        write(path, {"a.weight": torch.full((2, 2), float(number))})
    for folder, _, _ in os.walk(tmp_path.parent):
        os.utime(folder, (1e9, 1e9))
    listed, scandir = [], os.scandir
    monkeypatch.setattr("os.scandir", lambda path: [listed.append(path), scandir(path)][1])
    monkeypatch.setattr("ckptool.sources.paths._LASTS", 3600.0)  # this machine may be slow

    for path in paths:
        with ckptool.open_checkpoint(path):
            pass

    assert all(listed.count(path) <= 2 for path in listed)  # its files, and its folders


@pytest.mark.parametrize("pattern", ["rank{}.pt", "rank_{}/model.pt", "net-{}.safetensors"])
def test_a_file_that_comes_is_seen_at_once(pattern: str, tmp_path: Path) -> None:
    paths = [tmp_path / "in" / pattern.format(rank) for rank in range(2)]
    for path, is_part in zip(paths, (False, True), strict=True):
        write(path, slice_of(paths.index(path)))
        assert ("CK160" in said(paths[0])) is is_part
    paths[1].unlink()
    assert "CK160" not in said(paths[0])


def test_a_slice_may_be_edited_in_its_place(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"consolidated.{rank:02}.pth", slice_of(rank))

    done = run("migrate", "--in-place", tmp_path / "consolidated.00.pth", "--rename", "^emb=em")

    assert done.exit_code == 0, done.output


def test_the_first_slice_alone_may_be_all_and_another_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "7B/consolidated.00.pth", full())
    write(tmp_path / "13B/consolidated.01.pth", slice_of(1))

    for place in ("7B", "7B/consolidated.00.pth"):
        assert said(tmp_path / place)["CK145"] == "info"
        assert run("check", tmp_path / place).exit_code == 0
        caplog.clear()
        assert ckptool.load(tmp_path / place).keys() == full().keys()
        assert "nothing says how many there were" in caplog.text
    write(tmp_path / "zero/mp_rank_00_model_states.pt", {"module": full()})
    assert "CK145" not in said(tmp_path / "zero/mp_rank_00_model_states.pt")
    for place in ("13B", "13B/consolidated.01.pth"):
        assert said(tmp_path / place)["CK160"] == "warning"
        refused(tmp_path / place, IncompleteWeights, by=ckptool.load)


def test_what_one_rank_saved_for_vllm_is_one_model(tmp_path: Path) -> None:
    whole = full()
    write(tmp_path / "model-rank-0-part-0.safetensors", dict(list(whole.items())[:3]))
    write(tmp_path / "model-rank-0-part-1.safetensors", dict(list(whole.items())[3:]))

    assert ckptool.load(tmp_path).keys() == whole.keys()
    assert said(tmp_path / "model-rank-0-part-1.safetensors")["CK160"] == "warning"
    (tmp_path / "model-rank-0-part-0.safetensors").unlink()
    done = run("inspect", tmp_path)
    assert done.exit_code == 2
    assert "1 of 2 shards not there" in done.output


@pytest.mark.parametrize(
    ("pattern", "nbytes"),
    [("consolidated.{:02}.pth", 0), ("rank{}.safetensors", 300), ("stage_{}.pt", 0), ("tp_{}/model.pt", 300)],
)
def test_a_slice_is_none_the_less_one_where_another_is_damaged(pattern: str, nbytes: int, tmp_path: Path) -> None:
    folder, first = tmp_path / "in", tmp_path / "in" / pattern.format(0)
    for rank in range(2):
        write(folder / pattern.format(rank), slice_of(rank))
    (folder / pattern.format(1)).write_bytes(first.read_bytes()[:nbytes])
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", folder)

    for path in (first, folder, archive, f"{archive}::{pattern.format(0)}"):
        assert said(Path(path))["CK160"] == "warning"
        assert run("migrate", path, tmp_path / "a.safetensors").exit_code == 1
        refused(path, IncompleteWeights, by=ckptool.load)


@pytest.mark.parametrize("pattern", ["model_{}.pt", "net-{}.safetensors", "epoch_{}/model.pt"])
def test_a_damaged_file_beside_is_of_another_model_if_no_word_says_so(pattern: str, tmp_path: Path) -> None:
    write(tmp_path / pattern.format(0), full())
    write(tmp_path / pattern.format(1), full())
    (tmp_path / pattern.format(1)).write_bytes(b"")

    assert "CK160" not in said(tmp_path / pattern.format(0))
    assert ckptool.load(tmp_path / pattern.format(0)).keys() == full().keys()


@pytest.mark.parametrize(
    "pattern", ["model-{:05}-of-00002.safetensors", "net-{:03}-of-002.pt", "w_rank-{:08}-of-00000002.pth"]
)
def test_shards_may_be_counted_from_zero(pattern: str, tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / "in" / pattern.format(number), stage(number))
        write(tmp_path / "cut" / pattern.format(number), slice_of(number))
    archive = shutil.make_archive(str(tmp_path / "packed"), "tar", tmp_path / "in")

    assert ckptool.load(tmp_path / "in").keys() == (stage(0) | stage(1)).keys()
    refused(tmp_path / "cut", match="is in", by=ckptool.load)
    assert said(Path(archive))["CK155"] == "warning"
    for path in (tmp_path / "in" / pattern.format(0), f"{archive}::./{pattern.format(0)}"):
        assert said(Path(path))["CK160"] == "warning"
        refused(path, IncompleteWeights, "shard 0 of 2", by=ckptool.load)
    (tmp_path / "in" / pattern.format(1)).unlink()
    refused(tmp_path / "in", match="1 of 2 shards not there", by=ckptool.load)


def test_files_with_other_tensors_each_are_parts(tmp_path: Path) -> None:
    whole = list(full().items())
    write(tmp_path / "in/net_part1.pt", dict(whole[:3]))
    write(tmp_path / "in/net_part2.pt", dict(whole[3:]))

    assert said(tmp_path / "in/net_part1.pt")["CK160"] == "warning"
    done = run("migrate", tmp_path / "in", tmp_path / "a.pth")
    assert done.exit_code == 1
    assert "2 files are parts of one model" in done.output
    assert "Pick one" not in done.output
    done = run("migrate", tmp_path / "in/net_part1.pt", tmp_path / "a.safetensors")
    assert done.exit_code == 1
    assert "--allow-missing" in done.output


@pytest.mark.parametrize(
    ("first", "second", "are_parts"),
    [
        ("h.0.w h.3.w", "h.4.w h.7.w", True),
        ("net.emb net.layers.0.w", "net.layers.1.w net.head", True),
        ("conv1.weight fc.bias", "lin1.weight out.bias", False),
        ("encoder.layers.0.w encoder.layers.3.w", "decoder.layers.0.w decoder.layers.3.w", False),
        ("0.conv.w 1.conv.w", "0.lin.w 1.lin.w", False),
        ("weight bias", "scale shift", False),
    ],
)
def test_files_of_two_nets_are_no_parts_of_one(first: str, second: str, are_parts: bool, tmp_path: Path) -> None:
    for n, names in ((1, first), (2, second)):
        write(tmp_path / f"in/part{n}.pt", {name: torch.full((2, 2), float(n)) for name in names.split()})

    assert ("CK160" in said(tmp_path / "in/part1.pt")) is are_parts
    assert ("parts of one model" in run("check", tmp_path / "in").output) is are_parts


def lora(rank: int) -> Tensors:
    torch.manual_seed(rank)
    return {"a.lora_A.weight": torch.randn(rank, 8), "a.lora_B.weight": torch.randn(8, rank)}


def seed(number: int) -> Tensors:
    """Return what is made anew: biases are zeros, and norms ones."""
    torch.manual_seed(number)
    made = {"a.weight": torch.randn(8, 8), "b.weight": torch.randn(8, 8)}
    return made | {"a.bias": torch.zeros(8), "norm.weight": torch.ones(8), "norm.bias": torch.zeros(8)}


def other_seed(number: int) -> Tensors:
    """Return a whole model of another training."""
    torch.manual_seed(number)
    return {name: torch.randn(whole.shape) for name, whole in full().items()}


def chain(number: int, *sizes: int) -> Tensors:
    """Return a net of layers without norms."""
    torch.manual_seed(number)
    return {f"{at}.weight": torch.randn(b, a) for at, (a, b) in enumerate(pairwise(sizes))}


def heads(number: int, count: int) -> Tensors:
    """Return layers side by side, each of which gives half of what it takes."""
    torch.manual_seed(number)
    return {f"heads.{one}.weight": torch.randn(8, 16) for one in range(count)}


def language_model(number: int) -> Tensors:
    """Return a whole model of its own training, of two layers with what is before and after them."""
    torch.manual_seed(number)
    made = {"embed.weight": torch.randn(50, 32)}
    for at in range(2):
        made |= {f"layers.{at}.{part}.weight": torch.randn(32, 32) for part in ("q", "k", "v", "o")}
        made |= {f"layers.{at}.up.weight": torch.randn(128, 32), f"layers.{at}.down.weight": torch.randn(32, 128)}
        made[f"layers.{at}.norm.weight"] = torch.rand(32)
    return made | {"norm.weight": torch.rand(32), "head.weight": torch.randn(50, 32)}


def unet(number: int) -> Tensors:
    """Return a U-Net, whose layers on the way up take what two others give."""
    torch.manual_seed(number)
    widths = [(3, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)]
    made = {f"down.{at}.weight": torch.randn(b, a, 3, 3) for at, (a, b) in enumerate(widths)}
    for at, (a, b) in enumerate([(48, 16), (16, 16), (24, 8), (8, 8)]):
        made |= {f"up.{at}.weight": torch.randn(b, a, 3, 3), f"up.{at}.norm.weight": torch.randn(b)}
    return made | {"out.weight": torch.randn(1, 8, 1, 1)}


def even_unet(number: int) -> Tensors:
    """Return a U-Net that gives half on the way up, and takes twice as much with what is joined."""
    torch.manual_seed(number)
    widths = [(1, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 8), (16, 8), (8, 4), (8, 4), (4, 4)]
    return {f"conv{at}.weight": torch.randn(b, a, 3, 3) for at, (a, b) in enumerate(widths)}


def adapter(number: int, size: int = 4, *, first: int | None = None) -> Tensors:
    """Return an adapter of a training of its own; with ``first``, its first factors are those of that seed."""
    made = {}
    for at in range(3):
        for factor, shape, own in (("A", (size, 16), first), ("B", (16, size), None)):
            torch.manual_seed(97 * at + (number if own is None else own))
            made[f"layers.{at}.q_proj.lora_{factor}.weight"] = torch.randn(*shape)
    return made


def on_a_table(number: int) -> Tensors:
    """Return a net that was trained on top of a table of words, which it left as it was."""
    return other_seed(number) | {"words.weight": torch.arange(64.0).reshape(8, 8)}


def other_table(number: int) -> Tensors:
    torch.manual_seed(number)
    return {"embed.weight": torch.randn(20, 16), "head.weight": torch.randn(20, 16)}


def discriminator(number: int) -> Tensors:
    torch.manual_seed(number)
    return {f"model.{at}.weight": torch.randn(8 * (at + 1), 8, 4, 4) for at in (0, 2, 5, 8)}


def generator(number: int) -> Tensors:
    torch.manual_seed(number)
    return {f"model.{at}.conv.weight": torch.randn(8, 8, 3, 3) for at in range(1, 9)}


SERIES: dict[str, list[tuple[str, Tensors]]] = {
    "seeds by letters": [("a.pt", other_seed(1)), ("b.pt", other_seed(2))],
    "runs by Roman numerals": [("net_i.pt", seed(1)), ("net_ii.pt", seed(2)), ("net_iii.pt", seed(3))],
    "eyes": [("left.pt", other_seed(1)), ("right.pt", other_seed(2))],
    "a head and a tail": [("head.pt", chain(1, 16, 4)), ("tail.pt", chain(2, 8, 16))],
    "generators of a cycle": [("net_G_A.pth", generator(1)), ("net_G_B.pth", generator(2))],
    "a generator and a discriminator": [("net_G.pth", generator(1)), ("net_D.pth", discriminator(1))],
    "an encoder and a decoder": [("encoder.pth", stage(0)), ("decoder.pth", chain(1, 8, 8, 8))],
    "an average": [("model.pth", trained(1)), ("model_ema.pth", trained(2))],
    "hundreds of steps": [(f"m_{n}.pth", trained(n)) for n in (100, 200, 300)],
    "sizes": [(f"vgg_{n}.pth", chain(n, 8, n, n, 4)) for n in (16, 32)],
    "adapters by letters": [("style-a.safetensors", adapter(1)), ("style-b.safetensors", adapter(2))],
    "adapters on the same first factors": [(f"adapter_{n}.pt", adapter(n, first=9)) for n in (0, 1)],
    "sizes of adapters": [(f"adapter_rank_{n}.safetensors", adapter(n, n)) for n in (4, 8, 16)],
    "on the same table": [(f"rank{n}.safetensors", on_a_table(n)) for n in (0, 1)],
    "U-Nets of shards": [(f"shard{n}/unet.pth", unet(n)) for n in (0, 1)],
    "even U-Nets of shards": [(f"shard{n}/unet.pth", even_unet(n)) for n in (0, 1, 2, 3)],
    "tables": [(f"embedding_{n}.pt", other_table(n)) for n in (0, 1)],
    "steps": [(f"checkpoint_{step}.pth", trained(step)) for step in (100, 200)],
    "steps of fine-tuning": [(f"step_{n}.pt", trained(n, "layers.0.norm.weight", "emb.weight")) for n in (0, 1)],
    "ranks of adapters": [(f"lora_rank_{n}.safetensors", lora(n)) for n in (1, 2)],
    "copies": [(f"rank{n}.safetensors", full()) for n in (0, 1)],
    "copies of processes": [(f"rank{n}.pth", full()) for n in (0, 1)],
    "seeds of shards": [(f"shard{n}_model.pth", language_model(n)) for n in (0, 1)],
    "nets of shards": [(f"shard{n}_model.pth", chain(n, 12, 8, 8, 4)) for n in (0, 1)],
    "steps of seven digits": [(f"checkpoint-{n}000000.pt", trained(n)) for n in (1, 2)],
    "another without a number": [(f"model{n}.pth", trained(len(n))) for n in ("", "2")],
    "heads of three": [(f"net_{n}.pt", {**other_seed(n), f"head_{n}.weight": torch.randn(2, 8)}) for n in (0, 1, 2)],
    "models of ranks": [(f"rank{n}.safetensors", trained(n)) for n in (0, 1)],
    "a backbone and ranks": [(f"net.part{n}.pt", trained(n, *full().keys() - {"emb.weight"})) for n in (0, 1)],
    "seeds with zero biases": [(f"gpu{n}.pt", seed(n)) for n in (0, 1)],
    "models in folders": [(f"rank_{n}/net.pt", trained(n)) for n in (0, 1)],
    "gaps": [(f"part-{n}.pt", slice_of(min(n, 1))) for n in (0, 5, 7)],
    "numbers": [(f"model_{n}.pt", trained(n)) for n in (0, 1, 2)],
    "far steps": [(f"{n}.pt", seed(n)) for n in (0, 1000)],
    "trained matrices alone": [
        (f"checkpoint_{n}.pt", trained(n, "layers.0.norm.weight", "layers.0.wo.bias")) for n in (0, 1)
    ],
    "folds of": [(f"net_{n}_of_2.pt", seed(n)) for n in (1, 2)],
    "averages": [("model_0.pt", full()), ("model_1.pt", trained(0, "emb.weight", "layers.0.norm.weight"))],
    "one vector": [(f"net_{n}.pt", {**seed(n), "a.bias": torch.arange(8.0)}) for n in (0, 1)],
    "two types": [
        (f"net_{n}.pt", {k: v.to(t) for k, v in full().items()}) for n, t in enumerate((torch.half, torch.float))
    ],
    "grown": [(f"net_{n}.pt", {f"layers.{one}.w": torch.ones(2, 2) * n for one in range(2 * n)}) for n in (1, 2)],
    "two nets": [
        (f"net_{n}.pt", {f"{net}.{one}.weight": torch.ones(2, 2) for one in range(3)}) for n, net in enumerate("gd")
    ],
    "layers of another size": [
        ("net_0.pt", {f"h.{one}.weight": torch.ones(4, 4) for one in (0, 1)}),
        ("net_1.pt", {f"h.{one}.weight": torch.ones(6, 6) for one in (2, 3)}),
    ],
    "layers of other parts": [
        ("net_0.pt", {f"h.{one}.{part}": torch.ones(4, 4) for one in (0, 1) for part in ("a", "b", "c")}),
        ("net_1.pt", {f"h.{one}.{part}": torch.ones(4, 4) for one in (2, 3) for part in ("a", "d", "e")}),
    ],
    "later layers in front": [
        ("net_0.pt", {f"h.{one}.weight": torch.ones(4, 4) for one in (2, 3)}),
        ("net_1.pt", {f"h.{one}.weight": torch.ones(4, 4) for one in (0, 1)}),
    ],
    "two nets of stages": [
        (f"stage{n}.pt", {**trained(0), "head.weight": torch.randn(4, 4)} if n == 1 else full()) for n in (1, 2)
    ],
    "seeds with trained vectors": [(f"stage{n}.pt", other_seed(n)) for n in (1, 2)],
    "outputs of ranks": [(f"part{n}.pt", {"logits": torch.randn(9, 4), "ids": torch.randn(9)}) for n in (0, 1)],
    "heads": [(f"task_{n}.pt", full() | {f"heads.{n}.weight": torch.ones(2, 2)}) for n in (0, 1)],
    "below hosts": [(f"host0/dev{n}/w.pt", other_seed(n)) for n in (0, 1)],
    "runs on devices": [(f"run{n}/dev0/w.pt", seed(n)) for n in (0, 1)],
    "folds with the count": [(f"net-{n}-3.pt", other_seed(n)) for n in (0, 1, 2)],
    "of two dates": [(f"net-2024-0{n}.pt", seed(n)) for n in (1, 2)],
    "ranges of data": [(f"data_{n}-{n + 1}.pt", other_seed(n)) for n in (0, 2)],
    "layers of two trainings": [(f"layers_{n}-{n + 1}.pt", stage(0, seed=n)) for n in (0, 2)],
    "heads of one body": [
        (f"model_{n}.pt", chain(n, 4, 16) | {f"heads.{k}.weight": torch.randn(8, 16) for k in range(3)}) for n in (0, 1)
    ],
    "nets that narrow": [(f"model_{n}.pt", chain(n, 64, 32, 16, 8)) for n in (0, 1)],
    "nets with joined inputs": [
        (f"worker_{n}.pt", chain(n, 8, 8, 8) | {"z.weight": torch.randn(4, 16)}) for n in (0, 1)
    ],
}


@pytest.mark.parametrize("name", SERIES)
def test_no_series_is_taken_for_slices(name: str, tmp_path: Path) -> None:
    for file, tensors in SERIES[name]:
        write(tmp_path / file, tensors)

    assert not {"CK155", "CK160", "CK145"} & said(tmp_path).keys()
    for file, tensors in SERIES[name]:
        assert not {"CK155", "CK160", "CK145"} & said(tmp_path / file).keys()
        assert ckptool.load(tmp_path / file).keys() == tensors.keys()


@pytest.mark.parametrize("pattern", ["stage{}.pth", "part{}/model.safetensors", "epoch_{}_of_3.pt"])
def test_stages_of_one_training_are_no_slices(pattern: str, tmp_path: Path) -> None:
    frozen = [name for name in full() if "norm" in name or "bias" in name]
    for number in (1, 2, 3):
        write(tmp_path / "in" / pattern.format(number), trained(number, *frozen))

    for number in (1, 2, 3):
        path = tmp_path / "in" / pattern.format(number)
        assert "CK160" not in said(path)
        assert ckptool.load(path).keys() == full().keys()


@pytest.mark.parametrize("place", ["rank_{}/ckpt/model.pt", "mp_rank_0{}/weights/model.safetensors", "{}/a/model.pt"])
def test_slices_two_folders_deep_are_seen(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        write(tmp_path / "in" / place.format(rank), slice_of(rank))
    path = tmp_path / "in" / place.format(1)

    for one in (path, path.parent, path.parent.parent):
        assert said(one)["CK160"] == "warning"
        refused(one, IncompleteWeights, by=ckptool.load)
    monkeypatch.chdir(path.parent)
    assert said(Path(path.name))["CK160"] == "warning"
