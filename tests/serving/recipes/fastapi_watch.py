# Run with FastAPI 0.165.0, uvicorn 0.54.0, torch 2.13.0:
#   CHECKPOINT=model.pth uvicorn --workers 2 --app-dir tests/serving/recipes fastapi_watch:app
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI, Response

import ckptool
from ckptool.reference.nets import LeNet  # your model

checkpoint = os.environ["CHECKPOINT"]
live = ckptool.LiveModel(LeNet().eval(), checkpoint)  # a worker that cannot load it does not start


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with live:
        live.watch(checkpoint)  # rename another file there, and every worker serves it
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
def predict(images: list[list[list[list[float]]]]) -> list[list[float]]:
    with torch.inference_mode():
        return live(torch.tensor(images)).tolist()


@app.get("/health")
def health(response: Response) -> dict[str, str | int | None]:
    status = live.status()  # which weights serve, since when, and why not the newest
    response.status_code = 200 if status["digest"] else 503
    return {"worker": os.getpid(), **status}
