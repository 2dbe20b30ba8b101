"""The mean of checkpoints of one model: in float64, rounded once; what does not fit is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool import MigrationRefused
from tests.program import invoke
from tests.scale import in_turn

Tensors: TypeAlias = dict[str, torch.Tensor]


def weights(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    torch.manual_seed(seed)
    fixed = {
        "steps": torch.tensor([3, 4]),
        "mask": torch.tensor([True, False]),
        "bn.num_batches_tracked": torch.tensor(seed),
    }
    return {"a.weight": torch.randn(7, 5).to(dtype), "b": torch.randn(2000, 700).to(dtype), **fixed}


@pytest.mark.parametrize(
    ("dtype", "shares"), in_turn([torch.float32, torch.bfloat16, torch.float16], [None, (1, 2, 1)])
)
def test_a_mean_is_rounded_once(dtype: torch.dtype, shares: tuple[int, ...] | None, tmp_path: Path) -> None:
    every = [weights(seed, dtype if seed < 2 else torch.float32) for seed in range(3)]
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for path, tensors in zip(paths, every, strict=True):
        save_file(tensors, path)
    torch.save(every[1], tmp_path / "1.pth")
    paths[1] = tmp_path / "1.pth"

    report = ckptool.merge(paths[0], tmp_path / "mean.safetensors", average=paths[1:], shares=shares)
    found, parts = load_file(report.target), [share / sum(shares or (1, 1, 1)) for share in shares or (1, 1, 1)]
    for name, tensor in found.items():
        want = every[0][name]
        if want.dtype.is_floating_point:
            want = sum(
                (one[name].double() * part for one, part in zip(every, parts, strict=True)), torch.tensor(0.0).double()
            ).to(dtype)
        assert torch.equal(tensor, want), name
    assert found.keys() == every[0].keys()
    assert "'bn.num_batches_tracked'" not in str(report)
    assert "'num_batches_tracked' is that of" in str(report)


def test_equal_weights_have_themselves_as_mean_and_stay_tied(tmp_path: Path) -> None:
    tensor = torch.randn(5, 5)
    first, *others = (tmp_path / f"{name}.pth" for name in "123")
    for path in (first, *others):
        torch.save({"a": tensor, "b": tensor, "c": tensor.T}, path)
    report = ckptool.merge(first, tmp_path / "m.pth", average=others)
    found = torch.load(report.target)
    assert all(torch.equal(found[name], tensor) for name in "ab")
    assert torch.equal(found["c"], tensor.T)
    assert found["a"].data_ptr() == found["b"].data_ptr()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": torch.ones(1)}, "it has extra"),
        ({"a.weight": None}, "does not have a.weight"),
        ({"a.weight": torch.ones(5, 7)}, r"'a.weight' is \[5, 7\], and \[7, 5\] in the first"),
        ({"steps": torch.tensor([3, 5])}, "'steps' is int64"),
        ({"mask": torch.tensor([1, 0])}, "'mask' is int64"),
        ({"a.weight": torch.ones(7, 5).int()}, "'a.weight' is int32"),
    ],
)
def test_what_is_unlike_the_first_is_refused_by_name(
    change: dict[str, torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    other = {name: tensor for name, tensor in (weights(0) | change).items() if tensor is not None}
    save_file(weights(0), tmp_path / "a.safetensors")
    save_file(other, tmp_path / "b.safetensors")
    with pytest.raises(MigrationRefused, match=words):
        ckptool.merge(tmp_path / "a.safetensors", tmp_path / "m.safetensors", average=tmp_path / "b.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_a_file_counts_once(tmp_path: Path) -> None:
    for name in "ab":
        save_file(weights(0), tmp_path / f"{name}.safetensors")
    a, b, target = (str(tmp_path / f"{name}.safetensors") for name in "abm")
    best = str(tmp_path / ".." / tmp_path.name / "b.safetensors")
    for others in ([a], [b, b], [b, best]):
        with pytest.raises(ValueError, match="twice"):
            ckptool.merge(a, target, average=others)
    assert "twice" in invoke(["merge", "--average", a, b, best, "-o", target]).stderr


def test_a_mean_of_adapters_is_noted_to_be_one_of_halves(tmp_path: Path) -> None:
    for name in "ab":
        save_file({f"m.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}, tmp_path / f"{name}.safetensors")
    report = ckptool.merge(tmp_path / "a.safetensors", tmp_path / "m.safetensors", average=tmp_path / "b.safetensors")
    assert "halves of products" in str(report)


def test_what_is_left_out_is_left_out_of_all(tmp_path: Path) -> None:
    first, other, target = (tmp_path / f"{name}.safetensors" for name in "abm")
    save_file(weights(0) | {"ema.w": torch.ones(2)}, first)
    save_file(weights(1) | {"ema.w": torch.ones(3), "ema.count": torch.tensor(3)}, other)
    with pytest.raises(MigrationRefused) as caught:
        ckptool.merge(first, target, average=other)
    assert "`exclude=`" in str(caught.value.hint)
    ckptool.merge(first, target, average=other, exclude="ema.*")

    assert load_file(target).keys() == weights(0).keys()


def test_the_command(tmp_path: Path) -> None:
    for number in range(3):
        torch.save({"state_dict": {"w": torch.full((3,), float(number))}, "epoch": number}, tmp_path / f"{number}.pth")
    paths, target = [tmp_path / f"{number}.pth" for number in range(3)], tmp_path / "m.pth"

    done = invoke(["merge", "--average", *paths, "--shares", "1,2,1", "-o", target, "--dtype", "bf16"])
    assert done.exit_code == 0, done.output
    assert torch.load(target)["w"].tolist() == [1.0] * 3
    assert torch.load(target)["w"].dtype == torch.bfloat16
    wrong = ["1,2", "1,2,-1", "1,nan,1", "a"]
    assert {invoke(["merge", "--average", *paths, "--shares", one, "-o", target]).exit_code for one in wrong} == {2}
    assert invoke(["merge", "--average", paths[0], "-o", target]).exit_code == 2
    assert invoke(["merge", paths[0], "--lora", paths[1], "--shares", "1,1", "-o", target]).exit_code == 2
    assert invoke(["merge", "--average", *paths, "--scale", "2", "-o", target]).exit_code == 2
    assert invoke(["merge", "--average", *paths[:2], "--shares", "1e308,1e308", "-o", target]).exit_code == 2


@pytest.mark.parametrize("value", [1e6, torch.nan])
def test_what_would_not_be_finite_is_refused(value: float, tmp_path: Path) -> None:
    save_file({"w": torch.ones(3).half(), "mask": torch.full((2,), -torch.inf)}, tmp_path / "a.safetensors")
    save_file({"w": torch.full((3,), value), "mask": torch.full((2,), -torch.inf)}, tmp_path / "b.safetensors")
    with pytest.raises(MigrationRefused, match="3 values of 'w' would be infinite or NaN") as caught:
        ckptool.merge(tmp_path / "a.safetensors", tmp_path / "m.safetensors", average=tmp_path / "b.safetensors")
    assert not (tmp_path / "m.safetensors").exists()
    assert caught.value.path == str(tmp_path / ("b.safetensors" if value != value else "a.safetensors"))
    report = ckptool.merge(
        tmp_path / "a.safetensors", tmp_path / "m.safetensors", average=tmp_path / "b.safetensors", exclude="w"
    )
    assert "'mask' has 2 values that are NaN or infinite" in str(report)


@pytest.mark.parametrize("adds", ["mean", "adapter"])
def test_a_whole_training_checkpoint_gets_them_in_place(adds: str, tmp_path: Path) -> None:
    steps = []
    for number in range(2):
        net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.randn(5, 8)).sum().backward()
        optimizer.step()
        steps.append({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": number})
        torch.save(steps[-1], tmp_path / f"{number}.pth")
    save_file({"0.lora_A.weight": torch.ones(1, 8), "0.lora_B.weight": torch.ones(4, 1)}, tmp_path / "a.safetensors")

    paths = {"average": tmp_path / "1.pth"} if adds == "mean" else {"lora": tmp_path / "a.safetensors"}
    report = ckptool.merge(tmp_path / "0.pth", tmp_path / "out.pth", form="same", **paths)  # type: ignore[arg-type]
    found, (first, other) = torch.load(tmp_path / "out.pth"), steps
    assert report.verified
    assert not report.dropped
    assert found["epoch"] == 0
    assert str(found["optimizer"]) == str(first["optimizer"])
    one = first["model"]["0.weight"]
    assert torch.equal(
        found["model"]["0.weight"], (one + other["model"]["0.weight"]) / 2 if adds == "mean" else one + 1
    )
    with pytest.raises(MigrationRefused, match="keeps types"):
        ckptool.merge(tmp_path / "0.pth", tmp_path / "x.pth", form="same", dtype="float16", **paths)  # type: ignore[arg-type]


def test_a_share_of_nothing_puts_the_weights_of_another_in_place(tmp_path: Path) -> None:
    other = torch.tensor([0.0, -0.0, 1e-40, 3.0])
    torch.save({"model": {"w": torch.tensor([1.0, 2.0, 3.0, torch.inf])}, "epoch": 3}, tmp_path / "a.pth")
    save_file({"w": other}, tmp_path / "ema.safetensors")
    paths = [tmp_path / "a.pth", tmp_path / "ema.safetensors"]
    done = invoke(["merge", "--average", *paths, "--shares", "0,1", "--form", "same", "-o", tmp_path / "o.pth"])
    assert done.exit_code == 0, done.output
    found = torch.load(tmp_path / "o.pth")
    assert found["epoch"] == 3
    assert torch.equal(found["model"]["w"].view(torch.int32), other.view(torch.int32))


def test_a_moving_average_counts_files_in_their_order(tmp_path: Path) -> None:
    for number in range(3):
        save_file({"w": torch.full((3,), float(number))}, tmp_path / f"{number}.safetensors")
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    done = invoke(["merge", "--average", *paths, "--ema", "0.75", "-o", tmp_path / "o.safetensors"])
    assert done.exit_code == 0, done.output
    assert load_file(tmp_path / "o.safetensors")["w"].tolist() == [0.75 * 0.25 + 2 * 0.25] * 3
    for options in (["--ema", "1"], ["--ema", "0.5", "--shares", "1,1,1"]):
        assert invoke(["merge", "--average", *paths, *options, "-o", tmp_path / "x.safetensors"]).exit_code == 2


def test_what_a_hint_names_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.full((2,), 1e5), "b": torch.ones(2)}, "one.pth")
    torch.save({"a": torch.full((2,), 1e5)}, "two.pth")
    words = ["merge", "--average", "one.pth", "two.pth", "-o", "mean.safetensors", "--dtype", "float16"]

    assert "with --exclude" in invoke(words).stderr
    large = invoke([*words, "--exclude", "b"]).stderr
    assert "--keep-dtype" in large
    assert "--saturate" in large
    assert invoke([*words, "--exclude", "b", "--saturate"]).exit_code == 0
    assert load_file("mean.safetensors")["a"].tolist() == [65504, 65504]
    assert "--allow-unmatched" in invoke([*words, "--exclude", "b", "--exclude", "c", "--force"]).stderr
    assert invoke([*words, "--exclude", "b", "--keep-dtype", "a", "--force"]).exit_code == 0


def test_numbers_of_numpy_are_added_as_those_of_python(tmp_path: Path) -> None:
    for name, value in (("one", 0.0), ("two", 3.0)):
        torch.save({"w": torch.full((2,), value)}, tmp_path / name)
    shares = (np.uint8(200), np.uint8(100))  # their sum as uint8 is 44
    ckptool.merge(tmp_path / "one", tmp_path / "mean.pth", average=tmp_path / "two", shares=shares)  # type: ignore[arg-type]
    assert ckptool.load(tmp_path / "mean.pth")["w"].tolist() == [1, 1]
