"""Let torch have the device, as ``torch.sim``: what a maker of devices does, and no more."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from typing import Any

import torch

from tests.device.build import library

KIND = "sim"


def register() -> Any:
    """Register the device for this process, and return its C++ module, which has more to set."""
    path = library(KIND)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules["tests.device.native"] = native
    torch.utils.rename_privateuse1_backend(KIND)
    module = _module(native)
    torch._register_device_module(KIND, module)
    sys.modules[f"torch.{KIND}"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return native


def _module(native: Any) -> types.ModuleType:
    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        wanted = None if device is None else torch.device(device).index
        return int(native.current_device()) if wanted is None else wanted

    def at(device: Any = None) -> torch.device:
        return torch.device(KIND, index(device))

    class Device(contextlib.ContextDecorator):
        def __init__(self, which: Any) -> None:
            self.to = index(which)

        def __enter__(self) -> None:
            self.was = native.current_device()
            native.set_device(self.to)

        def __exit__(self, *error: object) -> None:
            native.set_device(self.was)

    module = types.ModuleType(f"torch.{KIND}")
    module.__dict__.update(
        device_count=native.device_count,
        current_device=native.current_device,
        set_device=lambda device: native.set_device(index(device)),
        device=Device,
        is_available=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        synchronize=lambda device=None: native.synchronize(index(device)),
        current_stream=lambda device=None: torch.accelerator.current_stream(at(device)),
        set_stream=torch.accelerator.set_stream,
        Stream=lambda device=None: torch.Stream(at(device)),
        Event=torch.Event,
        mem_get_info=lambda device=None: native.mem_get_info(index(device)),
        memory_allocated=lambda device=None: native.memory_allocated(index(device)),
        memory_reserved=lambda device=None: native.memory_allocated(index(device)),
        empty_cache=native.empty_cache,
        get_device_name=lambda device=None: "Simulated device",
    )
    return module
