"""Where tensors go is decided by ``map_location`` alone: tags in files are never obeyed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from tests.each import each
from tests.fixture_set.forging import forged, mixed, tagged
from tests.loading.same import assert_same, saved, sharing, torch_load
from tests.scale import in_turn

TAGS = ["cuda:0", "cuda:3", "npu:0", "xla:0", "mps", "hpu", "meta", "warp:7", "privateuseone:0", "", "gpu", "xpu:1"]
NO_DEVICES = ["gpu", "cuda:x", "", "cpu:", "warp:7", "cuda:-1", "cuda 0", "\0", "npu:0"]
NOT_HERE = ["cuda", "cuda:0", "cuda:7", "mps", "xpu", "hpu", "xla", "vulkan", "privateuseone:0", "mtia", "ipu"]

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def content() -> dict[str, torch.Tensor]:
    whole = torch.arange(12.0).reshape(3, 4)
    return {"whole": whole, "row": whole[1], "alone": torch.arange(5), "scalar": torch.tensor(2.5)}


def forged_file(path: Path, tag: str = "cuda:0", *, legacy: bool = False) -> dict[str, torch.Tensor]:
    tensors = content()
    with forged(tagged(tag)):
        saved(tensors, path, legacy=legacy)
    return tensors


@pytest.mark.parametrize(("legacy", "tag"), in_turn([False, True], TAGS[::2]))
def test_saved_tags_never_matter(tag: str, legacy: bool, tmp_path: Path) -> None:
    tensors = forged_file(tmp_path / "x.pth", tag, legacy=legacy)

    whole = (None, "cpu", "cpu:0", "CPU", "Cpu:0", torch.device("cpu"))
    for where in (*whole, {}, {"other": "cpu"}, {"cpu": "CPU"}, lambda storage, tag: None):
        assert_same(ckptool.load(tmp_path / "x.pth", where), tensors)
    assert_same(ckptool.load(tmp_path / "x.pth"), tensors)


@each(("mmap", "legacy"), [(True, False), (False, True)])
def test_meta_gives_shapes_without_memory(legacy: bool, mmap: bool, tmp_path: Path) -> None:
    tensors = forged_file(tmp_path / "x.pth", legacy=legacy)

    found = ckptool.load(tmp_path / "x.pth", "meta", mmap=mmap, dtype=torch.float16)

    assert all(tensor.is_meta for tensor in found.values())
    for name, tensor in tensors.items():
        wanted = torch.float16 if tensor.is_floating_point() else tensor.dtype
        assert (found[name].shape, found[name].stride(), found[name].dtype) == (tensor.shape, tensor.stride(), wanted)


def test_a_mapping_sends_each_tag_where_it_says(tmp_path: Path) -> None:
    a, b, c = torch.ones(2), torch.ones(3), torch.ones(4)
    with forged(mixed([(a, "cuda:0"), (b, "cuda:1")], otherwise="npu:0")):
        saved({"a": a, "b": b, "c": c}, tmp_path / "x.pth")

    found = ckptool.load(tmp_path / "x.pth", {"cuda:0": "meta", "cuda:1": torch.device("cpu")})

    assert [tensor.device.type for tensor in found.values()] == ["meta", "cpu", "cpu"]
    assert found["b"].equal(b)
    assert found["c"].equal(c)


@each(("mmap", "legacy"), [(True, False), (False, True)])
def test_a_function_is_given_each_storage_once_and_its_tag(legacy: bool, mmap: bool, tmp_path: Path) -> None:
    tensors = forged_file(tmp_path / "x.pth", "cuda:3", legacy=legacy)
    ours: list[tuple[int, str]] = []
    theirs: list[tuple[int, str]] = []

    def note(calls: list[tuple[int, str]]) -> Any:
        def mover(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
            assert storage.device.type == "cpu"
            calls.append((storage.nbytes(), tag))
            return storage.clone()

        return mover

    found = ckptool.load(tmp_path / "x.pth", note(ours), mmap=mmap)
    torch_load(tmp_path / "x.pth", map_location=note(theirs))

    assert_same(found, tensors)
    assert sorted(ours) == sorted(theirs)
    assert len(sharing(found)) == 4


def test_a_function_may_move_storages_of_any_size_and_cast_happens_there(tmp_path: Path) -> None:
    none = torch.empty(0, 3)
    content = {"none": none, "same": none.t(), "rest": torch.ones(4)[4:], "some": torch.ones(2), "n": torch.arange(5)}
    saved(content, tmp_path / "x.pth")

    def to_meta(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        return torch.UntypedStorage(storage.nbytes(), device="meta")

    found = ckptool.load(tmp_path / "x.pth", to_meta)
    wanted = torch_load(tmp_path / "x.pth", map_location=to_meta)
    assert [(name, one.device) for name, one in found.items()] == [(name, one.device) for name, one in wanted.items()]
    cast = ckptool.load(tmp_path / "x.pth", to_meta, dtype=torch.bfloat16)
    assert all(tensor.is_meta for tensor in cast.values())
    assert (cast["some"].dtype, cast["n"].dtype) == (torch.bfloat16, torch.int64)


def test_a_typed_storage_will_do_and_what_else_a_function_does_is_its_callers(tmp_path: Path) -> None:
    tensors = forged_file(tmp_path / "x.pth")

    def typed(storage: torch.UntypedStorage, tag: str) -> Any:
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)

    def broken(storage: torch.UntypedStorage, tag: str) -> Any:
        raise LookupError(tag)

    assert_same(ckptool.load(tmp_path / "x.pth", typed), tensors)
    with pytest.raises(TypeError, match="map_location returned int"):
        ckptool.load(tmp_path / "x.pth", lambda storage, tag: 7)
    with pytest.raises(LookupError, match="cuda:0"):
        ckptool.load(tmp_path / "x.pth", broken)


@each("device", NO_DEVICES)
def test_what_is_no_device_is_named(device: str, tmp_path: Path) -> None:
    forged_file(tmp_path / "x.pth")

    for where in (device, {"cuda:0": device}, *([{device: "cpu"}] if device in ("gpu", "cuda:x") else [])):
        with pytest.raises(ckptool.DeviceUnavailable) as caught:
            ckptool.load(tmp_path / "x.pth", where)
        assert caught.value.hint
        assert repr(device) in str(caught.value) or f"'{device}'" in str(caught.value)


@without_cuda
@pytest.mark.filterwarnings("ignore")
@each("device", NOT_HERE)
def test_devices_that_are_not_here_are_refused_with_the_reason(device: str, tmp_path: Path) -> None:
    forged_file(tmp_path / "x.pth")
    calls: list[Any] = [device, {"cuda:0": device}]
    if device not in ("mps", "privateuseone:0"):
        calls.append(torch.device(device))

    for where in calls:
        with pytest.raises(ckptool.DeviceUnavailable) as caught:
            ckptool.load(tmp_path / "x.pth", where)
        assert caught.value.hint
        reason = str(caught.value).partition(" is not here: ")[2]
        assert reason
    assert not device.startswith("cuda") or "CPU-only build" in reason or "CUDA" in reason


def test_loading_to_the_cpu_starts_no_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise AssertionError("CUDA was started")

    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    was_started = torch.cuda.is_initialized()
    path = tmp_path / "x.pth"
    forged_file(path)
    model = torch.nn.Module()
    for name, tensor in content().items():
        model.register_buffer(name, torch.zeros_like(tensor))

    ckptool.load(path)
    ckptool.load(path, mmap=False, dtype=torch.float16)
    ckptool.load(path, {"cuda:0": "cpu"})
    ckptool.load_into(model, path)
    ckptool.LiveModel(model).reload(path)
    ckptool.predict_memory(path)

    assert torch.cuda.is_initialized() == was_started


@each(("mmap", "legacy", "dtype"), [(True, False, None), (False, True, torch.float16), (True, True, torch.float16)])
def test_the_default_device_of_the_caller_is_not_ours(
    legacy: bool, mmap: bool, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    wanted = forged_file(tmp_path / "x.pth", legacy=legacy)
    saved(wanted | {"sparse": torch.eye(3).to_sparse()}, tmp_path / "sparse.pth")
    data = (tmp_path / "x.pth").read_bytes()
    fresh, real = torch.nn.Linear(4, 3, device="meta"), torch.nn.Linear(4, 3)
    saved(torch.nn.Linear(4, 3).double().state_dict(), tmp_path / "linear.pth")

    with torch.device("meta"):  # as torch.set_default_device("cuda") in a script, where meta would be noticed at once
        found = [ckptool.load(source, mmap=mmap, dtype=dtype) for source in (tmp_path / "x.pth", data)]
        found.append(ckptool.load(tmp_path / "sparse.pth", mmap=mmap, dtype=dtype))
        ckptool.load_into(fresh, tmp_path / "linear.pth", mmap=mmap, dtype=dtype)
        ckptool.load_into(real, tmp_path / "linear.pth", mmap=mmap)
        live = ckptool.LiveModel(torch.nn.Linear(4, 3), tmp_path / "linear.pth", mmap=mmap, dtype=dtype)

    for state in found:
        assert all(not tensor.is_meta for tensor in state.values())
        assert state["whole"].equal(wanted["whole"] if dtype is None else wanted["whole"].to(dtype))
    assert not fresh.weight.is_meta
    assert fresh.weight.float().allclose(real.weight, atol=1e-3)
    assert not live.model.weight.is_meta


def test_a_device_that_no_tensor_of_a_model_would_get_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "x.pth")
    with pytest.raises(ValueError, match=r"the model has none.*model\.to\('meta'\)"):
        ckptool.load_into(model, tmp_path / "x.pth", map_location="meta")
