"""
The name of the output: the path that was given, or a name beside the source or in a folder.

The content never depends on the name, but readers and people go by it: a name that another kind of file has is refused,
and so is one that was probably meant as an option.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Final

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import MigrationRefused
from ckptool.messages import as_path
from ckptool.migration.changes import TargetForm
from ckptool.sources import STORES
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import TORCH_SUFFIXES, below, is_remote, is_same_file, local_name, shown_path
from ckptool.tensors import dtypes
from ckptool.torch_ops.devices import device_meant

_OTHERS: Final = frozenset({
    ".onnx", ".gguf", ".ggml", ".npz", ".npy", ".h5", ".hdf5", ".keras", ".tflite", ".pb", ".mlmodel", ".mlpackage",
    ".msgpack", ".engine", ".trt", ".xml", ".joblib", ".pt2", ".gz", ".tgz", ".json", ".txt", ".csv", ".yaml", ".yml",
    ".toml", ".md", ".html", ".py",
})  # fmt: skip
"""Suffixes that no checkpoint of torch and no safetensors file has."""


def target_path(dst: str | None, checkpoint: Checkpoint, form: TargetForm, marks: Sequence[str]) -> str:
    """
    Return the path of the result: ``dst``, or in a folder, or beside the source.

    In a folder it has the source's own name. Beside the source, the name says what was done, by the form and the
    ``marks``: ``model.cpu.pth``.
    """
    if dst is not None and not is_folder(dst):
        _refuse_option(dst)
        _refuse_suffix(dst, form)
        is_more = checkpoint.shards or checkpoint.member or isinstance(checkpoint.source, FolderSource)
        if is_more and any(_is_same(dst, path) for path in _files(checkpoint)):
            raise MigrationRefused(
                f"{as_path(dst)} is a file of the source that holds more than what is taken from it",
                kind="part-of-source",
                hint="Write to another file.",
            )
        return dst
    stem, suffix = _stem(checkpoint)
    suffix = ".safetensors" if form == "safetensors" else suffix if suffix.lower() in TORCH_SUFFIXES else ".pth"
    if dst is not None:
        return below(dst, os.path.basename(stem) + suffix)
    _refuse_open_file(stem)
    done: list[str] = [form] if form in ("state_dict", "model") else []
    done += [mark.replace(":", "") for mark in marks]
    path = ".".join((stem, *done)) + suffix
    # A file named like the shards of an index would be taken for another model in their folder.
    is_twin = checkpoint.shards and not done and not isinstance(checkpoint.source, FolderSource)
    return f"{stem}.migrated{suffix}" if path == checkpoint.path or is_twin else path


def folder_path(dst: str | None, checkpoint: Checkpoint, form: TargetForm, marks: Sequence[str]) -> str:
    """Return the path of a folder to write: ``dst``, or one beside the source."""
    kind = "dcp" if form == "dcp" else "shards"
    if dst is None:
        _refuse_open_file(checkpoint.path)
        return ".".join((_stem(checkpoint)[0], *(mark.replace(":", "") for mark in marks), kind))
    if dst != form:
        _refuse_option(dst)
    bare = dst.rstrip(os.sep + (os.altsep or "")) or dst
    path = dst if is_remote(dst) else bare
    suffix = os.path.splitext(bare)[1].lower()
    if suffix in _OTHERS or suffix in (".safetensors", *TORCH_SUFFIXES[:3]):
        raise MigrationRefused(
            f"{as_path(os.path.basename(bare))} is the name of a file, and a folder is to be written",
            kind="another-suffix",
            hint=f"Name it {as_path(os.path.splitext(os.path.basename(bare))[0])}.",
        )
    files = [one for file in _files(checkpoint) for one in (file, file if is_remote(file) else os.path.realpath(file))]
    if any(_is_same(path, os.path.dirname(file) or os.curdir) for file in files):
        raise MigrationRefused(
            f"{as_path(dst)} is the folder that the source is in",
            kind="part-of-source",
            hint="Write to another folder.",
        )
    return path


def _refuse_open_file(path: str) -> None:
    """Raise MigrationRefused for the name that a system has for a file that is open: its folder holds no files."""
    if re.match(r"/dev/std|/(dev|proc/[^/]+)/fd/", os.path.abspath(path)):
        fact = f"{as_path(path)} is an open file, beside which nothing can be written"
        raise MigrationRefused(fact, kind="no-name", hint="Name what is to be written.")


def _stem(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the source's path without its suffix, and the suffix; a member's name is added, with its suffix."""
    if isinstance(checkpoint.source, FolderSource):
        path = os.path.normpath(checkpoint.path)
        if os.path.basename(path) in (os.curdir, os.pardir):
            path = os.path.abspath(path)
        stem, suffix = os.path.splitext(path)
        return (stem, suffix) if suffix.lower() in TORCH_SUFFIXES else (path, "")
    stem, suffix = _split(local_name(checkpoint.path))
    if checkpoint.shards:  # model.safetensors.index.json
        stem, suffix = os.path.splitext(stem.removesuffix(".index"))
    if checkpoint.member:
        inner, suffix = _split(checkpoint.member.replace("::", "."))
        stem = f"{stem}.{os.path.basename(inner)}"
    return stem, suffix


def _split(path: str) -> tuple[str, str]:
    """Return a path without its suffix, and the suffix; ``.pth.tar``, a common name, counts as ``.pth``."""
    stem, suffix = os.path.splitext(path)
    inner, first = os.path.splitext(stem)
    return (inner, first) if suffix.lower() == ".tar" and first.lower() in TORCH_SUFFIXES else (stem, suffix)


def is_folder(path: str) -> bool:
    """Return whether a target is a folder to write into: an existing one, or a path that ends in a separator."""
    return path.endswith((os.sep, os.altsep or os.sep)) or os.path.isdir(path)


def archive_root(target: str) -> str:
    """Return the folder that holds every member of a zip: torch names it after the file, where that name is ASCII."""
    stem = os.path.splitext(os.path.basename(target))[0]
    return stem if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", stem) else "archive"


def _refuse_option(dst: str) -> None:
    """Raise MigrationRefused for a bare word that is an option's value, such as ``cpu``, and for a member's name."""
    if "::" in os.path.basename(dst):
        hint = f"Name a file: {as_path(dst.partition('::')[0])}, say."
        raise MigrationRefused(f"{as_path(dst)} is the name of a member of a file", kind="member-as-name", hint=hint)
    device = device_meant(dst)
    options = {"to": device, "form": dst if dst in ("state_dict", "safetensors", "dcp") else None}
    options["dtype"] = dst if dtypes.spelled(dst) in dtypes.BY_NAME else None
    options["max_shard_size"] = dst if re.fullmatch(r"[0-9.]+[KMGT]i?B", dst, re.IGNORECASE) else None
    for option, value in options.items():
        if value is not None:
            raise MigrationRefused(
                f"{as_path(dst)} as the name of what is to be written",
                kind="option-as-name",
                hint=f"Say `{option}={value!r}`, and leave the name out or give another; "
                f"a file of this name is {as_path(os.path.join('.', dst))}.",
            )


def refuse_address(dst: str | None) -> None:
    """Raise MigrationRefused for a stream, and for an address that cannot be written to."""
    if dst == "-":
        hint = "Name a file or a folder; one that is called so is './-'."
        raise MigrationRefused("there is no output to a pipe", kind="stream-as-target", hint=hint)
    if dst is None or "://" not in dst:
        return
    from ckptool.sources.address import as_remote

    if as_remote(dst).scheme not in STORES:
        written = ", ".join(f"{scheme}://" for scheme in STORES)
        raise MigrationRefused(
            f"{as_remote(dst).scheme}:// cannot be written to",
            kind="address-as-target",
            hint=f"Write to an address of {written}, or to a path, and upload what is there.",
        )


def _refuse_suffix(dst: str, form: TargetForm) -> None:
    """Raise MigrationRefused if readers would take the file for something else, by its suffix."""
    stem, suffix = os.path.splitext(os.path.basename(dst))
    is_plain = form == "safetensors"
    of_torch = is_plain and suffix.lower() in TORCH_SUFFIXES
    other = f"a {suffix.lower()} file" if of_torch or suffix.lower() in _OTHERS else None
    instead = ", or write `form='state_dict'`" if of_torch else ""
    instead = instead if is_plain else ", or .safetensors for the weights alone"
    endings = (stem + suffix).lower().rstrip(". ").split(".")[1:]  # as somebody may have misspelt it: x.safetensors.bak
    if (
        not is_plain
        and suffix.lower() not in TORCH_SUFFIXES
        and any(
            ending in ("sft", "st") or get_close_matches(ending, ["safetensors"], cutoff=0.85) for ending in endings
        )
    ):
        other, instead = "a file of safetensors", ", or write `form='safetensors'`"
    if other is not None:
        written, right = ("safetensors", ".safetensors") if is_plain else ("torch.save's", ".pth")
        raise MigrationRefused(
            f"{as_path(stem + suffix)} would be read as {other}, and its format is {written}",
            kind="another-suffix",
            hint=f"Name it {as_path(stem + right)}{instead}.",
        )


def _files(checkpoint: Checkpoint) -> Iterator[str]:
    yield checkpoint.path
    if isinstance(checkpoint.source, FolderSource):
        yield from (file.path for _, file in checkpoint.source.opened())
    for shard in checkpoint.shards:
        if hasattr(shard.source, "path"):  # a local or remote file
            yield shard.source.path


def _is_same(dst: str, path: str) -> bool:
    return shown_path(dst) == path if is_remote(dst) else is_same_file(dst, path)
