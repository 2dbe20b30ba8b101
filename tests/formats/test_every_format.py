"""What every format promises, whichever it is; a new one in ``formats_in_order()`` needs a row in ``EXAMPLES``."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from ckptool import Checkpoint, CkptoolError, TruncatedFile, open_checkpoint
from ckptool.formats import formats_in_order
from tests import build
from tests.formats import test_pt2 as exported
from tests.formats import test_torch_tar as old
from tests.formats.said import refused
from tests.scale import step

SHAPE = (1024, 1024)
NUMEL = 1024 * 1024  # 4 MiB of float32
LARGE = random.Random(7).randbytes(4 * NUMEL)


class Example(NamedTuple):
    data: bytes
    names: list[str]
    tied: bool = True
    """Whether the first two tensors share memory, as they do where the format can say so."""
    index_only: bool = True
    """Whether tensors lie outside of what must be read to find them."""
    beside: Mapping[str, bytes] = MappingProxyType({})
    """Files that belong to it, and so stand in its folder: then it is no checkpoint without one."""
    file: str = "model.pth"
    """A usual name of such a file, by which it is found in a folder."""


def tree(storage: Callable[..., bytes]) -> dict[str, object]:
    large, small = storage("0", NUMEL), storage("1", 4)
    return {
        "whole": build.tensor(large, SHAPE, (1024, 1)),
        "turned": build.tensor(large, SHAPE, (1, 1024)),
        "small": build.tensor(small, (2, 2), (2, 1)),
        "epoch": 7,
    }


NAMES = ["whole", "turned", "small"]


def legacy_storage(key: str, numel: int) -> bytes:
    return build.storage(key, numel, rest=(None,))


def torch_zip() -> bytes:
    return build.torch_zip(tree(build.storage), {"0": LARGE, "1": build.floats()})


def torch_legacy() -> bytes:
    return build.legacy(tree(legacy_storage), [("0", NUMEL, LARGE), ("1", 4, build.floats())])


def torchscript() -> bytes:
    parameters = {name: node for name, node in tree(build.storage).items() if name != "epoch"}
    code = 'class Net(Module):\n  __parameters__ = ["whole", "turned", "small", ]\n  __buffers__ = []\n'
    root = build.named("__torch__", "Net") + b")\x81" + build.ops({"training": True, **parameters}) + b"b"
    return build.torch_zip(
        root, {"0": LARGE, "1": build.floats()}, members={"archive/code/__torch__.py": code.encode()}
    )


def pt2() -> bytes:
    def entry(path: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> dict[str, Any]:
        sizes, strides = ([{"as_int": number} for number in numbers] for numbers in (shape, stride))
        return exported.entry(path_name=path, tensor_meta=exported.meta(sizes=sizes, strides=strides))

    config = {
        "whole": entry("weight_0", SHAPE, (1024, 1)),
        "turned": entry("weight_0", SHAPE, (1, 1024)),
        "small": entry("weight_1", (2, 2), (2, 1)),
    }
    return exported.program(config, **{"data/weights/weight_0": LARGE, "data/weights/weight_1": build.floats()})


def torchscript_json() -> bytes:
    def entry(key: str, *numbers: int) -> dict[str, Any]:
        half = len(numbers) // 2
        return {
            "dims": list(map(str, numbers[:half])),
            "strides": list(map(str, numbers[half:])),
            "dataType": "FLOAT",
            "data": {"key": key},
            "device": "cpu",
        }

    tensors = [entry("t/0", *SHAPE, 1024, 1), entry("t/0", *SHAPE, 1, 1024), entry("t/1", 2, 2, 2, 1)]
    module = {"name": "m", "parameters": [{"name": name, "tensorId": str(at)} for at, name in enumerate(NAMES)]}
    index = json.dumps({"mainModule": module, "tensors": tensors}).encode()
    return build.zip_file({"m/version": b"1\n", "m/t/0": LARGE, "m/t/1": build.floats(), "m/model.json": index})


def safetensors() -> bytes:
    header = {
        "whole": {"dtype": "F32", "shape": SHAPE, "data_offsets": [0, len(LARGE)]},
        "small": {"dtype": "F32", "shape": [2, 2], "data_offsets": [len(LARGE), len(LARGE) + 16]},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + LARGE + build.floats()


def torch_tar() -> bytes:
    numbers = ((1, *SHAPE, 1024, 1, 0), (1, *SHAPE, 1, 1024, 0), (2, 2, 2, 2, 1, 0))
    return old.packed(
        [old.storage(1, LARGE), old.storage(2, build.floats())],
        [old.tensor(key, *of) for key, of in enumerate(numbers, 5)],
        {name: old.reference(str(key)) for key, name in enumerate(NAMES, 5)},
    )


def pickle() -> bytes:
    large = build.legacy(build.storage("0", NUMEL, rest=(None,)), [("0", NUMEL, LARGE)])
    small = build.legacy(build.storage("0", 4, rest=(None,)), [("0", 4, build.floats())])

    def stored(stream: bytes) -> bytes:
        return build.call(build.named("torch.storage", "_load_from_bytes"), build.raw(stream))

    return build.pickled(
        {
            "whole": build.tensor(stored(large), SHAPE, (1024, 1)),
            "small": build.tensor(stored(small), (2, 2), (2, 1)),
        }
    )


def sharded() -> tuple[bytes, dict[str, bytes]]:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = build.index_of_shards({"whole": second, "small": first}, total_size=len(LARGE) + 16)
    return index, {first: build.safetensors({"small": build.floats()}), second: build.safetensors({"whole": LARGE})}


EXAMPLES: dict[str, Example] = {
    "safetensors": Example(safetensors(), ["whole", "small"], tied=False, file="model.safetensors"),
    "torchscript": Example(torchscript(), NAMES, file="model.pt"),
    "torch_zip": Example(torch_zip(), NAMES),
    "pt2": Example(pt2(), NAMES, file="model.pt2"),
    "torchscript_json": Example(torchscript_json(), NAMES),
    "torch_legacy": Example(torch_legacy(), NAMES),
    "torch_tar": Example(torch_tar(), NAMES, file="model.t7"),
    "packed": Example(build.zip_file({"notes.txt": b"hello", "policy.pth": torch_zip()}), NAMES, file="model.zip"),
    "pickle": Example(pickle(), ["whole", "small"], tied=False, index_only=False, file="model.pkl"),
    "sharded": Example(
        sharded()[0], ["whole", "small"], tied=False, beside=sharded()[1], file="model.safetensors.index.json"
    ),
}
ALONE = [name for name, example in EXAMPLES.items() if not example.beside]

every_format = pytest.mark.parametrize("name", EXAMPLES)


FOLDER = TemporaryDirectory(prefix="ckptool-")


def put(name: str, folder: Path, data: bytes | None = None, file: str = "x") -> Path:
    """Write an example, or other bytes in its place, and what belongs beside it; return its path."""
    for other, shard in EXAMPLES[name].beside.items():
        (folder / other).write_bytes(shard)
    (folder / file).write_bytes(EXAMPLES[name].data if data is None else data)
    return folder / file


def at(name: str) -> Path:
    """Return where an example stands, which no test changes."""
    folder = Path(FOLDER.name, name)
    if folder.exists():
        return folder / "x"
    folder.mkdir()
    return put(name, folder)


def opened(name: str) -> Checkpoint:
    return open_checkpoint(at(name) if EXAMPLES[name].beside else EXAMPLES[name].data)


def test_every_format_has_an_example() -> None:
    assert [module.NAME for module in formats_in_order()] == list(EXAMPLES)


class Counting(io.BytesIO):
    """Counts the bytes that are asked for."""

    total = 0

    def read(self, nbytes: int | None = -1) -> bytes:
        found = super().read(nbytes)
        self.total += len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self.total += count
        return count


@pytest.mark.parametrize("name", [name for name in ALONE if EXAMPLES[name].index_only])
def test_reading_the_index_reads_no_tensor(name: str) -> None:
    stream = Counting(EXAMPLES[name].data)
    open_checkpoint(stream)

    assert 0 < stream.total < len(EXAMPLES[name].data) / 10


@every_format
def test_nothing_can_be_set_after_opening(name: str) -> None:
    checkpoint = opened(name)
    before = dict(vars(checkpoint))

    for attribute in (*before, "something_new"):
        with pytest.raises(AttributeError, match=attribute):
            setattr(checkpoint, attribute, None)
    assert vars(checkpoint) == before


@every_format
def test_the_first_to_recognise_a_file_is_its_own_format(name: str) -> None:
    checkpoint = opened(name)

    assert checkpoint.format == {"packed": "torch_zip", "sharded": "safetensors"}.get(name, name)
    assert checkpoint.member == ("policy.pth" if name == "packed" else None)


@every_format
def test_tensors_have_the_size_that_they_say_and_the_bytes_of_the_file(name: str) -> None:
    tensors = opened(name).tensors

    assert list(tensors) == EXAMPLES[name].names
    for key, tensor in tensors.items():
        assert (tensor.name, len(tensor.read())) == (key, tensor.info.nbytes)
    assert tensors["whole"].read() == LARGE
    assert tensors["small"].read() == build.floats()
    if "turned" in tensors:
        turned = tensors["turned"].read()
        numbers = memoryview(LARGE).cast("I")
        assert all(turned[4096 * row :][:4096] == numbers[row::1024].tobytes() for row in range(1024))


@every_format
def test_memory_that_is_shared_stays_shared(name: str) -> None:
    tensors = opened(name).tensors
    storages = [tensor.info.storage for tensor in tensors.values()]

    assert len(set(storages)) == 2
    if EXAMPLES[name].tied:
        assert tensors["whole"].info.storage == tensors["turned"].info.storage


@every_format
def test_bytes_stand_in_the_file_where_it_is_said(name: str) -> None:
    checkpoint = opened(name)
    for tensor in checkpoint.tensors.values():
        storage = tensor.info.storage
        assert storage is not None
        assert (storage.file_offset is not None) == EXAMPLES[name].index_only
        if storage.file_offset is not None:
            example = EXAMPLES[name]
            data = example.beside[checkpoint.shard_of[tensor.name]] if example.beside else example.data
            assert data[storage.file_offset :][: storage.nbytes] == storage.source.read(storage.offset, storage.nbytes)


@pytest.mark.parametrize("name", ALONE)
def test_paths_bytes_and_streams_give_the_same(name: str, tmp_path: Path) -> None:
    data = EXAMPLES[name].data
    path = tmp_path / "any.thing"
    path.write_bytes(data)

    found = []
    for origin in (path, str(path), data, io.BytesIO(data)):
        with open_checkpoint(origin) as checkpoint:
            infos = [tensor.info._replace(storage=None) for tensor in checkpoint.tensors.values()]
            found.append((checkpoint.format, checkpoint.form, checkpoint.file_nbytes, infos))
    assert found[0] == found[1] == found[2] == found[3]


@every_format
def test_the_file_is_left_as_it_is(name: str, tmp_path: Path) -> None:
    path = put(name, tmp_path)
    path.chmod(0o400)
    before, entries = path.stat(), sorted(tmp_path.iterdir())

    with open_checkpoint(path) as checkpoint:
        for tensor in checkpoint.tensors.values():
            tensor.read()
    after = path.stat()
    assert path.read_bytes() == EXAMPLES[name].data
    assert (after.st_mtime_ns, after.st_ctime_ns, after.st_mode) == (
        before.st_mtime_ns,
        before.st_ctime_ns,
        before.st_mode,
    )
    assert sorted(tmp_path.iterdir()) == entries
    assert all((tmp_path / file).read_bytes() == data for file, data in EXAMPLES[name].beside.items())


@every_format
def test_a_folder_with_one_file_of_its_usual_name_is_opened(name: str, tmp_path: Path) -> None:
    put(name, tmp_path, file=EXAMPLES[name].file)
    (tmp_path / "notes.txt").write_text("of this run")

    assert list(open_checkpoint(tmp_path).tensors) == EXAMPLES[name].names


@every_format
def test_half_a_file_is_truncated_and_the_error_has_its_path(name: str, tmp_path: Path) -> None:
    data = EXAMPLES[name].data
    path = put(name, tmp_path, data[: len(data) // 2], "half.pth")

    caught = refused(path, TruncatedFile)
    assert caught.path == str(path)
    assert caught.actual is not None


@every_format
def test_cut_anywhere_a_file_is_an_error_or_gives_the_right_bytes(name: str, tmp_path: Path) -> None:
    data = EXAMPLES[name].data
    source = random.Random(name)
    cuts = (
        {source.randrange(len(data)) for _ in range(40)}
        | set(range(0, 2000, 61))
        | {len(data) - n for n in range(1, 1600, 53)}
    )
    right = {key: tensor.read() for key, tensor in opened(name).tensors.items()}

    for length in sorted(cuts)[:: step(3)]:
        cut = put(name, tmp_path, data[:length]) if EXAMPLES[name].beside else data[:length]
        try:
            with open_checkpoint(cut) as checkpoint:
                found = {key: tensor.read() for key, tensor in checkpoint.tensors.items()}
        except CkptoolError:
            continue
        assert found.items() <= right.items(), length


@pytest.mark.parametrize("name", [name for name in ALONE if name != "packed"])
def test_nothing_in_it_is_lost_by_opening_it_as_a_member(name: str) -> None:
    outer = build.zip_file({"a/readme": b"x", "a/model.bin": EXAMPLES[name].data})

    for found in (open_checkpoint(outer), open_checkpoint(build.tar_file({"model.bin": EXAMPLES[name].data}))):
        assert list(found.tensors) == EXAMPLES[name].names
        assert found.tensors["whole"].read() == LARGE
