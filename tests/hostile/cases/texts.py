"""Texts of megabytes, all of it unprintable, wherever a file has text that somebody is told of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.build import call, floats, named, ops, pickled, storage, tensor, torch_zip, zip_file
from tests.hostile.cases import Case, written
from tests.hostile.cases.headers import entry, file, text

LONG = "\x01" * (60 << 20)
LARGE = "\x01" * (1 << 20)
T = tensor(storage())


def packed(make: Callable[[], bytes]) -> Callable[[], bytes]:
    """Return what makes a small zip of a tree that is large, and of four floats."""

    def zipped() -> bytes:
        members = {"archive/data.pkl": pickled(make(), protocol=4), "archive/data/0": floats()}
        return zip_file({**members, "archive/version": b"3"}, deflated=["archive/data.pkl"])

    return zipped


def asked(module: str, name: str) -> bytes:
    return ops(module) + ops(name) + b"\x93"


def module(cls: bytes, **more: bytes) -> bytes:
    state = {"_parameters": {"w": T}, "_buffers": {}, "_modules": {}, **more}
    return cls + b")\x81" + ops(state) + b"b"


def tagged(count: int) -> bytes:
    """Return many tensors whose storages share one tag."""
    first = ops("cuda" + LARGE) + b"q\x07" + b"0"
    each = ops("storage") + named("torch", "FloatStorage") + ops("0") + b"h\x07" + ops(4)
    hooks = call(named("collections", "OrderedDict"))
    made = named("torch._utils", "_rebuild_tensor_v2") + b"((" + each + b"tQ" + ops(0) + ops((4,)) + ops((1,))
    made += b"\x89" + hooks + b"tR"
    return first + b"}(" + b"".join(ops(f"w{number}") + made for number in range(count)) + b"u"


TREES: dict[str, Callable[[], bytes]] = {
    "a value": lambda: ops({"w": T, "note": LONG}),
    "a key of no tensor": lambda: ops({"w": T, "x": {LONG: 1}}),
    "a path": lambda: ops({"w": T, LONG: 1}),
    "a module": lambda: ops({"w": T, "x": asked(LONG, "a")}),
    "a class": lambda: ops({"w": T, "x": asked("a", LONG) + b")R"}),
    "the class of a tensor": lambda: ops({"w": T, "x": call(asked(LONG, "Tensor"), 1)}),
    "the class of a model": lambda: module(asked("a", LONG)),
    "a hook": lambda: module(named("a", "B"), _state_dict_hooks=ops({1: asked("a", LONG)})),
    "an unreadable parameter": lambda: module(named("a", "B"), _buffers=ops({"b": asked("a", LONG) + b")R", "w": T})),
    "an attribute": lambda: ops({"w": T, "x": named("a", "B") + b")R" + ops({LONG: 1}) + b"b"}),
    "a persistent id": lambda: ops({"w": T, "x": ops(LONG) + b"Q"}),
    "a device": lambda: ops({"w": tensor(storage(location=LONG))}),
    "a storage's class": lambda: ops({"w": tensor(storage(dtype="a").replace(named("torch", "a"), asked(LONG, "a")))}),
    "a storage's key": lambda: ops({"w": tensor(storage(LONG))}),
    "the device of 2,000 tensors": lambda: tagged(2000),
    "the type of a tensor": lambda: ops(
        {"w": call(named("torch._utils", "_rebuild_meta_tensor_no_storage"), asked("torch", LONG), (4,), (1,), False)}
    ),
}


def _cases() -> Iterator[Case]:
    for name, make in TREES.items():
        yield Case("I4", f"60 MiB as {name}", written(packed(make)), "any")
    headers = {
        "a value of the metadata": lambda: text(__metadata__={"a": LONG[: 12 << 20]}, x=entry()),
        "a key of the metadata": lambda: text(__metadata__={LONG[: 12 << 20]: "a"}, x=entry()),
        "100 values of the metadata": lambda: text(
            __metadata__={str(number): LONG[: 1 << 17] for number in range(100)}, x=entry()
        ),
        "a type": lambda: text(x=entry(LONG[: 12 << 20])),
        "a name": lambda: text(**{LONG[: 12 << 20]: entry()}),
        "a name twice": lambda: text(x=entry())[:-1] + f',"{"a" * (12 << 20)}":1,"{"a" * (12 << 20)}":1}}',
    }
    for name, header in headers.items():
        yield Case("I4", f"12 MiB as {name}", written(lambda header=header: file(header())), "any")
    yield Case("I4", "60,000 bytes as a member", torch_zip({"w": T}, {"0": floats(), "\x01" * 60_000: b""}), "any")


CASES = tuple(_cases())
"""All the cases."""
