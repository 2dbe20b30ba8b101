# Run with LitServe 0.2.19, torch 2.13.0:
#   CHECKPOINT=model.pth python litserve_api.py
import os
from typing import Any

import litserve
import torch

import ckptool
from ckptool.reference.nets import LeNet  # your model


class Digits(litserve.LitAPI):
    def setup(self, device: str) -> None:  # once in every worker process
        checkpoint = os.environ["CHECKPOINT"]
        self.live = ckptool.LiveModel(LeNet().to(device).eval(), checkpoint)
        self.live.watch(checkpoint)

    def decode_request(self, request: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(request["images"], device=self.device)

    def predict(self, images: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.live(images)

    def encode_response(self, scores: torch.Tensor) -> dict[str, Any]:
        return {"scores": scores.tolist(), "worker": os.getpid()}


if __name__ == "__main__":
    server = litserve.LitServer(Digits(), accelerator="auto", workers_per_device=2)
    server.run(host="127.0.0.1", port=int(os.environ.get("PORT", "8000")), generate_client_file=False)
