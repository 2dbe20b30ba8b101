"""
What each verb makes of the fixtures, as facts: exit codes, codes of findings, JSON, and digests of what is written.

``python -m tests.golden`` compares with the record, and prints what is not as it was; ``--write`` writes the record.
``--against REVISION`` compares with what the code of another commit makes, of the real files where they are, too.
``--print --bare`` prints what is made without torch and numpy, for `tests.machines` to compare with other systems.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".jsonl")
STRANGERS = ("../shared/corpus/files", "../shared/corpus-dirs")
_UNLIKE_ELSEWHERE = {"seconds", "version", "mtime", "modified"}
"""Keys whose values are those of a machine or a day."""

Fact = dict[str, Any]


def facts(paths: list[str], out: Path) -> Iterator[Fact]:
    """Yield what each verb makes of each of these paths; ``out`` is an empty folder to write in."""
    for path in paths:
        yield _said(out, "inspect", "--json", path)
        yield _said(out, "check", "--deep", "--json", path)
        yield _said(out, "stat", "--json", path)
        for name in ("m.pth", "m.safetensors"):
            yield _written(out, name, "migrate", "--json", path, str(out / name), "--to", "cpu")
        yield _written(
            out, "d.pth", "migrate", "--json", "--strip-wrappers", "--form", "state_dict", path, f"{out}/d.pth"
        )
        yield _written(out, "dcp", "migrate", "--json", path, str(out / "dcp"), "--form", "dcp")
        yield _written(out, "shards", "migrate", "--json", path, str(out / "shards"), "--max-shard-size", "20KB")
        if Path(path).is_file():
            copy = shutil.copyfile(path, out / f"of-{Path(path).name}")
            yield _written(out, copy.name, "migrate", "--json", "--in-place", str(copy), "--to", "cpu")
        yield _said(out, "diff", "--json", path, "fixtures/valid/checkpoint-plain-cpu-zip.pth")
        yield _said(out, "scan", "--check", "--digest", "--json", path)


def _written(out: Path, name: str, *arguments: str) -> Fact:
    """Return what a command said, and the digests of the files that it wrote, which go."""
    fact = _said(out, *arguments)
    made = out / name
    if made.is_dir():
        fact["files"] = {str(one.relative_to(made)): digest(one) for one in sorted(made.rglob("*")) if one.is_file()}
    elif made.exists():
        fact["files"] = {"": digest(made)}
    left = sorted(one.name for one in out.iterdir() if one.name != name)
    if left:
        fact["left"] = left
    for one in out.iterdir():
        shutil.rmtree(one) if one.is_dir() else one.unlink()
    return fact


def _said(out: Path, *arguments: str) -> Fact:

    from tests.program import invoke

    result = invoke(list(arguments))
    named = [_plain(one, out).replace(os.sep, "/") for one in arguments]
    fact: Fact = {"command": " ".join(named), "exit": result.exit_code}
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        fact["broken"] = repr(result.exception)
    lines = list[Any]()
    for line in result.stdout.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(_facts(json.loads(_plain(line, out))))
    codes = sorted(str(finding["code"]) for line in lines for finding in _findings(line))
    if codes:
        fact["codes"] = codes
    text = json.dumps(lines, sort_keys=True)
    fact["json"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    if os.environ.get("CKPTOOL_GOLDEN_TEXT"):
        fact["text"] = text
    return fact


def _plain(text: str, out: Path) -> str:
    for written in (str(out), json.dumps(str(out))[1:-1]):  # in JSON, a backslash is two
        text = text.replace(written, "OUT")
    return text.replace("\\\\", "/")


def _facts(value: Any) -> Any:
    """Return a value of JSON without what another machine would say in other words: fractions, and all wording."""
    if isinstance(value, dict):
        kept = {key: _facts(one) for key, one in value.items() if key not in _UNLIKE_ELSEWHERE}
        # The wording of findings and errors is free; their code and severity are not.
        return {key: one for key, one in kept.items() if key not in ("message", "hint", "text", "title")}
    if isinstance(value, list):
        return [_facts(one) for one in value]
    return None if isinstance(value, float) else value


def _findings(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "code" in value and "severity" in value:
            yield value
        for one in value.values():
            yield from _findings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _findings(one)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def fixtures() -> list[str]:
    """Return all fixtures, files and folders, from the root of the project."""
    found = [
        *Path("fixtures/valid").iterdir(),
        *Path("fixtures/invalid").iterdir(),
        *Path("fixtures/folders").iterdir(),
    ]
    return sorted(path.as_posix() for path in found if path.suffix not in (".json", ".md"))


def strangers() -> list[str]:
    """Return real files and folders of others, where they are."""
    return sorted(path.as_posix() for folder in STRANGERS if Path(folder).is_dir() for path in Path(folder).iterdir())


def run(paths: list[str]) -> Iterator[Fact]:
    os.environ["CKPTOOL_TRACEBACK"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        yield from facts(paths, Path(folder))


def differences(before: dict[str, Fact], after: dict[str, Fact]) -> Iterator[str]:
    """Yield a line for each command whose facts are not as they were."""
    for command in [*before, *(one for one in after if one not in before)]:
        old, new = before.get(command), after.get(command)
        if old is None or new is None:
            yield f"{'gone' if new is None else 'new'}: {command}"
        elif old != new:
            keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            yield "\n  ".join([command, *(f"{key}: {_differing(old.get(key), new.get(key))}" for key in keys)])


def _differing(old: Any, new: Any) -> str:
    """Return the first place where two values differ, with a little around it."""
    one, other = str(old), str(new)
    same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    at = max(0, same - 60)
    return f"{one[at : at + 200]} -> {other[at : at + 200]}"


def recorded() -> dict[str, Fact]:
    return by_command(RECORD.read_text("utf-8").splitlines())


def by_command(lines: Iterable[str]) -> dict[str, Fact]:
    found = [json.loads(line) for line in lines]
    return {fact["command"]: fact for fact in found}


def _made_by(root: Path, *options: str) -> dict[str, Fact]:
    """Return the facts of the code of a checkout, made in a process of its own, in the root of this one."""
    environment = {**os.environ, "PYTHONPATH": str(root), "CKPTOOL_GOLDEN_TEXT": "1"}
    command = [sys.executable, "-P", __file__, "--print", *options]
    made = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return by_command(made.stdout.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the record")
    parser.add_argument("--print", action="store_true", help="print the facts")
    parser.add_argument("--strangers", action="store_true", help="of the real files, where they are, too")
    parser.add_argument("--bare", action="store_true", help="as without torch and numpy")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of one in so many fixtures")
    parser.add_argument("--against", metavar="REVISION", help="compare with the code of another commit")
    options = parser.parse_args()
    os.chdir(ROOT)
    if options.against:
        with tempfile.TemporaryDirectory() as folder:
            before = Path(folder) / "before"
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", before, options.against], check=True)
            try:
                old, new = (_made_by(root, "--strangers") for root in (before, ROOT))
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", before], check=True)
        changed = list(differences(old, new))
        print(*changed, f"{len(changed)} of {len(new)} differ", sep="\n")
        return int(bool(changed))
    if options.bare:
        sys.modules.update(torch=None, numpy=None)  # type: ignore[arg-type]  # as if neither could be imported
    found = run(fixtures()[:: options.every] + (strangers() if options.strangers else []))
    if options.print or options.write:
        with RECORD.open("w", encoding="utf-8") if options.write else contextlib.nullcontext(sys.stdout) as stream:
            for fact in found:
                print(json.dumps(fact), file=stream, flush=True)
        return 0
    changed = list(differences(recorded(), {fact["command"]: fact for fact in found}))
    print(*changed, f"{len(changed)} differ", sep="\n")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
