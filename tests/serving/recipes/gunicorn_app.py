# Run with gunicorn 27.0.1, torch 2.13.0:
#   CHECKPOINT=model.pth gunicorn -c gunicorn_conf.py gunicorn_app:app
# The parent loads, the workers that it forks share its memory until they reload.
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

import ckptool
from ckptool.reference.nets import LeNet  # your model

checkpoint = os.environ["CHECKPOINT"]
live = ckptool.LiveModel(LeNet().eval(), checkpoint)


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    if environ["PATH_INFO"] == "/health":
        answer = {"worker": os.getpid(), **live.status()}
    else:
        with torch.inference_mode():
            scores = live(torch.tensor(json.load(environ["wsgi.input"])))
        answer = {"scores": scores.tolist(), "worker": os.getpid()}
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(answer).encode()]
