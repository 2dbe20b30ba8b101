"""
``LiveModel``: a model that serves while its weights are replaced.

Reloading has two phases. The file is read into memory of its own, compared with its checksums and with the model;
until that is done, nothing of the model is touched. Then the weights are committed, in one of two ways:

``in_place`` copies them into the storages that the model has: nothing has to be warmed up again, and captured graphs
stay valid: replay them inside ``use``. Calls in other threads go on until they return, and what they have launched on a
GPU until it is done; new ones wait until the copy is done. It costs the new weights' memory once, beside the model's,
until the copy is done.

``swap`` builds a second module around the new weights and exchanges the reference: no call ever waits, calls that
have begun end with the old weights. It costs the same, for as long as a call with the old weights runs; what was
compiled or captured for the old module is not there for the new one. The old weights' memory is given out again when
nothing holds their module any more and its devices have done all that calls have launched, on whatever streams.

``mmap`` makes the new weights pages of the file, which all processes share and the system may drop: to swap, they are
what serves, until the next reload, so any number of workers has them once; in place, they are what is copied from,
and only a model from the meta device serves from them, until its first reload writes to pages of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from ckptool.arguments import checked
from ckptool.cancellation import Cancellation, check_cancelled, steps
from ckptool.checking.value_survey import DIVERGED, is_meant
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.weights import Weights, WeightsChoice, digest_of
from ckptool.errors import CkptoolError, Failure, UnsupportedFeature, drop_tracebacks
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.loading.choice import Choice
from ckptool.loading.custom_loading import OwnLoading, fill, rehearse
from ckptool.loading.fill_plan import FillPlan, check_model, check_placing
from ckptool.loading.load import opened, torch_state_dict
from ckptool.loading.load_into import refuse_broken_plan, refuse_overflows_in, tied_apart
from ckptool.loading.memory.assembly import Assembly
from ckptool.loading.memory.filling import Mmap, buffer_of
from ckptool.loading.memory.placement import CPU, placement
from ckptool.loading.memory.threads import in_own_thread, is_castable, refuse_overflows
from ckptool.loading.report import LoadReport, report_of, report_through
from ckptool.loading.serving.commit import (
    Gate,
    copy_of,
    fill_in_place,
    moved,
    overwrite,
    ready,
    retire,
    with_weights,
)
from ckptool.loading.serving.watcher import Watcher, import_readers
from ckptool.messages import counted, show, some
from ckptool.names.matching import Renames
from ckptool.sections import completed
from ckptool.sources.files import Origin
from ckptool.sources.paths import shown_path
from ckptool.sources.source import Closing
from ckptool.sources.versions import version_under
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo
from ckptool.torch_ops.values import elements_of, is_finite, survey_values

Commit: TypeAlias = Literal["in_place", "swap"]

logger = logging.getLogger("ckptool")


class Reload(NamedTuple):
    """A reload that was carried out."""

    report: LoadReport
    digest: str
    """The digest of the weights, which ``inspect`` prints for the file: equal weights have equal digests."""

    def __dir__(self) -> list[str]:
        return completed(self)

    def __str__(self) -> str:
        return f"{self.report}\n  {self.digest}"

    def __repr__(self) -> str:
        return f"<Reload {self.report.path!r} {self.digest}>"


class Serving(NamedTuple):
    """A model and the digest of its weights; calling it calls the model."""

    model: torch.nn.Module
    digest: str | None
    """
    As in ``Reload``; None before the first load, and after one in place that failed while copying or in a hook.
    """

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the model."""
        return self.model(*arguments, **keywords)

    def __dir__(self) -> list[str]:
        return completed(self)

    def __repr__(self) -> str:
        return f"<Serving {type(self.model).__name__} {self.digest}>"


class LiveModel(Closing):
    """
    A model in a server, whose weights can be replaced while other threads call it.

    Each call sees the weights of one file, whole. Calling costs about two microseconds more than the model itself.
    ``digest`` and ``report`` are those of the last reload. A request that needs a model and its digest calls ``use``.

    Tensors of the model keep their device and type. With the first load, those on the meta device move to
    ``map_location``, the floating ones as ``dtype`` if that is given. ``mmap`` is what ``load`` takes. It is False
    here, because to truncate a file that serves would kill the process. The module's docstring says what each
    ``commit`` costs. ``limits`` are those of every load; a ``Cancellation`` in them stops only the first.

    Weights with NaN or infinities are refused, but for masks, unless ``allow_nan``. ``accept`` is called with new
    weights by name, on the CPU, before they serve: if it raises, or returns a false value other than None, they are
    refused, too. It must not write to them: what it writes would serve, unless it is NaN. If ``source`` is refused or
    cannot be loaded, the first weights are those of ``fallback``, if it is given; ``last_error`` says why.

    Raises:
        DeviceUnavailable: ``map_location`` is not a device, or is not here.
        TypeError: ``model`` is not a module, or is a class.
        ValueError: ``dtype`` is not a floating type, or another option has a value that it does not take.
        CkptoolError: As ``reload``, where there is a ``source``.
    """

    @checked("model")
    def __init__(
        self,
        model: torch.nn.Module,
        source: Origin | None = None,
        *,
        commit: Commit = "in_place",
        key: str | None = None,
        weights: WeightsChoice = "auto",
        map_location: str | torch.device = "cpu",
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        mmap: Mmap = False,
        fallback: Origin | None = None,
        allow_nan: bool = False,
        accept: Callable[[Mapping[str, torch.Tensor]], object] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        check_model(model)
        if fallback is not None and source is None:
            raise ValueError("fallback is for a source that cannot be loaded: name one")
        if any(getattr(module, "training", False) for module in model.modules()):
            logger.warning("%s is in training mode, with dropout and the like: call eval() first", type(model).__name__)
        import_readers()
        self._serving = Serving(model, None)
        self._commit = commit
        self._which = (key, weights)
        place, self._dtype = check_placing(model, map_location, device, dtype)
        self._device = place.everywhere or CPU  # map_location is a device here, not a mapping
        self._mmap: Mmap = mmap
        self._allow_nan, self._accept = allow_nan, accept
        self._limits = limits._replace(cancellation=None)  # a deadline is for one call
        self._gate = Gate()
        self._reloading = Gate()  # for one writer at a time, and no readers
        self._watcher: Watcher[Reload] | None = None
        self._seen: tuple[str, tuple[object, ...] | None] | None = None
        self.report: LoadReport | None = None
        self.loaded_time: datetime | None = None
        """When the weights that serve were loaded, in UTC."""
        self._failure: tuple[Exception, datetime] | None = None
        if source is not None:
            self._start(source, fallback, limits)

    def _start(self, source: Origin, fallback: Origin | None, limits: Limits) -> None:
        try:
            self.reload(source, limits=limits)
        except Failure as error:
            if fallback is None:
                raise
            logger.warning("not loaded: %s; loading the fallback", show(str(error)))
            drop_tracebacks(error)
            self.reload(fallback, limits=limits)
            self._note(error)
            # The path that ``watch`` takes by default, and has still to load.
            self._seen = (os.fspath(source), None) if isinstance(source, str | os.PathLike) else None

    @property
    def model(self) -> torch.nn.Module:
        """The module that serves now. Outside of ``use``, a reload in place may change its weights at any time."""
        return self._serving.model

    @property
    def digest(self) -> str | None:
        """The digest of the weights that serve now; a call before or after may have used others: see ``use``."""
        return self._serving.digest

    @property
    def last_error(self) -> Exception | None:
        """
        Why the last reload by ``watch`` failed, or why the ``fallback`` serves; None if no reload failed since the last
        that succeeded.
        """
        return self._failure and self._failure[0]

    @property
    def last_error_time(self) -> datetime | None:
        """When ``last_error`` happened, in UTC."""
        return self._failure and self._failure[1]

    def status(self) -> dict[str, str | None]:
        """
        Return an answer for a health route: ``digest``, ``path`` and ``loaded_time`` of the weights that serve, and why
        they are not newer: ``last_error`` and ``last_error_time``. Waits, as calls do, while weights are copied.
        """
        with self.use() as serving:
            found = {
                "digest": serving.digest,
                "path": self.report and self.report.path,
                "loaded_time": self.loaded_time,
                "last_error": self.last_error,
                "last_error_time": self.last_error_time,
            }
        return {name: None if value is None else _shown(value) for name, value in found.items()}

    def __repr__(self) -> str:
        path = f" from {show(self.report.path)!r} since {_shown(self.loaded_time)}" if self.report is not None else ""
        error, time = self._failure or (None, None)
        failed = f", not reloaded at {_shown(time)}: {show(str(error))}" if error is not None else ""
        return f"<LiveModel {type(self.model).__name__} {self.digest}{path}{failed}>"

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the model."""
        with self.use() as serving:
            return serving.model(*arguments, **keywords)

    @contextmanager
    def use(self) -> Iterator[Serving]:
        """
        Yield model and digest for a block in which both stay the same. Blocks may be nested, and end in another thread
        than they began in.

        The ``Serving`` can be called like the model, has ``model`` and ``digest``, and can be unpacked into these two.
        Threads that the block waits for have to call it, not the live model, which may wait for the block to end.
        """
        if self._commit == "swap":
            yield self._serving
            return
        visits = self._gate.enter()
        try:
            yield self._serving
        finally:
            self._gate.leave(visits)

    @checked()
    def reload(self, source: Origin, *, limits: Limits | None = None) -> Reload:
        """
        Replace the weights by those of a checkpoint of any form.

        A file that is damaged, or does not fit, changes nothing: the old weights go on serving. One reload runs at a
        time. It needs memory for the new weights once, beside those that serve, unless they are mapped. A model that
        loads through code of its own (hooks, overrides, packed parameters, lazy layers) is copied, and the copy loads:
        that needs memory for the weights once more, in place twice. To swap, the copy then serves. In place, the model
        itself loads after the copy did, or without it where there can be none; if it fails then, the error says that a
        part of it may be new, and ``digest`` is None until a reload goes well.

        Hooks that the model has for after loading are run before any call meets the new weights. What they raise is
        raised unchanged. With ``swap``, the old weights then go on serving. In place, the new ones serve without what
        those hooks would have made of them, and ``digest`` is None until a reload goes well.

        ``limits`` replace the model's own: with a ``Cancellation`` in them, the reload can be stopped until the
        new weights are committed, and the old ones go on serving.

        Raises:
            Cancelled: The cancellation in ``limits`` was triggered.
            UnsupportedFeature: The model has to be copied to swap, and cannot be; or its code refuses the file, or
                ``accept`` the weights.
            CkptoolError: As ``load_into``, with ``verify`` and ``strict``.
            RuntimeError: Called inside ``use``, in place: it would wait for itself.
        """
        started = time.perf_counter()
        # Noted before the file is opened: if another takes its place meanwhile, that one is still to be loaded.
        limits = limits if limits is not None else self._limits
        cancellation = limits.cancellation
        path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
        seen = None if path is None else (path, version_under(path, cancellation))
        with self._reloading.alone(cancellation), opened(source, limits) as checkpoint:
            checkpoint.check_index()
            choice = Choice(self.model, checkpoint, *self._which)
            targets = choice.targets()
            if targets is None:
                done = self._replace_through(choice, started, limits)
            else:
                refuse_broken_plan(checkpoint, targets[1], self._dtype)
                done = self._replace(checkpoint, *targets, started, limits)
            # Servers show warnings where nobody has set up logging, and that other weights serve is news.
            level, what = (logging.INFO, "loaded") if self.report is None else (logging.WARNING, "reloaded")
            self.report, self.loaded_time, self._failure, self._seen = done.report, _now(), None, seen
        logger.log(level, "%s: %s; %s", what, done.report.line, done.digest)
        return done

    def _replace(
        self, checkpoint: Checkpoint, found: StateDict, filling: FillPlan, started: float, limits: Limits
    ) -> Reload:
        model, cancellation = self.model, limits.cancellation
        tied_apart(model, filling.taken, strict=True)
        assembly = Assembly(placement(CPU), mmap=self._mmap, verify=True, cancellation=cancellation)
        staged = assembly.tensors(filling.taken)
        digest = self._accepted(checkpoint, found, filling.taken, staged, limits)
        staged |= self._placed({one.name: staged[one.name] for one in filling.targets if one.tensor.is_meta})
        self._serve(
            digest,
            lambda: with_weights(model, filling.targets, staged),
            lambda: overwrite(model, filling.targets, staged),
            cancellation,
        )
        return Reload(report_of(self.model, checkpoint.path, found, filling, started), digest)

    def _replace_through(self, choice: Choice, started: float, limits: Limits) -> Reload:
        """Let a copy of the model load through its own code, and serve it; in place, let the model itself load then."""
        model, checkpoint, cancellation = choice.model, choice.checkpoint, limits.cancellation
        assembly = Assembly(placement(CPU), mmap=self._mmap, verify=True, cancellation=cancellation)

        def load(chosen: Weights, changes: Renames) -> Reload:
            tied_apart(model, chosen.tensors, strict=True)
            state = torch_state_dict(checkpoint, chosen, assembly)
            tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            digest = self._accepted(checkpoint, chosen.state_dict, chosen.tensors, tensors, limits)
            if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
                state |= self._placed(tensors)
            rehearsed = None if self._commit == "swap" else rehearse(model, state, strict=True)
            taken: list[OwnLoading] = []

            def build() -> torch.nn.Module:
                fresh = copy_of(model)
                taken.append(fill(fresh, state, strict=True, is_fresh=True))
                return fresh

            self._serve(digest, build, lambda: taken.append(fill_in_place(model, state, rehearsed)), cancellation)
            report = report_through(self.model, checkpoint.path, chosen, taken[0], started)
            return Reload(report._replace(changes=changes), digest)

        return choice.through_own_code(load)

    def _serve(
        self,
        digest: str,
        build: Callable[[], torch.nn.Module],
        change: Callable[[], object],
        cancellation: Cancellation | None,
    ) -> None:
        """Serve a second model that is built with new weights; or change the one that serves, while nobody calls it."""
        model = self.model
        if self._commit == "swap":
            self._serving = Serving(ready(build()), digest)
            retire(model)
            return
        with self._gate.alone(cancellation):
            self._serving = Serving(model, None)  # while it has some weights of both
            try:
                change()
            finally:
                ready(model)  # also where a hook fails: whoever calls it next meets whole tensors
            self._serving = Serving(model, digest)

    def _accepted(
        self,
        checkpoint: Checkpoint,
        found: StateDict,
        sources: Mapping[str, LazyTensor],
        staged: Mapping[str, torch.Tensor],
        limits: Limits,
    ) -> str:
        """Return the digest of the new weights ``staged``, by the model's names; raise if they must not serve."""
        checkpoint.check_unchanged()
        digest = _digest(checkpoint, found, {id(one.info): staged[name] for name, one in sources.items()}, limits)
        refuse_overflows_in(self.model, staged)
        if not self._allow_nan:
            in_own_thread(lambda: _refuse_nan(staged, limits.cancellation))
        accept = self._accept
        if accept is None:
            return digest
        try:
            answer = in_own_thread(lambda: accept(staged))
            is_refused, why = answer is not None and not answer, f"it returned {answer!r}"
        except CkptoolError:
            raise
        except Exception as error:  # noqa: BLE001 - it may raise anything
            is_refused, why = True, str(error)
        if not self._allow_nan:
            in_own_thread(lambda: _refuse_nan(staged, limits.cancellation))  # it may have written to them
        if is_refused:
            raise UnsupportedFeature(f"accept= refuses the weights: {why}", kind="not-accepted")
        return digest

    def _placed(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return weights for tensors on the meta device, on the device and of the type that the caller chose."""
        dtype = self._dtype
        kinds = {name: dtype if dtype and is_castable(one.dtype) else one.dtype for name, one in values.items()}
        in_own_thread(lambda: refuse_overflows((name, one, kinds[name]) for name, one in values.items()))
        return {name: moved(one, self._device, kinds[name]) for name, one in values.items()}

    @checked()
    def watch(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: float = 1.0,
        on_reload: Callable[[Reload | CkptoolError], None] | None = None,
    ) -> None:
        """
        Reload whenever another file is at ``path`` than the one that was loaded. Put new files there by renaming.

        Without a path, the path loaded last is watched. If there is no file yet, a warning is logged, and the first
        that comes is loaded. Looks once in ``every`` seconds, in a thread of its own. A file that may still be written
        is loaded when two looks in a row find it the same. Files that are renamed there more often than that are whole,
        and are loaded. One that cannot be loaded is reported, through ``logging``, ``last_error`` and ``on_reload``,
        and not tried again until it changes; so is one that is gone. A process that forks has to call this after the
        fork. With an index of shards, only the index is watched: put it there last. With a folder, every file is; if it
        has an index, nothing is loaded until that is another one, too. At each look, the server of an address is asked
        for its version.

        Raises:
            ValueError: There is no path, and what was loaded last came from none, or nothing was loaded; or ``every``
                is not above 0.
        """
        if not 0 < every < threading.TIMEOUT_MAX:
            raise ValueError(f"every is a number of seconds above 0, not {every!r}")
        if path is None:
            if self._seen is None:
                raise ValueError("nothing was loaded from a path yet: say which one to watch")
            path = self._seen[0]
        path = os.fspath(path)
        self.unwatch()
        if version_under(path) is None:
            logger.warning("watching a path without a file: %s", show(shown_path(path)))
        # The version that was loaded, not the one that is there now: a file that came since must not be missed.
        loaded = self._seen[1] if self._seen is not None and self._seen[0] == path else None

        def reload(cancellation: Cancellation) -> Reload:
            return self.reload(path, limits=self._limits._replace(cancellation=cancellation))

        self._watcher = Watcher(path, every, loaded, reload, self._note, on_reload)

    def _note(self, error: Exception) -> None:
        drop_tracebacks(error)  # an error that is kept must not keep what was staged, which its traceback reaches
        self._failure = error, _now()

    def unwatch(self) -> None:
        """Stop watching. A reload that has begun is cancelled, unless its weights are being committed already."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()

    close = unwatch
    """Called at the end of a ``with`` block."""


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _shown(value: object) -> str:
    """Return a value as text; a time to the second."""
    return value.isoformat(" ", "seconds") if isinstance(value, datetime) else str(value)


def _refuse_nan(weights: Mapping[str, torch.Tensor], cancellation: Cancellation | None) -> None:
    """Raise UnsupportedFeature if weights have NaN or infinities that are not meant."""
    odd = []
    for name, one in weights.items():
        check_cancelled(cancellation)
        if one.is_meta or not (one.is_floating_point() or one.is_complex()) or is_finite(values := elements_of(one)):
            continue
        facts = survey_values([values])
        if not is_meant(name, facts, values.numel()):
            odd.append(f"{name} ({facts.nan + facts.infinite:,} of {values.numel():,})")
    if odd:
        raise UnsupportedFeature(
            f"NaN or infinities in {counted(len(odd), 'tensor')}: {some(odd)}",
            kind="not-finite",
            hint=f"{DIVERGED} If they are meant, say `allow_nan=True`.",
        )


def _digest(checkpoint: Checkpoint, weights: StateDict, made: Mapping[int, torch.Tensor], limits: Limits) -> str:
    """Return the digest of weights; tensors ``made`` already, by the ``id`` of their facts, are not read again."""

    def in_memory(info: TensorInfo) -> Iterator[memoryview] | None:
        if id(info) not in made or info.layout != "strided" or info.subclass is not None:
            return None
        return elements(made[id(info)].resolve_conj().resolve_neg().contiguous())

    def elements(packed: torch.Tensor) -> Iterator[memoryview]:
        yield from steps(buffer_of(packed), limits.cancellation)  # ``packed`` keeps that memory alive

    return in_own_thread(lambda: digest_of(checkpoint, limits, weights, in_memory))
