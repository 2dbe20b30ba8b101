# Run with FastAPI 0.165.0, uvicorn 0.54.0, torch 2.13.0: CHECKPOINT=model.pth uvicorn fastapi_small:app
import os

import torch
from fastapi import FastAPI

import ckptool
from ckptool.reference.nets import LeNet  # your model

live = ckptool.LiveModel(LeNet().eval(), os.environ["CHECKPOINT"])
live.watch(os.environ["CHECKPOINT"])  # when the file is replaced, its weights are loaded
app = FastAPI()


@app.post("/predict")
def predict(images: list[list[list[list[float]]]]) -> list[list[float]]:
    with torch.inference_mode():
        return live(torch.tensor(images)).tolist()


@app.get("/health")
def health() -> dict[str, str | None]:
    return {"digest": live.digest}
