"""The command lines that findings and errors advise: each is run on a copy, and what it writes must be opened."""

from __future__ import annotations

import os
import shlex
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

import ckptool
from tests.program import invoke

if TYPE_CHECKING:
    from tests.zoo.compare import Comparison


def opens(path: Path, *, weights_only: bool = True) -> bool:
    """Return whether ``torch.load`` opens a file, by default as it does by default."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception:  # noqa: BLE001 - any reason
        return False
    return True


def follow(found: Comparison, scratch: Path) -> None:
    """Run every advised command on a copy of the file and its neighbours."""
    opened = opens(found.path)
    for command, code in {command: code for code, command in _advised(found.path)}.items():
        words = shlex.split(command)
        if words[:1] == ["ckptool"]:
            _try(found, command, words[1:], scratch / "advice", weights_only=opened or code == "CK202")


def _advised(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the code or kind of what advises, and the command."""
    try:
        report = ckptool.check(path)
        yield from ((one.code, one.command) for one in report.findings if one.command)
        if report.error is not None and report.error.command:
            yield report.error.kind, report.error.command
        for form in ("state_dict", "safetensors"):
            try:
                ckptool.migrate(path, path.with_name("zoo-dry-run"), form=form, dry_run=True)
            except ckptool.CkptoolError as error:
                if error.command:
                    yield error.kind, error.command
        ckptool.load(path)
    except ckptool.CkptoolError as error:
        if error.command:
            yield error.kind, error.command
    except Exception:  # noqa: BLE001 - reported where the same call is compared
        return


def _try(found: Comparison, command: str, words: list[str], folder: Path, *, weights_only: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(found.path.parent, folder, symlinks=True)
    words = [_moved(word, found.path.parent, folder) for word in words]
    before = set(folder.rglob("*"))
    here = Path.cwd()
    os.chdir(folder)
    try:
        result = invoke(words, prog_name="ckptool")
    finally:
        os.chdir(here)
    # 1 is what check says of a file with warnings: to be told more is what was advised
    allowed = (0, 1) if words[0] == "check" else (0,)
    if result.exit_code not in allowed or isinstance(result.exception, Exception):
        said = " ".join(result.output.split())[-300:]
        found.bad_advice.append(f"{command}: exit {result.exit_code}: {said} {result.exception or ''}".strip())
    if words[0] == "migrate" and result.exit_code == 0:
        for path in set(folder.rglob("*")) - before:
            if path.is_file() and not _opened(path, weights_only):
                found.bad_advice.append(f"{command}: torch.load() does not open what it wrote")
    shutil.rmtree(folder, ignore_errors=True)


def _moved(word: str, old: Path, new: Path) -> str:
    return str(new) + word[len(str(old)) :] if word.startswith(str(old)) else word


def _opened(path: Path, weights_only: bool) -> bool:
    if path.suffix != ".safetensors":
        return opens(path, weights_only=weights_only)
    try:
        load_file(path)
    except Exception:  # noqa: BLE001 - any reason
        return False
    return True
