"""Indexes of shards: names that lead elsewhere, links, and tensors that are not where the index has them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests import build
from tests.hostile.cases import Case

Make = Callable[[Path], str]
DATA = build.floats()
SOUND = {"a": {"a": DATA}, "b": {"b": DATA}}
BOTH = {"a": "a", "b": "b"}
DIGEST = "5e" * 32

# None of these may be opened, and nothing else because of them: the watch knows of no file beside the index.
NAMES = (
    "",
    ".",
    "..",
    "/",
    "//",
    "/etc/passwd",
    "//etc/passwd",
    "/proc/self/environ",
    "/dev/zero",
    "../secret",
    "../../../../../../etc/passwd",
    "x/../../secret",
    "x/..",
    "./secret",
    "x/./secret",
    "x//secret",
    "secret/",
    "x/",
    "..\\secret",
    "C:\\Windows\\win.ini",
    "\\\\server\\share\\file",
    "x\\..\\..\\secret",
    "secret\0",
    "secret\0.safetensors",
    "\0",
    "..//..//etc/passwd",
    ".../../secret",
    "x/" * 40 + "..",
    "../" * 300 + "etc/passwd",
    "/" + "x" * 5000,
    "x" * 5000,
    "file:///etc/passwd",
    "https://example.org/model.safetensors",
    "\ud800",
)
# These are names like any other, though they look like more; what they name is not there.
LOOK_LIKE_MORE = (
    "~/secret",
    "$HOME/secret",
    "%2e%2e/secret",
    "|touch x",
    "`touch x`",
    "-rf",
    "...",
    "\x1b[2J\u202e.safetensors",
    "\u2025/secret",
    "CON",
    "x" * 256,
    "model.index.json::a",
)


def write(
    folder: Path,
    shard_of: Mapping[str, str] = BOTH,
    shards: Mapping[str, Mapping[str, bytes]] = SOUND,
    **metadata: object,
) -> str:
    """Write shards and their index, and a file outside of the folder that nobody is to read."""
    (folder.parent / "secret").write_bytes(build.safetensors({"a": DATA, "b": DATA}))
    for name, tensors in shards.items():
        (folder / name).write_bytes(build.safetensors(tensors))
    path = folder / "model.index.json"
    path.write_bytes(build.index_of_shards(shard_of, **metadata))
    return str(path)


def named(name: str) -> Make:
    return lambda folder: write(folder, {"a": "a", "b": name})


def holding(shard_of: Mapping[str, str], **shards: Mapping[str, bytes]) -> Make:
    return lambda folder: write(folder, shard_of, shards)


def without(make: Callable[[Path], object]) -> Make:
    """Return what puts something else in the place of a shard."""

    def made(folder: Path) -> str:
        path = write(folder)
        (folder / "b").unlink()
        make(folder / "b")
        return path

    return made


def linked(target: str) -> Make:
    return without(lambda shard: shard.symlink_to(target))


def index(text: str | bytes) -> Make:
    def made(folder: Path) -> str:
        path = Path(write(folder))
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return made


def _linked_folder(folder: Path) -> str:
    (folder.parent / "x").mkdir()
    (folder.parent / "x" / "b").write_bytes(build.safetensors({"b": DATA}))
    (folder / "x").symlink_to("../x")
    return write(folder, {"a": "a", "b": "x/b"})


def _pipe_for_a_folder(folder: Path) -> str:
    os.mkfifo(folder / "x")
    return write(folder, {"a": "a", "b": "x/b"})


def _next(folder: Path, up: str, blob: Callable[[Path], object]) -> str:
    """Lay out what looks like a cache of the hub's, outside of any."""
    (folder.parent / "blobs").mkdir()
    blob(folder.parent / "blobs" / DIGEST)
    return linked(f"{up}blobs/{DIGEST}")(folder)


def _no_snapshot(folder: Path) -> str:
    return _next(folder, "../", lambda blob: blob.write_bytes(build.safetensors({"b": DATA})))


def _snapshot(folder: Path, blob: Callable[[Path], object]) -> str:
    below = folder / "snapshots" / "1"
    below.mkdir(parents=True)
    (folder / "blobs").mkdir()
    blob(folder / "blobs" / DIGEST)
    return linked(f"../../blobs/{DIGEST}")(below)


def _circle(folder: Path) -> str:
    other = {"weight_map": {"b": "model.index.json"}}
    return without(lambda shard: shard.write_text(json.dumps(other)))(folder)


def _hard_linked(folder: Path) -> str:
    return without(lambda shard: shard.hardlink_to(shard.parent / "a"))(folder)


def _many_of_one(folder: Path) -> str:
    (folder / "s0").write_bytes(build.safetensors({f"t{number}": b"" for number in range(20_000)}))
    for number in range(1, 900):
        (folder / f"s{number}").hardlink_to(folder / "s0")
    return write(folder, {f"t{number}": f"s{number % 900}" for number in range(20_000)}, {})


def _sparse(shard: Path) -> None:
    with shard.open("wb") as stream:
        stream.write(b"\x00\xe0\xf5\x05\0\0\0\0{")
        stream.truncate(8 << 40)


REFUSED: dict[str, tuple[Make, str, tuple[str, ...]]] = {
    "a link out": (linked("../secret"), "shard-link", ("a",)),
    "a link by a whole path": (linked("/etc/passwd"), "shard-link", ("a", "b")),
    "a link within": (linked("a"), "shard-link", ("a", "b")),
    "a link to itself": (linked("b"), "shard-link", ("a",)),
    "a link to the index": (linked("model.index.json"), "shard-link", ("a",)),
    "a link to a device": (linked("/dev/zero"), "shard-link", ("a",)),
    "a link to no file": (linked("nowhere"), "shard-link", ("a",)),
    "a link to a folder of blobs": (_no_snapshot, "shard-link", ("a", "b")),
    "a link as in a cache, further up": (linked(f"../../../../blobs/{DIGEST}"), "shard-link", ("a", "..")),
    "a cache whose blob is a link": (
        lambda folder: _snapshot(folder, lambda blob: blob.symlink_to("/etc/passwd")),
        "shard-link",
        ("a", "..", "blobs", DIGEST),
    ),
    "a cache whose blob is a pipe": (
        lambda folder: _snapshot(folder, os.mkfifo),
        "not-a-file",
        ("a", "..", "blobs", DIGEST),
    ),
    "a folder that is a link": (_linked_folder, "shard-link", ("a",)),
    "a folder that is a pipe": (_pipe_for_a_folder, "unavailable", ("a", "x")),
    "a pipe": (without(os.mkfifo), "not-a-file", ("a", "b")),
    "a folder": (without(Path.mkdir), "not-a-file", ("a", "b")),
    "nothing": (without(lambda _: None), "missing-shards", ("a", "b")),
    "another index, and round again": (_circle, "nested-index", ("a", "b")),
    "itself": (holding({"a": "model.index.json"}), "ambiguous-shards", ("model.index.json",)),
    "one file under two names": (_hard_linked, "ambiguous-shards", ("a", "b")),
    "one file under 900 names": (_many_of_one, "ambiguous-shards", ("s0", "s1")),
    "a file that ends early": (without(lambda one: one.write_bytes(b"\xff" * 5)), "unknown-format", ("a", "b")),
    "8 TB of nothing": (without(_sparse), "malformed-safetensors", ("a", "b")),
    "a tensor in two shards": (holding(BOTH, a={"a": DATA, "b": DATA}, b={"b": DATA}), "ambiguous-shards", ("a", "b")),
    "a tensor that no index names": (holding({"a": "a"}, a={"a": DATA, "b": DATA}), "shard-tensors", ("a",)),
    "a tensor that no shard holds": (holding({**BOTH, "c": "b"}, **SOUND), "shard-tensors", ("a", "b")),
    "tensors in each other's shard": (holding({"a": "b", "b": "a"}, **SOUND), "shard-tensors", ("a", "b")),
    "a tensor twice in the index": (index('{"weight_map":{"a":"a","b":"b","a":"b"}}'), "ambiguous-index", ()),
    "two maps": (index('{"weight_map":{"a":"a","b":"b"},"weight_map":{}}'), "ambiguous-index", ()),
    "a map of maps": (index('{"weight_map":{"a":{"weight_map":{"a":"a"}}}}'), "malformed-index", ()),
    "a map of numbers": (index('{"weight_map":{"a":1}}'), "malformed-index", ()),
    "a map of nothing": (index('{"weight_map":{}}'), "malformed-index", ()),
    "depth": (index('{"weight_map":{"a":' + "[" * 100_000), "truncated-index", ()),
    "depth, and closed": (index('{"weight_map":{"a":' + "[" * 99_999 + "]" * 99_999 + "}}"), "malformed-index", ()),
    "a number of a million digits": (
        index('{"weight_map":{"a":"a"},"n":' + "9" * 1_000_000 + "}"),
        "malformed-index",
        (),
    ),
    "no number": (index('{"weight_map":{"a":"a"},"metadata":{"total_size":NaN}}'), "malformed-index", ()),
    "half of it": (index('{"weight_map":{"a":"a","b":"b'), "truncated-index", ()),
    "1,001 shards": (holding({f"t{number}": f"s{number}" for number in range(1001)}), "limit-exceeded", ()),
}
READ: dict[str, Make] = {
    "a sound one": write,
    "a total that lies": lambda folder: write(folder, total_size=1 << 200),
    "a total that is not a number": lambda folder: write(folder, total_size={"a": []}),
    "a cache of the hub's": lambda folder: _snapshot(
        folder, lambda blob: blob.write_bytes(build.safetensors({"b": DATA}))
    ),
}


def _cases() -> Iterator[Case]:
    for name in NAMES:
        kind = "name-too-long" if len(name) > 4096 else "malformed-index" if name == "\ud800" else "shard-name"
        yield Case("F7", f"the name {ascii(name)[:60]}", named(name), kind)
    for name in LOOK_LIKE_MORE:
        kind = "unavailable" if len(name) > 255 else "missing-shards"
        first = name.partition("/")[0]
        yield Case("F7", f"the name {ascii(name)[:60]}", named(name), kind, beside=("a", first))
    for title, (make, kind, opened) in REFUSED.items():
        yield Case("F7", title, make, kind, beside=opened)
    for title, make in READ.items():
        opened = ("a", "..", "blobs", DIGEST) if "cache" in title else ("a", "b")
        yield Case("F7", title, make, "read", {"a": DATA, "b": DATA}, beside=opened)


CASES = tuple(_cases())
"""All the cases."""
