"""
The one door to torch.

devices, values and models import it inside their functions, so that importing this package costs nothing; the
modules that load weights are made of torch and are imported when they are asked for.
"""

from ckptool.torch_bridge.devices import CudaMissing, Device, DeviceReport, devices
from ckptool.torch_bridge.models import model_shapes, save_model
from ckptool.torch_bridge.values import CastBytes, ValueFacts, cast, survey

__all__ = [
    "CastBytes",
    "CudaMissing",
    "Device",
    "DeviceReport",
    "ValueFacts",
    "cast",
    "devices",
    "model_shapes",
    "save_model",
    "survey",
]
