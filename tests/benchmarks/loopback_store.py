"""
A store on loopback that speaks enough of S3, and of the hub, to be read from: a process of its own, for bench_remote.

It serves the files of a folder as ``/b/NAME``, and as ``/org/net/resolve/main/NAME``, by ranges, straight from the page
cache. ``/_/counts`` tells how many requests and bytes there were since it was last asked.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

_STEP = 1 << 20


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder: Path
    lock = threading.Lock()
    counts = {"requests": 0, "bytes": 0}  # noqa: RUF012 - of all connections
    latency = 0.0
    rate = 0

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path.startswith("/_/"):
            self.tell(path[3:], query)
            return
        time.sleep(self.latency)
        try:
            fd = os.open(self.folder / path.rpartition("/")[2], os.O_RDONLY)
        except OSError:
            self.count(0)
            self.send_error(404)
            return
        try:
            self.serve(fd)
        finally:
            os.close(fd)

    def serve(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        self.send_response(206 if self.headers.get("Range") else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{os.fstat(fd).st_mtime_ns:x}-{size:x}"')
        self.send_header("Last-Modified", "Sun, 22 Nov 2026 00:00:00 GMT")
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if self.command == "HEAD":
            self.count(0)
            return
        self.count(self.send(fd, start, stop))

    def send(self, fd: int, start: int, stop: int) -> int:
        """Send a range, and return how much of it the client took."""
        begun, at = time.perf_counter(), start
        try:
            while at < stop:
                at += os.sendfile(self.connection.fileno(), fd, at, min(_STEP, stop - at))
                if self.rate:
                    time.sleep(max(0.0, begun + (at - start) / self.rate - time.perf_counter()))
        except OSError:
            self.close_connection = True
        return at - start

    def count(self, nbytes: int) -> None:
        with self.lock:
            self.counts["requests"] += 1
            self.counts["bytes"] += nbytes

    def tell(self, what: str, query: str) -> None:
        with self.lock:
            body = json.dumps(self.counts).encode()
            if what == "counts":
                self.counts.update(requests=0, bytes=0)
            for name, value in parse_qsl(query):
                setattr(Handler, name, float(value) if name == "latency" else int(value))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    Handler.folder = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.request_queue_size = 64
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
