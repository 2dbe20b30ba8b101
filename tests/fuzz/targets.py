"""Readers, one by one, as a fuzzer calls them: each takes any bytes, and may end in an error of ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ckptool.errors import CkptoolError
from ckptool.limits import Limits
from ckptool.sources.source import BytesSource
from tests import build
from tests.fuzz.mutants import seeds
from tests.hostile.cases import headers
from tests.hostile.cases.zips import SOUND
from tests.zip_bytes import whole

LIMITS = Limits(inflated_nbytes=1 << 20, expanded_nbytes=1 << 20)


def pickle(data: bytes) -> None:
    """The interpreter of pickles, alone."""
    from ckptool.pickles.reader import read_pickle

    read_pickle(BytesSource(data))


def zip_index(data: bytes) -> None:
    """The directory of a zip, and its members."""
    from ckptool.archives.zips import read_zip

    archive = read_zip(BytesSource(data), LIMITS)
    for name in archive:
        archive.open(name)


def legacy(data: bytes) -> None:
    """A stream of pickles and storages."""
    _open(data if data.startswith(STREAM) else STREAM + data)


def header(data: bytes) -> None:
    """The header of a safetensors file; its length is made to fit."""
    _open(len(data).to_bytes(8, "little") + data + bytes(8))


def _open(data: bytes) -> None:
    from ckptool.formats import open_checkpoint

    with open_checkpoint(data, limits=LIMITS) as checkpoint:
        for tensor in checkpoint.tensors.values():
            tensor.read(limits=LIMITS)


STREAM = build.legacy(None)[: len(build.pickled(build.MAGIC_NUMBER)) + len(build.pickled(1001))]
TARGETS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "pickle": (pickle, [build.pickled({"w": build.tensor(build.storage())}), build.pickled(build.inline_tensor())]),
    "zip": (zip_index, [whole(SOUND), whole(SOUND, zip64=True), *(data for data in seeds() if data[:2] == b"PK")]),
    "legacy": (legacy, [data for data in seeds() if data.startswith(STREAM)]),
    "header": (header, [text.encode() for text in headers.ACCEPTED.values()]),
}


def one(target: Callable[[bytes], None], data: bytes) -> None:
    """Run a target on one input; an error of ours is what it is for."""
    with suppress(CkptoolError):
        target(data)
