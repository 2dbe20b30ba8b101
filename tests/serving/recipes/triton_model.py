# Run with Triton 2.51.0 as nvidia-pytriton 0.7.0 has it (its utilities are made for numpy 1).
# This is <repository>/<model>/1/model.py, with the checkpoint beside it; triton_config.pbtxt is ../config.pbtxt.
import json
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

import ckptool
from ckptool.reference.nets import LeNet  # your model


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:  # once for every instance
        on_gpu = args["model_instance_kind"] == "GPU"
        self.device = f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
        name = json.loads(args["model_config"])["parameters"]["checkpoint"]["string_value"]
        checkpoint = Path(args["model_repository"], args["model_version"], name)
        self.live = ckptool.LiveModel(LeNet().to(self.device).eval(), checkpoint)
        self.live.watch(checkpoint)

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            images = torch.from_numpy(pb_utils.get_input_tensor_by_name(request, "images").as_numpy())
            with torch.inference_mode():
                scores = self.live(images.to(self.device)).cpu().numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("scores", scores)]))
        return responses

    def finalize(self) -> None:
        self.live.unwatch()
