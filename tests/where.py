"""
Which device tests of loading and serving are on: the CPU, or with ``--device NAME`` another one, and then they alone.

``tests/conftest.py`` sets it before it collects any test. What torch does not have here is the device for tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

device = "cpu"
on_any = pytest.mark.on_any_device


@pytest.fixture
def built_there() -> Iterator[None]:
    """Let a test make its tensors on the device, where it does not say another."""
    if device == "cpu":
        yield
        return
    import torch

    with torch.device(device):
        yield


def register(name: str) -> None:
    """Let the tests be on a device, which is the device for tests if torch has none of that name."""
    global device
    import torch

    kind = name.partition(":")[0]
    found = getattr(torch, kind, None)
    if kind != "cpu" and (found is None or not found.is_available()):
        from tests.device.register import register as register_device

        register_device(kind)
    device = name
