"""What a migration did, or would do: one record, with the file before and the file after beside each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import count, prefixes_of
from ckptool.messages import FORMS, counts, grouped, labelled, listed, show, show_nbytes
from ckptool.migration.casting import Cast
from ckptool.migration.targets import TargetForm
from ckptool.migration.torch_plan import TorchPlan
from ckptool.sources.cancellable import cancellation_of
from ckptool.tables import html_table, plain_table
from ckptool.tensors.tensor import TensorInfo

_LABEL: Final = 11


class Side(NamedTuple):
    """One of the two files, in the words of ``inspect``."""

    format: str
    form: str
    file_nbytes: int
    tensors: int
    tied: int
    numel: int
    devices: dict[str, int]
    dtypes: dict[str, int]
    prefixes: tuple[str, ...]


class MigrationReport(NamedTuple):
    """What was done, or would be."""

    source: str
    target: str
    form: TargetForm
    source_format: str
    tensors: int
    nbytes: int
    """Size of what was written, in bytes; of a dry run too, but where torch is to save a model that it builds."""
    retagged: dict[str, int]
    """Storages and devices that got the new device tag, by the tag that they had."""
    location: str | None
    renamed: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]
    """Entries that the source has and the target has not."""
    casts: tuple[Cast, ...]
    """Tensors that got another type, and the largest error of each."""
    tied: dict[str, str]
    """Names that a safetensors file leaves out, and the name that stands for each."""
    loses_training: bool
    """The source holds an optimizer's state and the target does not: training cannot be resumed from it."""
    weights_key: str | None
    """Where in the source the weights stand that were taken; None if everything was."""
    verified: bool
    written: bool
    """False for a dry run."""
    before: Side
    after: Side
    notes: tuple[str, ...]
    """What cannot be done with the target any more, or was asked for without effect."""

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        rows = list(_rows(self.before, self.after))
        return html_table(f"{self.target}: {_result(self)}", ("", "before", "after"), rows, len(rows))


def side_of(checkpoint: Checkpoint) -> Side:
    """Return the side of a file that is there."""
    cancellation = cancellation_of(checkpoint.source)
    counts = count([tensor.info for tensor in checkpoint.tensors.values()], cancellation=cancellation)
    prefixes = prefixes_of(checkpoint.weights or ())
    return Side(checkpoint.format, checkpoint.form, checkpoint.file_nbytes, *counts, prefixes)


def planned_torch(form: str, plan: TorchPlan, nbytes: int, location: str | None, weights: Collection[str]) -> Side:
    """Return the side of a torch zip that is not written yet; ``weights`` are the names of the weights in it."""
    counts = count([info for _, info in plan.expected], location)
    return Side("torch_zip", form, nbytes, *counts, prefixes_of(weights))


def planned_safetensors(infos: dict[str, TensorInfo], nbytes: int) -> Side:
    """Return the side of a safetensors file that is not written yet: it keeps no devices and no ties."""
    counts = count(list(infos.values()), "cpu")
    numel = sum(info.numel for info in infos.values())
    form = "state_dict" if infos else "data"
    return Side("safetensors", form, nbytes, *counts._replace(tied=0, numel=numel), prefixes_of(infos))


def _lines(report: MigrationReport) -> Iterator[str]:
    """Yield the target, the file before and after, then every change."""
    yield show(report.target)
    yield labelled("result", _result(report))
    yield labelled("source", show(report.source))
    yield labelled("takes", _taken(report))
    rows = [[f"{label:<{_LABEL}}", *cells] for label, *cells in _rows(report.before, report.after)]
    yield from (f"  {line}" for line in plain_table([" " * _LABEL, "before", "after"], rows, [False] * 3, None))
    devices = [f"{show(tag)} -> {report.location}: {count:,}" for tag, count in report.retagged.items()]
    yield from listed("device", devices)
    yield from listed("renamed", [f"{show(old)} -> {show(new)}" for old, new in report.renamed])
    yield from listed("cast", list(_casts(report)))
    yield from listed("tied", [f"{show(name)} is {show(kept)}" for name, kept in report.tied.items()])
    yield from listed("left out", grouped(report.dropped, "entries"))
    yield from listed("note", [show(note) for note in report.notes])


def _result(report: MigrationReport) -> str:
    if not report.written:
        return "not written: a dry run"
    return "written and verified" if report.verified else "written, not verified"


def _taken(report: MigrationReport) -> str:
    if report.weights_key is None:
        return "the model" if report.form == "model" else "everything"
    where = f" under {show(report.weights_key)}" if report.weights_key else ""
    return f"the weights{where}{', into a model that is built' if report.form == 'model' else ''}"


def _rows(*sides: Side) -> Iterator[tuple[str, ...]]:
    yield "format", *(f"{side.format}, {show_nbytes(side.file_nbytes)}" for side in sides)
    yield "form", *(FORMS[side.form] for side in sides)
    yield "tensors", *(f"{side.tensors:,}" + (f", {side.tied:,} of them tied" if side.tied else "") for side in sides)
    yield "parameters", *(f"{side.numel:,}" for side in sides)
    yield "devices", *(counts(side.devices) or "-" for side in sides)
    yield "dtypes", *(counts(side.dtypes) or "-" for side in sides)
    if any(side.prefixes for side in sides):
        yield "prefix", *(show("".join(side.prefixes)) or "-" for side in sides)


def _casts(report: MigrationReport) -> Iterator[str]:
    """Yield what was cast: all together, then one by one, the largest error first."""
    by_types: dict[tuple[str, str], list[Cast]] = {}
    for cast in report.casts:
        by_types.setdefault((cast.source, cast.target), []).append(cast)
    for (source, target), casts in by_types.items():
        many = f"{len(casts):,} tensor{'s' * (len(casts) > 1)}: {source} -> {target}"
        if not report.written:
            yield many
            continue
        casts.sort(key=lambda cast: -cast.max_error)
        yield f"{many}, off by at most {casts[0].max_error:.3g}{_cut(sum(cast.overflowed for cast in casts))}"
        yield from (f"{show(cast.name)}: {cast.max_error:.3g}{_cut(cast.overflowed)}" for cast in casts)


def _cut(overflowed: int) -> str:
    return f", {overflowed:,} cut to the largest value" if overflowed else ""
