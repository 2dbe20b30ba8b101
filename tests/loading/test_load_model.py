"""``load_model``: the one call that runs what a file names, and only when it is told to."""

from __future__ import annotations

import gzip
import pickle
import sys
import tarfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.reference.nets import LeNet, TiedReader
from ckptool.reference.trainer import process_group, wrap
from tests.each import each
from tests.fixture_set.forging import forged, pretend, tagged
from tests.loading.same import assert_same, saved
from tests.scale import in_turn

CPU = torch.device("cpu")
IMAGES = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
ran: list[str] = []

pytestmark = pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")


def canary() -> nn.Module:
    ran.append("canary")
    return nn.Linear(2, 2)


class Trap(nn.Module):
    """Runs code when it is unpickled, as every class may."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def __reduce__(self) -> Any:
        return canary, ()


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


@pytest.mark.parametrize("trust", [False, None, 1, "yes"])
def test_without_trust_nothing_runs(trust: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    saved(Trap(), path)

    with pytest.raises(ckptool.UnsafePickle) as caught:
        ckptool.load_model(path, trust=trust)

    assert ran == []
    assert caught.value.path == str(path)
    assert "trust=True" in str(caught.value.hint)
    with pytest.raises(TypeError):
        ckptool.load_model(path)  # type: ignore[call-arg]
    with pytest.raises(ckptool.CkptoolError):
        ckptool.load(path)
    with pytest.raises(ckptool.CkptoolError):
        ckptool.load_into(nn.Linear(2, 2), path)
    assert ran == []


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_with_trust_a_model_is_unpickled(legacy: bool, tmp_path: Path) -> None:
    source = TiedReader().eval()
    saved(source, tmp_path / "x.pth", legacy=legacy)

    model = ckptool.load_model(tmp_path / "x.pth", trust=True)

    assert type(model) is TiedReader
    assert_same(model.state_dict(), source.state_dict())
    assert torch.equal(model(IMAGES), source(IMAGES))
    on_meta = ckptool.load_model(tmp_path / "x.pth", trust=True, map_location="meta")
    assert all(parameter.is_meta for parameter in on_meta.parameters())


@each(("legacy", "tag", "unwrap"), [(False, "cuda:0", True), (True, "cpu", False), (True, "cuda:0", True)])
def test_a_data_parallel_model_is_unwrapped(legacy: bool, tag: str, unwrap: bool, tmp_path: Path) -> None:
    source = LeNet().eval()
    wrapped = nn.DataParallel(source)
    with forged(tagged(tag)):
        saved(wrapped, tmp_path / "x.pth", legacy=legacy)
    before = (tmp_path / "x.pth").read_bytes()

    model = ckptool.load_model(tmp_path / "x.pth", trust=True, unwrap=unwrap)

    assert type(model) is (LeNet if unwrap else nn.DataParallel)
    assert_same(model.state_dict(), (source if unwrap else wrapped).state_dict())
    assert torch.equal(model(IMAGES), source(IMAGES))
    assert (tmp_path / "x.pth").read_bytes() == before


def checkpointed(net: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(net)  # type: ignore[no-any-return]


def compiled(net: nn.Module) -> nn.Module:
    return wrap(net, "compile", CPU)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": compiled,
    "checkpointed": checkpointed,
    "both": lambda net: compiled(checkpointed(net)),
    "compiled, data parallel": lambda net: nn.DataParallel(compiled(net)),
    "data parallel, compiled": lambda net: compiled(nn.DataParallel(net)),
    "inside": lambda net: nn.DataParallel(nn.Sequential(checkpointed(net))),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_model_comes_out_of_all_that_training_wraps_it_in(kind: str, tmp_path: Path) -> None:
    source = LeNet().eval()
    saved(WRAPPED[kind](source), tmp_path / "x.pth")

    model = ckptool.load_model(tmp_path / "x.pth", trust=True)

    inner = model[0] if kind == "inside" else model
    assert type(model) is (nn.Sequential if kind == "inside" else LeNet)
    assert type(inner) is LeNet
    assert_same(inner.state_dict(), source.state_dict())
    assert torch.equal(model(IMAGES), source(IMAGES))
    assert type(ckptool.load_model(tmp_path / "x.pth", trust=True, unwrap=False)) is not LeNet


def test_a_model_comes_out_of_fsdp_without_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp

    class FullyShardedDataParallel(nn.Module):
        """As it lies in a pickle, without the group that only many processes have."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self._fsdp_wrapped_module = net

    source, name = LeNet().eval(), "FullyShardedDataParallel"
    FullyShardedDataParallel.__module__, FullyShardedDataParallel.__qualname__ = fsdp.__name__, name
    with monkeypatch.context() as patched:
        patched.setattr(fsdp, name, FullyShardedDataParallel)
        saved(FullyShardedDataParallel(source), tmp_path / "x.pth")

    model = ckptool.load_model(tmp_path / "x.pth", trust=True)

    assert type(model) is LeNet
    assert torch.equal(model(IMAGES), source(IMAGES))


WHERE = {"cpu": "cpu", "none": None, "empty": {}, "map": {"cuda:0": "cpu"}, "function": lambda storage, tag: None}
"""What `map_location` may be."""


@pytest.mark.parametrize(("where", "device"), in_turn(WHERE.values(), ["cpu", "cuda:0"]))
def test_a_distributed_model_needs_neither_a_group_nor_a_device(device: str, where: Any, tmp_path: Path) -> None:
    source = LeNet().eval()
    with process_group(CPU):
        wrapped = wrap(source, "ddp", CPU)
        if device != "cpu":
            pretend(wrapped, torch.device(device))
        with forged(tagged(device)):
            saved(wrapped, tmp_path / "x.pth")

    model = ckptool.load_model(tmp_path / "x.pth", trust=True, map_location=where)

    assert type(model) is LeNet
    assert torch.equal(model(IMAGES), source(IMAGES))
    with pytest.raises(ckptool.UnsupportedFeature):  # the group is missed where the wrapper is wanted
        ckptool.load_model(tmp_path / "x.pth", trust=True, unwrap=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["cpu", None])
def test_a_script_is_loaded_as_one(where: Any, tmp_path: Path) -> None:
    source = LeNet().eval()
    torch.jit.save(torch.jit.script(source), tmp_path / "x.pt")

    model = ckptool.load_model(tmp_path / "x.pt", trust=True, map_location=where)

    assert isinstance(model, torch.jit.ScriptModule)
    assert torch.equal(model(IMAGES), source(IMAGES))


def test_weights_are_no_model(tmp_path: Path) -> None:
    saved(LeNet().state_dict(), tmp_path / "x.pth")
    saved({"model": LeNet(), "epoch": 1}, tmp_path / "y.pth")

    for name in ("x.pth", "y.pth"):
        with pytest.raises(ckptool.UnsupportedFeature) as caught:
            ckptool.load_model(tmp_path / name, trust=True)
        assert "load_into" in str(caught.value.hint)


@pytest.mark.parametrize("how", ["no module", "no class", "other state", "own error"])
def test_a_class_that_is_not_here_is_named(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("gone")
    monkeypatch.setitem(sys.modules, "gone", module)
    module.Gone = type("Gone", (nn.Sequential,), {"__module__": "gone"})
    saved(module.Gone(nn.Linear(1, 1)), tmp_path / "x.pth")
    if how == "no module":
        monkeypatch.delitem(sys.modules, "gone")
    elif how == "no class":
        del module.Gone
    else:
        error = KeyError("fc") if how == "other state" else ZeroDivisionError("mine")

        def fail(self: Any, state: Any) -> None:
            raise error

        module.Gone.__setstate__ = fail

    with pytest.raises(ckptool.UnsupportedFeature) as caught:
        ckptool.load_model(tmp_path / "x.pth", trust=True)

    assert caught.value.path == str(tmp_path / "x.pth")
    assert caught.value.kind == "class-missing"


def test_a_member_of_an_archive_is_loaded_too(tmp_path: Path) -> None:
    source = LeNet().eval()
    data = saved(nn.DataParallel(source), tmp_path / "x.pth")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "x.pth", "deep/x.pth")
    (tmp_path / "x.pth.gz").write_bytes(gzip.compress(data))

    for unwrap in (True, False):
        model = ckptool.load_model(f"{tmp_path}/x.tar::deep/x.pth", trust=True, unwrap=unwrap)
        assert type(model) is (LeNet if unwrap else nn.DataParallel)
        assert torch.equal(model(IMAGES), source(IMAGES))
    with pytest.raises(ckptool.CkptoolError):
        ckptool.load_model(tmp_path / "x.pth.gz", trust=True, unwrap=False)


def test_bad_files_are_named_before_anything_runs(tmp_path: Path) -> None:
    data = saved(Trap(), tmp_path / "x.pth")
    cut = tmp_path / "cut.pth"
    cut.write_bytes(data[:-30])
    page = tmp_path / "page.pth"
    page.write_bytes(b"<html></html>")

    for path in (cut, page, tmp_path / "gone.pth"):
        with pytest.raises(ckptool.CkptoolError) as caught:
            ckptool.load_model(path, trust=True)
        assert caught.value.path == str(path)
        assert pickle.loads(pickle.dumps(caught.value)).path == str(path)
    assert ran == []
    with pytest.raises(TypeError, match=r"path takes str \| PathLike\[str\], not b'x\.pth'"):
        ckptool.load_model(b"x.pth", trust=True)  # type: ignore[arg-type]
