"""What is said of two checkpoints beside their values: names, shapes, types, devices, ties, order, metadata."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool import AmbiguousWeights, Cancellation, CkptoolError, DiffReport, Global, diff, migrate
from ckptool.diffing.trees import Change, tree_changes
from ckptool.pickles.nodes import Call, Dict, Inert, Set
from tests import build
from tests.device.tags import OfADevice
from tests.each import each
from tests.program import invoke
from tests.scale import one_of_twins, some

FIXTURES = Path(__file__).parents[2] / "fixtures" / "valid"
GPU = FIXTURES / "checkpoint-ddp-forged-cuda0-zip.pth"
CPU = FIXTURES / "checkpoint-plain-cpu-zip.pth"


def found_differences(report: DiffReport) -> dict[str, int]:
    return {kind: count for kind, count in report.counts.items() if count}


def compared(a: Any, b: Any, folder: Path, **options: Any) -> DiffReport:
    paths = []
    for name, tree in (("a.pth", a), ("b.pth", b)):
        torch.save(tree, folder / name)
        paths.append(folder / name)
    return diff(*paths, **options)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def test_names_shapes_and_types(tmp_path: Path) -> None:
    a = {"same": torch.ones(2), "gone": torch.ones(1), "shape": torch.ones(2, 3), "dtype": torch.ones(4)}
    b = {"same": torch.ones(2), "shape": torch.ones(3, 2), "dtype": torch.ones(4).half(), "new": torch.ones(1)}
    report = compared(a, b, tmp_path)

    assert found_differences(report) == {"names": 2, "shapes": 1, "dtypes": 1}
    assert (report.only_a, report.only_b, report.tensors) == (("gone",), ("new",), 3)
    assert report.shapes == (("shape", (2, 3), (3, 2)),)
    assert report.dtypes == (("dtype", "float32", "float16"),)
    assert not report.same


def test_devices_are_compared_unless_ignored() -> None:
    report = diff(GPU, CPU, ignore_wrappers=True)

    assert found_differences(report) == {"devices": 25, "others": 1}
    assert set(report.devices[0][1:]) == {"cuda:0", "cpu"}
    assert [change.name for change in report.others] == ["args.device"]
    assert diff(GPU, CPU, ignore_wrappers=True, ignore_device=True).same


def test_a_file_and_its_copy_for_the_cpu_differ_in_the_device_that_saved_it(
    of_a_device: OfADevice, tmp_path: Path
) -> None:
    source, target = of_a_device.file(), tmp_path / "cpu.pth"
    migrate(source, target, to="cpu")
    report = diff(source, target)

    assert found_differences(report) == {"devices": len(of_a_device.said(source)["tensors"])}
    assert {change[1:] for change in report.devices} == {(of_a_device.tag, "cpu")}
    assert diff(source, target, ignore_device=True).same


def test_wrappers_are_named_and_can_be_ignored(tmp_path: Path) -> None:
    weights = net().state_dict()
    wrapped = nn.DataParallel(net()).state_dict()
    compiled = {f"_orig_mod.module.{name}": tensor for name, tensor in weights.items()}
    report = compared(weights, wrapped, tmp_path)
    assert report.wrapped
    assert report.unwrapped == f"the same: {len(weights)} tensors"
    assert "(`ignore_wrappers=True`) the same" in str(report)
    assert "only in" not in str(report)
    other = compared({**weights, next(iter(weights)): torch.ones(())}, wrapped, tmp_path)
    assert "only in A" in str(other)
    assert (other.unwrapped or "").startswith("different: 1 tensor's shape")
    # Of modules that only have another name, the versions are not told too; a ReLU has no names to tell by.
    assert found_differences(report) == {"names": 2 * len(weights), "metadata": 1}
    assert report.metadata == (("2.version", "1", "nothing"),)

    assert compared(weights, wrapped, tmp_path, ignore_wrappers=True).same
    report = compared(compiled, wrapped, tmp_path, ignore_wrappers=True)
    assert found_differences(report) == {"metadata": 5}  # a plain dict has no versions of modules


def test_a_name_that_two_would_share_stays_as_it_is(tmp_path: Path) -> None:
    both = {"w": torch.ones(1), "module.w": torch.zeros(1)}
    report = compared(both, {"w": torch.ones(1)}, tmp_path, ignore_wrappers=True)

    assert report.only_a == ("module.w",)


def test_an_averaged_model_is_held_against_the_plain_one(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(net()).state_dict()
    report = compared(averaged, net().state_dict(), tmp_path, ignore_wrappers=True)

    assert found_differences(report) == {"names": 1}
    assert report.only_a == ("n_averaged",)


def test_order_is_compared_unless_ignored(tmp_path: Path) -> None:
    a = {name: torch.ones(1) for name in "abcd"}
    b = {name: torch.ones(1) for name in "abdc"}
    report = compared(a, b, tmp_path)

    assert report.order == (2, "c", "d")
    assert found_differences(report) == {"order": 1}
    assert compared(a, b, tmp_path, ignore_order=True).same
    some, others = ({name: torch.ones(1) for name in names} for names in ("xabc", "aybc"))
    assert compared(some, others, tmp_path).order is None  # that of the common names


def test_ties_on_one_side_alone(tmp_path: Path) -> None:
    tied = torch.ones(3)
    a = {"a": tied, "b": tied, "c": torch.ones(3), "d": tied[:2]}
    b = {"a": torch.ones(3), "b": tied, "c": tied, "d": torch.ones(2)}
    report = compared(a, b, tmp_path)

    assert found_differences(report) == {"ties": 2}
    assert (report.ties_a, report.ties_b) == ((("a", "b"),), (("b", "c"),))
    assert compared(a, a, tmp_path).same


def test_a_tied_tensor_is_compared_with_each_of_its_counterparts(tmp_path: Path) -> None:
    tied = torch.ones(3)
    report = compared({"a": tied, "b": tied}, {"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path)
    assert [found.name for found in report.values] == ["b"]

    other = torch.zeros(3)
    report = compared({"a": tied, "b": tied}, {"a": other, "b": other}, tmp_path)
    assert [(found.name, found.max_abs) for found in report.values] == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("zipped", some(sorted(FIXTURES.glob("*-zip.pth")), 3), ids=lambda path: path.stem)
def test_a_fixture_is_equal_to_itself_and_to_its_legacy_twin(zipped: Path) -> None:
    assert diff(zipped, zipped).same
    twin = zipped.with_name(zipped.name.replace("-zip", "-legacy"))
    if twin.exists():
        report = diff(zipped, twin)
        assert found_differences(report) == {}
        assert report.tensors or report.others == ()


@pytest.mark.parametrize("path", one_of_twins(sorted(FIXTURES.glob("*.pt*")), 3), ids=lambda path: path.name)
def test_every_fixture_is_equal_to_the_weights_taken_from_it(path: Path, tmp_path: Path) -> None:
    try:
        migrate(path, tmp_path / "w.pth", form="state_dict")
    except CkptoolError as error:
        pytest.skip(f"not migrated: {error.kind}")

    assert found_differences(diff(path, tmp_path / "w.pth")) == {}


def test_versions_of_modules(tmp_path: Path) -> None:
    weights = net().state_dict()
    plain = OrderedDict(weights)
    older = net().state_dict()
    older._metadata["1"]["version"] = 1  # type: ignore[attr-defined]

    assert compared(weights, older, tmp_path).metadata == (("1.version", "2", "1"),)
    lost = compared(weights, plain, tmp_path)
    assert found_differences(lost) == {"metadata": 5}
    assert ("1.version", "2", "nothing") in lost.metadata


def test_safetensors_metadata_of_two_files(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2), "v": torch.ones(1)}
    save_file(tensors, tmp_path / "a", {"format": "pt", "title": "one"})
    save_file(tensors, tmp_path / "b", {"format": "pt", "title": "two", "more": "x"})
    report = diff(tmp_path / "a", tmp_path / "b")

    assert report.metadata == (("title", "'one'", "'two'"), ("more", "nothing", "'x'"))
    done = invoke(["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 1
    assert done.output.endswith("different: 2 facts of metadata; the values of 2 tensors are the same\n")
    quick = invoke(["diff", "--no-values", str(tmp_path / "a"), str(tmp_path / "b")])
    assert quick.output.endswith("different: 2 facts of metadata; values were not compared\n")


@pytest.mark.parametrize("metadata", [None, {"format": "np"}, {"format": "pt"}])
def test_for_which_library_safetensors_are_is_no_difference(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2), "v": torch.ones(1)}
    save_file(tensors, tmp_path / "a", {"format": "pt"})
    save_file(tensors, tmp_path / "b", metadata)
    for pair in ("ab", "ba"):
        done = invoke(["diff", *(str(tmp_path / one) for one in pair)])
        assert done.exit_code == 0
        assert done.output.endswith("the same: 2 tensors\n")


def test_values_are_said_to_be_the_same_only_if_all_are(tmp_path: Path) -> None:
    base = {"a": torch.ones(2), "b": torch.zeros(3)}
    said = "the values of 2 tensors are the same"
    for name, other, is_said in (
        ("order", dict(reversed(base.items())), True),
        ("values", {"b": torch.zeros(3), "a": torch.tensor([1.0, 2.0])}, False),
        ("names", {**base, "c": torch.ones(1)}, False),
        ("shapes", {"a": torch.ones(2, 1), "b": torch.zeros(3)}, False),
        ("dtypes", {"a": torch.ones(2).double(), "b": torch.zeros(3)}, False),
    ):
        assert (said in compared(base, other, tmp_path).verdict) == is_said, name


def test_what_safetensors_cannot_hold_is_no_difference(tmp_path: Path) -> None:
    # torch has no GPU here: tags are what a GPU would have written.
    source = FIXTURES / "lenet-state-dict-data-parallel-forged-cuda0-zip.pth"
    with ckptool.open_checkpoint(source) as checkpoint:
        tensors = {
            name: torch.frombuffer(bytearray(tensor.read()), dtype=torch.float32).view(tensor.info.shape)
            for name, tensor in checkpoint.tensors.items()
        }
    save_file(tensors, tmp_path / "x.safetensors")
    report = diff(source, tmp_path / "x.safetensors")

    assert report.same
    assert report.not_compared == ("devices, module versions, order, which B does not record",)
    assert diff(tmp_path / "x.safetensors", source).same


def test_tied_names_that_a_safetensors_file_leaves_out_are_compared(tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    torch.save({"a": tied, "b": tied, "c": torch.ones(1)}, tmp_path / "a.pth")
    migrate(tmp_path / "a.pth", tmp_path / "b.safetensors")
    report = diff(tmp_path / "a.pth", tmp_path / "b.safetensors")

    assert report.same
    assert report.tensors == 3


def test_a_tie_that_one_safetensors_file_notes_and_another_writes_out_is_no_difference(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "noted", {"format": "pt", "b": "a"})
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "written", {"format": "pt"})

    assert diff(tmp_path / "noted", tmp_path / "written").same


def test_tensors_in_tuples_are_compared(tmp_path: Path) -> None:
    def tree(value: float) -> dict[str, Any]:
        return {"w": torch.ones(2), "v": torch.ones(1), "packed": (torch.full((2,), value), 3)}

    assert [found.name for found in compared(tree(1), tree(2), tmp_path).values] == ["packed.0"]
    report = compared({"model": tree(1), "epoch": 1}, tree(2), tmp_path)
    assert (report.scope, [found.name for found in report.values]) == ("weights", ["packed.0"])
    assert compared({"model": tree(1), "epoch": 1}, tree(1), tmp_path).same


def test_a_key_may_name_an_optimizer(tmp_path: Path) -> None:
    def tree(value: float) -> dict[str, Any]:
        state = {0: {"exp_avg": torch.full((2,), value), "step": torch.tensor(1.0)}}
        return {"model": {"w": torch.ones(2)}, "optimizer": {"state": state, "param_groups": [{"lr": value}]}}

    report = compared(tree(1), tree(2), tmp_path, key_a="optimizer", key_b="optimizer")
    assert [found.name for found in report.values] == ["state.0.exp_avg"]
    assert report.others == (("param_groups.0.lr", "1", "2"),)
    assert compared(tree(1), tree(1), tmp_path, key_a="optimizer", key_b="optimizer").tensors == 2


def test_what_stands_beside_weights_in_one_mapping_is_not_taken_for_weights(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}
    state = {0: {"exp_avg": torch.ones(2)}}
    mixed = {**weights, "optimizer": {"state": state, "param_groups": [{"lr": 1}]}}

    assert compared(mixed, weights, tmp_path, key_a="(root)").same
    assert compared(mixed, weights, tmp_path, key_a="").only_a == ("optimizer.state.0.exp_avg",)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_sparse_and_quantised_tensors_are_compared_by_their_parts(tmp_path: Path) -> None:
    def tree(value: float, scale: float) -> dict[str, torch.Tensor]:
        indices, values = torch.tensor([[0, 2]]), torch.tensor([1.0, value])
        return {
            "coo": torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True),
            "quantised": torch.quantize_per_tensor(torch.arange(4.0), scale, 3, torch.qint8),
        }

    assert compared(tree(2, 0.5), tree(2, 0.5), tmp_path).same
    report = compared(tree(2, 0.5), tree(3, 0.25), tmp_path)
    assert [found.name for found in report.values] == ["coo[values]", "quantised"]
    assert report.values[0].at == (1,)
    assert report.layouts == (
        ("quantised", "per_tensor_affine, scale 0.5, zero_point 3", "per_tensor_affine, scale 0.25, zero_point 3"),
    )


def test_meta_tensors_are_the_same_and_differ_from_real_ones(tmp_path: Path) -> None:
    a, b = {"w": torch.ones(2, device="meta")}, {"w": torch.ones(2)}

    assert compared(a, a, tmp_path).same
    report = compared(a, b, tmp_path, ignore_device=True)
    assert found_differences(report) == {"layouts": 1}


def test_a_model_a_checkpoint_and_plain_weights_are_compared_by_their_weights(tmp_path: Path) -> None:
    model = FIXTURES / "model-plain-cpu-zip.pth"
    checkpoint = FIXTURES / "checkpoint-plain-cpu-zip.pth"
    migrate(checkpoint, tmp_path / "w.pth", form="state_dict")
    migrate(model, tmp_path / "m.pth", form="state_dict")
    reports = [
        diff(checkpoint, tmp_path / "w.pth"),
        diff(tmp_path / "w.pth", checkpoint),
        diff(model, tmp_path / "m.pth"),
    ]

    assert [report.scope for report in reports] == ["weights"] * 3
    assert all(report.same for report in reports)
    assert (reports[0].a.key, reports[0].b.key) == ("model", "")


def test_two_training_checkpoints_are_compared_in_everything(tmp_path: Path) -> None:
    def tree(momentum: float, epoch: int) -> dict[str, Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "names": ["x"]}

    assert compared(tree(0.9, 1), tree(0.9, 1), tmp_path).same
    report = compared(tree(0.9, 1), tree(0.8, 2), tmp_path)
    assert report.scope == "everything"
    assert report.others == (("optimizer.param_groups.0.momentum", "0.9", "0.8"), ("epoch", "1", "2"))
    assert compared(tree(0.9, 1), tree(0.8, 2), tmp_path, key_a="model").same


def test_what_holds_several_models_asks_for_a_key(tmp_path: Path) -> None:
    gan = {"first": {"w": torch.ones(2, 2)}, "second": {"w": torch.zeros(2, 2)}}
    torch.save(gan, tmp_path / "a.pth")
    torch.save(gan["second"], tmp_path / "b.pth")
    with pytest.raises(CkptoolError) as caught:
        diff(tmp_path / "a.pth", tmp_path / "b.pth")

    assert isinstance(caught.value, AmbiguousWeights)
    assert caught.value.candidates == ("first", "second")
    assert (caught.value.kind, caught.value.path) == ("which-weights", str(tmp_path / "a.pth"))
    assert str(caught.value.hint).startswith("Pick one with `key_a=`: 'first', 'second'; or all of them")
    assert diff(tmp_path / "a.pth", tmp_path / "b.pth", key_a="(all)").only_a == ("first.w", "second.w")
    assert diff(tmp_path / "a.pth", tmp_path / "b.pth", key_a="second").same
    assert diff(tmp_path / "a.pth", tmp_path / "a.pth").same
    assert not diff(tmp_path / "a.pth", tmp_path / "a.pth", key_a="first", key_b="second").same
    with pytest.raises(CkptoolError, match="no state dict under"):
        diff(tmp_path / "a.pth", tmp_path / "b.pth", key_a="third")


def test_a_member_of_an_archive_is_compared(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "agent.zip", "w") as archive:
        archive.write(CPU, "policy.pth")
        archive.write(GPU, "other.pth")

    report = diff(f"{tmp_path / 'agent.zip'}::policy.pth", CPU)
    assert report.same
    assert report.a.path.endswith("::policy.pth")
    with pytest.raises(CkptoolError) as caught:
        diff(tmp_path / "agent.zip", CPU)
    assert caught.value.kind == "archive"


def test_tensors_that_hang_on_parameters_are_compared_with_those_of_a_model_alone(tmp_path: Path) -> None:
    def model(tag: float) -> nn.Linear:
        torch.manual_seed(0)
        made = nn.Linear(2, 1)
        made.weight.tag = torch.tensor([tag])  # type: ignore[assignment]
        return made

    torch.save(model(1), tmp_path / "a.pth")
    torch.save(model(2), tmp_path / "b.pth")
    torch.save(model(1).state_dict(), tmp_path / "c.pth")
    (found,) = diff(tmp_path / "a.pth", tmp_path / "b.pth").values

    assert (found.name, found.max_abs) == ("weight[tag]", 1)
    assert diff(tmp_path / "a.pth", tmp_path / "c.pth").same


def test_the_class_of_a_model_is_compared() -> None:
    report = diff(FIXTURES / "model-plain-cpu-zip.pth", FIXTURES / "lenet-model-forged-cuda0-zip.pth")

    assert "class" in [change.name for change in report.metadata]


def test_what_two_models_hold_beside_tensors_is_compared(tmp_path: Path) -> None:
    def model(p: float) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 2), nn.Dropout(p)).eval()

    assert compared(model(0.1), model(0.1), tmp_path).same
    assert compared(model(0.1), model(0.5), tmp_path).others == (("1.p", "0.1", "0.5"),)
    assert compared(model(0.1), model(0.1).train(), tmp_path).counts["others"] == 3
    report = compared(nn.DataParallel(model(0.1)), model(0.5), tmp_path, ignore_wrappers=True)
    assert report.same
    assert report.not_compared == ("what models hold beside tensors, for wrappers were to be ignored",)


def test_structure_alone_reads_no_values(tmp_path: Path) -> None:
    a, b = {"w": torch.ones(2)}, {"w": torch.zeros(2)}

    assert found_differences(compared(a, b, tmp_path)) == {"values": 1}
    report = compared(a, b, tmp_path, values=False)
    assert report.same
    assert not report.values_compared


def test_numpy_is_not_imported_unless_values_differ_and_torch_never(tmp_path: Path) -> None:
    code = (
        "import sys, ckptool\n"
        "for other in 'abc':\n"
        "    same = ckptool.diff(f'{sys.argv[1]}/a', f'{sys.argv[1]}/{other}').same\n"
        "    print(same, *{'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    )
    torch.save({"w": torch.ones(9).view(3, 3).t()}, tmp_path / "a")
    torch.save({"w": torch.ones(3, 3), "v": torch.ones(1)}, tmp_path / "b")
    torch.save({"w": torch.zeros(3, 3)}, tmp_path / "c")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)

    same, renamed, changed = done.stdout.splitlines()
    assert (same, renamed) == ("True", "False")
    assert changed.split() == ["False", "numpy"]


# Values that are not tensors


def tree_differences(a: Inert, b: Inert, path: str = "x") -> list[Change]:
    return list(tree_changes([(path, a, b)], lambda _a, _b: None))


def changes(a: Any, b: Any, protocol: int = 2, other: int | None = None) -> list[Change]:
    one, two = (
        ckptool.open_checkpoint(pickle.dumps(value, protocol=number)).root
        for value, number in ((a, protocol), (b, protocol if other is None else other))
    )
    return tree_differences(one, two)


PLAIN: dict[str, Any] = {
    "numbers": [1, 2.5, True, None, float("nan"), -0.0, 1 << 200],
    "text": {"a": "b" * 100, 3: "c", None: "d", 2.5: "e", True: "f"},
    "bytes": b"\0\xff" * 50,
    "tuple": (1, ("x", [2])),
    "set": {"p", "q", "r"},
    "ordered": OrderedDict([("m", 1), ("n", [2, 3])]),
    "numpy": np.arange(6.0).reshape(2, 3),
    "scalar": np.float32(0.25),
    "class": pytest.Item,
}


@pytest.mark.parametrize("protocol", range(6))
def test_a_tree_is_the_same_whatever_protocol_wrote_it(protocol: int) -> None:
    # numpy has other calls of its own for protocol 5.
    plain = {key: value for key, value in PLAIN.items() if protocol < 5 or key not in ("numpy", "scalar")}

    assert changes(plain, plain, 2, protocol) == []


def test_dict_and_ordered_dict_and_any_order_of_keys_are_the_same() -> None:
    assert changes({"a": 1, "b": 2}, OrderedDict([("b", 2), ("a", 1)])) == []


@each(
    ("a", "b", "name"),
    [
        (1, 2, "x"),
        (1, 1.0, "x"),
        (1, True, "x"),
        ("1", 1, "x"),
        ("a", b"a", "x"),
        (0.0, -0.0, "x"),
        ([1, 2], [1, 3], "x.1"),
        ([1, 2], [1, 2, 3], "x"),
        ([1], (1,), "x"),
        ({"k": {"l": [5]}}, {"k": {"l": [6]}}, "x.k.l.0"),
        ({"k": 1}, {"k": 1, "m": 2}, "x.m"),
        ({1: "a"}, {"1": "a"}, "x.1"),
        ({0.5: "a"}, {"0.5": "a"}, "x.0.5"),
        ({0.0: "a"}, {-0.0: "a"}, "x.0.0"),
        ({"p"}, {"q"}, "x"),
        ({"p"}, frozenset({"p"}), "x"),
        ("y" * 1000, "y" * 999 + "z", "x"),
        (b"y" * 1000, b"y" * 999 + b"z", "x"),
        (np.arange(3), np.arange(3) + 1, "x"),
        (np.arange(200), np.arange(200)[::-1].copy(), "x"),
        (np.arange(3), np.arange(3.0), "x"),
        (np.float32(1), np.float64(1), "x"),
        (np.float32(1), np.float32(2), "x"),
        (pytest.Item, pytest.Module, "x"),
        (Path("/a"), Path("/b"), "x.1"),
    ],
)
@each("protocol", [2, 4])
def test_a_change_is_found_where_it_is(a: Any, b: Any, name: str, protocol: int) -> None:
    assert changes(a, a, protocol) == []
    assert name in [change.name for change in changes(a, b, protocol)]
    assert changes([7, a, a], [7, b, b], protocol) != []


def test_attributes_of_objects_are_compared() -> None:
    class_of = Global("some.where", "Settings")

    def settings(**attributes: Inert) -> Call:
        made = Call(class_of, (), "newobj")
        made.state = Dict(list(attributes.items()))
        return made

    found = tree_differences(settings(lr=1, deep=[1]), settings(deep=[2], lr=1), "args")
    assert found == [("args.deep.0", "1", "2")]
    assert tree_differences(settings(lr=1), Call(Global("some", "Other"), ()))


def test_trees_that_hold_themselves_end() -> None:
    def cycle(length: int, last: Any) -> list[Any]:
        first: list[Any] = [last]
        node = first
        for _ in range(length - 1):
            node = [node, last]
        first.append(node)
        return first

    assert tree_differences(cycle(1000, 1), cycle(1000, 1)) == []
    assert tree_differences(cycle(997, 1), cycle(1000, 2))


@each("args", [[], ["a", 2, True, 4]])
def test_small_objects_that_are_alike_leave_no_note(args: list[Inert]) -> None:
    class_of = Global("some.where", "Settings")
    made = [[Call(class_of, tuple(args)) for _ in range(3_000)] for _ in range(2)]
    tracemalloc.start()
    assert tree_differences(*made) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 17  # notes of all would take three times that
    made[1][7] = Call(class_of, (*args[:-1], 5))
    assert [change.name for change in tree_differences(*made)] == [f"x.7.{len(args) - 1}" if args else "x.7"]


def test_parts_that_are_shared_a_billion_times_are_compared_once() -> None:
    def doubled(leaf: int) -> list[Any]:
        node: list[Any] = [leaf]
        for _ in range(40):
            node = [node, node]
        return node

    assert tree_differences(doubled(1), doubled(1)) == []
    (found,) = tree_differences(doubled(1), doubled(2))
    assert found[1:] == ("1", "2")
    assert "…" in found.name


def test_integers_that_all_hash_alike_cost_no_more_than_others() -> None:
    keys = [((1 << 61) - 1) * number for number in range(1, 60_000)]
    a, b = Dict([(key, 1) for key in keys]), Dict([(key, 1) for key in reversed(keys)])

    assert tree_differences(a, b) == []


def test_bare_storages_are_compared_by_their_bytes(tmp_path: Path) -> None:
    def tree(value: float) -> dict[str, Any]:
        return {"w": torch.ones(2), "raw": torch.full((3,), value).untyped_storage(), "epoch": 1, "more": [1]}

    assert compared(tree(1), tree(1), tmp_path).same
    assert [change.name for change in compared(tree(1), tree(2), tmp_path).others] == ["raw"]


def test_no_more_than_a_thousand_changes_are_listed(tmp_path: Path) -> None:
    weight = build.tensor(build.storage())
    trees = [
        build.torch_zip({"w": weight, "log": list(range(first, first + 5000))}, {"0": build.floats()})
        for first in (0, 1)
    ]
    for name, data in zip("ab", trees, strict=True):
        (tmp_path / name).write_bytes(data)

    assert len(diff(tmp_path / "a", tmp_path / "b").others) == 1000


class Timed(Cancellation):
    """Notes when it is looked at, in seconds of the processor."""

    __slots__ = ("times",)

    def __init__(self) -> None:
        super().__init__()
        self.times = [thread_time()]

    def check(self) -> None:
        self.times.append(thread_time())


@pytest.mark.parametrize(
    "make",
    [list, lambda items: Dict([(one, one) for one in items]), lambda items: Set(list(items))],
    ids=["list", "mapping", "set"],
)
def test_long_values_are_compared_with_looks_at_the_cancellation(make: Any) -> None:
    cancellation = Timed()
    one, other = make(range(100_000)), make(range(100_000))
    assert list(tree_changes([("x", one, other)], lambda *_: None, cancellation)) == []
    times = [*cancellation.times, thread_time()]
    longest = max(late - early for early, late in pairwise(times))
    assert longest < 0.4 * (times[-1] - times[0])
