"""
The recipes under their own servers: they answer, and follow when another file takes the place of the checkpoint.

Which of them run depends on what is installed; each says at its top what it was run with.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.scale import exhaustive, some
from tests.serving.running import IMAGES, RECIPES, Server, free_ports, save_as_gpus_do, serving

BODY = IMAGES.tolist()


class Recipe(NamedTuple):
    """How a recipe is started and asked."""

    package: str
    command: str
    path: str
    body: Any
    scores: Callable[[Any], Any]
    ends: bool = True
    """Whether its process ends well when it is asked to; Ray's driver ends by an exception of its own."""
    health: Any = None
    """What its route for health is sent."""


SERVED = {
    "fastapi_small.py": Recipe(
        "fastapi",
        "-m uvicorn --host 127.0.0.1 --port PORT fastapi_small:app",
        "/predict",
        BODY,
        lambda got: got,
    ),
    "litserve_api.py": Recipe("litserve", "litserve_api.py", "/predict", {"images": BODY}, lambda got: got["scores"]),
    "bentoml_service.py": Recipe(
        "bentoml",
        "-m bentoml serve --host 127.0.0.1 --port PORT bentoml_service:Digits",
        "/predict",
        {"images": BODY},
        lambda got: got,
        health={},
    ),
    "ray_serve_app.py": Recipe("ray", "ray_serve_app.py", "/", BODY, lambda got: got["scores"], ends=False),
    "gunicorn_app.py": Recipe(
        "gunicorn",
        "-m gunicorn --bind 127.0.0.1:PORT -c gunicorn_conf.py gunicorn_app:app",
        "/",
        BODY,
        lambda got: got["scores"],
    ),
}


@exhaustive
@pytest.mark.parametrize("name", some(SERVED, 3))
def test_its_server_answers_and_follows_the_file(name: str, tmp_path: Path) -> None:
    recipe = SERVED[name]
    if importlib.util.find_spec(recipe.package) is None:
        pytest.skip(f"{recipe.package} is not installed")
    checkpoint = tmp_path / "model.pth"
    a = save_as_gpus_do(checkpoint, seed=1)

    def asked(server: Server) -> Any:
        return recipe.scores(server.ask(recipe.path, recipe.body))

    with serving(recipe.command, checkpoint) as server:
        answers_and_follows(server, asked, checkpoint, a)
        if name != "ray_serve_app.py":  # which asks its replicas itself
            with server.connection() as client:
                assert client.answer("/health", recipe.health)[0] == 200
        if recipe.ends:
            server.stop()


def answers_and_follows(server: Server, asked: Callable[[Server], Any], checkpoint: Path, a: Any) -> None:
    server.until(lambda: asked(server))
    assert [asked(server) for _ in range(10)] == [a] * 10
    b = save_as_gpus_do(checkpoint, seed=2)
    found = []

    def all_b() -> bool:
        found.append(asked(server))
        return found[-10:] == [b] * 10

    server.until(all_b)
    assert all(answer in (a, b) for answer in found)


def test_torchserve_answers(tmp_path: Path) -> None:
    if importlib.util.find_spec("ts") is None or shutil.which("java") is None:
        pytest.skip("torchserve or java is not installed")
    checkpoint, archive, settings = (tmp_path / name for name in ("model.pth", "digits.mar", "settings.txt"))
    a = save_as_gpus_do(checkpoint, seed=1)
    handler = "torchserve_handler.py"
    model = {"modelName": "digits", "modelVersion": "1", "serializedFile": "model.pth", "handler": handler}
    with zipfile.ZipFile(archive, "w") as mar:
        mar.write(checkpoint, "model.pth")
        mar.write(RECIPES / handler, handler)
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    ports = free_ports(3)
    settings.write_text(
        "default_workers_per_model=2\nenable_envvars_config=false\n"
        f"inference_address=http://127.0.0.1:{ports[0]}\n"
        f"management_address=http://127.0.0.1:{ports[1]}\n"
        f"metrics_address=http://127.0.0.1:{ports[2]}\n"
    )
    start = "-m ts.model_server --start --foreground --disable-token-auth"
    command = f"{start} --model-store {tmp_path} --models digits.mar --ts-config {settings}"
    with serving(
        command, checkpoint, port=ports[0], LOG_LOCATION=str(tmp_path), METRICS_LOCATION=str(tmp_path)
    ) as server:
        assert server.until(lambda: server.ask("/predictions/digits", BODY[0])) == pytest.approx(a[0], abs=1e-6)
        assert [server.ask("/predictions/digits", BODY[1]) for _ in range(10)] == [pytest.approx(a[1], abs=1e-6)] * 10


def test_triton_answers_and_follows_the_file(tmp_path: Path) -> None:
    model = tmp_path / "models" / "digits"
    checkpoint = model / "1" / "model.pth"
    checkpoint.parent.mkdir(parents=True)
    program, options, environment = triton(tmp_path / "backends")
    shutil.copy(RECIPES / "triton_model.py", model / "1" / "model.py")
    shutil.copy(RECIPES / "triton_config.pbtxt", model / "config.pbtxt")
    a = save_as_gpus_do(checkpoint, seed=1)
    images = {"name": "images", "shape": list(IMAGES.shape), "datatype": "FP32", "data": IMAGES.flatten().tolist()}

    def asked(server: Server) -> Any:
        scores = server.ask("/v2/models/digits/infer", {"inputs": [images]})["outputs"][0]
        return torch.tensor(scores["data"]).reshape(scores["shape"]).tolist()

    command = f"--model-repository {model.parent} --http-address 127.0.0.1 --http-port PORT"
    quiet = "--allow-grpc false --allow-metrics false"
    with serving(f"{command} {quiet} {options}", checkpoint, program=program, **environment) as server:
        answers_and_follows(server, asked, checkpoint, a)
        server.stop()


def triton(backends: Path) -> tuple[str, str, dict[str, str]]:
    """
    Find Triton's server: its program, its options, and what its environment needs.

    The one that nvidia-pytriton carries keeps what it needs for a version of Python elsewhere: all is put together.
    """
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # its models' Python is the first
    if program := shutil.which("tritonserver"):
        return program, "", {"PATH": search}
    if (package := importlib.util.find_spec("pytriton")) is None or package.origin is None:
        pytest.skip("neither tritonserver nor nvidia-pytriton is installed")
    folder = Path(package.origin).parent / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(folder / "backends" / "python", backends / "python")
    shutil.copy(folder / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    libraries = [str(folder.parents[1] / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    environment = {"PATH": search, "LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    return str(folder / "bin" / "tritonserver"), f"--backend-directory {backends}", environment


def test_triton_is_handed_what_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its server is not: these are the calls that it makes, with a stand-in for its utilities."""
    checkpoint = tmp_path / "1" / "model.pth"
    checkpoint.parent.mkdir()
    a = save_as_gpus_do(checkpoint, seed=1)
    utilities = ModuleType("triton_python_backend_utils")
    utilities.Tensor = lambda name, array: (name, array)  # type: ignore[attr-defined]
    utilities.InferenceResponse = lambda tensors: tensors  # type: ignore[attr-defined]
    utilities.get_input_tensor_by_name = lambda request, name: request[name]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utilities)
    model = runpy.run_path(str(RECIPES / "triton_model.py"))["TritonPythonModel"]()
    config = {"parameters": {"checkpoint": {"string_value": "model.pth"}}}
    model.initialize(
        {
            "model_instance_kind": "CPU",
            "model_config": json.dumps(config),
            "model_repository": str(tmp_path),
            "model_version": "1",
        }
    )
    ((name, scores),) = model.execute([{"images": SimpleNamespace(as_numpy=IMAGES.numpy)}])[0]
    model.finalize()

    assert name == "scores"
    assert scores.tolist() == a
