# Run with Ray 2.60.0, torch 2.13.0:
#   CHECKPOINT=model.pth python ray_serve_app.py
import os
from typing import Any

import torch
from ray import serve
from starlette.requests import Request

import ckptool
from ckptool.reference.nets import LeNet  # your model


@serve.deployment(num_replicas=2)
class Digits:
    def __init__(self, checkpoint: str) -> None:  # once in every replica
        # Calls run on the event loop, which must not wait for a reload.
        self.live = ckptool.LiveModel(LeNet().eval(), checkpoint, commit="swap")
        self.live.watch(checkpoint)

    def check_health(self) -> None:  # Ray replaces a replica where this fails
        if self.live.digest is None:
            raise RuntimeError(self.live)

    async def __call__(self, request: Request) -> dict[str, Any]:
        images = torch.tensor(await request.json())
        with torch.inference_mode():
            return {"scores": self.live(images).tolist(), "worker": os.getpid()}


if __name__ == "__main__":
    serve.start(http_options={"port": int(os.environ.get("PORT", "8000"))})
    serve.run(Digits.bind(os.environ["CHECKPOINT"]), blocking=True)
