"""
Whether a pickle is data, and what else it may do, from what the reader has recorded.

A pickle is ``data`` only if every name and call in it is listed in ``constructions``. Any other name or call runs code,
or may; it is ``system`` if ``alarms`` knows it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Final

from ckptool.errors import Failure
from ckptool.pickles import alarms, nodes
from ckptool.pickles.alarms import Grade, How, Verdict, call_text, cut_text
from ckptool.pickles.constructions import (
    AXIS_NBYTES,
    BY_NAME,
    OBJECT_NBYTES,
    STORAGES,
    TENSOR_NBYTES,
    VALUES,
    Row,
    nbytes_made,
    takes,
    takes_state,
)
from ckptool.pickles.forms import NBYTES, Values, content, extent, is_key, storage_size
from ckptool.pickles.machine import Oddity
from ckptool.pickles.nodes import Call, Global, PersistentId, Unknown
from ckptool.pickles.reader import Pickle, read_pickle
from ckptool.sources.source import BytesSource, Source

PROGRAM: Final = "__torch__"
"""The package of TorchScript's classes, which Python does not import."""
_OF_PROGRAM: Final = re.compile(rf"{PROGRAM}\.(?!torch\.classes\.(?!(?:{'|'.join(sorted(alarms.PACKED))})\.))").match
"""Matches classes that are the program's own, or C++ classes of packed weights, but no other C++ classes."""
_FORM: Final = "is not of a form that is known to only make data"
_LOADER: Final = "what the loader has for an id"
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_LONGEST_HEAD: Final = 512
"""Bytes of the first three pickles of a legacy stream of one storage, and of the next two."""
_SPLIT: Final = Verdict(
    "system",
    "a split frame",
    "calls",
    alarms.UNFOLLOWED,
    lambda: "a frame that ends inside an opcode or goes on after the pickle, so that loaders read other opcodes",
)
_MAKE_OBJECTS: Final = ("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__")
_ALWAYS_IMPORTED: Final = frozenset(("builtins", "_codecs"))
"""Modules that are built into Python, so that no file can replace them."""


def name_at(module: str, name: str, protocol: int) -> str:
    """Return the full name that Python's unpickler looks up: up to protocol 2, it maps names of Python 2."""
    if protocol < 3:
        import _compat_pickle as compat

        if (module, name) in compat.NAME_MAPPING:
            module, name = compat.NAME_MAPPING[module, name]
        else:
            module = compat.IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}"


def is_listed(name: str) -> bool:
    """Return whether a pickle that refers to this full name may still be data."""
    return name in BY_NAME or name in STORAGES or name in VALUES or name in NBYTES


class Judge:
    """Judges the pickles of a file, one after the other."""

    def __init__(self, beside: Callable[[], str | None] | None = None) -> None:
        self.beside = beside or (lambda: None)
        """Returns a module beside the file that Python may import instead of another; None if there is none."""
        self._head = b""
        """The first three pickles of a legacy stream that was checked; most streams begin with the same bytes."""

    def verdicts(self, pickle: Pickle) -> Iterator[tuple[int, Verdict]]:
        """Yield the offset of the opcode, in bytes, and the verdict of each name and call that is not data."""
        names = {id(one): name_at(one.module, one.name, pickle.protocol) for one in pickle.globals}
        for one in pickle.globals:
            yield from ((one.offset, verdict) for verdict in self._reference(one, names[id(one)]))
        for is_met, what, why in (
            (pickle.has_protocols, "a second protocol", "with which names mean others"),
            (pickle.has_other_text, "text of Python 2", "which each reader may take for another"),
            (pickle.has_far_memo, "an index of the memo", "for which Python takes far more memory than the file has"),
        ):
            if is_met:
                yield pickle.start, _other(what, why)
        if pickle.split_frame is not None:
            yield pickle.split_frame, _SPLIT
        values = Values(names, pickle.end - pickle.start)
        values.has_old_strings = pickle.has_old_strings
        classes = {id(one) for one in pickle.globals if names[id(one)] in STORAGES}
        for node in pickle.persistent_ids:
            if (numel := storage_size(node.pid, classes)) is not None:
                values.has_storage(node, names[id(node.pid[1])], numel)
                if not values.is_one_storage(node.pid, names[id(node.pid[1])]):
                    yield pickle.start, _other("a key of a storage", "which another id has for one that is not alike")
            elif isinstance(node.pid, tuple) and len(node.pid) > 2 and node.pid[0] == "reduce_package":
                # The importer of torch.package makes this call.
                yield pickle.start, _of_call(Call(node.pid[-2], node.pid[-1]), is_wary=True)
            else:
                grade: Grade = "system" if nodes.is_sourced_object(node.pid) else "code"
                named = nodes.global_of(node)
                name = alarms.canonical(named.module, named.name) if named is not None else _LOADER
                yield pickle.start, Verdict(grade, name, "asks", alarms.FILES, partial(cut_text, node.pid))
        yield from self._calls(pickle, values)
        for odd in pickle.oddities:
            yield odd.offset, _of_oddity(odd)
        if not all(is_key(key, values) for key in pickle.odd_keys):
            yield pickle.start, _other("a key", "of which Python may not take the hash at once")

    def _reference(self, named: Global, name: str) -> Iterator[Verdict]:
        if re.fullmatch(alarms.ACTING, named.module):
            yield Verdict("system", named.module, "calls", alarms.IMPORTED, lambda: named.module)
        shown = alarms.canonical(named.module, named.name)
        if alarms.package_of(name) not in _ALWAYS_IMPORTED and (beside := self.beside()) is not None:
            yield Verdict("code", shown, "refers", f"may import {beside}, which lies beside the file", lambda: shown)
        elif _OF_PROGRAM(name):
            yield Verdict("program", PROGRAM, "refers", None, lambda: "objects of TorchScript")
        elif not is_listed(name):
            yield _of_name(named)

    def _calls(self, pickle: Pickle, values: Values) -> Iterator[tuple[int, Verdict]]:
        """Yield the verdicts of calls, and of states that their results get, in the order of their opcodes."""
        made = values.made
        rows = {at: row for at, name in values.names.items() if (row := BY_NAME.get(name)) is not None}
        foreign = {at for at, name in values.names.items() if _OF_PROGRAM(name)}
        values.state_at = {id(call): at for call, at in zip(pickle.builds, pickle.build_offsets, strict=True)}
        builds = zip(pickle.build_offsets, pickle.builds, strict=True)
        state_at, built = next(builds, _NO_BUILD)
        is_wary = cache(lambda: any(alarms.is_wary(one) for one in pickle.globals))
        tensor, ordered = (next((at for at, one in rows.items() if one is row), 0) for row in (_TENSOR, _ORDERED))
        nbytes = 0
        for call, offset in zip(pickle.calls, pickle.call_offsets, strict=True):
            at = id(call.func)
            if at == ordered and call.args is _NO_ARGUMENTS and call.items is None and call.how == "reduce":
                made[id(call)] = "ordered dict"
                nbytes += OBJECT_NBYTES
                continue
            if at == tensor and _is_plain_tensor(call, ordered, values):
                made[id(call)] = "tensor"
                nbytes += TENSOR_NBYTES + AXIS_NBYTES * len(call.args[2])
                continue
            while state_at < offset and built is not None:
                yield from self._state(built, state_at, rows, values, is_wary)
                state_at, built = next(builds, _NO_BUILD)
            row = rows.get(at)
            if row is not None:
                values.at = offset
                if takes(row, call, values):
                    stored = self.storage_of(BytesSource(content(call.args[0]) or b"")) if row is _LOADS else None
                    if row is not _LOADS or stored is not None:
                        made[id(call)] = row.makes
                        nbytes += nbytes_made(row, call)
                        if stored is not None:
                            values.has_storage(call, *stored)
                        continue
            elif at in foreign:
                continue
            yield offset, _of_call(call, is_wary=is_wary())
            if (named := alarms.asked(call)) is not None:
                yield offset, _of_name(named)
        if not values.memory.takes(nbytes):
            yield pickle.start, _other("calls", "which make far more than the pickle has bytes")
        while built is not None:
            yield from self._state(built, state_at, rows, values, is_wary)
            state_at, built = next(builds, _NO_BUILD)

    def _state(
        self, call: Call, offset: int, rows: Mapping[int, Row], values: Values, is_wary: Callable[[], bool]
    ) -> Iterator[tuple[int, Verdict]]:
        row = rows.get(id(call.func))
        if row is not None:
            values.at = offset
            if id(call) in values.made and takes_state(row, call, values):
                return
            values.made.pop(id(call), None)
        why = None
        if is_wary():
            given = alarms.passed((call.state,)) if nodes.partial_of(call) else alarms.as_method(call.state)
            why = f"{alarms.PASSED}: {given}" if given is not None else None
        if row is not None or why:
            name = nodes.class_name(call)
            shown = partial("{} gets {}".format, name, cut_text(call.state))
            yield offset, Verdict("system" if why else "code", name, "sets", why or _FORM, shown)

    def storage_of(self, source: Source) -> tuple[str, int] | None:
        """Return the class and the number of elements if a source is a legacy stream of one storage only, else None."""
        try:
            at = len(self._head) or _LONGEST_HEAD
            data = source.read(0, min(at + _LONGEST_HEAD, source.nbytes))
            if not data.startswith(self._head) or not self._head:
                at = self._begin(source)
            if (usual := _of_storage()(data, at)) is not None and usual[2][0] == len(usual[3]) == usual[7][0]:
                name, key, keys, view = f"torch.{str(usual[1], 'ascii')}", usual[3], [usual[8]], None
                numel, end = int.from_bytes(usual[4] or usual[5] or usual[6], "little"), usual.end()
            else:
                stored = read_pickle(source, at)
                listed = read_pickle(source, stored.end)
                if stored.persistent_ids != [stored.root] or any(map(self._makes_more, (stored, listed))):
                    return None
                _, cls, key, _, numel, *view = stored.root.pid
                name, keys, end = name_at(cls.module, cls.name, stored.protocol), listed.root, listed.end
        except Failure:
            return None
        is_alone = type(keys) is list and keys == [key] and not any(view or ())
        is_whole = end + 8 + numel * STORAGES.get(name, 0) == source.nbytes
        return (name, numel) if is_alone and is_whole and name in STORAGES else None

    def _begin(self, source: Source) -> int:
        """Return the end of a legacy stream's head (magic number, protocol, machine); if invalid, of the source."""
        parts: list[Pickle] = []
        while len(parts) < 3:
            parts.append(read_pickle(source, parts[-1].end if parts else 0))
        at = parts[-1].end
        if [one.root for one in parts[:2]] != [_MAGIC, 1001] or any(map(self._makes_more, parts)):
            return source.nbytes
        self._head = source.read(0, at)
        return at

    def _makes_more(self, pickle: Pickle) -> bool:
        return bool(pickle.calls) or next(self.verdicts(pickle), None) is not None


@cache
def _of_storage() -> Callable[[bytes, int], re.Match[bytes] | None]:
    """
    Return the compiled match of what torch writes for a storage, and its key again.

    It is faster than reading two pickles, and a plain pickle has a stream for each tensor.
    """
    return re.compile(
        rb"\x80\x02\(X\x07\0{3}storageq\0ctorch\n([A-Za-z0-9]{1,20}Storage)\nq\x01X(.)\0{3}([0-9]{1,20})q\x02"
        rb"X\x03\0{3}cpuq\x03(?:K(.)|M(.{2})|J(.{3}[\0-\x7f]))Ntq\x04Q\.\x80\x02\]q\0X(.)\0{3}([0-9]{1,20})q\x01a\.",
        re.DOTALL,
    ).match


def _is_plain_tensor(call: Call, ordered: int, values: Values) -> bool:
    """Return what ``takes`` returns for the most frequent call, of a tensor without flags, but faster."""
    args = call.args
    if type(args) is not tuple or len(args) != 6 or call.how != "reduce" or call.pairs or call.items:
        return False
    stored, offset, size, stride, needs_grad, hooks = args
    if type(size) is not tuple or type(stride) is not tuple or type(offset) is not int or type(needs_grad) is not bool:
        return False
    numel = -1 if id(stored) in values.quantised else values.storages.get(id(stored), -1)
    found = extent(size, stride) if _INTS.issuperset(map(type, size + stride)) else None
    if found is None or not 0 <= offset <= numel - found:
        return False
    if type(hooks) is not Call:
        return hooks is None
    is_dict = id(hooks.func) == ordered and hooks.how == "reduce" and hooks.items is None
    return is_dict and hooks.args is _NO_ARGUMENTS and hooks.pairs is None and hooks.state is None


def _of_name(named: Global) -> Verdict:
    """Return the verdict of a reference to a name that is not listed."""
    why, shown = alarms.reach(named), alarms.canonical(named.module, named.name)
    return Verdict("system" if why else "code", shown, "refers", why, lambda: shown)


def _of_call(call: Call, *, is_wary: bool) -> Verdict:
    """Return the verdict of a call that is not listed."""
    func, args = call.func, call.args
    given = args if type(args) is tuple else (args,)
    how: How = "calls" if call.how == "reduce" else "builds"
    named = alarms.found(call if type(func) is Call else None) or alarms.found(func)
    if named is None:
        return _of_unnamed(call, how, is_wary=is_wary)
    if alarms.canonical(named.module, named.name) in _MAKE_OBJECTS and given:
        made = [one for one in map(alarms.found, given[:2]) if one is not None]
        named = next((one for one in made if alarms.reach(one)), made[0] if made else named)
        how, given = "builds", given[1:]
    why = alarms.of_call(named, how, call, is_wary=is_wary)
    grade: Grade = "system" if why else "code"
    name = alarms.canonical(named.module, named.name)
    return Verdict(grade, name, how, why, partial(call_text, name, given))


def _of_unnamed(call: Call, how: How, *, is_wary: bool) -> Verdict:
    func = call.func
    maker = nodes.global_of(func.func) if type(func) is Call else None
    name = alarms.canonical(maker.module, maker.name) if maker is not None else cut_text(func)
    if type(func) is Unknown:
        return Verdict("system", func.why, how, alarms.UNFOLLOWED, partial(call_text, func.why, call.args))
    grade: Grade = "system" if maker is not None and how == "calls" and alarms.is_maker(name) else "code"
    why = alarms.EVALUATES if grade == "system" else alarms.UNFOLLOWED
    if is_wary and grade == "code" and (given := alarms.passed((call.args,))) is not None:
        grade, why = "system", f"{alarms.PASSED}: {given}"
    return Verdict(grade, name, how, why, partial(call_text, name, call.args))


def _of_oddity(odd: Oddity) -> Verdict:
    """Return the verdict of a change to an object that is not the pickle's own, or of a second state."""
    target = odd.target
    if odd.how == "refers":
        return Verdict("code", target.why, "refers", alarms.UNFOLLOWED, lambda: target.why)
    named = nodes.global_of(target)
    name = alarms.canonical(named.module, named.name) if named is not None else nodes.class_name(target)
    is_outside = named is not None or type(target) in (PersistentId, Unknown)
    is_given = alarms.passed((odd.given,)) or (type(target) is Call and alarms.as_method(target.state))
    grade: Grade = "system" if is_outside or is_given else "code"
    return Verdict(grade, name, odd.how, alarms.CHANGED, lambda: f"{name} gets {cut_text(odd.given)}")


def _other(name: str, why: str) -> Verdict:
    return Verdict("code", name, "odd", why, lambda: f"{name}, {why}")


_TENSOR: Final = BY_NAME["torch._utils._rebuild_tensor_v2"]
_LOADS: Final = BY_NAME["torch.storage._load_from_bytes"]
_ORDERED: Final = BY_NAME["collections.OrderedDict"]
_NO_ARGUMENTS: Final = ()
"""In CPython, all empty tuples are this object."""
_INTS: Final = frozenset((int,))
_NO_BUILD: Final[tuple[int, Call | None]] = (sys.maxsize, None)
