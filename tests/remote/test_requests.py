"""How few requests an index takes, and that it says the same as the file on a disk."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_safetensors

from ckptool import AmbiguousFile, MalformedFile, load, open_checkpoint
from ckptool.checking.structure import examine
from ckptool.loading.memory import filling
from ckptool.sources.remote import opening, parts
from tests.remote.servers import Server, serving

NUMEL = 1 << 14


def tensors(count: int, numel: int) -> dict[str, torch.Tensor]:
    whole = torch.arange(numel * count, dtype=torch.float32)
    return {f"layers.{at}.weight": whole[at * numel : (at + 1) * numel].clone() for at in range(count)}


def zipped(found: dict[str, torch.Tensor], **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(found, stream, **options)
    return stream.getvalue()


def legacy(found: dict[str, torch.Tensor]) -> bytes:
    return zipped(found, _use_new_zipfile_serialization=False)


SMALL = zipped(tensors(3, 4))
LARGE = zipped(tensors(200, NUMEL))


def opened(server: Server) -> dict[str, tuple[Any, ...]]:
    with open_checkpoint(f"{server.url}/x") as found:
        return {name: (one.dtype, one.shape, one.info.storage) for name, one in found.tensors.items()}


@pytest.mark.parametrize(
    ("save", "count", "numel", "most", "nbytes"),
    [
        (zipped, 288, 1 << 14, 3, 512_000),
        (zipped, 2_000, 1 << 11, 6, 2_000_000),
        (legacy, 288, 1 << 14, 4, 512_000),
        (legacy, 2_000, 1 << 11, 4, 2_000_000),
        (save_safetensors, 288, 1 << 14, 2, 512_000),
        (zipped, 5_000, 32, 2, 8 << 20),
        (legacy, 5_000, 32, 2, 8 << 20),
        (save_safetensors, 5_000, 32, 2, 8 << 20),
    ],
)
def test_an_index_takes_few_requests(
    save: Callable[[dict[str, torch.Tensor]], bytes], count: int, numel: int, most: int, nbytes: int
) -> None:
    data = save(tensors(count, numel))
    with serving({"/x": data}) as server:
        far = opened(server)

        assert len(server.requests) <= most, server.requests
        assert server.sent <= nbytes
    with open_checkpoint(data) as near:
        assert list(far) == list(near.tensors)
        for name, one in near.tensors.items():
            dtype, shape, storage = far[name]
            assert (dtype, shape) == (one.dtype, one.shape)
            assert one.info.storage is not None
            assert (storage.offset, storage.nbytes) == (one.info.storage.offset, one.info.storage.nbytes)


def test_what_is_quantised_is_said_without_values() -> None:
    """Integers without scales, which only their values tell from tables of indices: those are not read from far."""
    scaled = {"m.qweight": torch.ones(1024, 1024, dtype=torch.int8), "m.scales": torch.ones(1024)}
    loose = {f"layers.{at}.kernel{at}": torch.full((2048, 2048), -7, dtype=torch.int8) for at in range(4)}
    with serving({"/x": save_safetensors(scaled | loose)}) as server:
        with open_checkpoint(f"{server.url}/x") as found:
            asked = [one for one in server.requests if one[0] == "/x"]
            (said,) = [one.message for one in examine(found) if one.code == "CK506"]

        assert "1 of 1 weight has a scale" in said
        assert "without" not in said
        assert [one for one in server.requests if one[0] == "/x"] == asked


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.exhaustive)])
def test_many_tiny_tensors_take_two_requests(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = zipped(tensors(count, 32))
    if count < 20_000:
        monkeypatch.setattr(opening, "_WHOLE_NBYTES", len(data) - 1)
    with serving({"/x": data}) as server:
        assert len(opened(server)) == count
        assert len(server.requests) == 2
        assert server.sent == len(data)


def test_a_zip_of_larger_tensors_is_not_fetched_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    data = zipped(tensors(2_000, 512))
    monkeypatch.setattr(opening, "_WHOLE_NBYTES", len(data) - 1)
    with serving({"/x": data}) as server:
        assert len(opened(server)) == 2_000
        assert server.sent < len(data) / 2


def test_loading_fetches_each_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PIECE", 1 << 20)
    monkeypatch.setattr(parts, "PART_NBYTES", 1 << 17)
    saved = tensors(32, 1 << 17)
    with serving({"/x": save_safetensors(saved)}) as server:
        whole = load(f"{server.url}/x")
        sent = server.sent
        share = load(f"{server.url}/x", shard={"*": (0, 1, 4)})
        of_share = server.sent - sent

    assert all(torch.equal(one, saved[name]) for name, one in whole.items())
    assert all(torch.equal(one, saved[name].chunk(4)[1]) for name, one in share.items())
    assert sent < 1.1 * (16 << 20)
    assert of_share < 1.2 * (4 << 20)


@pytest.mark.parametrize(("numel", "part_nbytes"), [(1 << 13, 1 << 14), (1 << 14, 1 << 15)])
def test_a_zip_of_tensors_larger_than_a_part_is_fetched_once(
    numel: int, part_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was fetched with the index, or too early, does not make those ahead of it seem to be read."""
    monkeypatch.setattr(parts, "PART_NBYTES", part_nbytes)
    data = zipped(tensors(288, numel))
    with serving({"/x": data}) as server:
        assert len(load(f"{server.url}/x")) == 288
        assert server.sent < 1.01 * len(data)


@pytest.mark.parametrize("save", [zipped, legacy, save_safetensors])
def test_payloads_are_those_that_were_saved(save: Callable[[dict[str, torch.Tensor]], bytes]) -> None:
    wanted = tensors(200, NUMEL)
    with serving({"/x": save(wanted)}) as server, open_checkpoint(f"{server.url}/x") as found:
        found.announce(found.tensors.values())
        for name, tensor in wanted.items():
            assert found.tensors[name].read() == tensor.numpy().tobytes()
        assert len(server.requests) < 8


@pytest.mark.parametrize("save", [zipped, legacy])
def test_what_was_not_compared_is_noted_until_it_was(save: Callable[[dict[str, torch.Tensor]], bytes]) -> None:
    with serving({"/x": save(tensors(200, NUMEL))}) as server, open_checkpoint(f"{server.url}/x") as found:
        (note,) = [one.message for one in examine(found) if one.code == "CK170"]
        assert any(f"{count} " in note for count in (200, 201, 202, 203, 204))
        found.announce(found.tensors.values())
        for tensor in found.tensors.values():
            tensor.read()
        left = [one.message for one in examine(found) if one.code == "CK170"]
        assert not left or "200" not in left[0]


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_local_header_and_a_size_that_disagree_are_met_with_their_payload(is_zip: bool) -> None:
    data = bytearray(LARGE if is_zip else legacy(tensors(200, NUMEL)))
    with open_checkpoint(bytes(data)) as near:
        storage = near.tensors["layers.150.weight"].info.storage
        assert storage is not None
    at = data.index(b"data/150") if is_zip else storage.offset - 8
    data[at : at + 8] = b"data/151" if is_zip else b"\7" + bytes(data[at + 1 : at + 8])
    error, says = (AmbiguousFile, "disagree") if is_zip else (MalformedFile, "the tree says")
    with pytest.raises(error, match=says):
        open_checkpoint(bytes(data))
    with serving({"/x": bytes(data)}) as server, open_checkpoint(f"{server.url}/x") as found:
        found.tensors["layers.149.weight"].read()
        with pytest.raises(error, match=says):
            found.tensors["layers.150.weight"].read()
