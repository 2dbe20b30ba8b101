"""What the file of a rank says of a DTensor, sound and not: whole, refused with the reason, or malformed."""

from __future__ import annotations

from functools import partial
from struct import pack
from typing import Any

import pytest

from ckptool import Limits, MalformedFile, open_checkpoint
from ckptool.formats import torch_legacy
from ckptool.formats.directories.rank_files import parts as dtensors
from ckptool.formats.directories.rank_files.parts import Found, distributed_in
from ckptool.tensors.rebuild import Rebuilder
from tests.build import call, inline_tensor, legacy, named, ops, pickled, raw, storage, tensor
from tests.each import each

PLACEMENTS = "torch.distributed.tensor.placement_types"
LAYOUT = {"shape": (2,), "stride": (1,)}


def made(module: str, name: str, **attributes: Any) -> bytes:
    return named(module, name) + b")\x81" + ops(attributes) + b"b"


def shard(dim: Any = 0) -> bytes:
    return made(PLACEMENTS, "Shard", dim=dim)


BY_ROWS = (shard(),)


def mesh(layout: Any = LAYOUT, **fields: Any) -> bytes:
    said = made("torch.distributed._mesh_layout", "_MeshLayout", **layout) if isinstance(layout, dict) else layout
    own = {"_rank": 1, "_coordinate_on_dim": (1,)} | fields
    return made("torch.distributed.device_mesh", "DeviceMesh", _layout=said, **own)


def dtensor(
    shape: Any = (8,),
    placements: Any = BY_ROWS,
    on: bytes | None = None,
    local: Any = None,
    meta: Any = None,
    **spec: Any,
) -> bytes:
    """Return the opcodes of a part of four float32, that of the second of two ranks unless told otherwise."""
    facts = call(named("torch.distributed.tensor._dtensor_spec", "TensorMeta"), shape, (1,), named("torch", "float32"))
    fields = {
        "mesh": mesh() if on is None else on,
        "placements": placements,
        "tensor_meta": facts if meta is None else meta,
    }
    state = {
        "_local_tensor": inline_tensor() if local is None else local,
        "_spec": made("torch.distributed.tensor._dtensor_spec", "DTensorSpec", **(fields | spec)),
    }
    kind = named("torch.distributed.tensor", "DTensor")
    return call(named("torch._tensor", "_rebuild_from_type_v2"), named("torch._utils", "f"), kind, (), state)


def found_in(tree: Any) -> list[Found]:
    rebuilder = Rebuilder(nested=partial(torch_legacy.nested_storage, limits=Limits()))
    with open_checkpoint(pickled(tree)) as checkpoint:
        return list(distributed_in(checkpoint.root, rebuilder, None))


def why_not(tree: bytes) -> str | None:
    (found,) = found_in({"w": tree})
    return found.part.why_not


def test_parts_are_found_in_lists_in_parameters_and_under_two_names() -> None:
    parameter = call(named("torch._utils", "_rebuild_parameter"), dtensor(), True, ())
    again, kept = b"h\5", b"]q\6(h\5e"
    tree = {"c": dtensor() + b"q\5", "d": again, "a": [parameter, again], "b": kept, "e": b"h\6"}

    assert [one.name for one in found_in(tree)] == ["c", "d", "a.0", "a.1", "b.0"]


def test_other_calls_are_no_parts() -> None:
    assert found_in({"a": dtensor().replace(b"torch.distributed.tensor\nDTensor", b"my.tensors\nDTensor")}) == []
    assert (
        found_in({"a": dtensor().replace(b"torch.distributed.tensor\nDTensor", b"torch.distributed.tensor\nOther")})
        == []
    )
    text = call(named("torch._tensor", "_rebuild_from_type_v2"), named("torch._utils", "f"), "DTensor", (), {})
    assert found_in({"a": text, "b": call(named("builtins", "set"), [1])}) == []


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (dtensor(local=3), "without its part"),
        (dtensor(meta=None, tensor_meta=call(named("m", "TensorMeta"), (8,))), "without its part, or its facts"),
        (dtensor(meta=call(named("m", "TensorMeta"), (8,), (1,))), "without its part, or its facts"),
        (dtensor(placements="Shard(0)"), "without its placements"),
        (dtensor(placements=[shard()] * 65), "without its placements"),
        (dtensor(placements=(3,)), "placement that is none"),
        (dtensor(placements=(shard("first"),)), "placement that is none"),
        (dtensor(placements=(shard(1),)), "of 1 dimensions that is cut along number 1"),
        (dtensor(placements=(shard(-1),)), "cut along number -1"),
        (dtensor(on=mesh(_coordinate_on_dim=(2,))), r"at \[2\] of a mesh of \[2\]"),
        (dtensor(on=mesh(_coordinate_on_dim=(0, 0))), r"at \[0, 0\] of a mesh"),
        (dtensor(on=mesh(_coordinate_on_dim=())), r"at \[\] of a mesh"),
    ],
)
def test_what_contradicts_itself_is_malformed(tree: bytes, words: str) -> None:
    with pytest.raises(MalformedFile, match=words):
        found_in({"w": tree})


NOT_KNOWN = "where in the mesh its rank is, is not in the file"


@each(
    ("tree", "why"),
    [
        (dtensor(shape=(6,)), "by its placements the part has shape [3], in the file it has [4]"),
        (dtensor(placements=(made(PLACEMENTS, "_Odd"),)), "_Odd: how is not known"),
        (dtensor(placements=()), NOT_KNOWN),
        (dtensor(placements=(shard(), shard())), NOT_KNOWN),
        (dtensor(on=mesh({"shape": (2, 2), "stride": (1,)})), NOT_KNOWN),
        (dtensor(on=mesh({"shape": (2,), "stride": (1, 1)})), NOT_KNOWN),
        (dtensor(on=mesh({"shape": ((1, 2),), "stride": ((1,),)})), NOT_KNOWN),
        (dtensor(on=mesh({"shape": (2, *[1] * 64), "stride": (1,) * 65})), NOT_KNOWN),
        (dtensor(on=mesh({"shape": (-2,), "stride": (1,)})), NOT_KNOWN),
        (dtensor(on=mesh({"shape": ((1 << 20) + 1,), "stride": (1,)})), NOT_KNOWN),
        (dtensor(on=mesh(None)), NOT_KNOWN),
        (dtensor(on=mesh(call(named("m", "Layout"), 2))), NOT_KNOWN),
        (dtensor(on=mesh(_coordinate_on_dim=None)), NOT_KNOWN),
        (dtensor(on=mesh(_coordinate_on_dim=None, _rank_map=inline_tensor())), NOT_KNOWN),
        (
            dtensor(placements=(made(PLACEMENTS, "_StridedShard", dim=0, split_factor=3),)),
            "its split factor is that of no dimension of the mesh",
        ),
    ],
)
def test_what_cannot_be_put_together_says_why(tree: bytes, why: str) -> None:
    assert why_not(tree) == why


def box_of(tree: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    (found,) = found_in({"w": tree})
    assert found.part.why_not is None
    ((box, _),) = found.part.boxes
    return box


MOST: tuple[int, ...] = (2, *[1] * 63)
REPLICATE = made(PLACEMENTS, "Replicate")


DEEP = mesh({"shape": MOST, "stride": (1,) * 64}, _coordinate_on_dim=(1, *[0] * 63))
WIDE = mesh({"shape": (1 << 20,), "stride": (1,)}, _coordinate_on_dim=((1 << 20) - 1,))


@each(
    ("tree", "begin"),
    [
        (dtensor(placements=[shard(), *[REPLICATE] * 63], on=DEEP), 4),
        (dtensor(on=mesh({"shape": (MOST,), "stride": ((1,) * 64,)})), 4),
        (dtensor(shape=(4,), placements=(REPLICATE,), on=WIDE), 0),
    ],
)
def test_as_many_dimensions_and_ranks_as_there_can_be_are_understood(tree: bytes, begin: int) -> None:
    assert box_of(tree) == ((begin,), (4,))


TWO_BY_TWO = mesh({"shape": (2, 2), "stride": (2, 1)}, _coordinate_on_dim=(0, 1))


def ordered(*args: Any) -> tuple[bytes]:
    return (call(named("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"), *args),)


@each(
    ("order", "begin"),
    [
        (None, 4),
        (ordered(0, (0, 1)), 4),
        (ordered(0, (1, 0)), 8),
        (ordered((1, 0)), 4),
        (ordered(0, (1, 0), 0), 4),
        (ordered(0, (2, 0)), 4),
        (ordered(0, (3, 0)), 4),
    ],
)
def test_dimensions_of_the_mesh_cut_in_the_order_that_is_spelled_out(order: Any, begin: int) -> None:
    assert box_of(dtensor(shape=(16,), placements=(shard(), shard()), on=TWO_BY_TWO, shard_order=order)) == (
        (begin,),
        (4,),
    )


def int_tensor(*values: int) -> bytes:
    """Return a tensor of int32 in a pickle."""
    data = pack(f"<{len(values)}i", *values)
    stream = legacy(storage(numel=len(values), dtype="IntStorage", rest=(None,)), [("0", len(values), data)])
    loaded = call(named("torch.storage", "_load_from_bytes"), raw(stream))
    return tensor(loaded, (len(values),))


def test_the_place_of_a_rank_is_found_in_the_list_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(*ranks: int) -> bytes:
        return dtensor(on=mesh(_rank=5, _coordinate_on_dim=None, _rank_map=int_tensor(*ranks)))

    monkeypatch.setattr(dtensors, "MOST_RANKS", 3)  # of what a list may have

    assert box_of(tree(4, 5)) == ((4,), (4,))
    assert box_of(tree(5, 4)) == ((0,), (4,))
    assert box_of(tree(9, 5, 4)) == ((4,), (4,))
    assert why_not(tree(9, 5, 4, 3)) == NOT_KNOWN
    assert why_not(tree(9, 3)) == NOT_KNOWN
