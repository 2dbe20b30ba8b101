"""``load_into`` fills a model as ``load_state_dict`` does, in its own memory, or leaves it as it was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.reference.nets import MLP, CifarNet, LeNet, TiedReader
from ckptool.reference.trainer import wrap
from ckptool.sources.files import FileSource
from tests import where
from tests.loading.same import assert_same, saved
from tests.scale import in_turn, some

pytestmark = pytest.mark.usefixtures("built_there")
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (LeNet, (2, 1, 28, 28)),
    "mlp": (lambda: MLP(64, 3, inputs=64, outputs=10), (2, 64)),
    "tied": (TiedReader, (2, 1, 28, 28)),
    "cifar": (CifarNet, (2, 3, 32, 32)),
}


def fill(model: nn.Module, source: Any, **options: Any) -> ckptool.LoadReport:
    """Load into a model, whose tensors of the meta device go to the device of the tests."""
    return ckptool.load_into(model, source, **({"map_location": where.device} | options))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def materialise(model: nn.Module, like: nn.Module) -> None:
    """Compute the buffers that no file holds."""
    buffers = dict(like.named_buffers())
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, buffers[name].clone())


def state_bytes(model: nn.Module) -> dict[str, tuple[int, bytes]]:
    """Return where each tensor of a model is, and what is in it."""
    found = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        data = b"" if tensor.is_meta else bytes(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy())
        found[name] = (id(tensor), data)
    return found


KINDS = ("zip", "legacy", "safetensors", "model", "script")


@where.on_any
@pytest.mark.parametrize(
    ("net", "kind"),
    # A script of the tied net keeps the buffer that its state dict has not.
    some([(net, kind) for net in NETS for kind in KINDS if (net, kind) != ("tied", "script")], 3),
)
@pytest.mark.filterwarnings("ignore")
def test_real_nets_answer_as_the_ones_that_were_saved(net: str, kind: str, tmp_path: Path) -> None:
    build, shape = NETS[net]
    torch.manual_seed(1)
    trained = build().eval()
    path = tmp_path / "x"
    if kind == "script":
        torch.jit.save(torch.jit.trace(trained, torch.rand(shape)), path)
    else:
        saved(trained if kind == "model" else trained.state_dict(), path, legacy=kind == "legacy")
    if kind == "safetensors":
        ckptool.migrate(path, tmp_path / "x.safetensors")
        path = tmp_path / "x.safetensors"
    images = torch.rand(shape)

    for meta in (False, True):
        model = on_meta(build) if meta else build()
        pointers = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        report = fill(model, path)
        if meta:
            materialise(model, trained)
        assert (report.share, report.loaded) == (1.0, report.expected)
        assert torch.equal(model.eval()(images), trained(images))
        assert_same(model.state_dict(), trained.state_dict())
        assert model.state_dict()._metadata == trained.state_dict()._metadata
        if not meta:
            assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == pointers
        checked = build()
        assert str(checked.load_state_dict(ckptool.load(path), strict=True)) == "<All keys matched successfully>"
        assert torch.equal(checked.eval()(images), trained(images))


@where.on_any
def test_parameters_stay_what_they_are_and_are_known_to_be_changed(tmp_path: Path) -> None:
    saved(LeNet().state_dict(), tmp_path / "x.pth")
    model = LeNet()
    model.fc1.weight.requires_grad_(False)
    model.fc2.weight.grad = torch.ones_like(model.fc2.weight)
    before = {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters()}

    fill(model, tmp_path / "x.pth")

    assert {name: id(tensor) for name, tensor in model.named_parameters()} == {n: i for n, (i, _) in before.items()}
    assert all(tensor._version > before[name][1] for name, tensor in model.named_parameters())
    assert not model.fc1.weight.requires_grad
    assert model.fc2.weight.requires_grad
    assert model.fc2.weight.grad is not None


@where.on_any
def test_meta_tensors_get_the_type_asked_for_and_keep_requires_grad(tmp_path: Path) -> None:
    source = LeNet()
    saved(source.state_dict(), tmp_path / "x.pth")
    model = on_meta(LeNet)
    model.fc1.weight.requires_grad_(False)

    fill(model, tmp_path / "x.pth", dtype=torch.bfloat16)

    assert not model.fc1.weight.requires_grad
    assert model.fc2.weight.requires_grad
    assert type(model.fc2.weight) is nn.Parameter
    assert_same(model.state_dict(), {name: tensor.bfloat16() for name, tensor in source.state_dict().items()})


@where.on_any
def test_integers_can_go_where_a_meta_parameter_was(tmp_path: Path) -> None:
    saved({"weight": torch.arange(6).reshape(2, 3), "bias": torch.ones(2)}, tmp_path / "x.pth")
    model = on_meta(lambda: nn.Linear(3, 2))

    fill(model, tmp_path / "x.pth", break_quantized=True)

    assert model.weight.tolist() == [[0, 1, 2], [3, 4, 5]]


@where.on_any
@pytest.mark.parametrize(("dtype", "mmap"), in_turn([torch.float16, torch.bfloat16, torch.float64], ["auto", False]))
def test_other_types_are_cast_on_the_way(dtype: torch.dtype, mmap: Any, tmp_path: Path) -> None:
    source = LeNet().state_dict()
    saved(source, tmp_path / "x.pth")
    model = LeNet().to(dtype)

    report = fill(model, tmp_path / "x.pth", mmap=mmap)

    assert_same(model.state_dict(), {name: tensor.to(dtype) for name, tensor in source.items()})
    assert report.cast[0] == ("conv1.weight", "float32", str(dtype)[6:])
    assert len(report.cast) == len(source)


@where.on_any
def test_memory_that_is_laid_out_otherwise_keeps_its_layout(tmp_path: Path) -> None:
    source = CifarNet()
    saved(source.state_dict(), tmp_path / "x.pth")
    last: Any = CifarNet().to(memory_format=torch.channels_last)
    turned = nn.Linear(3, 4)
    turned.weight = nn.Parameter(torch.zeros(3, 4).t())
    saved({"weight": torch.arange(12.0).reshape(4, 3), "bias": torch.ones(4)}, tmp_path / "y.pth")

    fill(last, tmp_path / "x.pth")
    fill(turned, tmp_path / "y.pth")

    assert last.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert not last.conv2.weight.is_contiguous()
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in last.state_dict().items())
    assert turned.weight.stride() == (1, 4)
    assert turned.weight.tolist() == torch.arange(12.0).reshape(4, 3).tolist()


def test_views_and_conjugates_in_the_file_are_resolved(tmp_path: Path) -> None:
    raw = torch.arange(24.0)
    content = {
        "slice": raw[4:10],
        "turned": raw.reshape(4, 6).t(),
        "expanded": torch.arange(3.0)[:, None].expand(3, 5),
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 4),
    }
    saved(content, tmp_path / "x.pth")
    for meta in (False, True):
        model = nn.Module()
        for name, tensor in content.items():
            model.register_buffer(name, torch.zeros_like(tensor.resolve_conj(), device="meta" if meta else "cpu"))

        fill(model, tmp_path / "x.pth")

        assert all(torch.equal(getattr(model, name), tensor) for name, tensor in content.items())


def test_parameters_that_are_views_of_one_storage_are_filled_in_place(tmp_path: Path) -> None:
    source = nn.LSTM(5, 7)
    flat = torch.zeros(sum(tensor.numel() for tensor in source.parameters()) + 3)
    model, start = copy.deepcopy(source), 3
    for tensor in model.parameters():
        tensor.data = flat[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    saved(source.state_dict(), tmp_path / "x.pth")

    fill(model, tmp_path / "x.pth")

    assert torch.equal(flat, torch.cat([torch.zeros(3), *(tensor.flatten() for tensor in source.parameters())]))
    assert torch.equal(model(torch.ones(2, 5))[0], source(torch.ones(2, 5))[0])


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "data-parallel": lambda model: nn.DataParallel(model),
    "compile": lambda model: wrap(model, "compile", torch.device("cpu")),
    "lightning": lambda model: nn.ModuleDict({"model": model}),
    "deeper": lambda model: nn.ModuleDict({"net": nn.ModuleDict({"backbone": model})}),
    "both": lambda model: nn.DataParallel(wrap(model, "compile", torch.device("cpu"))),
}


@where.on_any
@pytest.mark.parametrize(("direction", "how"), in_turn(["wrapped file", "wrapped model"], WRAPPED))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_and_prefixes_on_either_side_are_seen_through(how: str, direction: str, tmp_path: Path) -> None:
    source, model = LeNet(), LeNet()
    wrapped = WRAPPED[how]
    saved((wrapped(source) if direction == "wrapped file" else source).state_dict(), tmp_path / "x.pth")

    report = fill(model if direction == "wrapped file" else wrapped(model), tmp_path / "x.pth")

    assert_same(model.state_dict(), source.state_dict())
    assert report.changes or direction == "wrapped model"
    assert (report.share, report.missing, report.unexpected) == (1.0, (), ())


@where.on_any
def test_where_names_are_left_over_a_prefix_that_all_of_the_model_needs_comes_off_without_strict(
    tmp_path: Path,
) -> None:
    source, model = LeNet(), LeNet()
    content = {f"model.{name}": tensor for name, tensor in source.state_dict().items()}
    saved(content | {"loss.weight": torch.ones(3)}, tmp_path / "x.pth")

    with pytest.raises(ckptool.KeyMismatch) as caught:
        fill(model, tmp_path / "x.pth")
    assert (caught.value.missing, caught.value.unexpected) == ((), ("loss.weight",))
    assert caught.value.hint == "Load what fits with ckptool.load_into(model, path, strict=False)."
    report = fill(model, tmp_path / "x.pth", strict=False)

    assert_same(model.state_dict(), source.state_dict())
    assert list(map(str, report.changes)) == ["--strip-prefix model"]
    assert report.unexpected == ("loss.weight",)


def classifier(classes: int, *, has_hook: bool = False, extra: bool = False) -> nn.Module:
    """Return a network whose head depends on the number of classes, and may have a name of its own."""
    body = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4)}
    model = nn.ModuleDict(body | {"extra" if extra else "head": nn.Linear(4, classes)})
    if has_hook:
        model.register_load_state_dict_pre_hook(lambda *_: None)
    return model


@where.on_any
@pytest.mark.parametrize("has_hook", [False, True], ids=["plain", "hook"])
@pytest.mark.parametrize("prefix", ["module", "_orig_mod", "model", "net.backbone", "module.model"])
def test_without_strict_a_prefix_comes_off_for_a_model_with_another_head(
    prefix: str, has_hook: bool, tmp_path: Path
) -> None:
    source, model = classifier(5), classifier(7, extra=True, has_hook=has_hook)
    saved({f"{prefix}.{name}": tensor for name, tensor in source.state_dict().items()}, tmp_path / "x.pth")

    report = fill(model, tmp_path / "x.pth", strict=False)

    for part in ("conv", "norm"):
        assert_same(model.get_submodule(part).state_dict(), source.get_submodule(part).state_dict())
    assert (report.loaded, report.expected) == (7, 9)
    assert report.changes
    assert report.missing == ("extra.weight", "extra.bias")
    assert {name.split(".")[-2] for name in report.unexpected} == {"head"}


@where.on_any
@pytest.mark.parametrize("has_hook", [False, True], ids=["plain", "hook"])
@pytest.mark.parametrize("prefix", ["", "module.", "model."])
def test_without_strict_a_part_of_the_model_gets_a_file_of_that_part(
    prefix: str, has_hook: bool, tmp_path: Path
) -> None:
    source, body = classifier(5), classifier(5, extra=True)
    del body["extra"]  # type: ignore[operator]
    model = nn.ModuleDict({"backbone": body, "head": nn.Linear(4, 2)})
    if has_hook:
        model.register_load_state_dict_pre_hook(lambda *_: None)
    saved({f"{prefix}{name}": tensor for name, tensor in source.state_dict().items()}, tmp_path / "x.pth")

    report = fill(model, tmp_path / "x.pth", strict=False)

    assert_same(body["norm"].state_dict(), source["norm"].state_dict())  # type: ignore[index]
    assert (report.loaded, report.missing) == (7, ("head.weight", "head.bias"))
    assert str(report.changes[-1]) == "--add-prefix backbone"


@where.on_any
@pytest.mark.parametrize("has_hook", [False, True], ids=["plain", "hook"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model."])
def test_a_head_of_another_shape_is_left_out_as_the_hint_says(prefix: str, has_hook: bool, tmp_path: Path) -> None:
    source, model = classifier(5), classifier(7, has_hook=has_hook)
    saved({f"{prefix}{name}": tensor for name, tensor in source.state_dict().items()}, tmp_path / "x.pth")
    before = state_bytes(model)

    with pytest.raises(ckptool.ShapeMismatch, match=r"head\.weight") as caught:
        fill(model, tmp_path / "x.pth", strict=False)

    assert state_bytes(model) == before
    assert "ckptool.load_into(model, path, strict=False)" in str(caught.value.hint)
    assert caught.value.option == "exclude"
    names = [f"{prefix}head.weight", f"{prefix}head.bias"]
    assert has_hook or f"`exclude={names}`" in str(caught.value.hint)
    ckptool.migrate(tmp_path / "x.pth", tmp_path / "y.pth", form="state_dict", exclude=names)
    report = fill(model, tmp_path / "y.pth", strict=False)
    assert (report.loaded, report.missing, report.unexpected) == (7, ("head.weight", "head.bias"), ())
    assert_same(model["norm"].state_dict(), source["norm"].state_dict())  # type: ignore[index]


@where.on_any
@pytest.mark.parametrize("has_hook", [False, True], ids=["plain", "hook"])
@pytest.mark.parametrize("content", ["nothing", "other names", "counters alone", "few of either side"])
def test_without_strict_it_is_an_error_where_no_weight_would_be_new(
    content: str, has_hook: bool, tmp_path: Path
) -> None:
    state = classifier(5).state_dict()
    counter = {"norm.num_batches_tracked": torch.tensor(3)}
    files: dict[str, dict[str, Any]] = {
        "nothing": {},
        "other names": {f"other_{name}": tensor for name, tensor in state.items()},
        "counters alone": counter | {"other.weight": torch.ones(3)},
        "few of either side": {"a.conv.weight": state["conv.weight"]} | {f"{n}": torch.ones(2) for n in range(4)},
    }
    saved(files[content], tmp_path / "x.pth")
    model = classifier(7, has_hook=has_hook)
    before = state_bytes(model)

    with pytest.raises(ckptool.KeyMismatch, match="the weights do not fit the model") as caught:
        fill(model, tmp_path / "x.pth", strict=False)

    assert caught.value.hint
    assert "conv.weight" in caught.value.missing
    assert state_bytes(model) == before


@where.on_any
def test_what_torch_makes_up_is_not_loaded(tmp_path: Path) -> None:
    state = classifier(5).state_dict()
    del state["norm.num_batches_tracked"], state["head.bias"]
    saved(dict(state), tmp_path / "x.pth")  # of no version, for which torch adds the counter itself

    report = fill(classifier(5, has_hook=True), tmp_path / "x.pth", strict=False)

    assert (report.loaded, report.expected) == (7, 9)
    assert set(report.missing) == {"norm.num_batches_tracked", "head.bias"}


@where.on_any
@pytest.mark.parametrize("strict", [False, True])
def test_of_two_prefixes_that_would_do_none_is_taken_and_both_are_told(strict: bool, tmp_path: Path) -> None:
    names = LeNet().state_dict().items()
    saved({f"{head}.{name}": tensor for head in ("net", "other_net") for name, tensor in names}, tmp_path / "x.pth")

    with pytest.raises(ckptool.KeyMismatch) as caught:
        fill(LeNet(), tmp_path / "x.pth", strict=strict)

    assert "10 names meet after --strip-prefix net or --strip-prefix other_net" in str(caught.value.hint)


@where.on_any
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("averaged", ["model_ema", "ema_model.module", "ema_net"])
def test_where_averages_are_beside_under_a_prefix_the_hint_says_how_to_choose(
    averaged: str, strict: bool, tmp_path: Path
) -> None:
    raw, ema = LeNet().state_dict(), LeNet().state_dict()
    head = "net" if averaged == "ema_net" else "model"
    content = {f"{head}.{name}": one for name, one in raw.items()} | {f"{averaged}.{n}": one for n, one in ema.items()}
    saved({"state_dict": content}, tmp_path / "x.pth")
    model = LeNet()

    with pytest.raises(ckptool.KeyMismatch) as caught:
        fill(model, tmp_path / "x.pth", strict=strict)

    assert "`weights='raw'` or `weights='ema'`" in str(caught.value.hint)
    fill(model, tmp_path / "x.pth", strict=strict, weights="raw")
    assert_same(model.state_dict(), raw)
    fill(model, tmp_path / "x.pth", strict=strict, weights="ema")
    assert_same(model.state_dict(), ema)


class Answering(nn.Module):
    """A network with a head that is tied to it, as GPT-2 has one; files of it hold the inner network's names."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.transformer[0].weight  # type: ignore[assignment]


@where.on_any
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_a_prefix_may_be_all_that_a_model_with_tied_weights_needs(meta: bool, tmp_path: Path) -> None:
    source = Answering()
    saved(source.transformer.state_dict(), tmp_path / "x.pth")
    model = on_meta(Answering) if meta else Answering()

    report = fill(model, tmp_path / "x.pth")

    assert_same(model.state_dict(), source.state_dict())
    assert list(map(str, report.changes)) == ["--add-prefix transformer"]
    assert report.tied == (("head.weight", "transformer.0.weight"),)


class Hooked(Answering):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda *_: None)


@where.on_any
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
@pytest.mark.parametrize("left_out", [None, 0, 1])
@pytest.mark.parametrize(
    "names", [("embedding.weight", "head.weight"), ("transformer.0.weight", "head.weight")], ids=str
)
def test_tied_weights_need_to_be_in_the_file_once(
    names: tuple[str, str], left_out: int | None, meta: bool, tmp_path: Path
) -> None:
    build: Any = TiedReader if names[0] == "embedding.weight" else Hooked
    source, lacking = build(), None if left_out is None else names[left_out]
    saved({name: tensor for name, tensor in source.state_dict().items() if name != lacking}, tmp_path / "x.pth")
    model = on_meta(build) if meta else build()

    report = fill(model, tmp_path / "x.pth")

    assert report.tied == (() if left_out is None else ((names[left_out], names[1 - left_out]),))
    assert model.get_parameter(names[0]) is model.head.weight
    assert_same(model.state_dict(), source.state_dict())
    assert (report.share, report.missing) == (1.0, ())


@where.on_any
def test_what_is_tied_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(TiedReader().state_dict(), tmp_path / "x.pth")
    model = TiedReader()
    read: list[int] = []
    real = FileSource.read_into
    monkeypatch.setattr(
        FileSource, "read_into", lambda self, offset, buffer: (read.append(len(buffer)), real(self, offset, buffer))[1]
    )

    fill(model, tmp_path / "x.pth")

    saved_buffers = [buffer for name, buffer in model.named_buffers() if name != "positions"]
    assert sum(read) == sum(tensor.nbytes for tensor in (*model.parameters(), *saved_buffers))


@where.on_any
@pytest.mark.parametrize("side", ["missing", "unexpected"])
def test_buffers_that_models_compute_themselves_may_differ(
    side: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    content = source.state_dict()
    if side == "missing":
        del content["1.num_batches_tracked"]
    else:
        content["0.position_ids"] = torch.arange(4)
    saved(content, tmp_path / "x.pth")
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    report = fill(model, tmp_path / "x.pth")

    name = ("1.num_batches_tracked",) if side == "missing" else ("0.position_ids",)
    assert getattr(report, side) == name
    assert not caplog.text
    assert torch.equal(model[0].weight, source[0].weight)


@where.on_any
def test_without_strict_what_fits_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = LeNet()
    content = {name: tensor for name, tensor in source.state_dict().items() if not name.startswith("out")}
    saved(content | {"head.weight": torch.ones(5)}, tmp_path / "x.pth")
    model = LeNet()
    before = model.out.weight.clone()

    with pytest.raises(ckptool.KeyMismatch):
        fill(model, tmp_path / "x.pth")
    with caplog.at_level("WARNING", "ckptool"):
        report = fill(model, tmp_path / "x.pth", strict=False)

    assert "missing 2: out.weight, out.bias" in caplog.text
    assert report.missing == ("out.weight", "out.bias")
    assert report.unexpected == ("head.weight",)
    assert (report.loaded, report.expected) == (8, 10)
    assert 0 < report.share < 1
    assert torch.equal(model.fc1.weight, source.fc1.weight)
    assert torch.equal(model.out.weight, before)


@where.on_any
def test_what_stays_on_meta_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(TiedReader().state_dict(), tmp_path / "x.pth")

    with caplog.at_level("WARNING", "ckptool"):
        report = fill(on_meta(TiedReader), tmp_path / "x.pth")

    assert report.still_meta == ("positions",)
    assert "positions" in caplog.text


@where.on_any
def test_of_several_candidates_the_one_that_fits_is_taken(tmp_path: Path) -> None:
    nets: dict[str, Callable[[], nn.Module]] = {"netG": LeNet, "netD": CifarNet, "with hooks": normed}
    sources = {key: build().state_dict() for key, build in nets.items()}
    saved(sources, tmp_path / "x.pth")
    for key, build in nets.items():
        model = build()
        assert fill(model, tmp_path / "x.pth").key == key
        assert_same(model.state_dict(), sources[key])
    with pytest.raises(ckptool.KeyMismatch, match="no state dict fits the model: several") as caught:
        fill(TiedReader(), tmp_path / "x.pth")
    all_of_them = "; or all of them, with names from the top: `key='(all)'`"
    assert caught.value.hint == f"Pick one with `key=`: 'netG', 'netD', 'with hooks'{all_of_them}"
    with pytest.raises(ckptool.KeyMismatch):
        fill(LeNet(), tmp_path / "x.pth", key="netD")


@where.on_any
def test_inference_tensors_are_filled_too(tmp_path: Path) -> None:
    source = LeNet().half()
    saved(source.float().state_dict(), tmp_path / "x.pth")
    saved(source.half().state_dict(), tmp_path / "half.pth")
    with torch.inference_mode():
        model = LeNet()

    for path in (tmp_path / "x.pth", tmp_path / "half.pth"):
        fill(model, path)
        with torch.inference_mode():
            fill(model, path)
        assert all(torch.equal(tensor.half(), source.state_dict()[name]) for name, tensor in model.state_dict().items())


@where.on_any
def test_a_tensor_subclass_is_filled_by_its_own_copy(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    saved({"weight": torch.arange(6.0).reshape(2, 3)}, tmp_path / "x.pth")
    model = nn.Module()
    model.weight = nn.Parameter(TwoTensor(torch.zeros(2, 3), torch.zeros(2, 3)))

    fill(model, tmp_path / "x.pth")

    assert torch.equal(model.weight.a, torch.arange(6.0).reshape(2, 3))
    assert torch.equal(model.weight.b, torch.arange(6.0).reshape(2, 3))


@where.on_any
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_progress_ends_at_the_whole(meta: bool, tmp_path: Path) -> None:
    saved(CifarNet().state_dict(), tmp_path / "x.pth")
    for model in (on_meta(CifarNet) if meta else CifarNet(), on_meta(CifarNet) if meta else CifarNet().half()):
        told: list[tuple[int, int]] = []
        fill(model, tmp_path / "x.pth", mmap=False, progress=lambda *n, told=told: told.append(n))
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1] > 0


# Models that load through code of their own


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 2))


OWN = {
    "plain": lambda net: net,
    "data parallel": nn.DataParallel,
    "compiled": lambda net: wrap(net, "compile", torch.device("cpu")),
}


@where.on_any
@pytest.mark.parametrize(("meta", "model_is", "file_is"), in_turn([False, True], OWN, [*OWN, "lightning"]))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_and_prefixes_are_seen_through_for_models_with_hooks(
    file_is: str, model_is: str, meta: bool, tmp_path: Path
) -> None:
    source, model = normed(), on_meta(normed) if meta else normed()
    if file_is == "lightning":
        saved({"state_dict": {f"model.{name}": one for name, one in source.state_dict().items()}}, tmp_path / "x.pth")
    else:
        saved(OWN[file_is](source).state_dict(), tmp_path / "x.pth")

    report = fill(OWN[model_is](model), tmp_path / "x.pth")

    assert_same(model.state_dict(), source.state_dict())
    assert bool(report.changes) == (file_is != model_is)
    assert (report.loaded, report.missing, report.unexpected) == (5, (), ())


@where.on_any
def test_a_model_with_hooks_keeps_its_memory_and_its_types(tmp_path: Path) -> None:
    source, model = normed(), normed().half()
    saved(source.state_dict(), tmp_path / "x.pth")
    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in model.named_parameters()}

    fill(model, tmp_path / "x.pth")

    assert {name: (id(tensor), tensor.data_ptr()) for name, tensor in model.named_parameters()} == before
    assert_same(model.state_dict(), source.half().state_dict())


@where.on_any
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_inference_tensors_of_models_with_hooks_are_filled_too(meta: bool, inside: bool, tmp_path: Path) -> None:
    source = Hooked()
    saved(source.state_dict(), tmp_path / "x.pth")
    with torch.inference_mode():
        model = on_meta(Hooked) if meta else Hooked()

    with torch.inference_mode(inside):
        fill(model, tmp_path / "x.pth")
        live = ckptool.LiveModel(model, tmp_path / "x.pth", commit="swap")

    assert_same(model.state_dict(), source.state_dict())
    assert_same(live.model.state_dict(), source.state_dict())


# What fails changes nothing.


@cache
def failing() -> dict[str, tuple[Any, dict[str, Any], type[ckptool.CkptoolError]]]:
    """Return a source that cannot be loaded, the options, and the error, by what is wrong."""
    state = LeNet().state_dict()
    data = saved(state)
    flipped = bytearray(data)
    flipped[data.index(bytes(state["fc1.weight"].cpu().numpy().tobytes()[:64])) + 5] ^= 4
    renamed = {name.replace("fc1", "fc_one"): tensor for name, tensor in state.items()}
    optimizer = torch.optim.Adam(LeNet().parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        integers = torch.quantize_per_tensor(state["out.weight"].cpu(), 0.1, 0, torch.qint8)
    return {
        "truncated": (data[: len(data) // 2], {}, ckptool.TruncatedFile),
        "damaged": (bytes(flipped), {"verify": True}, ckptool.DamagedFile),
        "damaged index": (data.replace(b"fc1.weight", b"fc1.weighs", 1), {"verify": True}, ckptool.DamagedFile),
        "no checkpoint": (b"<!DOCTYPE html><html></html>", {}, ckptool.NotACheckpoint),
        "names": (saved(renamed), {}, ckptool.KeyMismatch),
        "nothing": (saved({"a": torch.ones(1)}), {"strict": False}, ckptool.KeyMismatch),
        "shapes": (saved(state | {"out.bias": torch.ones(11)}), {}, ckptool.ShapeMismatch),
        "shapes, not strict": (saved(state | {"out.bias": torch.ones(11)}), {"strict": False}, ckptool.ShapeMismatch),
        "no key": (data, {"key": "model"}, ckptool.WeightsNotFound),
        "no optimizer state": (data, {"optimizer": "adam"}, ckptool.KeyMismatch),
        "wrong optimizer": (
            saved({"model": state, "optimizer": torch.optim.SGD(LeNet().parameters(), 1.0).state_dict()}),
            {"optimizer": "adam"},
            ckptool.KeyMismatch,
        ),
        "wrong parameters": (
            saved({"model": state, "optimizer": torch.optim.Adam([torch.ones(1)]).state_dict()}),
            {"optimizer": "adam"},
            ckptool.KeyMismatch,
        ),
        "two optimizers": (
            saved({"model": state, "one": optimizer.state_dict(), "two": optimizer.state_dict()}),
            {"optimizer": "adam"},
            ckptool.KeyMismatch,
        ),
        "sparse": (saved(state | {"out.weight": state["out.weight"].cpu().to_sparse()}), {}, ckptool.CkptoolError),
        "quantised": (saved(state | {"out.weight": integers}), {}, ckptool.CkptoolError),
        "without bytes": (saved(state | {"out.bias": torch.empty(10, device="meta")}), {}, ckptool.CkptoolError),
    }


@where.on_any
@pytest.mark.parametrize(("meta", "name"), in_turn([False, True], failing()))
@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz")
def test_a_load_that_fails_changes_nothing(name: str, meta: bool, tmp_path: Path) -> None:
    data, options, expected = failing()[name]
    if meta and name in ("sparse", "quantised", "without bytes"):
        pytest.skip("what a meta tensor is replaced by may be of any layout")
    (tmp_path / "x.pth").write_bytes(data)
    model = on_meta(LeNet) if meta else LeNet()
    real = LeNet()
    if "optimizer" in options:
        options = options | {"optimizer": torch.optim.Adam(real.parameters())}
    before = state_bytes(model)

    with pytest.raises(expected) as caught:
        fill(model, tmp_path / "x.pth", **options)

    assert caught.value.path == str(tmp_path / "x.pth")
    assert state_bytes(model) == before


@where.on_any
def test_names_that_are_near_and_shapes_that_differ_are_named(tmp_path: Path) -> None:
    state = LeNet().state_dict()
    saved({name.replace("fc1", "fc_one"): tensor for name, tensor in state.items()}, tmp_path / "x.pth")
    saved(state | {"out.bias": torch.ones(11)}, tmp_path / "y.pth")

    with pytest.raises(ckptool.KeyMismatch) as caught:
        fill(LeNet(), tmp_path / "x.pth")
    with pytest.raises(ckptool.ShapeMismatch) as other:
        fill(LeNet(), tmp_path / "y.pth", strict=False)

    assert "fc1.weight (nearest: fc_one.weight)" in str(caught.value)
    assert caught.value.missing == ("fc1.weight", "fc1.bias")
    assert caught.value.unexpected == ("fc_one.weight", "fc_one.bias")
    assert "out.bias [11], the model has [10]" in str(other.value)
    assert other.value.reshaped == (("out.bias", (10,), (11,)),)


@where.on_any
def test_a_model_whose_library_has_other_names_in_files_is_told_who_knows_them(tmp_path: Path) -> None:
    class Pretrained(nn.Linear):
        @classmethod
        def from_pretrained(cls, folder: str) -> None: ...

    torch.save({"kernel": torch.zeros(2, 2), "bias": torch.zeros(2)}, tmp_path / "model.pth")

    with pytest.raises(ckptool.KeyMismatch) as caught:
        fill(Pretrained(2, 2), tmp_path / "model.pth")
    assert caught.value.hint is not None
    assert "Pretrained.from_pretrained(folder) also knows" in caught.value.hint
    (tmp_path / "r.toml").write_text('rest = "keep"\n[[rule]]\nfrom = "{x:kernel}"\nto = "disk.{x}"\n')
    with pytest.raises(ckptool.KeyMismatch) as caught:
        ckptool.load_into(Pretrained(2, 2), tmp_path / "model.pth", recipe=tmp_path / "r.toml")
    assert "Write that folder first: ckptool.migrate(path, folder, recipe=" in str(caught.value.hint)


@where.on_any
def test_a_model_that_one_address_of_stands_for_many_elements_is_refused(tmp_path: Path) -> None:
    saved({"a": torch.ones(3), "b": torch.ones(3, 2)}, tmp_path / "x.pth")
    model = nn.Module()
    model.register_buffer("a", torch.zeros(3))
    model.register_buffer("b", torch.zeros(3, 1).expand(3, 2))

    with pytest.raises(ckptool.UnsupportedFeature):
        fill(model, tmp_path / "x.pth")
    assert model.a.eq(0).all()


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_that_has_no_weights_is_not_filled_without_a_word(strict: bool, tmp_path: Path) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(2, 2)]  # no ModuleList: torch does not know of them

    torch.save(Listed().layers[0].state_dict(), tmp_path / "x.pth")
    with pytest.raises(ckptool.KeyMismatch, match="2 are unexpected"):
        ckptool.load_into(Listed(), tmp_path / "x.pth", strict=strict)
