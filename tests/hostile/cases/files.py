"""Paths that are not files, and files that are not checkpoints."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import build
from tests.hostile.cases import Case

Make = Callable[[Path], str]


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


def _socket(folder: Path) -> str:
    here = Path.cwd()
    os.chdir(folder)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("s")
    finally:
        os.chdir(here)
    return str(folder / "s")


def _loop(folder: Path) -> str:
    (folder / "loop").symlink_to("loop")
    return str(folder / "loop")


def _link_to_pipe(folder: Path) -> str:
    (folder / "link").symlink_to(_pipe(folder))
    return str(folder / "link")


def _folder(folder: Path) -> str:
    return str(folder)


def _folder_of_files(folder: Path) -> str:
    for number in range(50):
        (folder / f"\x1b[31m{number}.pth").write_bytes(b"")
    return str(folder)


def _terminal(_: Path) -> str:
    return os.ttyname(os.openpty()[1])


def path(text: str) -> Make:
    return lambda _: text


def sparse(nbytes: int, head: bytes = b"") -> Make:
    def make(folder: Path) -> str:
        with (folder / "sparse").open("wb") as stream:
            stream.write(head)
            stream.truncate(nbytes)
        return str(folder / "sparse")

    return make


NO_FILES: dict[str, Make] = {
    "a pipe": _pipe,
    "a link to a pipe": _link_to_pipe,
    "a socket": _socket,
    "a link to itself": _loop,
    "a folder": _folder,
    "a folder of strange names": _folder_of_files,
    "a terminal": _terminal,
    "/dev/zero": path("/dev/zero"),
    "/dev/null": path("/dev/null"),
    "/dev/urandom": path("/dev/urandom"),
    "/proc": path("/proc"),
    "no file": path("/nowhere/model.pth"),
    "a path with a NUL": path("a\0b"),
    "a path too long": path("/" + "a" * 5000),
    "an empty path": path(""),
    "a member of no archive": path("/nowhere/model.zip::member"),
}
ODD_FILES: dict[str, Make | bytes] = {
    "a file of the system's": path("/proc/self/status"),
    "a file that never ends": path("/proc/kmsg" if not os.access("/proc/kmsg", os.R_OK) else "/proc/self/mem"),
    "8 TB of nothing": sparse(8 << 40),
    "8 TB behind a zip's head": sparse(8 << 40, b"PK\3\4"),
    "8 TB behind a pickle's head": sparse(8 << 40, b"\x80\x02"),
    "8 TB behind a stream": sparse(8 << 40, build.legacy({})[:40]),
    "8 TB behind a header's length": sparse(8 << 40, b"\x00\xe0\xf5\x05\0\0\0\0{"),
    "8 TB behind a tar's head": sparse(8 << 40, build.torch_tar()[:512]),
    "nothing": b"",
    "one byte": b"\x80",
    "zeros": bytes(1 << 20),
    "text": b"hello\n" * 99,
    "escapes": b"\x1b[2J" * 99,
    "a page": b"<html><body>404</body></html>",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n",
    "a script": b"#!/bin/sh\ntouch /tmp/x\n",
    "gzip of nothing": b"\x1f\x8b\x08\0\0\0\0\0\0\3\3\0\0\0\0\0\0\0\0\0",
    "gzip that lies": b"\x1f\x8b\x08\0\0\0\0\0\0\3" + b"\xff" * 99,
    "a tar of links": build.tar_file({"storages": b"", "tensors": b"", "pickle": b"", "sys_info": b""}),
}


def _cases() -> Iterator[Case]:
    for name, make in NO_FILES.items():
        yield Case("I3", name, make, "refused")
    for name, file in ODD_FILES.items():
        yield Case("F5" if "header" in name else "I3", name, file, "refused")
    for name, data in build.one_of_each().items():
        for keep in (1, 7, 8, 9, 20, 63, len(data) // 2, len(data) - 1):
            padding = name == "torch_tar" and keep > 1024  # zeros that nothing needs
            yield Case("I1", f"{name} cut to {keep:,} bytes", data[:keep], "any" if padding else "refused")


CASES = tuple(_cases())
