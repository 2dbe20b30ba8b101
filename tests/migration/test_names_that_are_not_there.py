"""Names that are not there are never taken for others; those that ``inspect`` prints work wherever a name is taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptool
from ckptool import WeightsNotFound, migrate
from tests.each import each
from tests.migration.refused import refused
from tests.program import invoke
from tests.scale import in_turn


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a training checkpoint, a state dict, one of safetensors, and one with averaged weights."""
    made = tmp_path_factory.mktemp("files")
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = net.state_dict()
    training = {"epoch": 3, "model": state, "optimizer": optimizer.state_dict(), "args": {"lr": 1, "deep": {"y": 2}}}
    torch.save(training, made / "train.pth")
    torch.save(state, made / "state.pth")
    migrate(made / "state.pth", made / "state.safetensors")
    torch.save({"state_dict": diffusion(), "global_step": 4}, made / "sd.ckpt")
    return made


@pytest.fixture
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of it, which is the current folder: two below one whose name counts, as those of ranks do."""
    place = tmp_path / "a" / "b"
    shutil.copytree(files, place)
    monkeypatch.chdir(place)
    return place


def diffusion() -> dict[str, torch.Tensor]:
    """Return weights with averages among them, as Stable Diffusion has them: under the same names without dots."""
    own = {
        f"model.{name}": torch.randn(3) for name in ("diffusion_model.input.0.0.weight", "diffusion_model.out.2.bias")
    }
    averages = {f"model_ema.{name[6:].replace('.', '')}": tensor + 1 for name, tensor in own.items()}
    counters = {"model_ema.decay": torch.tensor(0.9), "model_ema.num_updates": torch.tensor(7)}
    return {**own, "first_stage_model.w": torch.randn(2), "betas": torch.randn(4), **averages, **counters}


def run(*arguments: object, code: int = 0) -> str:
    result = invoke(list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.output


def names(path: str) -> list[str]:
    with ckptool.open_checkpoint(path) as found:
        return list(found.tensors)


# What is to be dropped

WRONG = {
    "train.pth": [
        "modl", "model.zzz", "model.0.wight", "model.0.weight.x", "optimizer.stat", "optimizer.state.0.exp", "epoch.x",
        "optimizer.state.9", "optimizer.param_groups.0", "args.lrr", "args.deep.z", "ema", "other", "", ".modl",
    ],
    "state.pth": ["2", "0.wight", "0.weight.x", "optimizer"],
    "state.safetensors": ["2", "0.wight", "0.weight.x"],
    "sd.ckpt": ["state_dict.model_em", "state_dict.model_ema.deca", "model.diffusion", "first_stage"],
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "a file of the same kind": {"dst": "out.pth"},
    "a state dict": {"dst": "out.pth", "form": "state_dict"},
    "safetensors": {"dst": "out.safetensors"},
    "shards": {"dst": "out", "max_shard_size": "1KB"},
    "dcp": {"dst": "out", "form": "dcp"},
    "in place": {"in_place": True},
}


@pytest.mark.parametrize(("way", "source"), in_turn(WAYS, WRONG))
def test_a_path_of_which_a_part_is_not_there_is_dropped_in_no_way(source: str, way: str, folder: Path) -> None:
    before = Path(source).read_bytes()
    for path in WRONG[source]:
        error = refused(source, **WAYS[way], drop=[path])
        assert error.kind == "nothing-to-drop", path
        assert repr(path) in error.message
        assert error.hint
    assert Path(source).read_bytes() == before
    assert not list(folder.glob("out*"))


def test_the_nearest_names_are_named_first(folder: Path) -> None:
    for path, first in (("optimzer", "'optimizer'"), ("optimizer.stat", "'optimizer.state'")):
        said = run("migrate", "train.pth", "out.pth", "--drop", path, code=1)
        assert f"there are: {first}" in said
    assert "there are: 'state_dict.model_ema'" in run("migrate", "sd.ckpt", "out.pth", "--drop", "model_emma", code=1)
    said = run("migrate", "train.pth", "out.pth", "--drop", "zzz", code=1)
    assert "there are: 'model', 'optimizer', 'epoch', 'args', 'model.0', 'model.1'\n" in said
    assert not Path("out.pth").exists()


@pytest.mark.parametrize(
    ("path", "gone"),
    [
        ("model.0", ["model.0.weight", "model.0.bias"]),
        ("0.weight", ["model.0.weight"]),
        ("optimizer.state.1", [f"optimizer.state.1.{name}" for name in ("step", "exp_avg", "exp_avg_sq")]),
        (".model.1.bias", ["model.1.bias"]),
    ],
)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_path_is_dropped_with_what_begins_with_it(path: str, gone: list[str], in_place: bool, folder: Path) -> None:
    before = names("train.pth")
    migrate("train.pth", None if in_place else "out.pth", drop=path, in_place=in_place)

    assert names("train.pth" if in_place else "out.pth") == [name for name in before if name not in gone]


def test_a_path_that_means_two_things_is_refused_until_it_is_clear(folder: Path) -> None:
    torch.save({"model": {"model.a": torch.ones(1), "head": torch.ones(2)}, "optimizer": 1, "w": 2}, "twice.pth")
    for option in ("drop", "include", "exclude"):
        text = "model" if option == "drop" else "model.*"
        refused(
            "twice.pth", "out.pth", **{option: text}, kind="two-readings", match=r"as a full path, and 'model\.model"
        )
    run("inspect", "twice.pth", "--include", "model.*", code=2)
    migrate("twice.pth", "out.pth", drop="model.model")
    assert names("out.pth") == ["model.head"]
    migrate("twice.pth", "out.pth", exclude="model.model.*", force=True)
    assert names("out.pth") == ["model.head"]
    refused("twice.pth", "out.pth", drop=".model", force=True, match="none of the 2 tensors is left")
    run("inspect", "twice.pth", "--include", ".model.*")


def test_a_prefix_that_one_of_two_state_dicts_has_is_looked_for_in_the_other(folder: Path) -> None:
    torch.save({"model": {"module.w": torch.ones(1)}, "ema": {"w": torch.ones(1)}}, "a.pth")

    for prefix, where, hint in (
        ("module.", "ema", "Take what has it alone, --key; or remove it where it is, --rename"),
        ("mod.", "model", "They begin with 'module'."),
    ):
        said = run("migrate", "a.pth", "out.pth", "--strip-prefix", prefix, code=1)
        assert f"in '{where}', no name begins with '{prefix}'" in said
        assert f"Hint: {hint}" in said
    run("migrate", "a.pth", "out.pth", "--rename", "^module.=")
    assert names("out.pth") == ["model.w", "ema.w"]


# Averaged weights


@pytest.mark.parametrize(
    ("form", "what"), in_turn(["same", "state_dict", "safetensors"], ["ema", "model_ema", "state_dict.model_ema"])
)
def test_averaged_weights_among_others_are_dropped(what: str, form: Any, folder: Path) -> None:
    migrate("sd.ckpt", "out", form=form, drop=[what])

    assert sorted(name.removeprefix("state_dict.") for name in names("out")) == sorted(
        name for name in diffusion() if "model_ema" not in name
    )


@each("key", ["params_ema", "ema_model", "ema_state_dict", "state_dict_ema", "net_g_ema", "shadow"])
def test_averaged_weights_are_found_under_many_words(key: str, folder: Path) -> None:
    torch.save({"params": {"a.w": torch.ones(1)}, key: {"a.w": torch.zeros(1)}}, "a.pth")

    assert float(ckptool.load("a.pth", weights="ema")["a.w"]) == 0
    migrate("a.pth", "out.pth", drop="ema", force=True)
    assert names("out.pth") == ["params.a.w"]


@pytest.mark.parametrize(("at_root", "style"), in_turn([True, False], ["without dots", "with dots", "averaged model"]))
def test_averages_get_the_names_of_what_they_are_averages_of(style: str, at_root: bool, folder: Path) -> None:
    state = diffusion()
    if style != "without dots":
        inside = "module." if style == "averaged model" else ""
        kept = {name: tensor for name, tensor in state.items() if "model_ema" not in name}
        averages = {f"model_ema.{inside}{name[6:]}": one + 1 for name, one in kept.items() if name.startswith("model.")}
        state = {**kept, **averages, "model_ema.n_averaged": torch.tensor(3)}
    torch.save(state if at_root else {"state_dict": state, "epoch": 1}, "a.pth")
    found = ckptool.load("a.pth", weights="ema")

    assert list(found) == [name for name in state if "model_ema" not in name]
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name] + name.startswith("model."))
    report = migrate("a.pth", "out.safetensors", weights="ema")
    assert {name: one.tolist() for name, one in ckptool.load("out.safetensors").items()} == {
        name: one.tolist() for name, one in found.items()
    }
    assert any("have no average, and are taken as they are" in note for note in report.notes)

    raw = ckptool.load("a.pth", weights="raw")
    assert {name: one.tolist() for name, one in raw.items()} == {
        name: one.tolist() for name, one in state.items() if "model_ema" not in name
    }
    report = migrate("a.pth", "raw.safetensors", weights="raw")
    assert sorted(names("raw.safetensors")) == sorted(raw)
    assert any("averaged weights among the others are left out" in note for note in report.notes)


@pytest.mark.parametrize(("head", "which"), in_turn(["model_ema", "ema", "EMA_net"], ["ema", "raw"]))
def test_what_may_be_averages_of_something_is_refused(head: str, which: Any, folder: Path) -> None:
    torch.save({"a.w": torch.ones(1), f"{head}.a.w": torch.zeros(1)}, "a.pth")

    with pytest.raises(WeightsNotFound, match=f"not certain if those under '{head}' are averaged") as caught:
        ckptool.load("a.pth", weights=which)
    assert f"`exclude='{head}.*'`" in str(caught.value.hint)
    run("migrate", "a.pth", "out.safetensors", "--weights", which, code=1)
    assert list(ckptool.load("a.pth")) == ["a.w", f"{head}.a.w"]


@pytest.mark.parametrize("fault", ["another name", "another number", "another shape", "two names without dots"])
def test_averages_of_what_is_not_certain_are_refused(fault: str, folder: Path) -> None:
    state = diffusion()
    if fault == "another name":
        state["model_ema.diffusion_modelmiddle"] = torch.ones(3)
    elif fault == "another number":
        state["model_ema.scale"] = torch.tensor(1.0)
    elif fault == "another shape":
        state["model_ema.diffusion_modelout2bias"] = torch.ones(4)
    else:
        state["model.diffusion_model.out2.bias"] = torch.ones(3)
    torch.save(state, "a.pth")

    with pytest.raises(WeightsNotFound, match="it is not certain of which weights") as caught:
        ckptool.load("a.pth", weights="ema")
    assert "model_ema" in str(caught.value.hint)
    run("migrate", "a.pth", "out.safetensors", "--weights", "ema", code=1)


# Globs, patterns, renames

NOTHING: dict[str, dict[str, Any]] = {
    "include": {"include": ["0.*", "zzz*"]},
    "exclude": {"exclude": ["optimiser.*"]},
    "a full path": {"exclude": ["model.2.*"]},
    "keep_dtype": {"keep_dtype": ["norn"], "dtype": "float16"},
    "rename": {"rename": ["^stem=root"]},
}


@pytest.mark.parametrize(("way", "case"), in_turn(WAYS, NOTHING))
def test_what_is_about_no_name_is_refused_unless_it_may_be(case: str, way: str, folder: Path) -> None:
    if way == "in place" and case == "keep_dtype":
        return
    before = Path("train.pth").read_bytes()
    error = refused("train.pth", **WAYS[way], **NOTHING[case])
    assert (error.kind, error.option) == ("no-such-name", "allow_unmatched")
    assert "The nearest names are" in str(error.hint)
    assert Path("train.pth").read_bytes() == before

    assert migrate("train.pth", **WAYS[way], **NOTHING[case], allow_unmatched=True).tensors


def test_a_type_that_is_kept_anyway_is_no_misspelling(folder: Path) -> None:
    torch.save({"a": torch.ones(1), "steps": torch.tensor(3)}, "a.pth")

    notes = migrate("a.pth", "out.pth", dtype="bf16", keep_dtype="steps").notes
    assert notes == ("keep_dtype 'steps' keeps the type of no tensor",)


def test_of_several_sources_one_is_enough(folder: Path) -> None:
    several = ("migrate", "train.pth", "sd.ckpt", "--out-dir", "out")
    run(*several, "--exclude", "model_ema.*", "--exclude", "0.weight", "--rename", "^betas=b")
    assert "model.0.weight" not in names("out/train.pth")
    for wrong in (["--exclude", "0.wight"], ["--rename", "^beta2=b"], ["--keep-dtype", "nrom", "--dtype", "fp16"]):
        said = run(*several, "--force", "--exclude", "0.weight", *wrong, code=1)
        assert "no name in any of the 2 sources" in said
    found = [json.loads(line) for line in run(*several, "--jsonl", "--include", "zz", code=1).splitlines()]
    assert [one["error"]["kind"] for one in found] == ["no-such-name"] * 2
    run(*several, "--force", "--exclude", "0.wight", "--allow-unmatched")
    run("migrate", "missing.pth", "sd.ckpt", "--out-dir", "out", "--force", "--exclude", "betas", code=2)


# Names with and without the key


@pytest.mark.parametrize("glob", ["state_dict.model_ema.*", "model_ema.*", ".state_dict.model_ema.*", "*.model_ema.*"])
def test_names_work_as_inspect_prints_them_and_without_the_key(glob: str, folder: Path) -> None:
    averages = {f"state_dict.{name}" for name in diffusion() if "model_ema" in name}
    listed = json.loads(run("inspect", "sd.ckpt", "--json", "--include", glob))["tensors"]
    counted = json.loads(run("stat", "sd.ckpt", "--json", "--include", glob))["rows"]
    assert {one["name"] for one in listed} == {one["name"] for one in counted} == averages

    for form in ("same", "state_dict", "dcp"):
        run("migrate", "sd.ckpt", f"out-{form}", "--form", form, "--exclude", glob)
        left = {f"state_dict.{name.removeprefix('state_dict.')}" for name in names(f"out-{form}")}
        assert left == {f"state_dict.{name}" for name in diffusion()} - averages


def test_a_pattern_for_types_is_read_with_and_without_the_key(folder: Path) -> None:
    for form in ("same", "state_dict"):
        for pattern in ("^0", r"^model\.0"):
            migrate("train.pth", "out.pth", form=form, dtype="half", keep_dtype=pattern, force=True)
            with ckptool.open_checkpoint("out.pth") as found:
                kept = {
                    name.removeprefix("model."): one.dtype for name, one in found.tensors.items() if "opt" not in name
                }
            assert kept == {"0.weight": "float32", "0.bias": "float32", "1.weight": "float16", "1.bias": "float16"}


@pytest.mark.parametrize(
    ("verb", "pattern", "form"),
    in_turn(
        ["inspect", "stat"],
        [["--include", "zz*"], ["--exclude", "optimiser.*"], ["--grep", "zz"], ["--exclude", "*"]],
        [[], ["--json"], ["--table", "csv"], ["-r"]],
    ),
)
def test_a_list_of_nothing_is_no_success(verb: str, pattern: list[str], form: list[str], folder: Path) -> None:
    assert "--allow-unmatched" in run(verb, "train.pth", *pattern, *form, code=1)
    assert "Error" in run(verb, "train.pth", "sd.ckpt", *pattern, *form, code=1)
    run(verb, "train.pth", *pattern, *form, "--allow-unmatched")


def test_a_list_of_several_files_needs_a_name_in_one(folder: Path) -> None:
    for verb in ("inspect", "stat"):
        run(verb, "train.pth", "sd.ckpt", "--include", "betas")


# Keys

ASKED: dict[str, Any] = {
    "load": lambda key: ckptool.load("train.pth", key=key),
    "load_into": lambda key: ckptool.load_into(nn.Linear(3, 4), "train.pth", key=key),
    "predict_memory": lambda key: ckptool.predict_memory("train.pth", key=key),
    "LiveModel": lambda key: ckptool.LiveModel(nn.Linear(3, 4), "train.pth", key=key),
    "migrate": lambda key: migrate("train.pth", "out.pth", key=key),
    "diff": lambda key: ckptool.diff("train.pth", "state.pth", key_a=key),
    "diff of the other": lambda key: ckptool.diff("state.pth", "train.pth", key_b=key),
}


@pytest.mark.parametrize("verb", ASKED)
def test_a_key_that_is_not_there_is_refused_with_the_nearest(verb: str, folder: Path) -> None:
    for key in ("modle", "model.zzz", "model.0", "modelx.0"):
        with pytest.raises(WeightsNotFound, match=f"no state dict under '{key}'") as caught:
            ASKED[verb](key)
        assert "'model'" in str(caught.value.hint)
    assert not Path("out.pth").exists()
    found = ckptool.check("train.pth", like="state.pth", key="modle").findings
    assert [one.code for one in found if one.code == "CK600"]


def test_hints_are_about_what_was_asked_for(folder: Path) -> None:
    said = run("migrate", "state.pth", "out.safetensors", "--weights", "module", code=1)
    assert "Pick one with --key instead: '(root)'" in said
    for paths in (["train.pth"], ["train.pth", "out"]):
        said = run("migrate", *paths, "--max-shard-size", "1", "GB", code=2)
        assert "write --max-shard-size 1GB" in said
    assert not Path("GB").exists()
    assert run("migrate", "train.pth", "out.pth", "--exclude", "0.*", "-b").startswith("written")


# From Python


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"drop": "optimizer"}, ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]),
        ({"drop": "optimizer", "exclude": "1.*"}, ["model.0.weight", "model.0.bias"]),
        ({"drop": "optimizer", "include": "*.bias", "rename": ["^0=root"]}, ["model.root.bias", "model.1.bias"]),
        ({"drop": "optimizer", "include": "*.bias", "rename": "^0=root"}, ["model.root.bias", "model.1.bias"]),
        ({"drop": "optimizer", "include": "*.bias", "rename": [("^0", "a"), "^1=b"]}, ["model.a.bias", "model.b.bias"]),
        ({"drop": "optimizer", "include": "0.*", "strip_prefix": "0"}, ["model.weight", "model.bias"]),
        (
            {"drop": "optimizer", "include": "0.*", "strip_prefix": "0", "add_prefix": ("a", "b"), "rename": "a.w=c"},
            ["model.b.ceight", "model.b.a.bias"],
        ),
    ],
)
def test_a_text_is_a_list_of_one(given: dict[str, Any], left: list[str], folder: Path) -> None:
    migrate("train.pth", "out.pth", **given)
    migrate("train.pth", "whole.pth", ckptool.Changes(**given))

    assert names("out.pth") == names("whole.pth") == left


@pytest.mark.parametrize("rename", ["x", ["x"], ("^0", "x"), "(=x", [("(", "x")]])
def test_what_is_no_rename_is_refused(rename: Any, folder: Path) -> None:
    refused("train.pth", "out.pth", rename=rename, kind="bad-pattern")


@each("dtype", ["float16", "fp16", "half", "FP16", "torch.float16", torch.float16])
def test_a_type_has_many_names(dtype: Any, folder: Path) -> None:
    migrate("state.pth", "out.pth", dtype=dtype, force=True)
    assert {one.dtype for one in torch.load("out.pth").values()} == {torch.float16}
    assert {one.dtype for one in ckptool.load("state.pth", dtype=dtype).values()} == {torch.float16}
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    ckptool.load_into(net, "state.pth", dtype=dtype)
    assert net[0].weight.dtype == torch.float16
    if isinstance(dtype, str):
        run("migrate", "state.pth", "cli.pth", "--dtype", dtype, "--force")


@pytest.mark.parametrize("dtype", ["fp17", "int8", torch.int8])
def test_what_is_no_type_to_cast_to_is_refused(dtype: Any, folder: Path) -> None:
    refused("state.pth", "out.pth", dtype=dtype, match="not a type to cast to")
    with pytest.raises(ValueError, match="nothing to cast weights to"):
        ckptool.load("state.pth", dtype=dtype)
    run("migrate", "state.pth", "out.pth", "--dtype", str(dtype), code=2)


def test_a_device_is_where_tensors_go(folder: Path) -> None:
    assert {one.device.type for one in ckptool.load("state.pth", device="meta").values()} == {"meta"}


# One thing twice


def twice(kind: str) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    state = model.state_dict()
    return {
        "a model inside a trainer": {"model": model, "trainer": {"model": model}},
        "a state dict inside a trainer": {"model": state, "trainer": {"model": state}},
        "under words of its own": {"model_": state, "best_model_dict": state},
        "made twice": {"left": model.state_dict(), "right": model.state_dict()},
        "three times": {"a": state, "b": {"c": state}, "d": model.state_dict()},
    }[kind]


@pytest.mark.parametrize("kind", [*("a model inside a trainer", "a state dict inside a trainer"), "three times",
                                  "under words of its own", "made twice"])  # fmt: skip
def test_one_thing_under_two_keys_is_one(kind: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = twice(kind)
    first, *others = {"three times": ["a", "b.c", "d"], "made twice": ["left", "right"]}.get(
        kind, ["model_", "best_model_dict"] if "own" in kind else ["model", "trainer.model"]
    )
    torch.save(content, "a.pth")
    with caplog.at_level("INFO", "ckptool"):
        assert list(ckptool.load("a.pth")) == ["weight", "bias"]
    assert all(other in caplog.text for other in others)
    report = ckptool.load_into(nn.Linear(3, 2), "a.pth")
    assert (report.key, report.also_under) == (first, tuple(others))
    done = migrate("a.pth", "out.safetensors")
    assert done.weights_key == first
    compared = ckptool.diff("a.pth", "out.safetensors")
    assert (compared.same, compared.a.key, compared.a.also_under) == (True, first, tuple(others))
    for other in others:
        assert migrate("a.pth", "out.safetensors", key=other, force=True).weights_key == other
    assert "several state dicts" not in run("inspect", "a.pth")


@pytest.mark.parametrize("kind", ["another order", "a part", "another name", "equal values", "more beside"])
def test_what_is_not_quite_the_same_is_two(kind: str, folder: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.zeros(3)}
    other: dict[str, Any] = {
        "another order": dict(reversed(state.items())),
        "a part": {"a": state["a"]},
        "another name": {"a": state["a"], "c": state["b"]},
        "equal values": {name: tensor.clone() for name, tensor in state.items()},
        "more beside": {**state, "extra": 3},
    }[kind]
    torch.save({"left": state, "right": other}, "a.pth")

    with pytest.raises(ckptool.AmbiguousWeights):
        ckptool.load("a.pth")
    with pytest.raises(ckptool.AmbiguousWeights):
        migrate("a.pth", "out.safetensors")
    with pytest.raises(ckptool.AmbiguousWeights):
        ckptool.diff("a.pth", "state.pth")


def test_an_average_of_a_number_is_one(folder: Path) -> None:
    torch.save({"model.a.scale": torch.tensor(1.0), "model_ema.ascale": torch.tensor(2.0)}, "a.pth")

    assert {name: float(one) for name, one in ckptool.load("a.pth", weights="ema").items()} == {"model.a.scale": 2.0}


def test_the_best_known_key_still_counts(folder: Path) -> None:
    state = {"a": torch.ones(2)}
    torch.save({"best": state, "model": state, "other": {"a": torch.ones(2)}}, "a.pth")

    assert migrate("a.pth", "out.safetensors").weights_key == "model"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_of_a_directory_is_dropped_by_its_name(folder: Path) -> None:
    dcp.save({"model": {"a": torch.ones(2), "b": torch.ones(3)}}, checkpoint_id="dir", no_dist=True)
    refused("dir", "out", form="dcp", drop="model.c", match=r"nothing called 'model\.c'")
    migrate("dir", "out", form="dcp", drop="model.a")
    assert names("out") == ["model.b"]


def test_several_in_one_option_are_told_apart(folder: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "epoch": 5, "note": ""}, "a.pth")
    said = run("migrate", "a.pth", "out.pth", "--drop", "epoch,note", code=1)
    assert "Hint: Name each by itself. At its top there are: " in said
    assert "once for each" in run("check", "a.pth", "--fail-on", "system,code", code=2)


def test_a_key_of_a_value_is_said_to_be_one(folder: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "epoch": 5, "scheduler": {"last_epoch": 5}}, "a.pth")
    for key in ("epoch", "scheduler"):
        said = run("migrate", "a.pth", "out.pth", "--key", key, code=1)
        assert (
            f"no state dict under '{key}': what is there is a value, and ckptool.open_checkpoint(path)['{key}']" in said
        )
    assert "is a value" not in run("migrate", "a.pth", "out.pth", "--key", "nothing", code=1)
