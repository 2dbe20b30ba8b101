"""Tensors and storages that contradict themselves, each other, or the bytes that are there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from struct import pack
from typing import Any

from ckptool.tensors.dtypes import BY_STORAGE_CLASS
from tests.build import call, floats, integer, legacy, named, ops, pickled, raw, storage, tensor, torch_zip, zip_file
from tests.hostile.cases import Case, written

FLOATS = {"0": floats()}

T = tensor(storage())


HOOKS = call(named("collections", "OrderedDict"))


ROOT_ONLY = (None,)  # what legacy streams write for a storage that is not a view


INDICES = tensor(storage("1", 2, "LongStorage"), (1, 2), (2, 1))


WITH_INDICES = {"0": floats(), "1": bytes(16)}


def zipped(tree: Any) -> bytes:
    return torch_zip({"w": tree}, FLOATS)


def streamed(numel: Any, stored: int = 4) -> bytes:
    """Return a legacy stream whose tree and whose storage may disagree about the number of elements."""
    tree = {"w": tensor(storage(numel=numel, rest=ROOT_ONLY), (1,))}
    return legacy(tree, [("0", stored, floats())])


WRONG_NUMEL = [-1, 0, 3, 5, 16, 1 << 31, (1 << 61) - 1, 1 << 61, 1 << 63, 1 << 200, True, 4.0, "4", None, (4,)]


STREAM_KEYS = {
    "none": [],
    "one too few": ["0"],
    "one too many": ["0", "1", "2"],
    "one twice": ["0", "0"],
    "both twice": ["0", "1", "0", "1"],
    "others": ["0", "x"],
    "in another order": ["1", "0"],
    "no strings": [None, True],
    "a bool": [False, True],
    "no list": "01",
    "a dict": {"0": 1, "1": 1},
}


NO_SIZES = [-1, 1 << 63, 1 << 200, True, 1.0, "1", None, (1,), [1], b"C\x011", named("a", "B")]


def sparse(layout: Any, data: Any, function: str = "_rebuild_sparse_tensor") -> bytes:
    return torch_zip({"w": call(named("torch._utils", function), layout, data)}, WITH_INDICES)


COO, CSR = named("torch", "sparse_coo"), named("torch", "sparse_csr")


FLOAT32 = named("torch", "float32")


SCATTERED = {
    "the same pair again and again": ((1_000_000, 2), (0, 17_000_000)),
    "two runs far apart": ((1_000_000, 2), (1, 16_000_000)),
    "rows that overlap": ((1000, 1000), (8500, 8501)),
}
"""Shapes and strides of a million elements or two that a reader might read one by one."""


def scattered(shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Return a dozen such views of a storage that is nearly nothing when compressed."""
    nbytes = 17_200_000
    views = {f"w{at}": tensor(storage("0", nbytes, "ByteStorage"), shape, stride, at) for at in range(12)}
    members = {"data.pkl": pickled(views), "byteorder": b"little", "data/0": bytes(nbytes), "version": b"3\n"}
    return zip_file({f"archive/{name}": data for name, data in members.items()}, deflated=["archive/data/0"])


def of_long_class(module: str, function: str) -> bytes:
    """Return 15,000 tensors of a subclass whose name is long; each takes five bytes."""
    cls, rebuild = named("m" * 4090, "C" * 4090), named("torch._utils", "_rebuild_tensor_v2")
    arguments = {
        "_rebuild_wrapper_subclass": (cls, FLOAT32, (1,), (1,), 0, named("torch", "strided"), "cpu", False),
        "_rebuild_from_type_v2": (rebuild, cls, (storage(), 0, (1,), (1,), False, HOOKS), {}),
    }
    head = b"\x80\x02" + named(module, function) + b"q\0" + ops(arguments[function]) + b"q\1"
    pickle = head + b"00](" + b"h\0h\1R" * 15_000 + b"e."
    members = {"data.pkl": pickle, "byteorder": b"little", "data/0": floats(), "version": b"3\n"}
    return zip_file({f"archive/{name}": data for name, data in members.items()})


MALFORMED_SPARSE = {
    "nothing": (COO, ()),
    "no tuple": (COO, [INDICES, T, (4,)]),
    "no data": (COO, None),
    "indices alone": (COO, (INDICES,)),
    "no shape": (COO, (INDICES, T)),
    "a number for indices": (COO, (7, T, (4,))),
    "no values": (COO, (INDICES, None, (4,))),
    "indices and values that are names": (COO, (COO, COO, (4,))),
    "a shape of text": (COO, (INDICES, T, ("a", "b"))),
    "a shape that is text": (COO, (INDICES, T, "4")),
    "a shape of numbers below zero": (COO, (INDICES, T, (-1,))),
    "a shape of bools": (COO, (INDICES, T, (True,))),
    "a shape of fractions": (COO, (INDICES, T, (4.0,))),
    "a shape of 65 dimensions": (COO, (INDICES, T, (1,) * 65)),
    "a shape that is a tensor": (COO, (INDICES, T, T)),
    "an unknown layout": (named("torch", "sparse_xyz"), (INDICES, T, (4,))),
    "a layout that is a number": (7, (INDICES, T, (4,))),
    "a layout that is a tensor": (T, (INDICES, T, (4,))),
    "no layout": (None, (INDICES, T, (4,))),
    "compressed with two parts": (CSR, (INDICES, T, (4,))),
    "compressed with a number": (CSR, (INDICES, 7, T, (4, 4))),
    "compressed without a shape": (CSR, (INDICES, INDICES, T)),
    "values outside their storage": (COO, (INDICES, tensor(storage(), (5,)), (4,))),
}


OTHERS = {
    "no arguments": named("torch._utils", "_rebuild_tensor_v2") + b"NR",
    "no storage": tensor(ops(None)),
    "a storage that is a tensor": tensor(T),
    "a storage that is bytes": tensor(raw(floats())),
    "a storage of another kind": tensor(ops("weights") + b"Q"),
    "no dtype": call(named("torch._utils", "_rebuild_tensor_v3"), storage(), 0, (4,), (1,), False, HOOKS, None),
    "a dtype of another module": call(
        named("torch._utils", "_rebuild_tensor_v3"), storage(), 0, (4,), (1,), False, HOOKS, named("numpy", "float32")
    ),
    "a dtype too large": call(
        named("torch._utils", "_rebuild_tensor_v3"), storage(), 0, (4,), (1,), False, HOOKS, named("torch", "float64")
    ),
    "no quantiser": call(named("torch._utils", "_rebuild_qtensor"), storage(), 0, (4,), (1,), None, False, HOOKS),
    "a quantiser of nothing": call(
        named("torch._utils", "_rebuild_qtensor"), storage(), 0, (4,), (1,), (), False, HOOKS
    ),
    "a quantiser that is deep": call(
        named("torch._utils", "_rebuild_qtensor"), storage(), 0, (4,), (1,), (b")" + b"\x85" * 100_000, 1), False, HOOKS
    ),
    "a nested tensor without a buffer": call(named("torch._utils", "_rebuild_nested_tensor"), None, INDICES),
    "a jagged tensor without values": call(
        named("torch.nested._internal.nested_tensor", "_rebuild_njt"), {"offsets": INDICES}
    ),
    "a jagged tensor of a list": call(named("torch.nested._internal.nested_tensor", "_rebuild_njt"), [T]),
    "a meta tensor of no type": call(named("torch._utils", "_rebuild_meta_tensor_no_storage"), None, (4,), (1,), False),
    "a meta tensor of no size": call(
        named("torch._utils", "_rebuild_meta_tensor_no_storage"), named("torch", "float32"), (-4,), (1,), False
    ),
}


def wrapped(times: int, tree: bytes = T) -> bytes:
    """Return a parameter of a parameter of a parameter…"""
    return (named("torch.nn.parameter", "Parameter") + b"(") * times + tree + b"\x88tR" * times


def subclassed(times: int) -> bytes:
    """Return a subclass of a subclass of a subclass…"""
    rebuild = named("torch._tensor", "_rebuild_from_type_v2")
    head = named("torch._utils", "_rebuild_tensor_v2") + named("a", "B") + b"("
    return (
        rebuild
        + b"("
        + (rebuild + named("a", "B") + b"(") * times
        + head
        + storage()
        + b"K\0K\4\x85K\1\x85\x89Nt}"
        + b"t}" * times
        + b"tR"
    )


def with_state(state: bytes) -> bytes:
    args = (storage(), 0, (4,), (1,), False, HOOKS)
    return call(
        named("torch._tensor", "_rebuild_from_type_v2"),
        named("torch._utils", "_rebuild_tensor_v2"),
        named("a", "B"),
        args,
        state,
    )


def ten(item: bytes) -> bytes:
    return b"}(" + b"".join(ops(f"a{number}") + item for number in range(10)) + b"u"


SHARED_PARTS = {
    # name: tree, whether it is refused
    "ten parts, each of ten, 20 levels": (T + b"q\1" + (b"0" + with_state(ten(b"h\1")) + b"q\1") * 20, True),
    "one state of many tensors": (
        T + b"q\0010" + b"}(" + b"".join(ops(str(i)) + b"h\1" for i in range(5_000)) + b"uq\0020]("
        + with_state(b"h\2") * 1_000 + b"e",
        True,
    ),
    "one state of many other things": (
        b"}(" + b"NN" * 100_000 + b"uq\0020](" + with_state(b"h\2") * 1_000 + b"e",
        True,
    ),
    "one list under many attributes": (
        b"](" + b"N" * 100_000 + b"eq\0020" + with_state(b"}(" + b"Nh\2" * 10_000 + b"u"),
        True,
    ),
    "one set of flags": (
        b"}(" + b"NN" * 100_000 + b"uq\0020" + HOOKS + b"q\0030](" + b"".join(
            call(named("torch._utils", "_rebuild_tensor_v2"), storage(), 0, (4,), (1,), False, b"h\3", b"h\2")
            for _ in range(1_000)
        ) + b"e",
        False,
    ),
    "one device of many words": (
        b"(" + ops("cuda") * 100_000 + b"tq\0020" + named("torch", "device") + b"q\0030](" + b"".join(
            call(named("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"), T, None, b"h\3h\2R", False)
            for _ in range(1_000)
        ) + b"e",
        False,
    ),
    "a key that is deep": (with_state(b"})" + b"\x85" * 100_000 + T + b"s"), False),
}  # fmt: skip


def numpy_tensor(shape: bytes, data: bytes) -> bytes:
    array = call(named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"), (0,), raw(b"b"))
    dtype = call(named("numpy", "dtype"), "u1", 0, 1) + ops((3, "|", None, None, None, -1, -1, 0)) + b"b"
    array += ops((1, shape, dtype, False, data)) + b"b"
    return call(
        named("torch._utils", "_rebuild_device_tensor_from_numpy"), array, named("torch", "uint8"), "xla:0", False
    )


NUMPY = {
    "20,000 dimensions of 1,000 bytes": (
        numpy_tensor(b"(" + integer(1 << 8100) + b"q\1" + b"h\1" * 20_000 + b"t", raw(b"")),
        0,
    ),
    "one text for many arrays": (
        ops("a" * 1_000_000) + b"q\1" + b"0](" + numpy_tensor(ops((1_000_000,)), b"h\1") * 300 + b"e",
        300,
    ),
    "one encoded text for many arrays": (
        ops("a" * 1_000_000) + b"q\1" + b"0]("
        + numpy_tensor(ops((1_000_000,)), call(named("_codecs", "encode"), b"h\1", "latin1")) * 300 + b"e",
        300,
    ),
}  # fmt: skip


LOAD = named("torch.storage", "_load_from_bytes")


INLINE = {
    "nothing": raw(b""),
    "no stream": raw(b"abc" * 100),
    "a pickle": raw(pickled({"a": 1})),
    "a zip": raw(zipped(T)),
    "a stream of a tensor": raw(legacy({"w": tensor(storage(rest=ROOT_ONLY))}, [("0", 4, floats())])),
    "a stream that is cut": raw(legacy(storage(rest=ROOT_ONLY), [("0", 4, floats())])[:-1]),
    "a stream without keys": raw(legacy(storage(rest=ROOT_ONLY), [("0", 4, floats())], keys=[])),
    "text that is not bytes": ops("\u20ac" * 100),
    "bytes in hex": call(named("_codecs", "encode"), legacy(storage(rest=ROOT_ONLY)).hex(), "hex"),
}


def view(*tree: Any) -> bytes:
    return zipped(tensor(storage(), *tree))


OUTSIDE: dict[str, tuple[Any, ...]] = {
    "more than there is": ((5,), (1,), 0),
    "beyond the end": ((4,), (1,), 1),
    "behind the end": ((1,), (1,), 4),
    "rows that reach beyond": ((2, 2), (3, 1), 0),
    "a stride of 2^62": ((2,), (1 << 62,), 0),
    "a size that overflows": (((1 << 62) + 1,), (4,), 0),
    "sizes whose product overflows": ((1 << 62, 1 << 62), (0, 1), 0),
    "more elements than 2^63 from one": ((1 << 40, 1 << 40), (0, 0), 0),
    "more elements than 2^63 of small sizes": ((1 << 14,) * 5, (0,) * 5, 0),
    "64 sizes of 2^62": ((1 << 62,) * 64, (0,) * 64, 0),
    "no elements, and an overflow on the way": ((1 << 40, 1 << 40, 0), (0, 0, 0), 0),
    "a number behind the end": ((), (), 4),
    "no strides": ((4,), (), 0),
    "no sizes": ((), (1,), 0),
    "fewer strides than sizes": ((2, 2), (1,), 0),
    "65 dimensions": ((1,) * 65, (1,) * 65, 0),
    "100,000 dimensions": ((1,) * 100_000, (1,) * 100_000, 0),
    "sizes that are none": (None, (1,), 0),
    "strides that are none": ((4,), None, 0),
    "numbers for tuples": (4, 1, 0),
    "text for tuples": ("4", "1", 0),
    "a dict for sizes": ({4: 4}, (1,), 0),
}
LAYOUTS = ((1 << 34,), (1 << 17, 1 << 17), (1 << 20, 4, 1 << 12))
CLASSES = sorted(BY_STORAGE_CLASS)
PAIRS = (("FloatStorage", "HalfStorage"), ("FloatStorage", "IntStorage"), *pairwise([*CLASSES, CLASSES[0]]))


def sparse_of(shape: tuple[int, ...]) -> bytes:
    stored = tensor(storage("1", 2, "LongStorage"), (1, 1), (1, 1))
    return sparse(COO, (stored, tensor(storage(), (1,)), shape))


def without_bytes(kind: str, shape: tuple[int, ...]) -> bytes:
    """Return a tensor on the meta device, or one of a wrapper class."""
    args = (named("torch", "float32"), shape, (0,) * len(shape))
    if kind == "meta":
        return zipped(call(named("torch._utils", "_rebuild_meta_tensor_no_storage"), *args, False))
    function = named("torch._utils", "_rebuild_wrapper_subclass")
    return zipped(call(function, named("m", "C"), *args, 0, named("torch", "strided"), "cpu", False))


def _cases() -> Iterator[Case]:
    for numel in WRONG_NUMEL:
        yield Case("S1", f"{numel!r:.20} elements in a zip", zipped(tensor(storage(numel=numel), (1,))), "refused")
        yield Case("S1", f"{numel!r:.20} elements in a stream", streamed(numel), "refused")
    for stored in (-(1 << 63), -1, 0, 3, 5, 1 << 34, (1 << 63) - 1):
        yield Case("S1", f"{stored:,} elements where the tree says 4", streamed(4, stored), "storage-size")
    for numel in (1 << 34, (1 << 62) - 1):
        yield Case(
            "S5",
            f"{numel:,} elements in the stream and the tree",
            streamed(numel, numel),
            "truncated-legacy",
            nbytes=16 << 20,
        )
    for number in NO_SIZES:
        named_number = f"{number!r:.20}"
        yield Case("S2", f"a size of {named_number}", view((number,)), "malformed-tensor")
        yield Case("S2", f"a stride of {named_number}", view((1,), (number,)), "malformed-tensor")
        yield Case("S2", f"a stride of {named_number} for nothing", view((0,), (number,)), "malformed-tensor")
        yield Case("S2", f"an offset of {named_number}", view((1,), (1,), number), "malformed-tensor")
    for name, layout in OUTSIDE.items():
        yield Case("S2", name, view(*layout), "malformed-tensor")
    yield Case("S2", "64 dimensions", view((1,) * 64, (1,) * 64), "read", {"w": floats(1)})
    yield Case("S2", "an empty tensor behind the end", view((0, 1 << 40), (9, 9), 99), "read", {"w": b""})
    yield Case("S2", "sizes in a list", view([4], [1]), "read", {"w": floats()})
    for size in LAYOUTS:
        yield Case("S3", f"{size} from 16 bytes", view(size, (0,) * len(size)), "read")
    for name, (shape, stride) in SCATTERED.items():
        yield Case("S3", f"scattered: {name}", written(partial(scattered, shape, stride)), "read")
    for made_by in (("torch._utils", "_rebuild_wrapper_subclass"), ("torch._tensor", "_rebuild_from_type_v2")):
        yield Case(
            "S3", f"often, a class with a long name: {made_by[1]}", written(partial(of_long_class, *made_by)), "any"
        )
    for shape in ((1 << 8100,), (1 << 8100,) * 60, (1 << 63,), (1 << 40, 1 << 40), (1 << 62,) * 64):
        rank = len(shape)
        yield Case("S2", f"sparse: {rank} sizes from {len(bin(shape[0]))} bits", sparse_of(shape), "malformed-tensor")
        for kind in ("meta", "wrapper"):
            data = without_bytes(kind, shape)
            yield Case("S2", f"{kind}: {rank} sizes from {len(bin(shape[0]))} bits", data, "malformed-tensor")
    for kind in ("meta", "wrapper"):
        yield Case("S3", f"{kind}: 2^62 elements", without_bytes(kind, (1 << 31, 1 << 31)), "read")
    yield Case("S3", "sparse: 2^62 elements", sparse_of((1 << 62,)), "read")
    yield Case("S3", "2^62 floats from one", view((1 << 31, 1 << 31), (0, 0)), "read")
    yield Case("S3", "four floats from one", view((4,), (0,)), "read", {"w": floats(1) * 4})
    yield Case("S3", "floats that overlap", view((2, 2), (1, 1)), "read", {"w": OVERLAPPING})
    tree = {"a": tensor(storage("0", 4, rest=ROOT_ONLY)), "b": tensor(storage("1", 2, rest=ROOT_ONLY), (2,))}
    both = [("0", 4, floats()), ("1", 2, floats(2))]
    for name, listed in STREAM_KEYS.items():
        yield Case("S4", f"keys: {name}", legacy(tree, both, keys=listed), "refused")
    yield Case("S4", "storages in another order", legacy(tree, both[::-1]), "read", {"a": floats(), "b": floats(2)})
    for key in ("1", "", "../0", "0/", "O", 1, None, True, 0.0, ("0",)):
        yield Case("S4", f"a storage called {key!r}", zipped(tensor(storage(key))), "refused")
    for dtype in ("NoStorage", "floatstorage", "FloatStorage.x", ""):
        yield Case("S4", f"a storage of the class {dtype!r}", zipped(tensor(storage(dtype=dtype))), "storage-class")
    for offset, numel in ((0, 5), (4, 1), (1, 4), (-1, 2), (0, -1), (1 << 62, 1), (True, 1), (0, 1.0)):
        part = {"w": tensor(storage(rest=(("5", offset, numel),)), (1,))}
        yield Case("S4", f"{numel} elements from {offset} of four", legacy(part, [("0", 4, floats())]), "refused")
    for view_of in (("7", 1.0, 2), (7, 1, 2), ("7", 1), "7"):
        part = {"w": tensor(storage(rest=(view_of,)), (1,))}
        yield Case("S4", f"the view {view_of!r}", legacy(part, [("0", 4, floats())]), "refused")
    part = {"w": tensor(storage(rest=(("7", 1, 2),)), (3,))}
    yield Case("S4", "more than its view", legacy(part, [("0", 4, floats())]), "malformed-tensor")
    for first, second in PAIRS:
        numels = [16 // BY_STORAGE_CLASS[one].itemsize for one in (first, second)]
        for rest in ((), ROOT_ONLY):
            pair = [
                tensor(storage(numel=numel, dtype=dtype, rest=rest), (1,))
                for dtype, numel in zip((first, second), numels, strict=True)
            ]
            data = legacy(pair, [("0", numels[0], floats())]) if rest else torch_zip(pair, FLOATS)
            kind = "stream" if rest else "zip"
            yield Case("S6", f"{first} and {second} in a {kind}", data, "ambiguous-storage")
    for more in ({"location": "cuda:0"}, {"numel": 8, "dtype": "HalfStorage", "location": "cuda:0"}, {"numel": 2}):
        again = tensor(storage(rest=ROOT_ONLY, **more), (1,))
        twice = legacy([tensor(storage(rest=ROOT_ONLY)), again], [("0", 4, floats())])
        yield Case("S6", f"a storage of a stream that is {more} as well", twice, "ambiguous-storage")
        if "location" in more:
            moved = torch_zip([T, tensor(storage(**more), (1,))], FLOATS)
            yield Case("S6", f"a storage of a zip that is {more} as well", moved, "ambiguous-storage")
    yield Case("S7", "sound parts", sparse(COO, (INDICES, T, (4,))), "read")
    for make in (wrapped, subclassed):
        yield Case("S7", f"8 times {make.__name__}", zipped(make(8)), "read", {"w": floats()})
        yield Case("S7", f"50 times {make.__name__}", zipped(make(50)), "malformed-tensor")
    for name, parts in MALFORMED_SPARSE.items():
        yield Case("S7", name, sparse(*parts), "malformed-tensor")
    for name, indices in BAD_INDICES.items():
        storages = {"0": floats(), "1": pack(f"<{len(indices)}q", *indices)}
        stored = tensor(storage("1", len(indices), "LongStorage"), (1, len(indices)), (len(indices), 1))
        values = tensor(storage(), (len(indices),))
        tree = {"w": call(named("torch._utils", "_rebuild_sparse_tensor"), COO, (stored, values, (4,)))}
        yield Case("S7", f"indices: {name}", torch_zip(tree, storages), "any")
    for name, part in OTHERS.items():
        yield Case("S7", name, torch_zip({"w": part}, WITH_INDICES), "malformed-tensor")
    for make in (wrapped, subclassed):
        for times in (50, 100_000):
            yield Case("P11", f"{times:,} times {make.__name__}", zipped(make(times)), "malformed-tensor")
    for name, (part, is_refused) in SHARED_PARTS.items():
        kind = "limit-exceeded" if is_refused else "read"
        yield Case("P8", f"shared: {name}", zipped(part), kind, nbytes=128 << 20)
    for name, (part, _) in NUMPY.items():
        yield Case("P10", f"arrays: {name}", zipped(part), "read")
    for name, part in INLINE.items():
        yield Case("P13", f"inline: {name}", pickled({"w": tensor(call(LOAD, part))}), "refused")
    for order in (True, False):
        data = legacy({"w": tensor(storage(rest=ROOT_ONLY))}, [("0", 4, floats())], little_endian=order)
        yield Case("S9", f"a stream that says little_endian={order}", data, "read", {"w": floats()})


OVERLAPPING = pack("<4f", 0, 1, 1, 2)
BAD_INDICES = {"below zero": [-1], "beyond the shape": [4], "far beyond": [1 << 62], "twice": [1, 1], "falling": [3, 0]}

CASES = tuple(_cases())
