# Run with gunicorn 27.0.1; see gunicorn_app.py.
from typing import Any

preload_app = True
workers = 2


def post_fork(server: Any, worker: Any) -> None:
    import gunicorn_app  # loaded in the parent, before the fork

    gunicorn_app.live.watch(gunicorn_app.checkpoint)  # threads do not survive a fork: each worker has its own
