"""Gives cases and files to processes of their own, and holds what it tells of them against what must happen."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.hostile.cases import Case

ROOT = Path(__file__).parents[2]
VERBS = ("inspect", "check", "migrate", "load")
SECONDS = 2.0
"""Of the processor, for each call and file, and what its size asks for on top:"""
SECONDS_PER_BYTE = 50e-9
"""a text of 75 MB in a header is parsed, written and parsed again in some 3 s."""


class Process:
    """A module of this folder that runs in a process of its own, and answers each job with a line."""

    def __init__(self, module: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.hostile.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def ask(self, **job: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


def run(child: Process, case: Case, tmp_path: Path) -> dict[str, Any]:
    """Make the file of a case, and return what the four verbs made of it."""
    # Two folders below those of other cases, which one letter or number apart could be of parts of one checkpoint.
    home = tmp_path / "case"
    inside, outside = home / "in", home / "out"
    inside.mkdir(parents=True)
    outside.mkdir()
    if callable(case.make):
        path = case.make(inside)
    else:
        path = str(inside / "file")
        Path(path).write_bytes(case.make)
    return child.ask(path=path, folder=str(outside), verbs=VERBS, beside=case.beside, patience=SECONDS)


def problems(case: Case, found: dict[str, Any]) -> list[str]:
    """Return everything that should not be so, in words."""
    if "broken" in found:
        return [found["broken"]]
    verbs = found["verbs"]
    # Telling of an error that is none of ours reads sources, too.
    untyped = any("untyped" in one for one in verbs.values())
    wrong = [] if untyped else [f"something happened: {event}" for event in found["happened"]]
    if found["changed"]:
        wrong.append("the file was changed")
    for name, one in verbs.items():
        if "untyped" in one:
            wrong.append(f"{name}: an error that is none of ours: {one['untyped']}")
        if one["seconds"] > allowed_seconds(found["nbytes"]):
            wrong.append(f"{name}: took {one['seconds']:.1f} s")
        if one["left"]:
            wrong.append(f"{name}: left {one['left']}")
        unprintable = {char for char in one.get("said", "") if not char.isprintable() and char != "\n"}
        if unprintable:
            wrong.append(f"{name}: printed {unprintable}")
    return wrong or _against(case, verbs)


def allowed_seconds(nbytes: int) -> float:
    """Return what a call may take. Files that are mostly holes are as large as what of them is looked at: 100 MB."""
    return SECONDS + SECONDS_PER_BYTE * min(nbytes, 100_000_000)


def _against(case: Case, verbs: dict[str, Any]) -> list[str]:
    wrong = []
    kinds = {name: one.get("error") for name, one in verbs.items() if name != "inspect"}
    if (verbs["inspect"]["code"] == 2) != (kinds["check"] is not None):
        wrong.append(f"inspect: exit code {verbs['inspect']['code']} where check says {kinds['check']}")
    if case.expect == "any" or (case.expect == "one" and kinds["check"] is None):
        return [line for name in ("migrate", "load") for line in _weights(case, name, verbs[name], refusable=True)]
    if case.expect == "read":
        wrong += [f"{name}: refused: {kinds[name]}" for name in ("check",) if kinds[name]]
        if verbs["migrate"].get("has_calls") and verbs["check"]["grade"] != "system":
            wrong.append(f"migrate: refused for a call, where check says {verbs['check']['grade']}")
        for name in ("migrate", "load"):
            wrong += _weights(case, name, verbs[name])
        return wrong
    expected = kinds["check"] if case.expect in ("refused", "one") else case.expect
    wrong += [f"{name}: {kind} and not {expected}" for name, kind in kinds.items() if kind != expected or not kind]
    return wrong


def _weights(case: Case, name: str, one: dict[str, Any], *, refusable: bool = False) -> list[str]:
    given = one.get("digests") or []
    if refusable and not given:
        return [] if one.get("error") else [f"{name}: neither weights nor an error"]
    if case.weights is False and (given or not one.get("error")):
        return [f"{name}: nothing was refused"]
    if case.weights is True and not given:
        return [f"{name}: {one.get('error')}"]
    if isinstance(case.weights, dict):
        expected = {key: hashlib.sha256(data).hexdigest() for key, data in case.weights.items()}
        tensors = [{key: value for key, value in found.items() if value != "none"} for found in given]
        if not tensors or any(found != expected for found in tensors):
            return [f"{name}: {one.get('error')}, other bytes: {sorted(tensors[0]) if tensors else None}"]
    return []
