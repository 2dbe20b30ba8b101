"""What is notable about a checkpoint that is several files, or about the folder that it lies in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from ckptool.checking.finding import Finding, command_line, run
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary
from ckptool.formats.directories.bare import ENGINE
from ckptool.messages import counted, some
from ckptool.sources.naming import is_far
from ckptool.tensors.tensor import identity

_OTHERS: Final = ("checkpoint", "folder", "variant")
"""What lies beside a checkpoint, and is one by itself."""


def remarks(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """What the reader of the format saw; it knows the codes."""
    if not checkpoint.remarks:
        return
    from ckptool.checking.codes import CODES

    for code, what, hint in checkpoint.remarks:
        yield Finding(code, CODES[code].severity or "warning", what, hint)


def absent_names(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK152: names of the model have no values."""
    # Components of a pipeline are told of as such.
    if checkpoint.absent and not checkpoint.unopened and all(code != "CK164" for code, _, _ in checkpoint.remarks):
        what = f"{counted(len(checkpoint.absent), 'name')} of the model without a value in any file"
        yield Finding("CK152", "warning", f"{what}: {some(checkpoint.absent)}", "They are not among the weights.")


def parts_apart(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK155: the state dicts are parts of one model that cannot be put together."""
    if checkpoint.unmerged is not None:
        yield Finding("CK155", "warning", checkpoint.unmerged, "Load it where it was written, and save it whole.")


def announced_size(checkpoint: Checkpoint, summary: Summary) -> Iterator[Finding]:
    """CK107: an index of shards announces another size than its tensors have."""
    said = checkpoint.announced_nbytes
    if said is None or said == summary.nbytes:
        return
    # Writers count what is tied under each name, or once; or the memory that is saved with it.
    infos = [tensor.info for tensor in checkpoint.tensors.values()]
    named = sum(info.total_nbytes for info in infos)
    distinct = sum({identity(info): info.total_nbytes for info in infos}.values())
    if said not in (named, distinct, summary.nbytes):
        yield Finding(
            "CK107",
            "warning",
            f"the index announces {said:,} bytes of tensors (total_size), the shards hold {named:,}",
            "Compare the index and the shards with those that were published: one of them may belong to another model.",
        )


def one_of_a_set(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK160: the file is one of several that are one checkpoint."""
    part = checkpoint.part_of
    if part is not None:
        yield Finding(
            "CK160",
            "warning",
            f"{part.what}: what is in the others is not here",
            "Give what they are together:",
            command_line(part.path, "inspect"),
        )


def once_more(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK161: the folder holds the same weights once more."""
    names = [f"{one.name} ({one.about})" for one in checkpoint.beside if one.role == "duplicate"]
    if names:
        yield Finding("CK161", "info", f"the same weights are there once more, and were not opened: {some(names)}")


def leftovers(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK162: shards that no index names."""
    names = [one.name for one in checkpoint.beside if one.role == "leftover"]
    if names:
        yield Finding(
            "CK162",
            "warning",
            f"{counted(len(names), 'shard')} that the index does not name: {some(names)}",
            "They may be left from another save into the same folder: remove them, or get the index again.",
        )


def not_opened(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK171: other checkpoints are beside the one that was opened, going by their names."""
    if any(code == "CK167" for code, _, _ in checkpoint.remarks):
        return  # they were looked into, and that counts them
    others = [one for one in checkpoint.beside if one.role in _OTHERS and not _is_with(checkpoint, one.path)]
    if not others:
        return
    what = f"{counted(len(others), 'other checkpoint')} beside, which {_were(others)} not opened"
    if is_far(others[0].path):
        yield Finding("CK171", "info", f"{what}: {some([one.name for one in others])}")
        return
    folder = os.path.commonpath([os.path.dirname(one.path) for one in others]) or os.curdir
    names = [os.path.relpath(one.path, folder) for one in others]
    look = command_line(folder, "inspect", brief=True, recursive=True)
    yield Finding("CK171", "info", f"{what}: {some(names)}", None, look)


def _is_with(checkpoint: Checkpoint, path: str) -> bool:
    """Say whether a path is a link, or the states of an engine that a trainer saved with its weights."""
    folder, name = os.path.split(path)
    is_engine = ENGINE.fullmatch(name) is not None and not checkpoint.is_folder
    return os.path.islink(path) or (is_engine and os.path.dirname(checkpoint.path or "") == folder)


def unfinished(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK163: downloads that were not finished."""
    names = [one.name for one in checkpoint.beside if one.role == "incomplete"]
    if names:
        what = f"{counted(len(names), 'download')} that {_were(names)} not finished: {some(names)}"
        whole = not any(name.endswith(".aria2") for name in names)  # which fills files in any order
        hint = f"Download again what is missing{'; what was opened is whole without it' * whole}."
        yield Finding("CK163", "warning", what, hint)


def _were(names: Sequence[object]) -> str:
    return "was" if len(names) == 1 else "were"


def unopened_members(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK114: a member of the archive is a checkpoint, by its name or its content, and cannot be opened."""
    hint = "Nothing is known of what it holds."
    for name, why in checkpoint.unopened:
        if checkpoint.path and _is_beside(checkpoint, name):
            path = os.path.join(os.path.dirname(checkpoint.path), name)
            yield Finding(
                "CK114", "error", f"{name!r} beside it cannot be opened: {why}", hint, command_line(path, "check"), path
            )
        else:
            look = run(checkpoint, "check", member=name, why=hint)
            yield Finding("CK114", "error", f"member {name!r} cannot be opened: {why}", *look)


def _is_beside(checkpoint: Checkpoint, name: str) -> bool:
    """Say whether what cannot be opened is another file of the folder that one was chosen from."""
    from ckptool.sources.folders import is_folder  # most files are opened whole

    first = name.partition("::")[0]
    return not is_folder(checkpoint.path or "") and not any(first in archive for archive in checkpoint.archives)


OF_THE_INDEX: Final = (remarks, absent_names, parts_apart)
AROUND_IT: Final = (unopened_members, announced_size, one_of_a_set, not_opened, once_more, leftovers, unfinished)
