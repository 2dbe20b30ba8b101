"""What ``inspect`` says of one checkpoint: text for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from ckptool.checking.finding import Finding
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.summary import Summary, sharing
from ckptool.cli.tables import tensor_file_offset
from ckptool.errors import CkptoolError
from ckptool.messages import counted, cut, show, show_nbytes
from ckptool.pickles.describe import describe, kind_of, scalar_of
from ckptool.pickles.nodes import Inert
from ckptool.tensors.reading import LazyTensor

SCHEMA = "ckptool.inspect/1"

FORMS = {
    "state_dict": "state_dict",
    "checkpoint": "checkpoint: weights and more",
    "model": "model",
    "tensors": "tensors, not named by a model",
    "data": "no tensors",
    "archive": "archive of several checkpoints",
}
"""What people are told of each form."""

_EXTRAS_SHOWN = 8
_SHARDS_SHOWN = 8
_SHARED_LISTED = 32
_SHARED_LENGTH = 1 << 12
_LABEL = 13
_WORD = 32
_LONGEST_PATH = 48


def head_lines(checkpoint: Checkpoint, summary: Summary, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines that say what a file is, one fact a line."""
    member = f"::{checkpoint.member}" if checkpoint.member else ""
    yield show(f"{checkpoint.path}{member}")
    yield labelled("format", f"{checkpoint.format}{_shards(checkpoint)}, {show_nbytes(checkpoint.file_nbytes)}")
    yield labelled("form", _form(checkpoint))
    tied = f", {summary.tied:,} of them tied" if summary.tied else ""
    yield labelled(
        "tensors",
        f"{summary.tensors:,}{tied}; {counted(summary.numel, 'parameter')}, {show_nbytes(summary.nbytes)}",
    )
    if summary.tensors:
        yield labelled("devices", counts(summary.devices))
        yield labelled("dtypes", counts(summary.dtypes))
    if summary.prefixes:
        yield labelled("prefix", show("".join(summary.prefixes)))
    if len(checkpoint.state_dicts) > 1 or checkpoint.form == "checkpoint":
        for index, state_dict in enumerate(checkpoint.state_dicts):
            yield labelled("state dicts" if index == 0 else "", _state_dict(state_dict, checkpoint.weights))
    for index, shard in enumerate(checkpoint.shards[:_SHARDS_SHOWN]):
        facts = f"{counted(shard.tensors, 'tensor')}, {show_nbytes(shard.nbytes)}"
        yield labelled("shards" if index == 0 else "", f"{show(shard.name)}: {facts}")
    if len(checkpoint.shards) > _SHARDS_SHOWN:
        yield labelled("", f"and {len(checkpoint.shards) - _SHARDS_SHOWN:,} more")
    for index, member_found in enumerate(checkpoint.members):
        facts = f"{member_found.format}, {member_found.form}, {counted(member_found.tensors, 'tensor')}"
        yield labelled("members" if index == 0 else "", f"{show(member_found.name)}: {facts}")
    if checkpoint.metadata:
        yield labelled(
            "metadata", show(", ".join(f"{key}={value[:200]}" for key, value in checkpoint.metadata.items())[:200])
        )
    extras = [extra for extra in checkpoint.extras if extra[0].rpartition(".")[2] != "_metadata"]
    if extras:
        yield labelled("also holds", _extras(extras))
    for finding in findings:
        yield from finding_lines(finding)


def finding_lines(finding: Finding) -> Iterator[str]:
    """Yield the line of a finding, and below it what to do; the command that does it stands on a line of its own."""
    yield labelled(finding.severity, f"{finding.code} {show(finding.message)}")
    why, found, command = (finding.hint or "").partition("Run: ")
    yield from (labelled("", show(text)) for text in (why.rstrip(), found + command) if text)


def extra_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line for each value that is not a tensor: its path, its type, what it is."""
    for path, node in checkpoint.extras:
        yield show(f"{path or '(root)'}: {kind_of(node)} = {describe(node)}")


def tree_lines(tensors: Iterable[LazyTensor]) -> Iterator[str]:
    """Yield the names as a tree: each component once, with the count and size of what is below it."""
    root = _Branch()
    for tensor in tensors:
        branch = root
        for component in tensor.name.split("."):
            branch.tensors += 1
            branch.nbytes += tensor.info.total_nbytes
            branch = branch.below.setdefault(component, _Branch())
        branch.leaf = tensor
    todo = [(branch, name, 0) for name, branch in reversed(root.below.items())]
    while todo:
        branch, name, depth = todo.pop()
        # A chain of single components (module.encoder.) is one line.
        while branch.leaf is None and len(branch.below) == 1:
            ((component, only),) = branch.below.items()
            name, branch = f"{name}.{component}", only
        indent = "  " * min(depth, 40)
        if branch.leaf is not None:
            info = branch.leaf.info
            yield f"{indent}{show(name)}  {list(info.shape)} {info.dtype} {show(info.location)}"
        if branch.below:
            yield f"{indent}{show(name)}  {counted(branch.tensors, 'tensor')}, {show_nbytes(branch.nbytes)}"
        todo.extend((below, component, depth + 1) for component, below in reversed(branch.below.items()))


class _Branch:
    __slots__ = ("below", "leaf", "nbytes", "tensors")

    def __init__(self) -> None:
        self.below: dict[str, _Branch] = {}
        self.leaf: LazyTensor | None = None
        self.tensors = 0
        self.nbytes = 0


def as_json(
    checkpoint: Checkpoint, summary: Summary, findings: Sequence[Finding], tensors: Iterable[LazyTensor]
) -> dict[str, object]:
    """Return the object that ``inspect --json`` prints for a file."""
    groups = sharing(checkpoint.tensors.values())
    shared = {name: group for group in groups for name in group}
    return {
        "schema": SCHEMA,
        "path": checkpoint.path,
        "member": checkpoint.member,
        "file_nbytes": checkpoint.file_nbytes,
        "format": checkpoint.format,
        "form": checkpoint.form,
        "summary": {
            "tensors": summary.tensors,
            "tied": summary.tied,
            "numel": summary.numel,
            "nbytes": summary.nbytes,
            "devices": summary.devices,
            "dtypes": summary.dtypes,
            "prefixes": list(summary.prefixes),
        },
        "state_dicts": [
            {
                "key": found.key,
                "role": found.role,
                "tensors": len(found),
                "numel": found.numel,
                "class": found.class_name,
                "is_weights": found is checkpoint.weights,
            }
            for found in checkpoint.state_dicts
        ],
        "tensors": [_tensor_json(tensor, shared, checkpoint.shard_of.get(tensor.name)) for tensor in tensors],
        "attributes": [_tensor_json(tensor, {}) for tensor in checkpoint.attributes.values()],
        "members": [member._asdict() for member in checkpoint.members],
        "shards": [{"name": one.name, "tensors": one.tensors, "nbytes": one.nbytes} for one in checkpoint.shards],
        "metadata": {cut(key): cut(value) for key, value in checkpoint.metadata.items()},
        "extras": [
            {"name": path, "type": kind_of(node), "value": scalar_of(node), "text": describe(node)}
            for path, node in checkpoint.extras
        ],
        "globals": [str(found) for found in checkpoint.globals],
        "findings": [{"code": f.code, "severity": f.severity, "message": f.message, "hint": f.hint} for f in findings],
    }


def error_text(error: CkptoolError) -> str:
    """Return the one or two lines that a person sees of an error: the fact, and what to do about it."""
    hint = f"\nHint: {show(error.hint)}" if error.hint and error.hint not in error.message else ""
    return f"Error: {show(str(error))}{hint}"


def error_as_json(path: str, error: CkptoolError) -> dict[str, object]:
    """Return the object that ``inspect --json`` prints for a file that cannot be read."""
    return {
        "schema": SCHEMA,
        "path": path,
        "error": {
            "kind": error.kind,
            "message": error.message,
            "hint": error.hint,
            "offset": error.offset,
            "needed": error.needed,
            "actual": error.actual,
        },
    }


def _tensor_json(
    tensor: LazyTensor, shared: Mapping[str, Sequence[str]], shard: str | None = None
) -> dict[str, object]:
    info = tensor.info
    others = [name for name in shared.get(tensor.name, ())[: _SHARED_LISTED + 1] if name != tensor.name]
    lengths = accumulate(map(len, others))  # each of a thousand tensors would list the same long names
    others = [name for name, length in zip(others, lengths, strict=True) if length <= _SHARED_LENGTH]
    found: dict[str, object] = {
        "name": tensor.name,
        "shape": list(info.shape),
        "dtype": info.dtype.name,
        "device": info.location,
        "numel": info.numel,
        "nbytes": info.total_nbytes,
        "stride": list(info.stride),
        "storage_offset": info.storage_offset,
        "requires_grad": info.requires_grad,
        "kind": info.kind,
        "storage": info.storage.key if info.storage else "",
        "file_offset": tensor_file_offset(info),
        "shared_with": others[:_SHARED_LISTED],
        "layout": info.layout,
    }
    if shard is not None:
        found["shard"] = shard
    if info.subclass:
        found["subclass"] = info.subclass
    if info.details:
        found["details"] = dict(info.details)
    if info.parts:
        found["parts"] = [_tensor_json(LazyTensor(name, part), {}) for name, part in info.parts]
    return found


def labelled(label: str, text: str) -> str:
    """Return one line of a head: a fact, and what it is about."""
    return f"  {label:<{_LABEL}}{text}"


def _shards(checkpoint: Checkpoint) -> str:
    return f" in {counted(len(checkpoint.shards), 'shard')}" if checkpoint.shards else ""


def _form(checkpoint: Checkpoint) -> str:
    if checkpoint.form != "model":
        return FORMS[checkpoint.form]
    cls = checkpoint.state_dicts[0].class_name if checkpoint.state_dicts else None
    return f"model: {show(cls)}" if cls else "model"


def counts(found: Mapping[str, int]) -> str:
    """Return what there is, and how many of each."""
    return ", ".join(f"{show(name)} ({count:,})" for name, count in found.items())


def _extras(extras: Sequence[tuple[str, Inert]]) -> str:
    """Return what is not a tensor, the outermost first, and how many more there are."""
    outermost = sorted(extras, key=lambda extra: extra[0].count("."))[:_EXTRAS_SHOWN]
    more = f" and {len(extras) - len(outermost):,} more" if len(extras) > len(outermost) else ""
    return show(", ".join(_extra(path, node) for path, node in outermost)) + more


def _extra(path: str, node: Inert) -> str:
    """Return a path, with its value where that is a number or a word."""
    if not path:
        return describe(node)
    value = scalar_of(node)
    if value is None or (isinstance(value, str) and len(value) > _WORD):
        return _clip(path)
    shown = f"{value:.6g}" if isinstance(value, float) else value
    return f"{_clip(path)}={shown}"


def _clip(path: str) -> str:
    return path if len(path) <= _LONGEST_PATH else f"{path[: _LONGEST_PATH // 2]}…{path[-_LONGEST_PATH // 2 :]}"


def _state_dict(found: StateDict, weights: StateDict | None) -> str:
    name = show(_clip(found.key)) or "(root)"
    cls = f", {show(found.class_name)}" if found.class_name else ""
    chosen = "  <- the weights" if found is weights else ""
    return f"{name}: {found.role}{cls}, {counted(len(found), 'tensor')}, {counted(found.numel, 'parameter')}{chosen}"
