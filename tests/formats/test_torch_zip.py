"""What is peculiar to ``torch.save``'s zip: its root folder, its storages, and what may be wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from ckptool import (
    Checkpoint,
    MalformedFile,
    open_checkpoint,
)
from tests import build, zip_bytes
from tests.each import each
from tests.formats.said import refused
from tests.scale import in_turn

TREE = {"w": build.tensor(build.storage())}
FLOATS = build.floats()


def members(root: str = "archive/", tree: Any = None, **more: bytes) -> dict[str, bytes]:
    return {f"{root}data.pkl": build.pickled(TREE if tree is None else tree), f"{root}data/0": FLOATS, **more}


def opened(tree: Any, storages: dict[str, bytes] | None = None) -> Checkpoint:
    return open_checkpoint(build.torch_zip(tree, {"0": FLOATS} if storages is None else storages))


@each("root", ["archive/", "my.model.v2/", "x.pth/", "модель/", "a b/", "deep/er/", ""])
def test_the_root_is_whatever_stands_in_front_of_the_pickle(root: str) -> None:
    names = members(root)
    data = zip_bytes.whole([zip_bytes.stored(name, data, flags=0x800) for name, data in names.items()])

    checkpoint = open_checkpoint(data)
    assert checkpoint.format == "torch_zip"
    assert checkpoint.tensors["w"].read() == FLOATS
    assert len(checkpoint.notes) == (1 if root in ("deep/er/", "") else 0)


def test_two_trees_beside_each_other_are_no_torch_zip() -> None:
    data = build.zip_file({**members("a/"), **members("b/")})

    refused(data)


@each(
    "files",
    [
        {"archive/extra/data.pkl": build.pickled({"other": 1}), **members()},
        dict(reversed(members().items())),
        members(**{"archive/data/9": b"left over", "archive/.data/serialization_id": b"1" * 40}),
        *(members(**{"archive/version": one}) for one in (b"1", b"2\n", b"3\n", b"10", b"", b"three", b"-1")),
    ],
)
def test_other_members_their_order_and_old_or_unreadable_versions_are_no_harm(files: dict[str, bytes]) -> None:
    found = open_checkpoint(build.zip_file(files)).tensors
    assert (list(found), found["w"].read()) == (["w"], FLOATS)


def test_keys_may_be_numbers() -> None:
    assert opened({"w": build.tensor(build.storage(0))}).tensors["w"].read() == FLOATS


def test_an_untyped_storage_counts_bytes() -> None:
    stored = build.ops(("storage", build.named("torch.storage", "UntypedStorage"), "0", "cpu", 16)) + b"Q"
    hooks = build.call(build.named("collections", "OrderedDict"))
    node = build.call(
        build.named("torch._utils", "_rebuild_tensor_v3"),
        stored,
        1,
        (3,),
        (2,),
        False,
        hooks,
        build.named("torch", "uint16"),
    )

    found = opened({"w": node}).tensors["w"]
    assert (str(found.info.dtype), found.read()) == ("uint16", FLOATS[2:4] + FLOATS[6:8] + FLOATS[10:12])


def test_storage_classes_are_known_by_their_name_alone() -> None:
    stored = build.ops(("storage", build.named("torch.cuda", "FloatStorage"), "0", "cuda:1", 4)) + b"Q"

    found = opened({"w": build.tensor(stored)}).tensors["w"]
    assert (found.info.location, found.read()) == ("cuda:1", FLOATS)


@each(("nbytes", "where"), in_turn([0, 1, 15, 17, 32], ["stored", "deflated"]))
def test_a_record_of_another_size_is_told_of_with_both_numbers(nbytes: int, where: str) -> None:
    pack_member = getattr(zip_bytes, where)
    tree = build.pickled(TREE)
    data = zip_bytes.whole([zip_bytes.stored("x/data.pkl", tree), pack_member("x/data/0", bytes(nbytes))])

    caught = refused(data, MalformedFile)
    assert (caught.kind, caught.needed, caught.actual) == ("storage-size", 16, nbytes)


def test_a_compressed_storage_has_no_place_in_the_file() -> None:
    tree = build.pickled(TREE)
    data = zip_bytes.whole([zip_bytes.deflated("x/data.pkl", tree), zip_bytes.deflated("x/data/0", FLOATS)])

    found = open_checkpoint(data).tensors["w"]
    assert found.info.storage is not None
    assert found.info.storage.file_offset is None
    assert found.read() == FLOATS


def test_a_damaged_compressed_storage_is_told_of_when_it_is_read() -> None:
    storage = zip_bytes.deflated("x/data/0", FLOATS, crc32=1)
    data = zip_bytes.whole([zip_bytes.stored("x/data.pkl", build.pickled(TREE)), storage])

    with pytest.raises(MalformedFile) as caught:
        open_checkpoint(data).tensors["w"].read()
    assert caught.value.kind == "damaged-record"
