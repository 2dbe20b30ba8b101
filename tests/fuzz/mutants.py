"""Endless hostile files from a seed: damaged sound ones, pickle programs, zips with fields that lie, headers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from struct import pack
from typing import Any, NamedTuple

from tests import build
from tests.hostile.cases import headers
from tests.hostile.cases.zips import END, FIELDS, ONLY_CENTRAL, SOUND
from tests.zip_bytes import whole

FIXTURES = Path(__file__).parents[2] / "fixtures" / "valid"
NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]


class Mutant(NamedTuple):
    """A file, and where it comes from: family and number are enough to make it again from the seed."""

    family: str
    number: int
    data: bytes


@cache
def seeds() -> list[bytes]:
    """Return small sound files of every format: those that are built here, and the project's fixtures."""
    small = [path.read_bytes() for path in sorted(FIXTURES.glob("*")) if path.suffix != ".json"]
    return [*build.one_of_each().values(), *(data for data in small if len(data) < 20_000)]


def damaged(chance: random.Random) -> bytes:
    """Return a sound file that was flipped, overwritten, moved, cut, or spliced with others."""
    data = bytearray(chance.choice(seeds()))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(7):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                if place < len(data):
                    data[place] ^= 1 << chance.randrange(8)
            case 2:
                width = chance.choice((1, 2, 4, 8))
                number = chance.choice(NUMBERS) & ((1 << 8 * width) - 1)
                data[place : place + width] = number.to_bytes(width, chance.choice(("little", "big")))
            case 3:
                del data[place : place + chance.choice((1, 2, 8, 64))]
            case 4:
                start = chance.randrange(len(data) + 1)
                data[place:place] = data[start : start + chance.choice((1, 4, 30, 100))]
            case 5:
                other = chance.choice(seeds())
                start = chance.randrange(len(other))
                piece = other[start : start + chance.choice((4, 30, 200))]
                data[place : place + len(piece)] = piece
            case _:
                if chance.random() < 0.3:
                    del data[place:]
    return bytes(data or b"\x80")


# Pickle programs

NAMES = [
    f"{module} {name}"
    for module, *names in map(
        str.split,
        (
            "torch FloatStorage FloatTensor Size device float32 sparse_coo per_tensor_affine",
            "torch._utils _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_qtensor",
            "torch._utils _rebuild_parameter_with_state _rebuild_sparse_tensor _rebuild_nested_tensor",
            "torch._utils _rebuild_wrapper_subclass _rebuild_meta_tensor_no_storage",
            "torch._utils _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor",
            "torch._tensor _rebuild_from_type_v2",
            "torch.nested._internal.nested_tensor _rebuild_njt",
            "torch.nn.parameter Parameter UninitializedParameter",
            "torch.autograd.variable Variable",
            "torch.storage _load_from_bytes",
            "torch.fx.graph_module reduce_graph_module",
            "torch._dynamo.eval_frame OptimizedModule",
            "numpy.core.multiarray _reconstruct scalar",
            "numpy dtype",
            "_codecs encode",
            "collections OrderedDict",
            "builtins getattr bytes set",
            "copyreg _reconstructor",
            "os system",
            "__torch__ Net",
            "m C",
        ),
    )
    for name in names
]


TEXTS = [b"a", b"weight", b"cpu", b"0", b"storage", b"\xc3\xbc", b"\xff", b"\x1b", b""]
LINES = [b"0", b"1", b"-7", b"00", b"01", b"12L", b"x", b"1.5", b"'a'", b"u\\u0041", b"", b"9" * 30]


def _sized(width: int) -> Callable[[random.Random], bytes]:
    def argument(chance: random.Random) -> bytes:
        data = chance.choice(TEXTS)
        length = len(data) if chance.random() < 0.95 else chance.choice(NUMBERS) & ((1 << 8 * width) - 1)
        return length.to_bytes(width, "little") + data

    return argument


def _bytes(width: int) -> Callable[[random.Random], bytes]:
    return lambda chance: chance.choice([chance.randrange(4).to_bytes(width, "little"), chance.randbytes(width)])


def _named(chance: random.Random) -> bytes:
    return chance.choice(NAMES).replace(" ", "\n").encode() + b"\n"


OPCODES: dict[int, Callable[[random.Random], bytes]] = {
    **dict.fromkeys(b"()012NQRabdelostu]}.\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98", lambda _: b""),
    **dict.fromkeys(b"FILPSVgp", lambda chance: chance.choice(LINES) + b"\n"),
    **{code: _bytes(width) for code, width in ((0x4B, 1), (0x4D, 2), (0x4A, 4), (0x47, 8), (0x82, 1), (0x83, 2))},
    **dict.fromkeys(b"hq", lambda chance: bytes([chance.randrange(4)])),
    **dict.fromkeys(b"jr", lambda chance: pack("<I", chance.randrange(4))),
    **{code: _sized(1) for code in b"UC\x8a\x8c"},
    **{code: _sized(4) for code in b"TXB\x8b"},
    **{code: _sized(8) for code in b"\x8d\x8e\x96"},
    ord("c"): _named,
    ord("i"): _named,
    0x84: _bytes(4),
    0x80: lambda chance: bytes([chance.randrange(7)]),
    0x95: lambda chance: pack("<Q", chance.randrange(30)),
}
"""All 68 opcodes, and how each makes up its argument."""
PARTS = [
    build.storage(),
    build.tensor(build.storage()),
    build.inline_tensor(),
    build.raw(build.floats()),
    *map(build.ops, ("cpu", "0", "storage", "latin1", "<", "f4", -1, 1.5, (4,), (1,), (), {}, [])),
    build.ops({"_parameters": {}, "_buffers": {}, "_modules": {}}),
    build.named("collections", "OrderedDict") + b")R",
    build.ops({"w": build.tensor(build.storage())}),
    b"](",
    b"}(",
]


TAKES = {
    **dict.fromkeys(b"0Q2bR\x85\x98q\x94rp", 1),
    **dict.fromkeys(b"aR\x81\x86\x93b", 2),
    **dict.fromkeys(b"s\x87\x92", 3),
}
"""How many things on the stack an opcode needs; those that it leaves are counted as if they were none but one."""
TO_MARK = frozenset(b"tld1eu\x90\x91io")
PUSHES_NOTHING = frozenset(b"(01eu\x90\x94pqr\x80\x95\x98.2")


def likely(chance: random.Random, length: int) -> Iterator[bytes]:
    """Yield opcodes of which most find on the stack what they need."""
    depths = [0]
    codes = list(OPCODES)
    while length:
        code = chance.choice(codes)
        needs = TAKES.get(code, 0)
        lacks = depths[-1] < needs or (code in TO_MARK and len(depths) == 1)
        if (lacks and chance.random() < 0.98) or (code in b".\x82\x83\x84\x97" and chance.random() < 0.97):
            continue
        length -= 1
        if code == ord("("):
            depths.append(0)
        elif code in TO_MARK and len(depths) > 1:
            depths.pop()
        depths[-1] += (code not in PUSHES_NOTHING) - (needs if code not in b"2bqrp\x94\x98" else needs - 1)
        depths[-1] = max(depths[-1], 0)
        yield bytes([code]) + OPCODES[code](chance)
    yield b"1" * (len(depths) - 1)


def program(chance: random.Random) -> bytes:
    """Return a checkpoint whose tree is a program of any opcodes, mostly beside a sound tensor."""
    pieces = []
    for piece in likely(chance, chance.randrange(1, 16)):
        pieces.append(chance.choice(PARTS) if chance.random() < 0.15 else piece)
    middle = b"".join(pieces)
    # What is left on the stack is gathered up, so that most programs end well.
    tree = chance.choice([b"(" + middle + b"l", b"}(X\1\0\0\0w" + PARTS[1] + b"X\1\0\0\0x(" + middle + b"lu", middle])
    head = chance.choice([b"\x80\2", b"\x80\4", b""])
    container = chance.randrange(4)
    if container == 0:
        return head + tree + b"."
    if container == 1:
        return build.legacy(tree, [("0", 4, build.floats())])
    members = {"archive/data.pkl": head + tree + b".", "archive/data/0": build.floats(), "archive/version": b"3\n"}
    return build.zip_file(members)


# Zips


def lying_zip(chance: random.Random) -> bytes:
    """Return a zip of a checkpoint in which one field lies, or two."""
    members = list(SOUND)
    last: dict[str, int] = {}
    for _ in range(chance.choice((1, 2))):
        if chance.random() < 0.2:
            field = chance.choice(list(END))
            last[field] = chance.choice(END[field])
            continue
        number = chance.randrange(len(members))
        name = chance.choice(list(FIELDS))
        lie: dict[str, Any] = {name: chance.choice(FIELDS[name])}
        where = "central" if name in ONLY_CENTRAL else chance.choice(("local", "central", "both"))
        old = members[number]
        members[number] = old.__class__(
            **{
                **old.__dict__,
                "local": {**old.local, **(lie if where != "central" else {})},
                "central": {**old.central, **(lie if where != "local" else {})},
            }
        )
    if chance.random() < 0.1:
        chance.shuffle(members)
    return whole(members, zip64=chance.random() < 0.3, last=last)


def header(chance: random.Random) -> bytes:
    """Return a safetensors file whose header was changed."""
    return headers.mutated(chance, chance.choice(headers.SEEDS))


FAMILIES: dict[str, Callable[[random.Random], bytes]] = {
    "damaged": damaged,
    "program": program,
    "zip": lying_zip,
    "header": header,
}


def mutant(seed: int, family: str, number: int) -> Mutant:
    """Return one file, always the same for the same three."""
    return Mutant(family, number, FAMILIES[family](random.Random(f"{seed}/{family}/{number}")))


def mutants(seed: int) -> Iterator[Mutant]:
    """Yield files without end, each family in turn."""
    for number in count():
        for family in FAMILIES:
            yield mutant(seed, family, number)
