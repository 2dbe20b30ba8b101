"""``LoadReport``: the result of loading into a model, for programs and, as text, for people."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ckptool.checkpoints.checkpoint import StateDict
from ckptool.checkpoints.weights import Weights
from ckptool.loading.custom_loading import OwnLoading, own_loader
from ckptool.loading.fill_plan import FillPlan, entries_of
from ckptool.messages import show, some
from ckptool.names.matching import Renames
from ckptool.sections import Fact, completed, html_of
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

_LISTED: Final = 4


class LoadReport(NamedTuple):
    """What was loaded into a model. Its text has one or two lines: counts, then what was done and what is missing."""

    path: str
    key: str
    """The path of the weights in the file; empty for the root."""
    loaded: int
    """Tensors of the model that were loaded; those that share memory with a loaded one count, too."""
    expected: int
    """Tensors that the model has."""
    share: float
    """The share of the model's elements that were loaded, 0 to 1; those of tied weights count once."""
    seconds: float
    nbytes: int = 0
    """Bytes of the weights that were read; those that are tied in the file count once."""
    missing: tuple[str, ...] = ()
    """Names of the model that the file does not have."""
    unexpected: tuple[str, ...] = ()
    """Names of the file that the model does not have."""
    cast: tuple[tuple[str, str, str], ...] = ()
    """Name, type in the file, type in the model."""
    tied: tuple[tuple[str, str], ...] = ()
    """Name that the file does not have, name of the same tensor that it has."""
    changes: Renames = ()
    """Changes that make the file's names the model's: wrappers and prefixes that were stripped."""
    still_meta: tuple[str, ...] = ()
    """Tensors that are still on the meta device, because no file has them: buffers that the model must fill itself."""
    optimizer: int = 0
    """Parameters whose optimizer state was loaded."""
    left_out: tuple[str, ...] = ()
    """Names of the file that were not loaded: counters of a wrapper, raw weights next to averages, no ``include``."""
    own_loading: str | None = None
    """The class or hook because of which the model's own ``load_state_dict`` has filled it; None if none has."""
    is_tried: bool = True
    """False if no copy of the model could load first: had the load failed, a part of the model might be new."""
    hooks: tuple[str, ...] = ()
    """The classes of the modules whose hooks ran after their weights were loaded."""
    also_under: tuple[str, ...] = ()
    """Other keys under which the file has the same weights."""
    tied_apart: tuple[tuple[str, str], ...] = ()
    """Pairs of names that the model ties, but for which the file has different values: the second's were taken."""
    joined: tuple[str, ...] = ()
    """Keys of the state dicts that together are the model, if no single one is; names are relative to ``key``."""

    def __dir__(self) -> list[str]:
        return completed(self)

    def __str__(self) -> str:
        return "\n  ".join(filter(None, (self._head(), "; ".join(self._facts()))))

    def __repr__(self) -> str:
        return f"<LoadReport {self.path!r} {self.loaded} of {self.expected} tensors>"

    def _repr_html_(self) -> str:
        lacking = {"missing": self.missing, "unexpected": self.unexpected, "still on the meta device": self.still_meta}
        return html_of(self._head(), (Fact(*one) for one in lacking.items()))

    @property
    def line(self) -> str:
        """The text on one line, for logs."""
        return "; ".join((self._head(), *self._facts()))

    def _head(self) -> str:
        where = f", from {show(self.key)!r}" if self.key else ""
        counts = f"{self.loaded:,} of {self.expected:,} tensors, {self.share:.1%} of the parameters{where}"
        return f"{show(self.path)}: {counts}; {self.nbytes:,} bytes in {self.seconds:.2f} s"

    def _facts(self) -> Iterator[str]:
        """Yield texts of what was done, then of what is missing or differs from the file."""
        facts = (
            _listed("state dicts together", self.joined),
            f"names changed by {' '.join(map(str, self.changes))}" if self.changes else "",
            _listed("cast", [f"{name} {old} -> {new}" for name, old, new in self.cast]),
            _listed("tied", [f"{name} = {kept}" for name, kept in self.tied]),
            f"optimizer state of {self.optimizer:,} parameters" if self.optimizer else "",
            _listed("left out", self.left_out),
            f"filled by load_state_dict(), for {show(self.own_loading)}" if self.own_loading else "",
            "" if self.is_tried else "not tried on a copy first: a failure would have left a part of the weights",
            _listed("hooks ran", self.hooks),
            f"the same are under {show(some(self.also_under))}" if self.also_under else "",
            _listed("missing", self.missing),
            _listed("unexpected", self.unexpected),
            _listed("still on the meta device", self.still_meta),
            _listed("tied in the model, different in the file", [f"{a} is now {b}" for a, b in self.tied_apart]),
        )
        yield from filter(None, facts)


def _listed(what: str, names: Iterable[str]) -> str:
    shown = [show(name) for name in names]
    return f"{what} {len(shown):,}: {some(shown, _LISTED)}" if shown else ""


def report_of(
    model: torch.nn.Module,
    path: str,
    found: StateDict,
    filling: FillPlan,
    started: float,
    tied_apart: tuple[tuple[str, str], ...] = (),
) -> LoadReport:
    """Return the report of a load that has just ended; ``started`` is when it began, by ``time.perf_counter``."""
    loaded = {one.name for one in filling.targets} | set(filling.tied)
    return _report(model, path, found, loaded, [one.source for one in filling.targets], started)._replace(
        missing=filling.missing,
        unexpected=filling.unexpected,
        cast=filling.cast,
        tied=tuple(filling.tied.items()),
        changes=filling.match.changes,
        left_out=filling.left_out,
        tied_apart=tied_apart,
    )


def report_through(model: torch.nn.Module, path: str, chosen: Weights, taken: OwnLoading, started: float) -> LoadReport:
    """Return the report for a model that has loaded through its own code."""
    loaded = entries_of(model).keys() - {*taken.missing, *taken.forgiven}
    return _report(model, path, chosen.state_dict, loaded, chosen.tensors.values(), started)._replace(
        missing=taken.missing,
        unexpected=taken.unexpected,
        tied=taken.tied,
        left_out=chosen.dropped,
        own_loading=own_loader(model),
        is_tried=taken.is_tried,
    )


def _report(
    model: torch.nn.Module,
    path: str,
    found: StateDict,
    loaded: AbstractSet[str],
    sources: Iterable[LazyTensor],
    started: float,
) -> LoadReport:
    entries = entries_of(model)
    has_size = {name for name, one in entries.items() if isinstance(one, torch.Tensor) and not is_lazy(one)}
    numel = {id(one): one.numel() if name in has_size else 0 for name, one in entries.items()}
    reached = {id(one) for name, one in entries.items() if name in loaded}
    named = (*model.named_parameters(), *model.named_buffers())
    return LoadReport(
        path=path,
        key=found.key,
        loaded=len(loaded),
        expected=len(entries),
        share=sum(numel[one] for one in reached) / max(1, sum(numel.values())),
        nbytes=sum({identity(one.info): one.info.total_nbytes for one in sources}.values()),
        still_meta=tuple(name for name, tensor in named if tensor.is_meta),
        seconds=time.perf_counter() - started,
        joined=tuple(one.key for one in found.parts),
        hooks=tuple(type(one).__name__ for one in model.modules() for _ in one._load_state_dict_post_hooks),
    )
