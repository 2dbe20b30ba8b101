"""Web servers on loopback, started by tests: they count what is asked of them, and can be made to misbehave."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


@lru_cache(maxsize=8)
def tag_of(data: bytes) -> str:
    return f'"{md5(data).hexdigest()}"'


class Server(ThreadingHTTPServer):
    """
    Serves ``files`` by their path. ``requests`` has the path and the Range of each, ``sent`` the bytes of all answers.

    ``before`` may answer a request itself, and then returns True.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, files: dict[str, bytes], handler: type[Handler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.files = files
        self.requests: list[tuple[str, str | None]] = []
        self.sent = 0
        self.has_ranges = True
        self.has_etag = True
        self.checks_tag = True
        self.modified: str | None = None
        self.seconds = 0.0
        self.cut: Callable[[], bool] = lambda: False
        self.busy: Callable[[], bool] = lambda: False
        self.before: Callable[[Handler], bool] = lambda _: False
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is not an error."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        self.get()

    def do_HEAD(self) -> None:
        self.get()

    def do_PUT(self) -> None:
        self.change()

    def do_POST(self) -> None:
        self.change()

    def do_DELETE(self) -> None:
        self.change()

    def change(self) -> None:
        self.answer(405)

    def get(self) -> None:
        server = self.server
        ranged = self.headers.get("Range")
        with server.lock:
            server.requests.append((self.path, ranged))
        if server.seconds:
            time.sleep(server.seconds)
        if server.before(self):
            return
        data = server.files.get(unquote(self.path.partition("?")[0]))
        if data is None:
            self.answer(404)
        elif server.busy():
            self.answer(503)
        else:
            self.serve(data, ranged)

    def serve(self, data: bytes, ranged: str | None) -> None:
        tag = tag_of(data)
        wanted = self.headers.get("If-Match")
        if self.server.checks_tag and wanted not in (None, tag):
            self.answer(412)
            return
        headers = {"ETag": tag} if self.server.has_etag else {}
        headers |= {"Last-Modified": self.server.modified} if self.server.modified else {}
        if ranged is None or not self.server.has_ranges:
            self.answer(200, data, headers)
            return
        first, _, last = ranged.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(data) - int(last))
        stop = min(len(data), int(last) + 1) if first and last else len(data)
        if start >= len(data):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.answer(206, data[start:stop], headers)

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/octet-stream", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if body and self.server.cut():
            body = body[: random.Random(len(body)).randrange(len(body))]
            self.close_connection = True
        self.wfile.write(body)
        with self.server.lock:
            self.server.sent += len(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(files: dict[str, bytes], handler: type[Handler] | None = None) -> Iterator[Server]:
    """Serve files until the block ends."""
    server = Server(files, handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
