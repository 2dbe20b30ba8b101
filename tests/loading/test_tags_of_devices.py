"""Files of a device that is not here: into tensors, into models, while one serves, and migrated to the CPU."""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.reference.nets import TiedReader
from tests.device.tags import FORGED, WRAPPERS, OfADevice
from tests.loading.same import assert_same, torch_load
from tests.scale import some

CONTAINERS = pytest.mark.parametrize("container", ["zip", "legacy"])
WIDTH = 16


def weights(of_a_device: OfADevice) -> Any:
    """Return the weights of the net that was trained there, as torch reads them."""
    return torch_load(of_a_device.file(), map_location="cpu")


def with_its_weights(of_a_device: OfADevice) -> Any:
    """
    Return what ``load_state_dict`` makes of a model with them.

    Most devices get the tied embedding and head as one parameter; on the one for tests, as on others that torch does
    not have itself, ``Module.to`` makes two of them, which training then moves apart.
    """
    model = TiedReader(WIDTH)
    model.load_state_dict(weights(of_a_device))
    return model.state_dict()


def is_tied_no_more(of_a_device: OfADevice) -> bool:
    found = weights(of_a_device)
    return not torch.equal(found["embedding.weight"], found["head.weight"])


def test_what_lies_beside_a_file_says_which_device_wrote_it(of_a_device: OfADevice) -> None:
    for path in of_a_device.files():
        said = of_a_device.said(path)
        assert said["file"] == path.name
        assert (said["device"], said["forged"]) == (of_a_device.tag, of_a_device is FORGED)


@CONTAINERS
def test_the_tags_are_those_of_the_tensors_when_they_were_saved(container: str, of_a_device: OfADevice) -> None:
    for path in (one for one in of_a_device.files() if container in one.name):
        said = {one["name"]: one["device"] for one in of_a_device.said(path)["tensors"]}
        with ckptool.open_checkpoint(path) as checkpoint:
            assert {name: one.device for name, one in checkpoint.tensors.items()} == said
        assert of_a_device.tag in said.values()


@CONTAINERS
def test_they_load_where_the_caller_says(container: str, of_a_device: OfADevice) -> None:
    path = of_a_device.file(container=container)
    wanted = torch_load(path, map_location="cpu")
    calls: dict[str, list[tuple[int, str]]] = {"ours": [], "theirs": []}

    def note(whose: str) -> Any:
        def mover(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
            calls[whose].append((storage.nbytes(), tag))
            return storage

        return mover

    for where in (None, "cpu", {}, {of_a_device.tag: "cpu"}, note("ours")):
        assert_same(ckptool.load(path, where), wanted)
    assert_same(torch_load(path, map_location=note("theirs")), wanted)
    assert sorted(calls["ours"]) == sorted(calls["theirs"])
    found = ckptool.load(path, {of_a_device.tag: "meta"})
    assert all(tensor.is_meta for tensor in found.values())


@CONTAINERS
@pytest.mark.parametrize("habit", ["checkpoint", "state-dict"])
def test_they_load_into_a_model(habit: str, container: str, of_a_device: OfADevice) -> None:
    model, path = TiedReader(WIDTH), of_a_device.file(habit, container)
    if is_tied_no_more(of_a_device):
        with pytest.raises(ckptool.WeightsMismatch, match="embedding"):
            ckptool.load_into(model, path)
    ckptool.load_into(model, path, strict=not is_tied_no_more(of_a_device))

    assert_same(model.state_dict(), with_its_weights(of_a_device))


@pytest.mark.parametrize("commit", ["in_place", "swap"])
def test_a_model_that_serves_takes_them(commit: Any, of_a_device: OfADevice) -> None:
    live = ckptool.LiveModel(TiedReader(WIDTH), FORGED.folder / "state-dict-plain-cpu-zip.pth", commit=commit)
    path = of_a_device.file("checkpoint", "legacy")
    if is_tied_no_more(of_a_device):
        before = live.digest
        with pytest.raises(ckptool.WeightsMismatch, match="embedding"):
            live.reload(path)
        assert live.digest == before
        return
    live.reload(path)

    assert_same(live.model.state_dict(), with_its_weights(of_a_device))


@pytest.mark.parametrize(("wrapper", "container"), some(product(("plain", *WRAPPERS), ("zip", "legacy")), 3))
def test_a_whole_model_is_trusted_wherever_the_caller_says(
    wrapper: str, container: str, of_a_device: OfADevice
) -> None:
    path, wanted = of_a_device.file("model", container, wrapper), weights(of_a_device)
    for where in ("cpu", None, {}, {of_a_device.tag: "cpu"}, lambda storage, tag: None):
        model = ckptool.load_model(path, trust=True, map_location=where)

        assert type(model) is TiedReader
        assert_same(model.state_dict(), wanted)


@pytest.mark.parametrize("path", ["state-dict-zip", "state-dict-legacy", "checkpoint-zip", "model-legacy"])
def test_migrated_to_the_cpu_they_are_what_they_were(path: str, of_a_device: OfADevice, tmp_path: Path) -> None:
    habit, _, container = path.rpartition("-")
    source, target = of_a_device.file(habit, container), tmp_path / "out.pth"
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            torch_load(source, map_location=None, weights_only=False)
    said = {one["name"]: one["sha256"] for one in of_a_device.said(source)["tensors"]}
    ckptool.migrate(source, target, to="cpu")

    torch_load(target, map_location=None, weights_only=False)
    with ckptool.open_checkpoint(target) as checkpoint:
        assert {one.device for one in checkpoint.tensors.values()} == {"cpu"}
        assert {name: hashlib.sha256(one.read()).hexdigest() for name, one in checkpoint.tensors.items()} == said
