"""
Every fixture through every form and back: names, order, ties, values, metadata, and everything that is not a tensor.

What ckptool reads of a source is held against what torch reads of the target; that ckptool reads the source right is
shown in ``against_torch``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from ckptool import Checkpoint, LazyTensor, migrate, open_checkpoint
from tests.against_torch import oracle
from tests.migration.refused import refused
from tests.scale import in_turn, one_of_twins, some

VALID = Path(__file__).parents[2] / "fixtures" / "valid"
FIXTURES = [json.loads(path.read_text()) for path in sorted(VALID.glob("*.json"))]
FILES = [row["file"] for row in FIXTURES]
PICKLED = [row["file"] for row in FIXTURES if row["format"] in ("torch_zip", "torch_legacy")]

# There are no names in a list of tensors.
NO_WEIGHTS = [name for name in FILES if name.startswith("tensor-list-")]
# Layouts and types that safetensors has no words for, and tensors without values.
NOT_PLAIN = ("sparse-", "quantised-", "device-meta-", "device-forged-meta-", "complex-", "every-dtype-")
# torch.save writes untyped storages in the old format, and torch.load then trips over them; there is no XLA here.
TORCH_FAILS = [name for name in FILES if name.startswith("state-dict-float8") and "legacy" in name]
TORCH_FAILS += ["every-dtype-cpu-legacy.pth", "one-storage-two-dtypes-cpu-legacy.pth"]
TORCH_FAILS += ["device-rebuilt-forged-xla0-legacy.pth", "device-rebuilt-forged-xla0-zip.pth"]


def source_of(name: str) -> str:
    return str(VALID / name)


def loaded(path: Path | str, **options: Any) -> Any:
    """Return what torch reads of a target: no ``map_location``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, **options)


def weights_of(source: Checkpoint) -> dict[str, LazyTensor]:
    """Return the weights by name; of a safetensors file, the tied names that its metadata records with them."""
    assert source.weights is not None
    tied = {name: source.weights[kept] for name, kept in source.metadata.items() if kept in source.weights}
    return {**source.weights, **tied}


def expected_refusal(name: str, form: str) -> str | None:
    if form == "same":
        return None if name in PICKLED or name.endswith(".safetensors") else "no-tree"
    if name in NO_WEIGHTS:
        return "which-weights"
    if form == "safetensors" and name.startswith(NOT_PLAIN):
        return "unsupported-entries"
    return None


def assert_weights(found: Mapping[str, torch.Tensor], expected: Mapping[str, LazyTensor], *, detached: bool) -> None:
    """Fail unless torch read just these tensors, in this order, with the same strides, bytes and ties."""
    names = list(expected)
    assert list(found) == names
    for name in names:
        lazy = expected[name]
        if detached:  # a state_dict() has no gradients
            lazy = LazyTensor(name, lazy.info._replace(requires_grad=False))
        oracle.assert_same_tensor(lazy, found[name])
    assert oracle.torch_ties(list(found.values())) == oracle.ties([expected[name] for name in names])


@pytest.mark.parametrize("name", one_of_twins(FILES, 3))
def test_a_state_dict_opens_plainly_and_holds_the_weights(name: str, tmp_path: Path) -> None:
    target = tmp_path / "x.pth"
    with open_checkpoint(source_of(name)) as source:
        kind = expected_refusal(name, "state_dict")
        if kind is not None:
            refused(source.path, target, form="state_dict", to="cpu", kind=kind)
            return
        report = migrate(source.path, target, form="state_dict", to="cpu")

        found = loaded(target, weights_only=True)
        assert source.weights is not None
        assert_weights(found, weights_of(source), detached=source.weights.class_name is not None)
        assert report.tensors == len(found)
        assert report.nbytes == target.stat().st_size


@pytest.mark.parametrize("name", one_of_twins(FILES, 2))
def test_a_safetensors_file_opens_in_the_reference_reader_and_holds_the_weights(name: str, tmp_path: Path) -> None:
    target = tmp_path / "x.safetensors"
    with open_checkpoint(source_of(name)) as source:
        kind = expected_refusal(name, "safetensors")
        if kind is not None:
            refused(source.path, target, kind=kind)
            if kind == "which-weights":
                return
        report = migrate(source.path, target, drop_unsupported=kind is not None, allow_empty=True)

        weights = {name: tensor for name, tensor in weights_of(source).items() if name not in report.dropped}
        assert bool(len(weights) < len(weights_of(source))) == (kind is not None)
        with safe_open(target, framework="pt") as reference:
            found = {key: reference.get_tensor(key) for key in reference.keys()}  # noqa: SIM118 - no mapping
            metadata = reference.metadata()
        assert metadata["format"] == "pt"
        assert {key: metadata[key] for key in report.tied} == report.tied
        assert found.keys() | report.tied.keys() == set(weights)
        assert not found.keys() & report.tied.keys()
        for key, lazy in weights.items():
            tensor = found[report.tied.get(key, key)]
            assert (f"torch.{lazy.info.dtype}", lazy.info.shape) == (str(tensor.dtype), tuple(tensor.shape)), key
            assert lazy.read() == oracle.tensor_bytes(tensor), key


@pytest.mark.parametrize("name", some([name for name in FILES if expected_refusal(name, "safetensors") is None], 9))
def test_over_safetensors_and_back_nothing_is_lost(name: str, tmp_path: Path) -> None:
    straight, over, back = (tmp_path / file for file in ("a.pth", "b.safetensors", "c.pth"))
    migrate(source_of(name), straight, form="state_dict", to="cpu")
    migrate(straight, over)
    migrate(over, back)

    wanted, found = loaded(straight), loaded(back)
    assert list(found) == list(wanted)
    for key, tensor in wanted.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert oracle.tensor_bytes(found[key]) == oracle.tensor_bytes(tensor), key
    assert getattr(found, "_metadata", None) == getattr(wanted, "_metadata", None)
    assert same_memory(found) == same_memory(wanted)


def same_memory(state: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Return the names that are one tensor: not those of different views, which safetensors keeps apart."""
    first: dict[tuple[Any, ...], str] = {}
    pairs = []
    for name, tensor in state.items():
        if tensor.numel():
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
            other = first.setdefault(place, name)
            if other != name:
                pairs.append((other, name))
    return pairs


@pytest.mark.parametrize(("form", "name"), in_turn(["state_dict", "safetensors", "same"], FILES[::8]))
def test_a_second_time_the_file_is_the_same_byte_for_byte(name: str, form: Any, tmp_path: Path) -> None:
    if expected_refusal(name, form) is not None:
        pytest.skip("refused, as other tests say")
    for folder in ("one", "two", "three"):
        (tmp_path / folder).mkdir()
    migrate(source_of(name), tmp_path / "one" / "x", form=form, to="cpu")
    # Once, pickles of other protocols become one of protocol 2.
    migrate(tmp_path / "one" / "x", tmp_path / "two" / "x", form=form, to="cpu")
    migrate(tmp_path / "two" / "x", tmp_path / "three" / "x", form=form, to="cpu")

    assert (tmp_path / "three" / "x").read_bytes() == (tmp_path / "two" / "x").read_bytes()


# Form same: the whole tree.


def live(tree: Any, seen: dict[int, int] | None = None, *, peel: Callable[[Any], Any] = lambda one: one) -> Any:
    """
    Return everything that can be said of a loaded tree, down to bytes, with a number where an object was before.

    What is in it is taken as ``peel`` returns it.
    """
    seen, tree, inner = {} if seen is None else seen, peel(tree), partial(live, peel=peel)
    if tree is None or isinstance(tree, bool | int | str | bytes | torch.dtype | type | torch.layout):
        return type(tree).__name__, tree
    if isinstance(tree, float):
        return type(tree).__name__, tree.hex()
    if isinstance(tree, torch.device):
        return "device", "cpu"
    if isinstance(tree, tuple) and not tree:
        return ()
    if id(tree) in seen:
        return "again", seen[id(tree)]
    seen[id(tree)] = len(seen)
    if isinstance(tree, torch.Tensor):
        return tensor_facts(tree)
    found: list[Any] = [type(tree).__qualname__]
    if isinstance(tree, list | tuple):
        found += [inner(item, seen) for item in tree]
    elif isinstance(tree, dict):
        found += [(inner(key, seen), inner(item, seen)) for key, item in tree.items()]
    elif isinstance(tree, set | frozenset):
        found.append(sorted(tree))
    elif hasattr(tree, "dtype"):
        found.append((str(tree.dtype), tree.tobytes()))
    elif callable(tree) and hasattr(tree, "__self__"):
        found += [tree.__name__, inner(tree.__self__, seen)]
    if (hasattr(tree, "__dict__") and not callable(tree)) or isinstance(tree, nn.Module):
        found += [(key, inner(item, seen)) for key, item in tree.__dict__.items() if key not in RUNTIME]
    return found


# What a compiled module, one of torch.fx or DistributedDataParallel makes anew whenever it is loaded.
RUNTIME = {"forward", "dynamo_ctx", "process_group", "reducer", "logger", "_lock", "_ddp_params_and_buffers_to_ignore"}
RUNTIME |= {"_graph", "_compiled_call_impl"}


def tensor_facts(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, nn.UninitializedParameter):
        return type(tensor).__name__
    facts = (type(tensor).__name__, str(tensor.dtype), tuple(tensor.shape), str(tensor.layout), tensor.requires_grad)
    parts = oracle.parts(tensor)
    if parts:
        return *facts, [tensor_facts(part) for part in parts.values()]
    if tensor.device.type == "meta":
        return facts
    return (
        *facts,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.is_conj(),
        tensor.is_neg(),
        oracle.tensor_bytes(tensor),
    )


@pytest.mark.parametrize(
    "name",
    one_of_twins(
        [name for name in PICKLED if name not in TORCH_FAILS and "ddp" not in name and "compiled" not in name], 2
    ),
)
def test_the_whole_tree_is_the_same_for_torch(name: str, tmp_path: Path) -> None:
    target = tmp_path / "x.pth"
    migrate(source_of(name), target, form="same", to="cpu")

    wanted = oracle.load(source_of(name))
    found = loaded(target, weights_only=False)
    assert live(found) == live(wanted)


@pytest.mark.parametrize("name", one_of_twins(PICKLED, 6))
def test_the_whole_tree_is_the_same_for_us(name: str, tmp_path: Path) -> None:
    target = tmp_path / "x.pth"
    migrate(source_of(name), target, form="same", to="cpu")

    with open_checkpoint(source_of(name)) as source, open_checkpoint(target) as found:
        assert (found.format, found.form) == ("torch_zip", source.form)
        for ours, theirs in ((found.tensors, source.tensors), (found.attributes, source.attributes)):
            assert list(ours) == list(theirs)
            assert oracle.ties(list(ours.values())) == oracle.ties(list(theirs.values()))
            for key, tensor in theirs.items():
                assert facts(ours[key]) == facts(tensor), key
        assert {str(one) for one in found.globals} == {str(one) for one in source.globals}
        assert [path for path, _ in found.extras] == [path for path, _ in source.extras]
        assert [(one.key, one.role, list(one)) for one in found.state_dicts] == [
            (one.key, one.role, list(one)) for one in source.state_dicts
        ]


def facts(tensor: LazyTensor) -> Any:
    info = tensor.info
    parts = [facts(LazyTensor(name, part)) for name, part in info.parts]
    plain = info._replace(storage=None, location="", parts=())
    return plain, parts, tensor.read() if info.storage is not None else None


@pytest.mark.parametrize("name", [name for name in PICKLED if name.startswith("checkpoint-") and "whole" not in name])
def test_training_goes_on_from_what_was_kept(name: str, tmp_path: Path) -> None:
    target = tmp_path / "x.pth"
    migrate(source_of(name), target, form="same", to="cpu", strip_wrappers=True)

    before, after = oracle.load(source_of(name)), loaded(target, weights_only=False)
    assert list(after) == list(before)
    assert live(after["optimizer"]) == live(before["optimizer"])
    assert live(after["scheduler"]) == live(before["scheduler"])
    assert (after["epoch"], after["best_accuracy"]) == (before["epoch"], before["best_accuracy"])
    assert vars(after["args"]).keys() == vars(before["args"]).keys()
    assert vars(after["args"])["device"] == torch.device("cpu")
    state = after["model"]
    assert all(not key.startswith(("module.", "_orig_mod.")) for key in state)
    assert len(state) == len(before["model"])


def saved(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


MODELS: dict[str, Any] = {
    "batch norms": lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Sequential(nn.InstanceNorm1d(3), nn.SyncBatchNorm(1))),
    "attention": lambda: nn.Transformer(4, 2, 1, 1, 4, batch_first=True),
    "weights with a norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2))),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("model", MODELS)
def test_metadata_is_torchs_own_word_for_word(model: str, tmp_path: Path) -> None:
    module = MODELS[model]()
    for form in ("state_dict", "same", "safetensors"):
        migrate(saved(module.state_dict(), tmp_path / "a.pth"), tmp_path / form, form=form)  # type: ignore[arg-type]
        migrate(tmp_path / form, tmp_path / f"{form}.pth", form="state_dict")
    if model in ("batch norms", "attention"):
        migrate(saved(module, tmp_path / "a.pth"), tmp_path / "whole.pth", form="state_dict")

    for path in (*tmp_path.glob("[!a]*.pth"), tmp_path / "state_dict", tmp_path / "same"):
        assert loaded(path)._metadata == module.state_dict()._metadata, path.name


def test_a_safetensors_file_whose_metadata_names_a_tensor_gains_no_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"pt": torch.ones(1), "x": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    migrate(tmp_path / "a.safetensors", tmp_path / "b.pth")

    assert set(loaded(tmp_path / "b.pth")) == {"pt", "x"}


@pytest.mark.parametrize("form", ["same", "state_dict"])
def test_a_sparse_tensor_that_is_coalesced_stays_so(form: Any, tmp_path: Path) -> None:
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (2,), check_invariants=True)
    migrate(saved({"c": torch.eye(3).to_sparse(), "u": twice}, tmp_path / "a.pth"), tmp_path / "b.pth", form=form)

    found = loaded(tmp_path / "b.pth")
    assert [found[key].is_coalesced() for key in ("c", "u")] == [True, False]


def test_a_source_without_a_tree_cannot_be_written_as_it_is(tmp_path: Path) -> None:
    for name in FILES:
        if name.endswith((".pt2", ".pt")):
            refused(source_of(name), tmp_path / "x.pt", form="same", kind="no-tree")
