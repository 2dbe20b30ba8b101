"""What a path is that cannot be opened as a file, and which file to give instead."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from shlex import join, quote
from typing import Final

from ckptool.errors import FileUnavailable
from ckptool.messages import counted, some
from ckptool.sources.paths import directory_entries, is_likely

_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_INDEXES: Final = (".safetensors.index.json", ".bin.index.json")
_WEIGHTS: Final = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model", "open_clip_pytorch_model")
_NEVER_WEIGHTS: Final = re.compile(
    r"(?:optimizer|scheduler|scaler|training_args|rng_state|random_states|sampler|dataloader|custom_checkpoint).*"
)
"""What trainers put beside weights."""
_DISTRIBUTED: Final = "Make one file of it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch"


def unavailable(path: str, error: OSError) -> FileUnavailable:
    """Return the error for a path that the system does not open."""
    if error.errno == errno.ENOENT or _ADDRESS.fullmatch(path):
        return _missing(path)
    if error.errno in (errno.EACCES, errno.EPERM):
        if os.path.isdir(path):  # noqa: PTH112 - Windows refuses to open a directory with this errno
            return directory(path)
        command = join(("chmod", "u+r", "--", path))
        return FileUnavailable("permission denied", kind="permission", hint="Make it readable.", command=command)
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    return FileUnavailable(f"cannot be opened: {reason}", kind="unavailable")


def _missing(path: str) -> FileUnavailable:
    if path == "-":
        return not_a_file("standard input is a pipe")
    address = _ADDRESS.fullmatch(path)
    if address is not None:
        local = address[1].lower() == "file"
        hint = f"Give the path alone: {quote(address[2])}" if local else "Download the file first, and give its path."
        return FileUnavailable("an address, and addresses are not read", kind="address", hint=hint)
    hint = "Check the path."
    if _HUB_NAME.fullmatch(path) and not is_likely(path) and not os.path.isdir(path.partition("/")[0]):  # noqa: PTH112
        hint = f"Check the path. If it is a name on the Hugging Face hub, download it first: hf download {path}"
    return FileUnavailable("no such file", kind="missing", hint=hint)


def not_a_file(what: str) -> FileUnavailable:
    """Return the error for a pipe or a device."""
    return FileUnavailable(f"{what}, not a file", kind="not-a-file", hint="Save the stream to a file first.")


def directory(path: str) -> FileUnavailable:
    """Return the error for a directory, with the command for the one file in it that holds weights."""
    names = sorted(directory_entries(path), key=lambda name: (not name.endswith(".index.json"), not is_likely(name)))
    shards = sum(name.endswith(".distcp") for name in names)
    if shards and ".metadata" not in names:
        return FileUnavailable(
            f"a directory, a torch.distributed.checkpoint in {counted(shards, 'file')} without its index, .metadata",
            kind="distributed-checkpoint",
            hint="Use another one: saving was not finished.",
        )
    if shards:
        return FileUnavailable(
            f"a directory, a torch.distributed.checkpoint in {counted(shards, 'file')}, which is not read as a whole",
            kind="distributed-checkpoint",
            hint=f"{_DISTRIBUTED} {quote(path)} FILE.pt",
        )
    if not names:
        return _without_files(path)
    found = FileUnavailable(f"a directory with {_many(names)}", kind="directory")
    chosen = _candidate(names)
    if chosen is None:
        found.hint = f"Name a file in it: {some(list(map(quote, names)), 4)}"
    else:
        others = [name for name in names if name != chosen]
        found.hint = f"Name a file in it: {some(list(map(quote, [chosen, *others])), 4)}"
        found.command = join(("ckptool", "inspect", os.path.join(path, chosen)))  # noqa: PTH118 - a name
    return found


def _many(names: Sequence[str]) -> str:
    return "one file" if len(names) == 1 else counted(len(names), "file")


def _without_files(path: str) -> FileUnavailable:
    folders = directory_entries(path, folders=True)
    hint = f"Name a file in one of its folders: {some(list(map(quote, folders)), 4)}" if folders else None
    return FileUnavailable("a directory without files", kind="directory", hint=hint)


def _candidate(names: Sequence[str]) -> str | None:
    """Return the one file that stands for the weights in a directory: an index of shards before all others."""
    usual = [f"{stem}{suffix}" for suffix in (".safetensors", ".bin") for stem in _WEIGHTS]
    tiers = (
        *([name for name in names if name.endswith(suffix)] for suffix in _INDEXES),
        [name for name in names if name in usual and not _repeats(name, names)],
        [name for name in names if is_likely(name) and not _NEVER_WEIGHTS.fullmatch(name)],
    )
    first = next((tier for tier in tiers if tier), [])
    return first[0] if len(first) == 1 else None


def _repeats(name: str, names: Sequence[str]) -> bool:
    """Say whether the same weights are there as safetensors."""
    stem = name.removesuffix(".bin").removeprefix("pytorch_")
    return name.endswith(".bin") and any(f"{one}.safetensors" in names for one in (stem, f"pytorch_{stem}"))
