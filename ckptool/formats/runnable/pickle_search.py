"""
Find pickles in whatever holds them, and keep what they would do: gzip, zips, tars, strings of other pickles.

Each is read as far as it goes, and judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final

from ckptool.archives.archive import Archive
from ckptool.archives.zip_directory import LOCAL_MAGIC
from ckptool.archives.zips import Remnant
from ckptool.checkpoints.parsed import Stream
from ckptool.errors import Failure, LimitExceeded
from ckptool.formats import holders, other_programs
from ckptool.formats.runnable import SETTINGS
from ckptool.formats.runnable.unpacking import Act, Content, Name, Survey, Unpacking
from ckptool.formats.runnable.unpacking import place as at
from ckptool.formats.torch_legacy import end_of_stream, is_legacy
from ckptool.limits import Limits
from ckptool.messages import cut
from ckptool.pickles.alarms import Verdict, is_known
from ckptool.pickles.dangerous_names import UNFOLLOWED
from ckptool.pickles.judge import Judge
from ckptool.pickles.machine import packed_nbytes
from ckptool.pickles.numpy_values import read_as_far_with_arrays
from ckptool.pickles.reader import Pickle, read_as_far
from ckptool.sources.source import BytesSource, SliceSource, Source

_DEEPEST: Final = 16
"""Archives, and pickles in the bytes of pickles, inside each other."""
_MOST_COST: Final = 1 << 24
_MOST_RATIO: Final = 4
"""What is looked at inside others may cost so much, or so many times the bytes of the file: its own bytes, so that the
same byte counts once for each level, and for each thing by itself"""
_COST: Final = 128
_COST_OF_PICKLE: Final = 512
"""so much, and so much where no format has read it."""
_HEAD: Final = 512
_MOST_LISTED: Final = 1000
_MOST_UNSEEN: Final = 100
_MOST_NAMES: Final = 100_000
_LONGEST: Final = 4096
"""A name is shown up to there: it may be as long as the file."""
_OF_PROGRAMS: Final = (
    ".py",
    "bytecode.pkl",
    "constants.pkl",
    ".json",
    ".data/extern_modules",
    "archive_format",
    SETTINGS,
)
"""How names of members end where there may be programs;"""
_FOLDERS: Final = ("/models/", "/aotinductor/")
"""what is in the names of others that are some, in what remains of an exported one."""
_PROTO: Final = 0x80
_OF_LEGACY: Final = 5
_LONGEST_MAGIC: Final = 48

_TEXT_OPCODES: Final = frozenset(
    b"(]}clidoISVLFNUTXKMJGgpPCB\x82\x83\x84\x8a\x8b\x8c\x8d\x8e\x8f\x95\x96)0123aest\x88\x89"
)
"""What a pickle without PROTO may begin with."""


_SPLIT: Final = Verdict("system", "a split frame", "calls", UNFOLLOWED, lambda: _SPLIT_FRAME)
_SPLIT_FRAME: Final = (
    "a frame that ends inside an opcode or goes on after the pickle, so that loaders read other opcodes"
)


class Search:
    """Looks into sources, and keeps what it finds."""

    def __init__(self, limits: Limits, beside: Callable[[], str | None] | None = None) -> None:
        self.acts: dict[tuple[object, ...], Act] = {}
        self.names: dict[Name, None] = {}
        self.further: list[str] = []
        self.unseen: list[str] = []
        self.called = 0
        """How often something was done beyond making data."""
        self.limits = limits
        self._unpacking = Unpacking(limits)
        self._cost = 0
        self._judge = Judge(beside)

    def stream(self, stream: Stream, record: str, pickles: Sequence[Pickle] = (), depth: int = 0) -> None:
        """Judge consecutive pickles; read them, if that was not done before."""
        self._unpacking.of_file(stream.source)
        for one in pickles:
            self._judged(one, stream.source, record, None, depth)
        if pickles:
            return
        resume = {block.start: block.stop for block in stream.blocks}
        at = stream.start
        while 0 <= at < stream.end:
            if at in resume:
                at = resume[at]
            else:
                at = self._one(stream.source, at, record, None, depth, has_arrays=stream.has_arrays)

    def _one(
        self, source: Source, start: int, record: str, nested_at: int | None, depth: int, *, has_arrays: bool = True
    ) -> int:
        """
        Read one pickle and judge it, and return where it ends; -1 where it breaks off.

        If there are elements of arrays between the opcodes, joblib skips them and ``pickle.load`` does not.
        """
        self._unpacking.of_file(source)
        found = (read_as_far_with_arrays if has_arrays else read_as_far)(source, start)
        self._judged(found, source, record, nested_at, depth)
        if found.is_over_limit:
            self.miss(f"{record or 'the file'}: {found.broken}")
        return found.end if found.broken is None else -1

    def _judged(self, pickle: Pickle, source: Source, record: str, nested_at: int | None, depth: int) -> None:
        for one in pickle.globals:
            self.name(one.module, one.name, record, one.offset, nested_at)
        for offset, verdict in self._judge.verdicts(pickle):
            self.note(verdict, record, offset, nested_at)
        if pickle.split_frame is not None:
            self.note(_SPLIT, record, pickle.split_frame, nested_at)
        for offset, value in pickle.carried:
            self._string(value, source, record, offset if nested_at is None else nested_at, depth)
        if pickle.blocks:
            self._only_sure(read_as_far(source, pickle.start), record, nested_at, pickle.blocks[0].start)

    def _affords(self, cost: int, record: str) -> bool:
        """Say whether one thing more may be looked at; the first that may not is told of."""
        most, before = max(_MOST_COST, _MOST_RATIO * self._unpacking.file_nbytes), self._cost
        self._cost += cost
        if before <= most < self._cost:
            self.miss(f"{record or 'the file'}: more pickles, strings and members inside it than are looked at")
        return self._cost <= most

    def _string(self, value: str | bytes, source: Source, record: str, where: int, depth: int) -> None:
        """Look into a string of a pickle that lies in ``source``."""
        try:
            data = value.encode("latin-1") if isinstance(value, str) else value
        except UnicodeError:
            return
        inner = BytesSource(data, source.cancellation, packed_nbytes=packed_nbytes(source))
        self._inside(inner, record, where, depth)

    def _inside(self, source: Source, record: str, where: int, depth: int) -> None:
        if not self._affords(_COST + source.nbytes, record):
            return
        if depth >= _DEEPEST:
            self.miss(f"{record or 'the file'}, byte {where:,}: more than {_DEEPEST} levels deep")
            return
        try:
            self.anything(source, record, where, depth + 1)
        except LimitExceeded as error:
            self.miss(f"{record or 'the file'}, byte {where:,}: {error.message}")
        except Failure:
            return  # bytes that only begin like an archive

    def anything(self, source: Source, record: str, nested_at: int | None, depth: int) -> None:
        """Look at whatever a source is: compressed, an array of numpy, a zip, a tar, or pickles."""
        head = source.read(0, min(_HEAD, source.nbytes))
        self._unpacking.of_file(source)
        if head[4:8] == b"PTMF":  # TorchScript in a flatbuffer
            self.programs(source, record)
        contents = self._unpacking.contents(source, head, record)
        if contents is not None:
            if not head.startswith(LOCAL_MAGIC):
                self.beginning(source, record, nested_at)
            self._contents(contents, nested_at, depth)
        elif holders.is_json(head):
            for at, data in holders.base64_texts(source):
                self._inside(BytesSource(data), record, at, depth)
        elif not head.startswith(holders.NUMPY):
            self._pickles(source, head, record, nested_at, depth)
        else:
            for begin in holders.arrays(source):  # one of objects is a pickle
                self._pickles(source, source.read(begin, 1), record, nested_at, depth, begin)

    def _contents(self, contents: Iterator[tuple[str, Content]], nested_at: int | None, depth: int) -> None:
        for place, content in contents:
            if callable(content):
                self._content(content, place, nested_at, depth)
            elif isinstance(content, Stream):
                self.stream(content, place)
            else:
                self.programs(content, place)

    def member(self, archive: Archive, name: str, record: str, depth: int) -> None:
        """Look at one member of an archive."""
        self._content(partial(archive.open, name), record, None, depth)

    def programs(self, found: Archive | Remnant | Source, record: str = "") -> None:
        """Look at the programs in an archive, or in what remains of one; at one that is a file by itself."""
        if isinstance(found, Archive):
            self.foreign(record, other_programs.among(found, found.head))
        if isinstance(found, Remnant):
            lowered = found.name.lower()
            if not lowered.endswith(_OF_PROGRAMS) and not any(map(lowered.__contains__, _FOLDERS)):
                return
        elif isinstance(found, Archive) and not any(name.lower().endswith(_OF_PROGRAMS) for name in found):
            return
        from ckptool.formats.runnable.programs import of_file, programs  # few hold some

        try:
            for act in programs(found, record) if isinstance(found, Archive | Remnant) else of_file(found, record):
                self.keep(act)
        except LimitExceeded as error:
            self.miss(f"{record or 'the file'}: {error.message}")

    def others(self, archive: Archive, record: str) -> None:
        """Look at what readers of another archive than ours may take for members of this one."""
        self._contents(self._unpacking.others(archive.source, archive, record), None, 0)

    def ending(self, source: Source, *, is_read: bool = False) -> None:
        """Look into the zip that ends what begins otherwise, for its readers look there; at its programs if it was."""
        found = (one for one in self._unpacking.ending(source) if not is_read or isinstance(one[1], Archive))
        try:
            self._contents(found, None, 0)
        except LimitExceeded as error:
            self.miss(f"the zip at its end: {error.message}")

    def _content(self, opened: Callable[[], Source], record: str, nested_at: int | None, depth: int) -> None:
        if not self._affords(_COST, record):
            return
        try:
            if depth >= _DEEPEST:
                raise LimitExceeded(f"more than {_DEEPEST} levels deep")
            source = opened()
            if what := other_programs.in_content(record, source):
                self.miss(f"{record}: {what}")
            self.anything(source, record, nested_at, depth + 1)
        except Failure as error:
            self.miss(f"{record or 'the file'}: {error.message}")

    def beginning(self, source: Source, record: str = "", nested_at: int | None = None) -> None:
        """Look for a pickle at the begin of what is something else as well: a loader of pickles does not ask."""
        if (head := source.read(0, min(4, source.nbytes))) and head[0] in _TEXT_OPCODES and head != LOCAL_MAGIC:
            self._only_sure(read_as_far(source), record, nested_at)

    def _only_sure(self, pickle: Pickle, record: str, nested_at: int | None, first: int = 0) -> None:
        """Keep, of bytes that may be no opcodes, the calls from ``first`` on that can hardly be a chance."""
        for offset, verdict in self._judge.verdicts(pickle):
            is_call = verdict.grade == "system" and verdict.how not in ("refers", "odd")
            if offset >= first and is_call and is_known(verdict.name):
                self.note(verdict, record, offset, nested_at)

    def _pickles(
        self, source: Source, head: bytes, record: str, nested_at: int | None, depth: int, at: int = 0
    ) -> None:
        """Look at the pickles that a source begins with; five where it is what ``torch.save`` wrote before 1.6."""
        if not head or not (head[0] == _PROTO or head[0] in _TEXT_OPCODES):
            return
        most = _OF_LEGACY if is_legacy(head) else None
        if most and nested_at is not None and self._judge.storage_of(source) is not None:
            return  # plain pickles have such a stream for each tensor
        count = 0
        while at < source.nbytes and (most is None or count < most):
            if source.read(at, min(4, source.nbytes - at)) == LOCAL_MAGIC:
                self._inside(SliceSource(source, at, source.nbytes - at), record, at, depth)
                return
            end = self._unread(source, at, record, nested_at, depth)
            if end < 0:
                return
            at, count = end, count + 1
        if most and nested_at is None and at < source.nbytes and (end := end_of_stream(source, 0, self.limits)):
            self.behind(source, end, record)

    def _unread(self, source: Source, at: int, record: str, nested_at: int | None, depth: int) -> int:
        """
        Look at one pickle that no format has read. What only begins like one calls nothing, and is none; but a file
        that begins with a name that reaches the system is no text.
        """
        if not self._affords(_COST_OF_PICKLE, record):
            return -1
        acts, names, called = len(self.acts), len(self.names), self.called
        end = self._one(source, at, record, nested_at, depth)
        doubtful = nested_at is not None or source.read(at, 1) != b"\x80"
        if end < 0 and doubtful and self.called == called:
            found = islice(reversed(self.acts.values()), len(self.acts) - acts)
            if nested_at is None and any(one.grade == "system" and is_known(one.name) for one in found):
                return end
            for kept, count in ((self.acts, acts), (self.names, names)):
                while len(kept) > count:
                    kept.popitem()
        return end

    def behind(self, source: Source, at: int, record: str = "") -> None:
        """Look at what stands behind what is loaded."""
        if source.read(at, min(4, source.nbytes - at)) == LOCAL_MAGIC:
            self._inside(SliceSource(source, at, source.nbytes - at), record, at, 0)
            return
        end_of_legacy, left = at, 0
        while at < source.nbytes:
            place = f"{record}, byte {at:,}" if record else f"byte {at:,}"
            if not left and is_legacy(source.read(at, min(_LONGEST_MAGIC, source.nbytes - at))):
                end_of_legacy, left = self._end_of_legacy(source, at, place), _OF_LEGACY
            end = self._unread(source, at, record, None, 0)
            if end < 0:
                return
            self.further.append(place)
            left = max(0, left - 1)
            at = end if left else max(end, end_of_legacy)

    def _end_of_legacy(self, source: Source, at: int, place: str) -> int:
        try:
            return end_of_stream(source, at, self.limits)
        except Failure as error:
            self.miss(f"{place}: {error.message}")
            return 0

    def survey(self) -> Survey:
        """Return what was found; names and texts that are longer than any module's are cut."""
        acts = (one._replace(name=cut(one.name, _LONGEST), text=cut(one.text, _LONGEST)) for one in self.acts.values())
        names = (one._replace(module=cut(one.module, _LONGEST), name=cut(one.name, _LONGEST)) for one in self.names)
        return Survey(tuple(acts), tuple(names), tuple(self.further), tuple(self.unseen))

    def miss(self, what: str) -> None:
        """Note what could not be looked at, unless so much was not that no one reads more of it."""
        if len(self.unseen) < _MOST_UNSEEN:
            self.unseen.append(what)

    def keep(self, act: Act) -> None:
        """Keep what something beside the pickles does."""
        self.acts.setdefault((act.grade, act.name, act.record, act.text), act)

    def foreign(self, record: str, found: Iterable[tuple[str, str, str | None]]) -> None:
        """Keep what loaders of other kinds run in the files of a record, and why; without that, it is not looked at."""
        for name, what, why in found:
            where = at(record, name)
            unseen = f"{where}: {what}" if where else what
            self.keep(Act("code", "runs", what, what, why, where, 0)) if why else self.miss(unseen)

    def name(self, module: str, name: str, record: str, offset: int, nested_at: int | None) -> None:
        if len(self.names) < _MOST_NAMES:
            self.names[Name(module, name, record, offset, nested_at)] = None

    def note(self, verdict: Verdict, record: str, offset: int, nested_at: int | None) -> None:
        self.called += verdict.how not in ("refers", "odd")
        if len(self.acts) >= 2 * _MOST_LISTED:
            return
        repeats = verdict.grade != "system" or verdict.how == "refers"
        shown = None if repeats else verdict.shown()
        key = (verdict.grade, verdict.how, verdict.name, record, shown)
        known = self.acts.get(key)
        if known is not None:
            self.acts[key] = known._replace(times=known.times + 1)
        elif len(self.acts) < _MOST_LISTED or verdict.grade == "system":
            shown = verdict.shown() if shown is None else shown
            self.acts[key] = Act(
                verdict.grade, verdict.how, verdict.name, shown, verdict.why, record, offset, nested_at
            )
