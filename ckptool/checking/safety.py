"""
What unpickling a file would run, each call with its grade and place; findings of it, and a line per loader.

Also makes findings of that, and a line for each way to load the file. Nothing is looked up or called.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache, lru_cache
from itertools import chain, repeat
from typing import Final, TypeAlias

from ckptool.archives.archive import Archive
from ckptool.archives.compressed import Compression, compression_of
from ckptool.archives.zips import LOCAL_MAGIC
from ckptool.checking import finding
from ckptool.checking.finding import Advice, Finding, note
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Failure
from ckptool.formats import other_programs
from ckptool.formats.runnable import Act, Survey, place
from ckptool.formats.runnable.pickle_search import Search
from ckptool.formats.torch_zip import may_be_unpickled
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import show, some
from ckptool.pickles.alarms import NATIVE, SETTINGS, SOURCE, canonical, words
from ckptool.pickles.judge import is_listed
from ckptool.pickles.reader import gc_paused, read_as_far
from ckptool.pickles.weights_only import is_allowed
from ckptool.sources.files import Origin, open_source
from ckptool.sources.paths import is_remote
from ckptool.sources.source import Source
from ckptool.tensors.tensor import storage_id

_OF_PROGRAMS: Final = (".py", ".debug_pkl")
"""Suffixes of members that only torch reads, as parts of a program."""
_IMPORTED: Final = (
    sys.stdlib_module_names
    | words(
        "torch torchgen functorch numpy typing_extensions sympy mpmath tqdm zstandard opt_einsum optree gmpy gmpy2"
        " flint cuda dill envwrap monkeytype pydot pynvml torchcomms torchdistx pyzstd colorama filelock networkx redis"
        " tabulate triton hypothesis pandas sklearn xarray z3 tree onnx onnxruntime onnx_tf tensorflow tensorrt"
        " torch2trt fx2trt_oss tvm joblib lz4 psutil"
    )
) - {"test"}
"""Modules that are imported, directly or by others, for pickles that only make data."""
_ENDS_OF_MODULES: Final = (".py", ".pyc", ".so", ".pyd")
_IS_INIT: Final = re.compile(r"__init__\..*(?:py|pyc|so|pyd)").fullmatch
_IS_MODULE: Final = re.compile(r"[\w.-]+").fullmatch
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_LONGEST_SETTINGS: Final = 4 << 20
_PACKED_NBYTES: Final = 256
"""Bytes that show how a file is compressed."""
_SHORT: Final = 64
_IS_WORD: Final = re.compile(rb"[0-9A-Za-z]*\n?").fullmatch
"""Small members of a zip of ``torch.save`` match this: too little for a pickle that does something."""


def survey(
    checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS, *, glances: bool = False, skims: bool = False
) -> Survey:
    """
    Inspect every pickle of an open checkpoint, but for those of the other checkpoints in its archive.

    ``glances`` leaves out the members of a program that only torch reads, and what needs more remote requests.
    ``skims`` leaves out parts of a folder, and an index whose names all only make data: there may be very many.
    """
    search, known = Search(limits, modules_beside(getattr(checkpoint.source, "path", None))), _own_records(checkpoint)
    for stream, pickles in zip(checkpoint.streams, chain((checkpoint.pickles,), repeat(())), strict=False):
        if stream.record in known and not (
            skims and stream.is_index and all(is_listed(canonical(one.module, one.name)) for one in stream.globals)
        ):
            search.stream(stream, stream.record, pickles)
    if not (glances and is_remote(checkpoint.path or "")):
        _disguised(search, checkpoint)
    for stream in checkpoint.streams:
        if stream.rest is not None:
            search.behind(stream.source, stream.rest, stream.record)
    for part in () if skims or (glances and is_remote(checkpoint.path or "")) else checkpoint.parts:
        if part.contradiction is not None or part.twin is not None:  # other values are streams
            search.part(part)
    if checkpoint.traits.is_plain:
        return search.survey()
    for archive in checkpoint.archives:
        search.programs(archive)
    members = {*known.values()} - {""}
    but = _OF_PROGRAMS if glances and checkpoint.traits.program else ()
    for archive in checkpoint.archives:
        if any(name in archive for name in members):
            for name in _others(checkpoint, archive, members):
                if not name.endswith(but):
                    search.member(archive, name, name)
            search.unused(archive.source, archive.unused)
    return search.survey()


def modules_beside(path: str | None) -> Callable[[], str | None]:
    """Return a function that finds a module beside a file, or in a folder, that hides one that unpickling imports."""
    if not path or is_remote(path):
        return lambda: None
    return cache(lambda: _module_in(path if os.path.isdir(path) else os.path.dirname(path) or "."))


def _module_in(folder: str) -> str | None:
    try:
        return _module_of(folder, os.stat(folder).st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=64)
def _module_of(folder: str, _: int) -> str | None:
    """Return such a module in a folder; cached by the folder's time, as its files are often checked in a row."""
    with os.scandir(folder) as entries:
        names = [one.name for one in entries if one.name.partition(".")[0] in _IMPORTED]
    for name in sorted(names):
        if name.endswith(_ENDS_OF_MODULES) or _is_package(os.path.join(folder, name)):
            return name
    return None


def _is_package(folder: str) -> bool:
    try:
        return any(map(_IS_INIT, os.listdir(folder)))
    except OSError:
        return False


def _disguised(search: Search, checkpoint: Checkpoint) -> None:
    """
    Look for pickles and tars where files begin that are something else, and for zips where they end: loaders that only
    know pickles, or only zips, load them.
    """
    tars = {id(one.source) for one in checkpoint.archives if one.source.read(0, len(LOCAL_MAGIC)) != LOCAL_MAGIC}
    read = {id(stream.source) for stream in checkpoint.streams if stream.start == 0}
    shards = (shard.source for shard in checkpoint.shards)
    sources = [checkpoint.source, *(archive.source for archive in checkpoint.archives), *shards]
    is_member = checkpoint.member is not None
    sources += (one.source for one in checkpoint.streams if is_member or one.start == one.end)
    if checkpoint.traits.is_plain:  # the archive that it is a member of is the last one
        parts = (checkpoint.member or "").split("::")
        names = ["::".join(parts[at:]) for at in range(len(parts))]
        sources += (one.open(name) for one in checkpoint.archives[-1:] for name in names if name in one)
    for source in {id(one): one for one in sources}.values():
        if id(source) not in read:
            search.beginning(source)
        if id(source) not in tars:
            search.as_tar(source)
        search.ending(source)
        search.flatbuffer(source)


def whole(
    checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS, *, glances: bool = False, skims: bool = False
) -> Survey:
    """Inspect every pickle of a checkpoint, of others in its archive, and of the other members; see ``survey``."""
    members = (checkpoint, *inside(checkpoint))
    surveys = [
        (one.member or "" if one is not checkpoint else "", survey(one, limits, glances=glances, skims=skims))
        for one in members
    ]
    return merged([*surveys, ("", packed(members, limits))])


def inside(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Yield the other checkpoints in an archive, and those in these."""
    for member in checkpoint.inside.values():
        yield member
        yield from inside(member)


def survey_origin(origin: Origin, limits: Limits = DEFAULT_LIMITS, *, glances: bool = False) -> Survey:
    """Inspect every pickle in a file that cannot be opened as a checkpoint; if it ``glances``, not those in text."""
    member = ""
    if isinstance(origin, str | os.PathLike) and not os.path.lexists(origin):
        origin, _, member = os.fspath(origin).partition("::")
    try:
        source, _ = open_source(origin, limits.cancellation)
    except Failure:
        return Survey()  # no file: its error says so
    search = Search(limits, modules_beside(getattr(source, "path", None)))
    try:
        with gc_paused():
            search_file(search, str(origin) if isinstance(origin, str | os.PathLike) else "", source)
            if not glances:
                search.in_text(source)
    except Failure as error:
        search.miss(error.message)
    finally:
        source.close()
    found = search.survey()
    if not member:
        return found
    return found._replace(
        acts=tuple(act for act in found.acts if act.record.startswith(member)),
        names=tuple(name for name in found.names if name.record.startswith(member)),
    )


def search_file(search: Search, name: str, source: Source) -> None:
    """Search a file of any kind, which may be settings of NeMo, or a program of another kind."""
    if what := other_programs.in_content(name, source):
        search.miss(what)
    if name.endswith(other_programs.NEMO):
        from ckptool.formats.runnable.programs import of_settings  # few files are

        text = str(source.read(0, min(source.nbytes, _LONGEST_SETTINGS)), "utf-8", "replace")
        for act in of_settings(text, ""):
            search.keep(act)
    search.anything(source)


def may_be_pickle(origin: Origin) -> bool:
    """Return whether a file begins like a pickle, or like text for which unpicklers would call or import something."""
    source, _ = open_source(origin)
    with closing(source):
        found = read_as_far(source)
        head = source.read(0, min(len(_PNG), source.nbytes))
        asks = found.persistent_ids and head != _PNG  # as a pickle, a PNG only asks for an id
        is_one = head.startswith(b"\x80") or found.memo or found.calls or asks
        return bool(is_one) or any(_IS_MODULE(one.module) for one in found.globals)


def merged(surveys: Sequence[tuple[str, Survey]]) -> Survey:
    """Return one survey of several members, each with its name; empty for the file itself."""
    return Survey(
        tuple(act._replace(record=place(name, act.record)) for name, one in surveys for act in one.acts),
        tuple(found._replace(record=place(name, found.record)) for name, one in surveys for found in one.names),
        tuple(place(name, what) for name, one in surveys for what in one.unseen),
    )


def packed(checkpoints: Sequence[Checkpoint], limits: Limits = DEFAULT_LIMITS) -> Survey:
    """Inspect the members of archives that only pack others, but for those that are ``checkpoints``."""
    search = Search(limits, modules_beside(getattr(checkpoints[0].source, "path", None)))
    opened = [one.member for one in checkpoints if one.member is not None]
    unopened = {name for one in checkpoints for name, _ in one.unopened}
    done: set[int] = set()
    for one in checkpoints:
        place = ""
        own = _own_records(one).values()
        for archive in () if one.shards else one.archives:
            if any(name in archive for name in own):
                break
            storages = _members_of_bytes(one, archive)
            for name, record in archive.items() if id(archive) not in done else ():
                full = place + name
                is_known = name in storages or any(f"{known}::".startswith(f"{full}::") for known in opened)
                if record.nbytes and not is_known:
                    unseen = Search(limits) if full in unopened else search
                    unseen.member(archive, name, full)
                    if unseen is not search:
                        search.acts.update(unseen.acts)  # but not its parts that were not inspected:
                        search.names.update(unseen.names)  # that it cannot be opened is reported
            if id(archive) not in done:
                search.foreign(place.removesuffix("::"), other_programs.among(archive, archive.head))
                search.unused(archive.source, archive.unused, place.removesuffix("::"))
            done.add(id(archive))
            inner = f"{one.member or ''}::".removeprefix(place)
            place += next((f"{name}::" for name in archive if inner.startswith(f"{name}::")), "")
    return search.survey()


def _own_records(checkpoint: Checkpoint) -> dict[str, str]:
    """
    Return the name of the archive member that each stream of a checkpoint is in, by the stream's record.

    Streams inside a member are left out: the member is inspected as a whole, as a file that a loader reads by itself.
    """
    files = {shard.name for shard in checkpoint.shards}
    found: dict[str, str] = {}
    for stream in checkpoint.streams:
        name, _, rest = stream.record.partition("::")
        name, _, inner = (rest if name in files else stream.record).partition("::")
        if not (inner and any(name in archive for archive in checkpoint.archives)):
            found[stream.record] = name
    return found


def _others(checkpoint: Checkpoint, archive: Archive, known: Collection[str]) -> Iterator[str]:
    """Yield the members of an archive that are not ``known`` streams, not storages, and more than a word."""
    tensors = (*checkpoint.tensors.values(), *checkpoint.attributes.values())
    keys = {tensor.info.storage.key for tensor in tensors if tensor.info.storage is not None}
    named = (storage_id(node.pid) for one in checkpoint.pickles for node in one.persistent_ids)
    keys.update(one.key for one in named if one is not None)  # storages that no tensor uses
    folders = {name.rpartition("/")[0] for name in known}
    of_storages = {
        f"{one}/{kind}/{key}".lstrip("/") for one in folders for kind in ("data", "constants") for key in keys
    }
    of_storages = {name for name in of_storages if name in archive and not may_be_unpickled(archive, name)}
    of_storages |= _members_of_bytes(checkpoint, archive)
    for name, record in archive.items():
        if name in known or not record.nbytes or name in of_storages:
            continue
        if record.nbytes > _SHORT or not _IS_WORD(archive.head(name, _SHORT)):
            yield name


def _members_of_bytes(checkpoint: Checkpoint, archive: Archive) -> set[str]:
    """Return the members that are exactly one storage, whatever their names, and not a pickle as well."""
    if checkpoint.traits.loader != "torch.export.load":
        return set()
    tensors = (*checkpoint.tensors.values(), *checkpoint.attributes.values())
    storages = (tensor.info.storage for tensor in tensors)
    places = {(one.file_offset, one.nbytes) for one in storages if one is not None}
    stored = {name: one for name, one in archive.items() if one.compression == "stored"}
    found = {name for name, one in stored.items() if (archive.source.file_offset(one.offset), one.nbytes) in places}
    return {name for name in found if not archive.may_hold_objects(name)} - {name for name, _ in checkpoint.unopened}


AskAdvice: TypeAlias = Callable[[], Advice]
"""Called only for findings that need advice: finding it takes a while."""

_SHOWN = 3
_LOADERS = "torch.jit.load(), torch.export.load(), NeMo's restore_from() and what calls the model"
_DATA = "only makes data"
_LAST = ("asks", "refers", "odd")
"""Kinds of acts that are reported after calls."""
_TRUST = "Unpickle it only if you trust where it comes from."
_TRUST_LOADER = "Load it only if you trust where it comes from."


def findings(survey: Survey, advice: AskAdvice = Advice) -> Iterator[Finding]:
    """
    Yield findings about unpickling a file. ``advice`` returns how to get its tensors without that.

    CK203: pickles inside the strings of others import names that torch.load does not allow. Calls and names that do not
    only make data: CK205, CK216, CK206, CK217, CK207. CK209: parts that were not inspected.
    """
    inside = (one for one in survey.names if one.nested_at is not None and not is_allowed(one.module, one.name))
    names = dict.fromkeys(f"{one.module}.{one.name}" for one in inside)
    if names:
        yield note("CK203", f"pickles inside its strings ask for {some(list(names))} (not imported here)")
    yield from system_calls(survey, advice)
    code = [act for act in survey.acts if act.grade == "code" and act.how != "runs"]
    acts = sorted(code, key=lambda act: _LAST.index(act.how) if act.how in _LAST else -1)
    if acts:
        packages = _packages(acts)
        what = f"runs code of {some(packages)}" if packages else "may do more than make data"
        found = advice()
        found = found if found.command else Advice(_TRUST)
        yield note("CK206", f"unpickling {what}: it {describe_act(acts[0])}", *found)
    brought = [act for act in survey.of("code") if act.how == "runs"]
    kinds = {
        SOURCE: "source code in modules that it holds",
        NATIVE: "native code in folders that it holds",
        SETTINGS: "what its settings name",
    }
    for why, what in kinds.items():
        places = dict.fromkeys(act.name for act in brought if act.why == why)
        if places:
            fact = f"its loader runs {what}: {some(list(places))}"
            yield note("CK217", fact, _TRUST_LOADER)
    called = {act.name for act in survey.acts if act.how != "refers"}
    only_named = (act for act in survey.of("system", called=False) if act.name not in called)
    named = [f"{act.name} ({_place(act)})" for act in only_named]
    if named:
        fact = f"the pickles name what reaches the system, though they do not call it: {some(named)}"
        yield note("CK207", fact, _TRUST)
    if survey.unseen:
        yield note("CK209", f"not looked at: {some(survey.unseen)}", _TRUST_LOADER)


def imported(survey: Survey) -> Iterator[Finding]:
    """CK201, of a file that cannot be opened: its pickles import names that do not only make data."""
    own = (one for one in survey.names if one.nested_at is None and not is_listed(canonical(one.module, one.name)))
    names = list(dict.fromkeys(f"{one.module}.{one.name}" for one in own))
    if names:
        yield note("CK201", f"unpickling would import {some(names)} (not imported here)")


def system_calls(survey: Survey, advice: AskAdvice) -> Iterator[Finding]:
    """CK205: unpickling would call what reaches the system. CK216: a program in the file would."""
    acts = list(survey.of("system"))
    if not acts:
        return
    command = advice().command
    programs = [act for act in acts if act.how == "runs"]
    calls = [act for act in acts if act.how != "runs"]
    if calls:
        shown = [f"{act.text}, which {act.why} ({_place(act)})" for act in calls]
        hint = "Do not unpickle this file: not with torch.load(weights_only=False), not with pickle.load()."
        yield note("CK205", f"unpickling calls {some(shown, _SHOWN)}", hint, command)
    if programs:
        shown = [f"{act.text}, which {act.why} ({_place(act)})" for act in programs]
        fact = f"the program in the file has {some(shown, _SHOWN)}"
        yield note("CK216", fact, f"Do not load it: {_LOADERS} run it.", command)


def describe_act(act: Act) -> str:
    """Return what an act does, as part of a sentence."""
    verb = {
        "calls": "calls",
        "builds": "builds",
        "refers": "imports",
        "sets": "sets a state:",
        "adds": "adds items:",
        "asks": "asks the loader for",
        "odd": "holds",
    }
    return f"{verb[act.how]} {act.name if act.how in ('builds', 'refers') else act.text} ({_place(act)})"


def _place(act: Act) -> str:
    return finding.place(act.record, act.offset, act.nested_at)


def loading(
    survey: Survey, checkpoints: Sequence[Checkpoint], *, refused: bool, is_alone: bool = True
) -> tuple[str, ...]:
    """
    Return a line for each way to load a file: what it would run. The first of ``checkpoints`` is the file, the others
    are its members.

    If not ``is_alone``, there are findings in other files of its folder.
    """
    traits = checkpoints[0].traits
    is_empty = not (survey.names or any(one.streams or one.traits.program for one in checkpoints))
    if not (survey.acts or survey.unseen) and (traits.is_plain or is_empty):
        others = "" if is_alone else "; what other files of the folder run is said above"
        files = [one.traits for one in checkpoints if not one.inside]
        loaders = dict.fromkeys(one.call if one.is_read else "ckptool.load()" for one in files or [traits])
        opened = _opened(checkpoints[0])
        return (f"{' or '.join(loaders)} opens {opened} and runs nothing: it holds no pickle{others}",)
    runs = _runs([act for act in survey.acts if act.how != "runs"])
    if runs == _DATA and survey.unseen:
        runs += ", as far as it was looked at"
    if traits.is_trusted:
        return (f"{traits.call} unpickles its index and its values without weights_only, which {runs}",)
    if traits.loader != "torch.load":
        programs = [act.text for act in survey.acts if act.how == "runs" and act.grade != "program"]
        opens = "runs the program in it" if traits.program else "opens it"
        has = f", which has {some(programs, 1)}" if programs else ""
        return (f"{traits.call} {opens}{has}", f"pickle.load() of a part of it {runs}")
    opens = "refuses it" if refused else "opens it and runs nothing"
    return (f"torch.load() {opens}", *(f"{loader} {runs}" for loader in traits.unpickled_by))


def _opened(checkpoint: Checkpoint) -> str:
    """Return what the loader of a plain checkpoint opens: the path itself, or files in it."""
    if checkpoint.inside or (checkpoint.shards and checkpoint.traits.is_plain):
        return "each file of it"
    is_packed = checkpoint.member is not None or packing(checkpoint) is not None
    return "the file in it" if is_packed else "it"


def packing(checkpoint: Checkpoint) -> Compression | None:
    """Return the compression of the whole file of a checkpoint; None if it has none."""
    return compression_of(checkpoint.source.read(0, min(_PACKED_NBYTES, checkpoint.source.nbytes)))


def of_refused(acts: Sequence[Act]) -> Iterator[str]:
    """Yield what unpickling a file that cannot be opened would do; nothing if, as far as known, it only makes data."""
    what = _runs(acts)
    if what != _DATA:
        is_program = all(act.how == "runs" for act in acts if act.how != "refers")
        yield show(f"what {'loads' if is_program else 'unpickles'} it all the same {what}")


def _runs(acts: Sequence[Act]) -> str:
    """Return what acts run, as part of a sentence."""
    system = [act.text for act in acts if act.grade == "system" and act.how != "refers"]
    code = [act for act in acts if act.grade in ("code", "system")]
    if system:
        return f"calls {some(system, 1)}"
    if code and all(act.why == NATIVE for act in code):
        return f"runs {some(list(dict.fromkeys(act.text for act in code)))}"
    if packages := _packages(code):
        return f"runs code of {some(packages)}"
    return "may do more than make data" if code else _DATA


def _packages(acts: Iterable[Act]) -> list[str]:
    """Return the packages whose code acts run, those first of which something is called."""
    named = [act for act in acts if " " not in act.name]
    return list(dict.fromkeys(act.package for act in sorted(named, key=lambda act: act.how == "refers")))
