"""What must be true of any file: an error of ours, or tensors that the stock loaders read alike."""

from __future__ import annotations

import io
import warnings
from typing import Any

import safetensors
import torch

import ckptool
from ckptool.errors import CkptoolError

LARGEST = 1 << 24
"""Bytes of a tensor that is still compared."""


def judge(data: bytes) -> str:
    """
    Open a file and read all that it holds, as inspect, check and load do; return what became of it.

    That is ``refused``, ``read``, or ``compared`` with a stock loader.

    Raises:
        AssertionError: The stock loader reads the same file and finds something else.
        BaseException: Any error that is none of ours: a bug.
    """
    try:
        checkpoint = ckptool.open_checkpoint(data)
    except CkptoolError as error:
        if not (error.kind and str(error)):
            raise AssertionError("refused without a reason") from error
        return "refused"
    with checkpoint:
        found = _read(checkpoint)
    assert ckptool.check(data, deep=True).error is None
    try:
        loaded = ckptool.load(data)
    except CkptoolError:
        loaded = None
    if checkpoint.format == "safetensors":
        expected = {name: bytes(view["data"]) for name, view in safetensors.deserialize(data)}
        assert found.keys() == expected.keys()
        assert all(found[name] in (None, content) for name, content in expected.items())
        return "compared"
    if checkpoint.format in ("torch_zip", "torch_legacy"):
        stock = _stock(data)
        if stock is not None:
            _compare(stock, found, loaded)
            return "compared"
    return "read"


def _read(checkpoint: ckptool.Checkpoint) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for name, tensor in checkpoint.tensors.items():
        try:
            found[name] = tensor.read() if tensor.info.layout == "strided" else None
        except CkptoolError:
            found[name] = None
    return found


def _stock(data: bytes) -> Any:
    """Return what ``torch.load`` finds with ``weights_only=True``, or None if it refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 - whatever it is, it refuses
        return None


def _compare(stock: Any, found: dict[str, bytes | None], loaded: Any) -> None:
    """Hold the tensors of a nested value, by their names, against those that were found."""
    expected = dict(_tensors(stock))
    for name, tensor in expected.items():
        if found.get(name) is not None:
            assert _content(tensor) in (found[name], None), f"torch.load finds other bytes in {name!r}"
    if isinstance(loaded, dict) and isinstance(stock, dict) and loaded.keys() == stock.keys():
        for name, tensor in stock.items():
            mine = loaded[name]
            if isinstance(tensor, torch.Tensor) and isinstance(mine, torch.Tensor):
                assert _content(mine) == _content(tensor), f"load() gives other bytes for {name!r}"


def _tensors(value: Any, path: str = "", depth: int = 0) -> Any:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth < 20 and isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            if isinstance(key, str | int):
                yield from _tensors(item, f"{path}.{key}" if path else str(key), depth + 1)


def _content(tensor: torch.Tensor) -> bytes | None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.nbytes > LARGEST:
        return None
    # A view that conjugates or negates holds the bytes that it does not show.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
