"""
The recipes under their own servers: two workers answer, and follow when another file takes the checkpoint's place.

Which of them run depends on what is installed; all say at their top what they were run with.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.serving.running import IMAGES, RECIPES, Server, save_as_gpus_do, serving, versions

BODY = IMAGES.tolist()


class Recipe(NamedTuple):
    """How a recipe is started and asked."""

    package: str
    command: str
    path: str
    body: Any
    scores: Callable[[Any], Any]


SERVED = {
    "litserve_api.py": Recipe("litserve", "litserve_api.py", "/predict", {"images": BODY}, lambda got: got["scores"]),
    "bentoml_service.py": Recipe(
        "bentoml",
        "-m bentoml serve --host 127.0.0.1 --port PORT bentoml_service:Digits",
        "/predict",
        {"images": BODY},
        lambda got: got,
    ),
    "ray_serve_app.py": Recipe("ray", "ray_serve_app.py", "/", BODY, lambda got: got["scores"]),
    "gunicorn_app.py": Recipe(
        "gunicorn",
        "-m gunicorn --bind 127.0.0.1:PORT -c gunicorn_conf.py gunicorn_app:app",
        "/",
        BODY,
        lambda got: got["scores"],
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_two_workers_answer_and_follow_the_file(name: str, tmp_path: Path) -> None:
    recipe = SERVED[name]
    if importlib.util.find_spec(recipe.package) is None:
        pytest.skip(f"{recipe.package} is not installed")
    checkpoint = tmp_path / "model.pth"
    a = save_as_gpus_do(checkpoint, seed=1)

    def asked(server: Server) -> Any:
        return recipe.scores(server.ask(recipe.path, recipe.body))

    with serving(recipe.command, checkpoint) as server:
        server.until(lambda: asked(server))
        assert [asked(server) for _ in range(10)] == [a] * 10
        b = save_as_gpus_do(checkpoint, seed=2)
        found = []

        def all_b() -> bool:
            found.append(asked(server))
            return found[-10:] == [b] * 10

        server.until(all_b)
        assert all(answer in (a, b) for answer in found)
        server.stop()


def test_every_recipe_says_with_what_it_was_run() -> None:
    for recipe in RECIPES.glob("*.py"):
        assert versions(recipe.name)
