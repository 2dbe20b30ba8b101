"""
``python -m tests.fuzz.judged --programs 100000 --seed 1``: what ``check`` says of programs of names that matter.

Programs are made from a seed, of names of which each has a meaning for how far a pickle reaches. Of each,
- whatever Python's own unpickler calls, with recorders in the place of every name, is among what ``check`` lists;
- what is told from the list of its calls is what is told when it is followed opcode by opcode;
- how far it reaches at a glance, as ``scan`` takes it, is how far ``check`` says that it does.
Nothing real is ever looked up or called. Exits 1 if one of them does not hold.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from struct import pack
from typing import Any
from unittest import mock

from ckptool import CheckReport, CkptoolError, check, open_checkpoint
from ckptool.checking import safety
from ckptool.pickles import called
from tests.fuzz.calls import registered, unlisted

NAMES = [
    (module, name)
    for module, names in {
        "os": "system _exit",
        "functools": "partial lru_cache",
        "builtins": "getattr setattr set list iter map object eval type property dict repr",
        "__builtin__": "object",
        "operator": "getitem attrgetter methodcaller",
        "collections": "OrderedDict defaultdict Counter deque UserDict",
        "pkg": "Net f Sub.method",
        "torch": "Size device load",
        "torch.nn.modules.linear": "Linear",
        "torch.nn.modules.module": "Module",
        "torch.nn.functional": "relu",
        "torch._tensor": "_rebuild_from_type_v2",
        "torch._utils": "_rebuild_parameter",
        "torch.optim.adam": "Adam",
        "torch.optim.lr_scheduler": "LambdaLR",
        "torch._dynamo.convert_frame": "CatchErrorsWrapper",
        "types": "GenericAlias SimpleNamespace MethodType FunctionType",
        "typing": "_GenericAlias",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy": "ndarray dtype",
        "weakref": "ref",
        "copyreg": "_reconstructor __newobj__",
        "_codecs": "encode",
        "dill._dill": (
            "_create_type _import_module _get_attr _getattr _create_namedtuple _create_array"
            " _create_ftype _create_weakref"
        ),
        "cloudpickle.cloudpickle": (
            "_make_skeleton_class _class_setstate subimport _make_function _make_skeleton_enum _function_setstate"
            " _make_dict_items"
        ),
        "argparse": "Namespace",
        "enum": "Enum",
        "itertools": "accumulate",
        "importlib": "import_module",
        "logging": "getLogger",
        "math": "sqrt",
    }.items()
    for name in names.split()
]
TEXTS = (
    *("system", "f", "x", "os", "pkg", "latin1", "state_dict", "forward", "append", "extend", "update", "add", "items"),
    *(
        "hooks",
        "_modules",
        "_buffers",
        "__call__",
        "__class__",
        "__dict__",
        "__globals__",
        "__reduce__",
        "__setstate__",
        "__slots__",
        "__closure__",
        "__subclasshook__",
        "_abc_impl",
        "close",
        "data",
    ),
)
SPLIT = "a split frame"
TAME = [
    (module, name)
    for module, name in NAMES
    if module.startswith(("collections", "functools", "pkg", "torch.nn", "torch._utils", "argparse", "builtins"))
    and name not in ("getattr", "setattr", "eval", "map", "type", "property")
]
"""Names that reach nothing by themselves: programs of these alone may be judged at a glance."""


class Program:
    """Makes one pickle, which may take up again what it has made before."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.names = TAME if chance.random() < 0.3 else NAMES
        self.kept = 0

    def text(self) -> bytes:
        data = self.chance.choice(TEXTS).encode()
        return b"X" + pack("<I", len(data)) + data

    def name(self) -> bytes:
        return "c{}\n{}\n".format(*self.chance.choice(self.names)).encode()

    def keep(self, data: bytes) -> bytes:
        if self.kept == 250 or self.chance.random() < 0.6:
            return data
        self.kept += 1
        return data + b"q" + bytes([self.kept - 1])

    def several(self, depth: int, most: int = 4) -> bytes:
        return b"".join(self.value(depth - 1) for _ in range(self.chance.randrange(most)))

    def pairs(self, depth: int) -> bytes:
        return b"".join(self.text() + self.value(depth - 1) for _ in range(self.chance.randrange(4)))

    def value(self, depth: int) -> bytes:
        kind = self.chance.randrange(14 if depth > 0 else 6)
        if kind < 5:
            return (b"N", b"K\1", b")", b"}", self.text())[kind]
        if kind == 5:
            return self.name() if self.chance.random() < 0.4 else b"]"
        if kind == 6 and self.kept:
            return b"h" + bytes([self.chance.randrange(self.kept)])
        if kind < 10:
            return (b"(%bt", b"](%be", b"}(%bu")[kind - 7] % (self.pairs if kind == 9 else self.several)(depth)
        return self.made(depth)

    def made(self, depth: int) -> bytes:
        """Return the call of a name, mostly, with items and a state for what it gives."""
        chance = self.chance.random
        data = self.keep(self.name()) if chance() < 0.93 else self.value(depth - 1)
        given = (b")", b"]\x85", b"(" + self.several(depth) + b"t")[self.chance.choices((0, 1, 2), (5, 1, 14))[0]]
        data = self.keep(data + given + (b"R" if chance() < 0.6 else b"\x81"))
        if chance() < 0.1:
            data += b"(" + self.value(depth - 1) + self.several(depth, 2) + b"e"
        if chance() < 0.1:
            data += b"(" + self.text() + self.value(depth - 1) + b"u"
        if chance() < 0.45:
            data += (b"}(" + self.pairs(depth) + b"u" if chance() < 0.8 else self.value(depth - 1)) + b"b"
        return data

    def whole(self) -> bytes:
        dropped = b"".join(self.made(self.chance.randrange(1, 4)) + b"0" for _ in range(self.chance.randrange(3)))
        return b"\x80\2" + dropped + b"}(" + self.pairs(4) + b"u."


def unclear(*_: Any) -> None:
    raise called.Unclear


@contextmanager
def counted(ways: Counter[str]) -> Iterator[None]:
    """Count how many are told from their calls, and how many of these with all arguments looked at."""
    plain = called.told

    def told(*given: Any) -> Any:
        found = plain(*given)
        ways["told"] += 1
        ways["wary"] += found[1]
        return found

    with mock.patch.object(called, "told", told):
        yield


def said(report: CheckReport) -> Any:
    """
    Return what is said of calls and of loading; names that are looked up count once, or each time.

    What a call is given stands for itself: a tree has what a container got later, too.
    """
    # That an object without a method for it is given the state None changes nothing.
    acts = [one for one in report.acts if not one.text.endswith(" gets None")]
    bare = [one._replace(text=one.text.partition("(")[0]) for one in acts]
    found = [one._replace(times=1) if one.how == "refers" else one for one in bare]
    return str(report.loading).partition("it calls ")[0], found


def wrong(data: bytes, ways: Counter[str]) -> Iterator[str]:
    """Yield what is wrong with what is said of a program."""
    with counted(ways):
        report = check(data)
    with mock.patch.object(called, "told", unclear):
        followed = check(data)
    if not any(one.text.endswith(" gets None") for one in followed.acts) and said(report) != said(followed):
        yield f"told {said(report)}, and followed {said(followed)}"
    with suppress(CkptoolError), open_checkpoint(data) as checkpoint:
        glanced = safety.glance(checkpoint)
        ways[f"at a glance {glanced}"] += 1
        if glanced not in (None, report.grade):
            yield f"{glanced} at a glance, and {report.grade}"
    if not any(one.name == SPLIT for one in report.acts):
        yield from (f"{how} {name} is not told" for how, name in unlisted(data))


def run(seed: int, programs: int) -> tuple[Counter[str], list[tuple[bytes, str]]]:
    """Try so many programs; return how many were told from their calls, and what is wrong with which."""
    registered()
    chance, ways = random.Random(seed), Counter[str]()
    made = (Program(chance).whole() for _ in range(programs))
    return ways, [(data, what) for data in made for what in wrong(data, ways)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.judged", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--programs", type=int, default=10_000)
    asked = parser.parse_args(arguments)
    ways, found = run(asked.seed, asked.programs)
    print(
        f"seed {asked.seed}: {asked.programs:,} programs, {ways['told']:,} told from their calls "
        f"({ways['wary']:,} with all arguments), {ways['at a glance code']:,} and {ways['at a glance data']:,} judged "
        f"at a glance, {len(found)} faults"
    )
    for data, what in found[:10]:
        print(f"  {what}: {data!r}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
