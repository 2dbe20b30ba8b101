"""
``LiveModel``: a model that serves while its weights are replaced.

Reloading has two phases. The file is read into memory of its own, held against its checksums and against the model;
until that is done, nothing of the model is touched. Then the weights are committed, in one of two ways:

``in_place`` copies them into the storages that the model has: nothing has to be warmed up again, and captured graphs
stay valid. Calls in other threads go on until they return, new ones wait until the copy is done.

``swap`` builds a second module around the new weights and exchanges the reference: no call ever waits, calls that
have begun end with the old weights, and both sets are in memory until the last of them has returned.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from ckptool.errors import CkptoolError, UnsupportedFeature
from ckptool.files import file_identity
from ckptool.formats import Origin, open_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.tables import show
from ckptool.torch_bridge.arithmetic import in_own_thread
from ckptool.torch_bridge.assembly import Assembly
from ckptool.torch_bridge.fill_plan import Target, model_tensors
from ckptool.torch_bridge.filling import LoadReport, assign, choose_targets, parameter_like, report_of
from ckptool.torch_bridge.host_memory import buffer_of
from ckptool.torch_bridge.loading import naming
from ckptool.torch_bridge.own_loading import own_loader
from ckptool.torch_bridge.placement import CPU, placement
from ckptool.weights import Which

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

Commit: TypeAlias = Literal["in_place", "swap"]

logger = logging.getLogger("ckptool")


class Reload(NamedTuple):
    """A reload that was carried out."""

    report: LoadReport
    digest: str
    """SHA-256 of the names, types, shapes and bytes that were loaded: equal weights have equal digests."""


class LiveModel:
    """
    A model in a server, whose weights can be replaced while other threads call it.

    Each call sees the weights of one file, whole. Calling costs about two microseconds more than the model itself.
    ``digest`` and ``report`` are those of the last reload. What the options mean, the module's docstring says.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        source: Origin | None = None,
        *,
        commit: Commit = "in_place",
        key: str | None = None,
        weights: Which = "auto",
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._model = model
        self._commit = commit
        self._which = (key, weights)
        self._limits = limits
        self._gate = _Gate()
        self._reloading = threading.Lock()
        self._watcher: _Watcher | None = None
        self._seen: tuple[str, tuple[int, ...] | None] | None = None
        self.digest: str | None = None
        self.report: LoadReport | None = None
        if source is not None:
            self.reload(source)

    @property
    def model(self) -> torch.nn.Module:
        """The module that serves now. Outside of ``use``, in_place may change it under your hands."""
        return self._model

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the model."""
        if self._commit == "swap":
            return self._model(*arguments, **keywords)
        self._gate.enter()
        try:
            return self._model(*arguments, **keywords)
        finally:
            self._gate.leave()

    @contextmanager
    def use(self) -> Iterator[torch.nn.Module]:
        """Give the model for a block in which its weights stay as they are. Blocks may be nested."""
        if self._commit == "swap":
            yield self._model
            return
        self._gate.enter()
        try:
            yield self._model
        finally:
            self._gate.leave()

    def reload(self, source: Origin) -> Reload:
        """
        Replace the weights by those of a checkpoint of any form.

        A file that is damaged, or does not fit, changes nothing: the old weights go on serving. One reload runs at a
        time. It needs memory for the new weights once, beside those that serve.

        Raises:
            UnsupportedFeature: To swap, and the model cannot be copied.
            CkptoolError: As ``load_into``, with ``verify`` and ``strict``.
            RuntimeError: Called inside ``use``, in place: it would wait for itself.
        """
        started = time.perf_counter()
        key, weights = self._which
        loader = own_loader(self._model)
        if loader is not None:
            raise UnsupportedFeature(
                f"the model loads through code of its own: {loader}",
                kind="own-loading",
                hint="Build a second model, fill it with ckptool.load_into, and serve that one.",
            )
        # Noted before the file is opened: if another takes its place meanwhile, that one is still to be loaded.
        seen = (os.fspath(source), file_identity(os.fspath(source))) if isinstance(source, str | os.PathLike) else None
        with self._reloading, open_checkpoint(source, limits=self._limits) as checkpoint, naming(checkpoint):
            checkpoint.check_index()
            found, filling = choose_targets(self._model, checkpoint, key, weights)
            assembly = Assembly(placement(CPU), mmap=False, verify=True)
            staged = assembly.tensors({one.name: one.source for one in filling.targets})
            checkpoint.check_unchanged()
            digest = digest_of(_by_first_name(self._model, filling.targets, staged))
            if self._commit == "swap":
                self._model = _with_weights(self._model, filling.targets, staged)
            else:
                with self._gate.alone():
                    _overwrite(self._model, filling.targets, staged)
            report = report_of(self._model, checkpoint.path, found, filling, started)
            self.report, self.digest, self._seen = report, digest, seen
        logger.info("%s, sha256 %s", report, digest)
        return Reload(report, digest)

    def watch(
        self,
        path: str | os.PathLike[str],
        *,
        every: float = 1.0,
        on_reload: Callable[[Reload | CkptoolError], None] | None = None,
    ) -> None:
        """
        Reload whenever the file under ``path`` is another than the one that was loaded from there: rename it there.

        Looks every so many seconds, in a thread of its own. A file that is still being written is left until it rests
        for one look; one that cannot be loaded is reported, through ``logging`` and ``on_reload``, and not tried
        again until it changes. A process that forks has to call this after the fork.
        """
        self.unwatch()
        self._watcher = _Watcher(self, os.fspath(path), every, on_reload)

    def unwatch(self) -> None:
        """Stop watching, and return once a reload that has begun has ended."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unwatch()


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes, in order of names; equal weights have equal digests."""
    found = hashlib.sha256()

    def add_all() -> None:
        for name in sorted(tensors):
            tensor = tensors[name]
            found.update(f"{name}\0{tensor.dtype}\0{tensor.layout}\0{list(tensor.shape)}\0".encode())
            for part in _parts(tensor):
                found.update(buffer_of(part))

    in_own_thread(add_all)
    return found.hexdigest()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return plain memory that tells a tensor from every other of its type and shape."""
    if tensor.is_quantized:
        is_whole = tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        scales = torch.tensor(tensor.q_scale()) if is_whole else tensor.q_per_channel_scales()
        zeros = torch.tensor(tensor.q_zero_point()) if is_whole else tensor.q_per_channel_zero_points()
        parts = [tensor.int_repr(), scales.double(), zeros.double()]
    elif tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor]
    return [part.resolve_conj().resolve_neg().contiguous() for part in parts]


def _by_first_name(
    model: torch.nn.Module, targets: tuple[Target, ...], staged: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what was staged under the first name that the model has for it: files may have any, or all of them."""
    first: dict[int, str] = {}
    for name, tensor in model_tensors(model).items():
        first.setdefault(id(tensor), name)
    return {first[id(one.tensor)]: staged[one.name] for one in targets}


def _overwrite(model: torch.nn.Module, targets: tuple[Target, ...], staged: Mapping[str, torch.Tensor]) -> None:
    """Copy staged weights into the model's own memory, and those of the meta device into their places."""
    assign(model, {id(one.tensor): staged[one.name] for one in targets if one.tensor.is_meta})
    real = [one for one in targets if not one.tensor.is_meta]
    devices = {one.tensor.device for one in real if one.tensor.is_cuda}
    for device in devices:  # calls have returned, but their kernels may still run
        torch.cuda.synchronize(device)

    def copy_all() -> None:
        for one in real:  # see _copy_all in filling
            with torch.inference_mode(one.tensor.is_inference()), torch.no_grad():
                one.tensor.detach().copy_(staged[one.name], non_blocking=False)

    in_own_thread(copy_all)
    for device in devices:
        torch.cuda.synchronize(device)


def _with_weights(
    model: torch.nn.Module, targets: tuple[Target, ...], staged: Mapping[str, torch.Tensor]
) -> torch.nn.Module:
    """
    Return a copy of the model around other weights; what is not replaced, it shares.

    Raises:
        UnsupportedFeature: The model holds something that cannot be copied, a lock say.
    """
    fresh: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for one in targets:
        old = one.tensor
        new = staged[one.name] if old.is_meta else in_own_thread(partial(staged[one.name].to, old))
        is_parameter = isinstance(old, torch.nn.Parameter)
        fresh[id(old)] = parameter_like(old, new) if is_parameter else new
    try:
        return copy.deepcopy(model, fresh)
    except Exception as error:
        raise UnsupportedFeature(
            f"the model cannot be copied: {error}",
            kind="not-copyable",
            hint="Use commit='in_place', which needs no copy.",
        ) from error


class _Gate:
    """Many threads at once, or one alone. Whoever wants to be alone goes first, so that calls cannot starve it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._waiting = 0
        self._is_alone = False
        self._mine = threading.local()

    def enter(self) -> None:
        """Come in, once nobody is alone inside or waits to be."""
        depth = getattr(self._mine, "depth", 0)
        if not depth:  # a thread that is inside already must not wait for itself
            with self._changed:
                while self._is_alone or self._waiting:
                    self._changed.wait()
                self._inside += 1
        self._mine.depth = depth + 1

    def leave(self) -> None:
        """Go out, as often as one came in."""
        self._mine.depth -= 1
        if not self._mine.depth:
            with self._changed:
                self._inside -= 1
                if not self._inside and self._waiting:
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        if getattr(self._mine, "depth", 0):
            raise RuntimeError("reload() inside use() would wait for itself")
        with self._changed:
            self._waiting += 1
            try:
                while self._inside or self._is_alone:
                    self._changed.wait()
                self._is_alone = True
            finally:  # whoever waits may be interrupted
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()


class _Watcher:
    """The thread that looks at a path."""

    def __init__(
        self, live: LiveModel, path: str, every: float, on_reload: Callable[[Reload | CkptoolError], None] | None
    ) -> None:
        self._live, self._path, self._every, self._on_reload = live, os.fspath(path), every, on_reload
        self._stopped = threading.Event()
        # What was loaded, not what is there now: a file that came between the two must not be missed.
        self._loaded = live._seen[1] if live._seen is not None and live._seen[0] == self._path else None
        self._thread = threading.Thread(target=self._run, name="ckptool-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        seen = self._loaded
        while not self._stopped.wait(self._every):
            found = file_identity(self._path)
            if found is not None and found != self._loaded and found == seen:
                self._loaded = found
                try:
                    self._tell(self._reload())
                except Exception:  # no memory left on the device, say: the next file may do
                    logger.exception("not reloaded: %s", self._path)
            seen = found

    def _reload(self) -> Reload | CkptoolError:
        try:
            return self._live.reload(self._path)
        except CkptoolError as error:
            logger.warning("not reloaded: %s", show(str(error)))
            return error

    def _tell(self, outcome: Reload | CkptoolError) -> None:
        if self._on_reload is None:
            return
        try:
            self._on_reload(outcome)
        except Exception:
            logger.exception("on_reload failed")
