"""What is peculiar to the tars of PyTorch 0.1: tensors and storages in tables of their own."""

from __future__ import annotations

import warnings
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from ckptool import Checkpoint, CkptoolError, TruncatedFile, open_checkpoint
from tests import build
from tests.each import each

FLOATS = build.floats(6)


def storage(
    key: Any = 1, data: bytes = FLOATS, *, cls: str = "FloatStorage", location: Any = "cpu", numel: Any = None
) -> bytes:
    named = build.pickled((key, location, build.named("torch", cls)))
    return named + pack("<q", len(data) // 4 if numel is None else numel) + data


def tensor(key: Any, of: Any, *numbers: int, ndim: int | None = None) -> bytes:
    """Return a row of the table; ``numbers`` are sizes, strides and the offset."""
    named = build.pickled((key, of, build.named("torch", "FloatTensor")))
    return named + pack(f"<i4x{len(numbers)}q", len(numbers) // 2 if ndim is None else ndim, *numbers)


def packed(
    storages: list[bytes], tensors: list[bytes], tree: Any, *, views: Any = (), counts: tuple[Any, Any] | None = None
) -> bytes:
    many, few = counts or (len(storages), len(tensors))
    return build.tar_file(
        {
            "sys_info": build.pickled({"protocol_version": 1000, "little_endian": True}),
            "pickle": build.pickled(tree),
            "tensors": build.pickled(few) + b"".join(tensors),
            "storages": build.pickled(many) + b"".join(storages) + build.pickled(list(views)),
        }
    )


def reference(key: Any) -> bytes:
    return build.ops(key) + b"Q"


def opened(*parts: Any, **more: Any) -> Checkpoint:
    return open_checkpoint(packed(*parts, **more))


def test_tensors_read_as_torch_reads_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")  # its helpers are of use without it
    from tests.against_torch import oracle

    storages = [storage(1), storage(2, b"\1\0\2\0", cls="ShortStorage", numel=2)]
    tensors = [
        tensor(10, 1, 2, 3, 3, 1, 0),
        tensor(11, 1, 3, 2, 1, 3, 0),
        tensor(12, 1, 2, 1, 4),
        tensor(13, 2, 2, 1, 0).replace(b"FloatTensor", b"ShortTensor"),
    ]
    tree = {"plain": reference(10), "turned": reference(11), "part": reference(12), "short": reference(13), "n": 5}
    path = tmp_path / "old.pth"
    path.write_bytes(packed(storages, tensors, tree))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch.load(path, weights_only=False)

    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "torch_tar"
        oracle.assert_same(checkpoint, {name: value for name, value in expected.items() if name != "n"})


@pytest.mark.parametrize(("offset", "numel"), [(0, 6), (0, 1), (5, 1), (6, 0)])
def test_a_view_may_reach_to_both_ends_of_its_storage(offset: int, numel: int) -> None:
    views = [(2, 1, offset, numel)]

    found = opened([storage(1)], [tensor(10, 2, numel, 1, 0)], {"w": reference(10)}, views=views)
    assert found.tensors["w"].read() == FLOATS[4 * offset :][: 4 * numel]


def test_tensors_of_one_storage_share_it() -> None:
    tensors = [tensor(10, 1, 6, 1, 0), tensor(11, 1, 3, 2, 0)]

    found = opened([storage()], tensors, {"a": reference(10), "b": reference(11), "c": reference("11")}).tensors
    assert found["a"].info.storage == found["b"].info.storage
    assert found["b"].info is found["c"].info


def test_locations_are_reported() -> None:
    found = opened([storage(location="cuda:2")], [tensor(10, 1, 6, 1, 0)], {"w": reference(10)})

    assert found.tensors["w"].info.location == "cuda:2"


ROW = [tensor(10, 1, 6, 1, 0)]
FLOAT = build.named("torch", "FloatStorage")
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    **{
        f"the counts {counts}": (([storage()], ROW), {"counts": counts})
        for counts in ((-1, 1), (1, -1), (1 << 60, 1), (1, 1 << 60), ("1", 1), (1, None), (True, 1), (2, 1), (1, 2))
    },
    **{f"{ndim} dimensions": (([storage()], [tensor(10, 1, 6, 1, 0, ndim=ndim)]), {}) for ndim in (-1, 2, 65, 1 << 30)},
    **{f"{numel} elements": (([storage(numel=numel)], ROW), {}) for numel in (-1, 7, 1 << 40, 1 << 62)},
    **{
        f"sizes, strides and offset {numbers}": (([storage()], [tensor(10, 1, *numbers)]), {})
        for numbers in ((7, 1, 0), (6, 2, 0), (6, 1, 1), (-6, 1, 0), (6, -1, 0), (1, 1, -1))
    },
    **{f"the storage {of!r}": (([storage()], [tensor(10, of, 6, 1, 0)]), {}) for of in (2, "2", None, True)},
    **{
        f"the view {view}": (([storage()], []), {"views": [view]})
        for view in (
            (2, 9, 0, 1),
            (2, 1, 0, 7),
            (2, 1, -1, 2),
            (2, 1, 5, 2),
            (2, 1),
            5,
            (None, 1, 0, 1),
            (2, 1, 0.5, 1),
        )
    },
    **{
        f"the entry {number}": (([build.pickled(entry) + pack("<q", 0)], []), {})
        for number, entry in enumerate((5, (1, "cpu"), (1, 5, FLOAT), (None, "cpu", FLOAT)))
    },
}


@each("name", REFUSED)
def test_tables_that_lie_are_refused(name: str) -> None:
    tables, more = REFUSED[name]
    with pytest.raises(CkptoolError):
        opened(*tables, {"w": reference(10)}, **more)


def test_a_storage_larger_than_the_table_is_truncated() -> None:
    with pytest.raises(TruncatedFile) as caught:
        opened([storage(numel=1 << 40)], [], {})
    assert caught.value.kind == "truncated-tar"


def test_references_to_nothing_are_no_tensors() -> None:
    found = opened([storage()], [], {"a": reference(77), "b": reference(1), "c": reference(None)})

    assert not found.tensors


def test_sources_of_classes_are_kept() -> None:
    cls = build.ops((build.named("model", "RNN"), "/home/x/model.py", "class RNN: ...")) + b"Q"
    node = cls + b")\x81" + build.ops({"size": 5}) + b"b"

    (source,) = opened([], [], {"model": node}).class_sources
    assert (source.name, source.path, source.text) == ("model.RNN", "/home/x/model.py", "class RNN: ...")
