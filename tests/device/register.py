"""
Let torch have the device under a name of our own, ``sim``, as its maker would; or take it for ``cuda`` or ``xpu``.

For the latter two, torch's C++ finds the kernels, the memory and the streams; what its Python asks of libraries that a
build for the CPU lacks is put in their places here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, Final

import torch

from tests.device.build import library

KIND: Final = os.environ.get("SIM_KIND", "sim")
_TYPES: Final = {"cuda": 1, "xpu": 12}
"""The numbers that C++ has for them, for streams."""
_PINNING: Final = "simpinning"


def register(kind: str = KIND) -> Any:
    """Register the device for this process, and return its C++ module, which has more to set."""
    path = library(kind if kind in _TYPES else "sim")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules["tests.device.native"] = native
    if kind in _TYPES:
        # torch asks the hooks of PrivateUse1 for pinned memory: those of CUDA and XPU were made when it was imported.
        torch.utils.rename_privateuse1_backend(_PINNING)
        getattr(torch, kind).__dict__.update(_attributes(native, kind) | _of_torch(native, kind))
        _storages(kind)
        torch._register_device_module(_PINNING, getattr(torch, kind))  # for optimizers it is the one that torch has
        # The compiler imports it by this name, and asks no more before it compiles.
        setattr(torch._C, f"_{kind}_getCurrentRawStream", native.current_stream)
        torch.backends.cudnn.enabled = False  # on cuda, recurrent layers would warn that it is missing
        return native
    torch.utils.rename_privateuse1_backend(kind)
    module = types.ModuleType(f"torch.{kind}")
    module.__dict__.update(_attributes(native, kind))
    torch._register_device_module(kind, module)
    sys.modules[f"torch.{kind}"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.distributed.Backend.register_backend(f"{kind}ccl", _group_of_one, devices=[kind, "cpu"])
    return native


def _group_of_one(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Return a process group that says nothing to anybody."""
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup._create_internal(rank, size)


def _attributes(native: Any, kind: str) -> dict[str, Any]:
    """Return what the maker of a device has in its module."""

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        wanted = None if device is None else torch.device(device).index
        return int(native.current_device()) if wanted is None else wanted

    def at(device: Any = None) -> torch.device:
        return torch.device(kind, index(device))

    class Device(contextlib.ContextDecorator):
        def __init__(self, which: Any) -> None:
            self.to = index(which)

        def __enter__(self) -> None:
            self.was = native.current_device()
            native.set_device(self.to)

        def __exit__(self, *error: object) -> None:
            native.set_device(self.was)

    return {
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda device: native.set_device(index(device)),
        "device": Device,
        "is_available": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "synchronize": lambda device=None: native.synchronize(index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(at(device)),
        "set_stream": torch.accelerator.set_stream,
        "Stream": lambda device=None: torch.Stream(at(device)),
        "Event": torch.Event,
        "mem_get_info": lambda device=None: native.mem_get_info(index(device)),
        "memory_allocated": lambda device=None: native.memory_allocated(index(device)),
        "memory_reserved": lambda device=None: native.memory_allocated(index(device)),
        "empty_cache": native.empty_cache,
        "get_device_name": lambda device=None: "Simulated device",
    }


def _of_torch(native: Any, kind: str) -> dict[str, Any]:
    """Return what ``torch.cuda`` has besides, and what it has in its own way."""

    def stream_of(device: Any = None) -> torch.Stream:
        index = native.current_device() if device is None else getattr(torch.device(device), "index", None) or 0
        return torch.Stream(
            stream_id=native.current_stream(index), device_index=index, device_type=_TYPES[kind]
        )  # torch.accelerator would ask PrivateUse1

    def set_stream(stream: torch.Stream) -> None:
        native.set_stream(stream.device_index, stream.stream_id)

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        device, before = native.current_device(), stream_of(stream.device)
        native.set_device(stream.device.index)
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)
            native.set_device(device)

    return {
        "current_stream": stream_of,
        "set_stream": set_stream,
        "stream": on,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "manual_seed": lambda seed: None,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name="Simulated device", major=9, minor=0, total_memory=native.mem_get_info(0)[1], multi_processor_count=1
        ),
    }


def _storages(kind: str) -> None:
    """Let storages be made on the device: torch of the CPU has no constructor for them there, but tensors have them."""
    storage: Any = torch.UntypedStorage
    to, clone = storage.to, storage.clone

    def made_on(device: torch.device, source: Any, *, non_blocking: bool) -> Any:
        fresh = torch.empty(source.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
        return fresh.copy_(source, non_blocking)

    def clone_there(self: Any) -> Any:
        return made_on(self.device, self, non_blocking=False) if self.device.type == kind else clone(self)

    def to_device(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        device = torch.device(device)
        if device.type != kind or self.device == device:
            return to(self, device=device, non_blocking=non_blocking)
        return made_on(device, self, non_blocking=non_blocking)

    storage.to, storage.clone = to_device, clone_there
