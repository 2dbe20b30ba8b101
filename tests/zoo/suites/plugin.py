"""A plugin of pytest: it wraps what saves and loads, and reports at the end."""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

import ckptool
from ckptool.loading.custom_loading import model_on
from ckptool.loading.memory.placement import CPU
from tests.zoo import truth
from tests.zoo.compare import _contents
from tests.zoo.suites.tally import Tally

FILES, MODELS = Tally("files"), Tally("models filled")
TORCH_SAVE, TORCH_LOAD = torch.save, torch.load
LOAD_STATE_DICT = torch.nn.Module.load_state_dict
TLS = torch.serialization._serialization_tls
"""What ``torch.serialization.skip_data`` sets while a test is inside it."""
LARGEST = 100 << 20
"""Bytes of a file that is looked at."""
_seen: set[bytes] = set()
_busy = False


def watched(function: Callable[[], None]) -> None:
    """Compare, unless this is a comparison already; nothing that goes wrong here may reach the test."""
    global _busy
    if _busy:
        return
    _busy = True
    state = torch.get_rng_state()
    skips, TLS.skip_data = TLS.skip_data, False
    try:
        with warnings.catch_warnings(), unset_fake_temporarily():
            warnings.simplefilter("ignore")
            function()
    finally:
        TLS.skip_data = skips
        torch.set_rng_state(state)
        _busy = False


def _bytes(file: Any, begin: int = 0) -> bytes | None:
    """Return what is in a file that was saved or is to be loaded, without moving in it."""
    if isinstance(file, bytes | bytearray):
        return bytes(file)
    if isinstance(file, str | os.PathLike):
        path = Path(file)
        return path.read_bytes() if path.is_file() and path.stat().st_size <= LARGEST else None
    if isinstance(file, io.BytesIO):
        return file.getvalue()[begin:]
    return None


def _compare_file(data: bytes | None, read: Callable[[bytes], Any]) -> None:
    if data is None or hashlib.sha1(data).digest() in _seen:
        return
    _seen.add(hashlib.sha1(data).digest())
    try:
        there = truth.named(read(data))
    except Exception as error:  # noqa: BLE001 - files that torch itself does not open
        FILES.skipped[f"torch: {type(error).__name__}"] += 1
        return
    try:
        with ckptool.open_checkpoint(data) as checkpoint:
            ours = dict(_contents(checkpoint))
    except ckptool.CkptoolError as error:
        FILES.refuse(error)
        return
    except Exception as error:  # noqa: BLE001 - a mistake of ours
        FILES.differ(f"open raised {type(error).__name__}: {error}")
        return
    values = set(ours.values())
    lost = [name for name, one in there.items() if one not in values]
    if lost:
        FILES.differ(f"{len(lost)} of {len(there)} tensors: {lost[:3]} {there[lost[0]].dtype}")
    else:
        FILES.equal += 1


def _torch_read(data: bytes) -> Any:
    return TORCH_LOAD(io.BytesIO(data), map_location="cpu", weights_only=False)


def _save(obj: Any, f: Any, *arguments: Any, **options: Any) -> Any:
    begin = f.tell() if isinstance(f, io.BytesIO) else 0
    result = TORCH_SAVE(obj, f, *arguments, **options)
    watched(lambda: _compare_file(_bytes(f, begin), _torch_read))
    return result


def _load(f: Any, *arguments: Any, **options: Any) -> Any:
    watched(lambda: _compare_file(_bytes(f, f.tell() if isinstance(f, io.BytesIO) else 0), _torch_read))
    return TORCH_LOAD(f, *arguments, **options)


def _filled(self: torch.nn.Module, state_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
    strict = options.get("strict", arguments[0] if arguments else True)
    # load_into copies into the memory of the model, and makes memory where there is none: torch, if told to assign
    assign = any(one.is_meta for one in (*self.parameters(), *self.buffers()))
    watched(lambda: _compare_filled(self, state_dict, strict=strict, assign=assign))
    return LOAD_STATE_DICT(self, state_dict, *arguments, **options)


def _compare_filled(model: torch.nn.Module, state: Mapping[str, Any], **options: bool) -> None:
    """Fill a copy from a file, and another one as torch does from the same file."""
    buffer = io.BytesIO()
    try:
        TORCH_SAVE(state, buffer)
        ours, theirs = model_on(model, CPU), model_on(model, CPU)
        again = _torch_read(buffer.getvalue())
    except Exception as error:  # noqa: BLE001 - models that cannot be copied, state that cannot be saved
        MODELS.skipped[f"cannot be copied or saved: {type(error).__name__}: {str(error)[:80]}"] += 1
        return
    failed = _fill_as_torch(theirs, again, **options)
    try:
        ckptool.load_into(ours, buffer.getvalue(), strict=options["strict"])
    except Exception as error:  # noqa: BLE001 - hooks raise what they like
        if failed is not None and (isinstance(error, ckptool.CkptoolError) or type(error) is type(failed)):
            MODELS.equal += 1
        elif isinstance(error, ckptool.CkptoolError):
            MODELS.refuse(error)
        else:
            MODELS.differ(f"load_into raised {type(error).__name__}: {error}")
        return
    if failed is not None:
        said = " ".join(str(failed).split())[:150]
        MODELS.fill_more(f"{type(failed).__name__}: {said}")
        return
    found, expected = truth.named(dict(ours.state_dict())), truth.named(dict(theirs.state_dict()))
    if found == expected:
        MODELS.equal += 1
    else:
        MODELS.differ(f"{[name for name in expected if found.get(name) != expected[name]][:3]} differ")


def _fill_as_torch(model: torch.nn.Module, state: Mapping[str, Any], **options: bool) -> Exception | None:
    try:
        LOAD_STATE_DICT(model, state, **options)
    except Exception as error:  # noqa: BLE001 - whatever torch or a hook raises
        return error
    return None


def _safetensors(module: Any, name: str) -> None:
    """Wrap one of safetensors' functions: those that save give or take the file's bytes, those that load take them."""
    original = getattr(module, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        place = {"save": result, "load": arguments[0] if arguments else None}.get(name)
        if name == "load_file":
            place = arguments[0]
        elif name == "save_file":
            place = options.get("filename", arguments[1] if len(arguments) > 1 else None)
        watched(lambda: _compare_file(_bytes(place), safetensors.torch.load))
        return result

    setattr(module, name, wrapped)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Wrap everything, before the tests import it."""
    logging.getLogger("ckptool").setLevel(logging.CRITICAL)
    torch.save = torch.serialization.save = _save
    torch.load = torch.serialization.load = _load
    torch.nn.Module.load_state_dict = _filled
    for module in (safetensors.torch, safetensors.numpy):
        for name in ("save", "load", "save_file", "load_file"):
            _safetensors(module, name)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was compared."""
    terminalreporter.section("ckptool")
    for tally in (FILES, MODELS):
        for line in tally.lines():
            terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail for differences alone."""
    session.exitstatus = int(bool(FILES.different or MODELS.different))
