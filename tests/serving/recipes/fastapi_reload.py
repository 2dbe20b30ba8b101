# Run with FastAPI 0.165.0, uvicorn 0.54.0, torch 2.13.0:
#   CHECKPOINT=model.pth uvicorn fastapi_reload:app
# For one worker: of several, a request reaches any one. They watch a path instead.
import os

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

import ckptool
from ckptool.reference.nets import LeNet  # your model

live = ckptool.LiveModel(LeNet().eval(), os.environ["CHECKPOINT"])
app = FastAPI()


@app.post("/predict")
def predict(images: list[list[list[list[float]]]]) -> list[list[float]]:
    with torch.inference_mode():
        return live(torch.tensor(images)).tolist()


@app.post("/reload")
def reload() -> dict[str, str]:
    return {"digest": live.reload(os.environ["CHECKPOINT"]).digest}


@app.get("/health")
def health() -> dict[str, str | None]:
    return live.status()


@app.exception_handler(ckptool.CkptoolError)
def refused(request: Request, error: ckptool.CkptoolError) -> JSONResponse:
    # What served before goes on serving.
    return JSONResponse({"kind": error.kind, "error": str(error), "hint": error.hint}, status_code=409)
