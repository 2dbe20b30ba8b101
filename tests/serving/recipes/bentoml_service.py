# Run with BentoML 1.4.40, torch 2.13.0:
#   CHECKPOINT=model.pth bentoml serve bentoml_service:Digits
import os

import bentoml
import torch

import ckptool
from ckptool.reference.nets import LeNet  # your model


@bentoml.service(workers=2)
class Digits:
    def __init__(self) -> None:  # once in every worker process
        checkpoint = os.environ["CHECKPOINT"]
        self.live = ckptool.LiveModel(LeNet().eval(), checkpoint)
        self.live.watch(checkpoint)

    @bentoml.api
    def predict(self, images: list[list[list[list[float]]]]) -> list[list[float]]:
        with torch.inference_mode():
            return self.live(torch.tensor(images)).tolist()

    @bentoml.api
    def health(self) -> dict[str, str | int | None]:
        return {"worker": os.getpid(), **self.live.status()}

    @bentoml.on_shutdown
    def close(self) -> None:
        self.live.unwatch()
