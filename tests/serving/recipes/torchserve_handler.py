# Run with TorchServe 0.12.0, torch 2.13.0: beside the checkpoint in a .mar, as its handler and serializedFile.
from pathlib import Path
from typing import Any

import torch
from ts.context import Context
from ts.torch_handler.base_handler import BaseHandler

import ckptool
from ckptool.reference.nets import LeNet  # your model


class DigitsHandler(BaseHandler):
    def initialize(self, context: Context) -> None:  # once in every worker process
        folder, gpu = context.system_properties["model_dir"], context.system_properties.get("gpu_id")
        device = f"cuda:{gpu}" if gpu is not None and torch.cuda.is_available() else "cpu"
        checkpoint = Path(folder, context.manifest["model"]["serializedFile"])
        self.context, self.device, self.model = context, torch.device(device), LeNet().to(device).eval()
        ckptool.load_into(self.model, checkpoint)  # another version of the model is another .mar
        self.initialized = True

    def preprocess(self, data: list[dict[str, Any]]) -> torch.Tensor:
        return torch.tensor([row.get("body") or row["data"] for row in data], device=self.device)

    def inference(self, images: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(images)

    def postprocess(self, scores: torch.Tensor) -> list[list[float]]:
        return scores.tolist()
