"""Damage inside what is compressed: no verb ends in a traceback, and no changed value is accepted."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptool import CkptoolError, check, open_checkpoint
from tests.build import COMPRESSED, floats, storage, tensor, torch_zip
from tests.program import invoke
from tests.scale import times

PLAIN = torch_zip(
    {"m": {f"w{one}": tensor(storage(key=str(one))) for one in range(8)}}, {str(k): floats() for k in range(8)}
)


def deflated(data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return stream.getvalue()


PACKERS = {"a deflated zip": deflated, **COMPRESSED}
VERBS = (
    ("inspect", "{}"),
    ("check", "--deep", "--json", "{}"),
    ("stat", "{}"),
    ("diff", "{}", "{}"),
    ("migrate", "--force", "{}", "{}.safetensors"),
)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Flip a bit, cut the end off, take some bytes out, or write others over them."""
    at = rng.randrange(len(data))
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        lambda: data[:at],
        lambda: data[:at] + data[at + rng.randrange(1, 20) :],
        lambda: data[:at] + rng.randbytes(9) + data[at + 9 :],
    )
    return rng.choice(changes)()


def values(data: bytes | Path) -> dict[str, bytes]:
    with open_checkpoint(data) as checkpoint:
        return {name: checkpoint.tensors[name].numpy().tobytes() for name in checkpoint.tensors}


@pytest.mark.parametrize("packer", PACKERS)
def test_damage_in_what_is_compressed_is_an_error_and_never_another_value(packer: str, tmp_path: Path) -> None:
    data, rng = PACKERS[packer](PLAIN), random.Random(packer)
    right = values(data)
    path = tmp_path / "x"
    for number in range(times(3, 40)):
        path.write_bytes(damaged(data, rng))
        for verb in VERBS:
            result = invoke([word.replace("{}", str(path)) for word in verb])
            assert result.exception is None or isinstance(result.exception, SystemExit), (packer, number, verb)
            assert "Traceback" not in result.output
        try:
            found = values(path)
        except CkptoolError:
            continue
        assert found == right or check(path, deep=True).worst == "error", (packer, number)
