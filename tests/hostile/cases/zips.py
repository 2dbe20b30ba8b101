"""Zips that two programs would read differently, or that lie: a sound checkpoint, and one lie in each."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from struct import pack
from typing import Any

from tests.build import floats, named, ops, pickled, storage, tensor, torch_zip, torchscript, zip_file
from tests.hostile.cases import Case, written
from tests.zip_bytes import (
    FULL16,
    FULL32,
    Member,
    deflated,
    end,
    entry,
    local_header,
    stored,
    streamed,
    whole,
    zip64_field,
)

WEIGHTS = {"w": floats()}
TREE = stored("archive/data.pkl", pickled({"w": tensor(storage())}))
DATA = stored("archive/data/0", floats())
VERSION = stored("archive/version", b"3\n")
SOUND = [TREE, VERSION, DATA]
OTHER = stored("archive/data/0", floats(5)[4:])
"""A storage of other numbers, for whoever reads it instead."""

FIELDS: dict[str, tuple[Any, ...]] = {
    "name": (b"archive/data/1", b"", b"archive/DATA/0", b"../data/0", b"archive/data\\0", b"archive/data/0\0"),
    "flags": (1, 1 << 3, 1 << 5, 1 << 6, 1 << 11, 1 << 13, FULL16),
    "method": (1, 8, 9, 12, 14, 93, 95, 99, FULL16),
    "crc32": (1, FULL32, zlib.crc32(OTHER.payload)),
    "stored": (0, 15, 17, 1 << 31, FULL32 - 1, FULL32),
    "nbytes": (0, 15, 17, 1 << 31, FULL32 - 1, FULL32),
    "extra": (
        b"\1",
        b"\1\0\0\0",
        zip64_field(16),
        zip64_field(16, 16),
        zip64_field(1 << 63, 1 << 63),
        b"\x75\x70\1\0x",
        b"\x75\x70\x13\0\1" + zlib.crc32(DATA.name).to_bytes(4, "little") + b"archive/data/1",
        b"\x46\x42\x10\0short",
        b"\x46\x42\0\0tail",
    ),
    "header": (0, 1, 5, 60, 1 << 20, FULL32 - 1, FULL32),
    "disk": (1, FULL16),
    "attributes": (0x10, 0o120777 << 16, 0o040755 << 16, 0o020666 << 16, 0o060666 << 16, 0o010644 << 16, FULL32),
    "comment": (b"a comment", end(0, 0, 0)),
    "version": (0, 45, 63, FULL16),
    "made_by": (3 << 8, FULL16),
}
ONLY_CENTRAL = {"header", "disk", "attributes", "comment", "made_by"}
END: dict[str, tuple[int, ...]] = {
    "disk": (1, FULL16),
    "start": (1, FULL16),
    "here": (0, 1, 2, 4, FULL16),
    "count": (0, 1, 2, 4, FULL16),
    "nbytes": (0, 1, 46, 1 << 30, FULL32),
    "offset": (0, 1, 5, 1 << 30, FULL32),
    "comment_n": (1, 5, FULL16),
}
SIX = ("data.pkl", "version", "byteorder", "constants.pkl", ".format_version", "data/0")


def _matrix() -> Iterator[tuple[str, str, bytes]]:
    """Yield each field of each header of the tree and of the storage with each value that it should not have."""
    for number, (field, values) in product((0, 2), FIELDS.items()):
        for where in ("central",) if field in ONLY_CENTRAL else ("local", "central", "both"):
            for value in values:
                lie: dict[str, Any] = {field: value}
                member = SOUND[number]
                member = replace(
                    member, local=lie if where != "central" else {}, central=lie if where != "local" else {}
                )
                members = [*SOUND[:number], member, *SOUND[number + 1 :]]
                shown = value.hex()[:24] if isinstance(value, bytes) else hex(value)
                row = (
                    "Z15"
                    if field in ("flags", "method") and where == "both"
                    else "Z6"
                    if field == "attributes"
                    else "Z4"
                )
                yield row, f"{where} {field} {shown} of {member.name.decode()}", whole(members)
    for field, numbers in END.items():
        for number in numbers:
            yield "Z8", f"{field} {number:#x} of the end", whole(SOUND, last={field: number})
            yield "Z9", f"{field} {number:#x} of an end with zip64", whole(SOUND, zip64=True, last={field: number})


def _twins() -> Iterator[Case]:
    for copies, place in product((2, 3, 17), (0, 1, 3)):
        twins = [replace(OTHER, name=DATA.name) for _ in range(copies - 1)]
        yield Case(
            "Z1", f"{copies} storages of one name at {place}", whole(SOUND[:place] + twins + SOUND[place:]), "refused"
        )
    yield Case("Z1", "one member listed twice", whole(SOUND, listed=[*SOUND, DATA]), "ambiguous-zip")
    for name in SIX:
        for variant in sorted({name.upper(), name.title(), name.swapcase()} - {name}):
            twin = stored(f"archive/{variant}", b"x")
            members = [*(m for m in SOUND if m.name.decode() != f"archive/{name}"), stored(f"archive/{name}"), twin]
            yield Case("Z3", f"{name} and {variant}", whole(members), "ambiguous-zip")
    for variant in ("DATA.PKL", "Data.pkl", "data.PKL"):
        members = [replace(TREE, name=f"archive/{variant}".encode()), VERSION, DATA]
        yield Case("Z3", f"{variant} alone", whole(members), "any")
    other = [TREE, VERSION, OTHER]
    yield Case("Z2", "two archives", whole(SOUND) + whole(other), "refused")
    yield Case("Z2", "an archive in front", whole(SOUND, prefix=whole(other)), "refused")
    yield Case("Z2", "an archive between", whole(SOUND, gap=whole(other)), "refused")
    yield Case("Z2", "a member that only a sequential reader sees", whole([OTHER, *SOUND], listed=SOUND), "refused")
    for name, filler in (("a zero", b"\0"), ("a script", b"#!/bin/sh\n"), ("zeros", bytes(60_000))):
        for where in ("prefix", "gap", "suffix"):
            data = whole(SOUND, **{where: filler})  # type: ignore[arg-type]
            if where == "prefix":
                yield Case("Z2", f"{name} as {where}", data, "unknown-format")
            else:
                yield Case("Z2", f"{name} as {where}", data, "read", WEIGHTS)
    inner = stored("archive/data/0", local_header(OTHER) + OTHER.payload)
    nested = replace(OTHER, central={"header": len(local_header(inner))})
    yield Case("Z5", "a member inside another's bytes", whole([inner, TREE], listed=[nested, TREE]), "refused")
    shared = replace(OTHER, central={"header": 0})
    yield Case("Z5", "two members of one header", whole([DATA, TREE], listed=[DATA, TREE, shared]), "refused")
    yield Case("Z8", "an end in the comment", whole(SOUND, last={"comment": end(0, 0, 0)}), "refused")
    yield Case("Z8", "a whole archive in the comment", whole(SOUND, last={"comment": whole(other)}), "refused")
    for shift in (-56, -1, 1, 56):
        data = whole(SOUND, zip64=True, last64={"record": whole(SOUND, zip64=True).rindex(b"PK\6\6") + shift})
        yield Case("Z9", f"a locator {shift:+} bytes beside", data, "refused")


def _streamed() -> Iterator[Case]:
    """Yield storages whose sizes follow their bytes, and lie in one of three places."""
    for magic, width in product((True, False), (4, 8)):
        sound = streamed(DATA, magic=magic, width=width)
        for at, name in enumerate(("crc32", "stored", "nbytes")):
            begin = (0, 4, 4 + width)[at] + 4 * magic
            lies = {
                "in the directory": replace(sound, central={name: 9}),
                "in front": replace(sound, local={**sound.local, name: 9}),
                "behind": replace(sound, descriptor=sound.descriptor[:begin] + b"\x07" + sound.descriptor[begin + 1 :]),
            }
            for where, member in lies.items():
                label = f"the {name} {where}, {'with' if magic else 'without'} a mark, {width} bytes wide"
                yield Case("Z12", label, whole([member, TREE, VERSION]), "ambiguous-zip")
    bare = replace(streamed(DATA), descriptor=b"")
    yield Case("Z12", "no sizes behind", whole([bare, TREE, VERSION]), "ambiguous-zip")


MODES = (0o120777, 0o040755, 0o020666, 0o060666, 0o010644, 0o140644)
MARKED = [(0, 0x10), (3 << 8, 0x10), *((3 << 8, mode << 16) for mode in MODES)]
"""As a folder, a link, a device, a pipe or a socket."""


def _structures() -> Iterator[Case]:
    """Yield members and directories that lie about more than one field."""
    first = len(local_header(TREE)) + len(TREE.payload)
    into = replace(TREE, central={"stored": first, "nbytes": first})
    yield Case("Z5", "one member into another", whole(SOUND, listed=[into, VERSION, DATA]), "ambiguous-zip")
    outer = stored("archive/x", b"before" + local_header(OTHER) + OTHER.payload)
    at_end = replace(OTHER, central={"header": len(local_header(outer)) + 6})
    yield Case("Z5", "one at the end of another", whole([outer, TREE], listed=[outer, TREE, at_end]), "ambiguous-zip")
    hidden = whole([TREE, OTHER, VERSION, DATA], listed=SOUND)
    yield Case("Z2", "a hidden member between others", hidden, "ambiguous-zip")
    spelt = [Member(name="archive/é".encode(), flags=0x800), Member(name="archive/é".encode("cp437"))]
    yield Case("Z3", "two spellings of one name", whole([*SOUND, *spelt]), "ambiguous-zip")
    for where in ("local", "central"):
        half = replace(spelt[0], flags=0, **{where: {"flags": 0x800}})
        yield Case("Z3", f"a name that is UTF-8 in {where}", whole([*SOUND, half]), "ambiguous-zip")
        for extra in (b"", zip64_field(5), zip64_field(16, 16) * 2, zip64_field(16, 17), zip64_field(16, 16, 16)):
            full = replace(DATA, **{where: {"stored": FULL32, "nbytes": FULL32, "extra": extra}})
            yield Case("Z4", f"{where} sizes in the field {extra.hex()}", whole([full, TREE, VERSION]), "refused")
    for made_by, attributes in MARKED:
        marked = replace(DATA, central={"made_by": made_by, "attributes": attributes})
        yield Case("Z6", f"marked {made_by:#x} {attributes:#x}", whole([TREE, VERSION, marked]), "ambiguous-zip")
    for name, data in (("empty", b""), ("with bytes/", b"bytes"), ("both", b"bytes")):
        folder = stored(f"archive/{name}", data, central={"attributes": 0x10})
        yield Case("Z6", f"the folder {name!r}", whole([*SOUND, folder]), "ambiguous-zip")
    body, central = local_header(DATA) + DATA.payload, entry(DATA, 0)
    for junk in (b"\0", b"PK\1\2", bytes(46)):
        data = body + central + junk + end(1, len(central + junk), len(body))
        yield Case("Z8", f"{junk[:4]!r} more in the directory", data, "ambiguous-zip")
    yield Case("Z8", "an entry alone", central + end(1, len(central), 0), "refused")
    for count in (1, 7):
        counts = {"here": count, "count": count}
        yield Case("Z8", f"{count} members, as the end says twice", whole(SOUND, last=counts), "refused")
        yield Case("Z9", f"{count} members beside zip64", whole(SOUND, zip64=True, last=counts), "ambiguous-zip")
    says_nothing = {"here": FULL16, "count": FULL16, "nbytes": FULL32, "offset": FULL32}
    lies = ({"count": 1, "here": 1}, {"offset": 0}, {"record": 0}, {"record": 1 << 40}, {"size": 45}, {"here": 1})
    for last64, last in product(lies, ({}, says_nothing)):
        data = whole(SOUND, zip64=True, last64=last64, last=last)
        yield Case("Z9", f"zip64 with {last64}, {len(last)} full", data, "refused")


def _large_tree() -> bytes:
    return whole([deflated("archive/data.pkl", bytes(200 << 20)), VERSION])


def _large_text() -> bytes:
    text = pickled(b"X" + pack("<I", 60 << 20) + bytes(60 << 20))
    return whole([deflated("archive/data.pkl", text), VERSION])


def _large_storages() -> bytes:
    count = 1 << 26
    tree = pickled({str(i): tensor(storage(str(i), count), (count,)) for i in range(16)})
    bomb = deflated("archive/data/0", bytes(4 * count))
    bombs = [replace(bomb, name=b"archive/data/%d" % number) for number in range(16)]
    return whole([stored("archive/data.pkl", tree), *bombs, VERSION])


def _many_members() -> bytes:
    return whole([stored(f"archive/x{number}") for number in range(50_000)])


BOMBS = {
    "a tree that inflates to 200 MiB": (_large_tree, "limit-exceeded"),
    "a text of 60 MiB": (_large_text, "read"),
    "16 storages that inflate to 4 GiB": (_large_storages, "any"),
}


def _payloads() -> Iterator[Case]:
    damaged = replace(DATA, payload=OTHER.payload)
    yield Case("Z7", "a storage of another checksum", whole([TREE, VERSION, damaged]), "read")
    bare = replace(DATA, crc32=0)
    yield Case("Z7", "a storage without a checksum", whole([TREE, VERSION, bare]), "read", WEIGHTS)
    yield Case("Z7", "a tree of another checksum", whole([replace(TREE, crc32=5), VERSION, DATA]), "any")
    packed = deflated("archive/data/0", floats())
    yield Case("Z12", "a deflated storage", whole([TREE, VERSION, packed]), "read", WEIGHTS)
    for name, lie in (("checksum", {"crc32": 5}), ("size", {"nbytes": 15})):
        yield Case(
            "Z12", f"a deflated storage of another {name}", whole([TREE, VERSION, replace(packed, **lie)]), "any", False
        )
    yield Case("Z12", "a streamed storage", whole([TREE, VERSION, streamed(DATA)]), "read", WEIGHTS)
    for name, (make, expect) in BOMBS.items():
        yield Case("Z11", name, written(make), expect)
    claims = replace(packed, nbytes=(1 << 32) - 2)
    for name, parts in OBJECTS.items():
        yield Case("Z11", f"60 MiB of {name}", written(partial(bomb, *parts)), "pickle-bomb")
    yield Case("Z11", "a storage that claims 4 GiB", whole([TREE, VERSION, claims]), "any", False)
    yield Case("Z11", "50,000 members and no tree", written(_many_members), "refused")


def _texts() -> Iterator[Case]:
    for name in (".format_version", ".storage_alignment"):
        for text in (b"", b"0", b"-1", b"99999999999999999999", b"\xff" * 90):
            data = whole([*SOUND, stored(f"archive/{name}", text)])
            yield Case("Z13", f"{name} {text[:8]!r}", data, "read", WEIGHTS)
    for text in (b"little", b"big", b"", b"LITTLE", b"middle\x1b[31m", b"x" * 99_999):
        yield Case("Z13", f"byteorder {text[:12]!r}", whole([*SOUND, stored("archive/byteorder", text)]), "any")
    for text in (b"11", b"1000", b"99999999999999999999"):
        yield Case("Z13", f"version {text!r}", whole([TREE, DATA, stored("archive/version", text)]), "future-version")
    yield Case("Z14", "TorchScript", torchscript(), "read", {"weight": floats()})
    code = b"class Net(Module):\n  __parameters__ = []\n"
    net = named("__torch__", "Net") + b")\x81" + ops({"training": True}) + b"b"
    for constants in (b"", b"\x80\x02", b"not a pickle", pickled(7), b"\x80\x02Q.", b"\x80\x02(" * 99):
        members = {"archive/constants.pkl": constants, "archive/code/__torch__.py": code}
        yield Case("Z14", f"constants {constants[:12]!r}", torch_zip(net, members=members), "any", False)
    for name in (b"/etc/passwd", b"../up", b"x/..", b"x\\y", b"C:\\x", b"x\0y", b"x\ny", b"x\x1b[31m", b"\xff\xfe"):
        yield Case("Z10", f"a member called {name!r}", whole([*SOUND, Member(name=name, flags=0x800)]), "malformed-zip")


INFLATED = 60 << 20
OBJECTS = {
    "empty lists": (b"(", b"]", b"t"),
    "dicts": (b"(", b"}", b"t"),
    "lists in each other": (b"]" * 500_000, b"]a", b"a" * 499_999),
    "objects that are dropped": (b"N", b"]0", b""),
    "lines": (b"N", b"Va\n0", b""),
    "strings of a byte": (b"(", b"\x8c\x01a", b"t"),
}
"""What stands in front, what is repeated, and what stands behind."""


def bomb(head: bytes, body: bytes, tail: bytes) -> bytes:
    program = b"\x80\x04" + head + body * (INFLATED // len(body)) + tail + b"."
    return zip_file({"a/data.pkl": program, "a/version": b"3"}, deflated=["a/data.pkl"])


def _cases() -> Iterator[Case]:
    yield Case("Z4", "no lie at all", whole(SOUND), "read", WEIGHTS)
    for row, name, data in _matrix():
        yield Case(row, name, data, "one", WEIGHTS)
    yield from _twins()
    yield from _streamed()
    yield from _structures()
    yield from _payloads()
    yield from _texts()


CASES = tuple(_cases())
