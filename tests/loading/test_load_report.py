"""What a load says it did: to programs, and in two or three lines to people."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptool
from ckptool.reference.nets import LeNet, TiedReader
from tests.loading.same import saved


def text_of(report: object) -> str:
    return re.sub(r"in \d+\.\d\d s", "in 0.00 s", str(report))


def test_a_load_without_anything_to_tell_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    saved(LeNet().state_dict(), path)

    report = ckptool.load_into(LeNet(), path)

    assert text_of(report) == f"{path}: 10 of 10 tensors, 100.0% of the parameters; 131,992 bytes in 0.00 s"
    assert repr(report) == f"<LoadReport '{path}' 10 of 10 tensors>"
    assert report.line == str(report)


def test_what_was_done_and_what_is_not_there_are_a_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.pth"
    state = {f"net.{name}": tensor.half() for name, tensor in LeNet().state_dict().items()}
    saved({"epoch": 1, "model": state}, path)

    with caplog.at_level(logging.INFO, "ckptool"):
        report = ckptool.load_into(LeNet(), path)

    assert text_of(report) == (
        f"{path}: 10 of 10 tensors, 100.0% of the parameters, from 'model'; 65,996 bytes in 0.00 s\n"
        "  names changed by --strip-prefix net; cast 10: conv1.weight float16 -> float32, "
        "conv1.bias float16 -> float32, conv2.weight float16 -> float32, conv2.bias float16 -> float32 and 6 more"
    )
    assert re.sub(r"\n  ", "; ", str(report)) == report.line == caplog.messages[-1]

    kept = {name: tensor for name, tensor in LeNet().state_dict().items() if not name.startswith("fc")}
    saved(kept | {"extra\x1b[2J": torch.ones(1)}, path)
    with torch.device("meta"):
        model = LeNet()
    report = ckptool.load_into(model, path, strict=False)

    assert text_of(report) == (
        f"{path}: 6 of 10 tensors, 7.8% of the parameters; 10,312 bytes in 0.00 s\n"
        "  missing 4: fc1.weight, fc1.bias, fc2.weight, fc2.bias; unexpected 1: extra\\x1b[2J; "
        "still on the meta device 4: fc1.weight, fc1.bias, fc2.weight, fc2.bias"
    )


def test_tied_weights_count_once(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.manual_seed(0)
    source = TiedReader()
    state = source.state_dict()
    distinct = {id(tensor): tensor.nbytes for tensor in source.parameters()}
    distinct |= {id(tensor): tensor.nbytes for name, tensor in source.named_buffers() if name in state}
    saved(state, path)

    report = ckptool.load_into(TiedReader(), path)
    assert report.nbytes == sum(distinct.values()) < sum(tensor.nbytes for tensor in state.values())
    assert (report.loaded, report.expected, report.share) == (len(state), len(state), 1.0)

    saved({name: tensor for name, tensor in state.items() if name != "head.weight"}, path)
    again = ckptool.load_into(TiedReader(), path)
    assert (again.nbytes, again.share) == (report.nbytes, 1.0)
    assert "tied 1: head.weight = embedding.weight" in str(again)

    saved({name: tensor for name, tensor in state.items() if name not in ("head.weight", "embedding.weight")}, path)
    less = ckptool.load_into(TiedReader(), path, strict=False)
    whole = sum({id(one): one.numel() for one in state_of(source).values()}.values())
    assert less.share == pytest.approx(1 - source.embedding.weight.numel() / whole)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict(keep_vars=True)


def test_a_reload_a_change_and_a_cost_read_well(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    saved(LeNet().state_dict(), path)
    done = ckptool.LiveModel(LeNet()).reload(path)

    assert str(done) == f"{done.report}\n  {done.digest}"
    assert repr(done) == f"<Reload '{path}' {done.digest}>"
    cost = ckptool.predict_memory(path, mmap=False)
    assert str(cost) == "host 131,992 bytes, device 0, mapped 0, and 0 while loading"


def test_a_report_says_what_took_part_in_loading(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.LazyLinear(3))
    saved(torch.ones(1, 2))
    torch.save(saved.state_dict(), tmp_path / "made.pth")
    empty, ran = nn.Sequential(nn.LazyLinear(3)), []
    empty.register_load_state_dict_post_hook(lambda module, keys: ran.append(keys))
    report = ckptool.load_into(empty, tmp_path / "made.pth")
    assert (len(ran), report.hooks) == (1, ("Sequential",))
    assert report.own_loading == "a hook of Sequential"
    assert "filled by load_state_dict(), for a hook of Sequential; hooks ran 1: Sequential" in str(report)
    plain = ckptool.load_into(nn.Sequential(nn.Linear(2, 3)), tmp_path / "made.pth")
    assert (plain.hooks, plain.own_loading, plain.left_out) == ((), None, ())
