"""
What ``ckptool check -q`` says as a gate, of 500 files such as a repository of models has, and how long it takes.

    python tests/benchmarks/bench_gate.py [--picklescan PROGRAM] [--runs 5]

Of the files, 15 run something when they are loaded and 3 were cut; 10 are pointers of Git LFS, 10 arrays, 2 texts and 1
the image of a firmware; all others are what training leaves: a model of 140 tensors, its optimizer, settings of
argparse, scalars of numpy, objects of classes of their own. PROGRAM, of an environment of its own, is timed in turn on
the files that it reads to their end. Last, one reading for both digests is compared with ``sha256sum`` and a reading
for the checksums. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from measuring import CKPTOOL, at_most, parser, processes_in_turn, report

CHECK = [*CKPTOOL, "check"]
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 12\n"
MOST_LINES = 40
MOST_OF_PICKLESCAN = 1.0
MOST_OF_TWO_READINGS = 1.1
DIGESTED = 1 << 28


class Runs:
    """Calls something when it is loaded."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def make(place: Path) -> None:
    """Write the files."""
    import builtins
    import os

    bad = (
        Runs(os.system, "echo pwned"),
        Runs(builtins.eval, "1 + 1"),
        Runs(builtins.exec, "pass"),
        Runs(builtins.__import__, "this"),
    )
    for number in range(15):
        kind = (torch.save, lambda value, path: torch.save(value, path, _use_new_zipfile_serialization=False))[
            number % 2
        ]
        kind({"w": torch.ones(3), "x": bad[number % 4]}, place / f"bad{number:02}.pth")
    module = ModuleType("ourproject")
    ours = type("Config", (), {"__module__": "ourproject"})
    module.Config = ours  # type: ignore[attr-defined]
    sys.modules["ourproject"] = module
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(20))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for number in range(459):
        tree: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": number}
        if number % 4 == 1:
            tree["args"] = argparse.Namespace(lr=0.1, name="run")
        elif number % 4 == 2:
            tree |= {"best": np.float64(0.5), "history": np.arange(3)}
        elif number % 16 == 3:
            tree["config"] = ours()
        torch.save(tree, place / f"epoch{number:03}.pth")
    whole = (place / "epoch000.pth").read_bytes()
    for number in range(3):
        (place / f"cut{number}.pth").write_bytes(whole[: len(whole) * (number + 1) // 5])
    for number in range(10):
        (place / f"pointer{number}.pth").write_text(LFS)
        np.save(place / f"array{number}.npy", np.ones(number + 1))
    for name in ("README.md", "MODEL_CARD.md"):
        (place / name).write_text("# Models\n")
    (place / "firmware.bin").write_bytes(bytes(range(200, 256)) * 99)


def checked(place: Path, *options: str) -> tuple[list[str], int]:
    done = subprocess.run([*CHECK, "-r", str(place), *options], capture_output=True, text=True)
    return (done.stdout + done.stderr).splitlines(), done.returncode


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--picklescan", metavar="PROGRAM")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        place = Path(folder) / "models"
        place.mkdir()
        make(place)
        held = [said(place)]
        if given.picklescan:
            held.append(timed(place, given.picklescan, given.runs))
        held.append(digested(Path(folder), given.runs))
    return 0 if all(held) else 1


def said(place: Path) -> bool:
    lines, code = checked(place, "-q", "--fail-on", "system")
    brief, _ = checked(place, "-q", "-b", "--fail-on", "system")
    found = json.loads("\n".join(checked(place, "--json", "--fail-on", "system")[0]))
    failed = sorted(Path(one["path"]).name for one in found if one["gate"] == "fails")
    unknown = sorted(Path(one["path"]).name for one in found if one["gate"] == "unknown")
    right = [f"bad{number:02}.pth" for number in range(15)]
    harmless = [name for name in (*failed, *unknown) if not name.startswith(("bad", "cut"))]
    facts = SimpleNamespace(lines=len(lines), brief=len(brief), found=len({*failed} & {*right}), red=len(harmless))
    print(
        f"{sum(1 for _ in place.iterdir())} files: exit code {code}; -q {facts.lines} lines, -b -q {facts.brief} lines;"
    )
    print(f"{facts.found} of 15 attacks, {len(unknown)} of 3 cut files, {facts.red} harmless files red")
    is_right = (code, facts.found, facts.red, len(unknown)) == (1, 15, 0, 3)
    return is_right and max(facts.lines, facts.brief) <= MOST_LINES


def timed(place: Path, program: str, runs: int) -> bool:
    for path in [*place.glob("cut*"), *place.glob("pointer*"), *place.glob("*.npy"), *place.glob("firmware*")]:
        path.unlink()
    commands = {"check": [*CHECK, "-b", "-q", "-r", str(place), "--fail-on", "system"]}
    figures = processes_in_turn({**commands, "picklescan": [program, "-p", str(place)]}, runs, exit_code=1)
    share = figures["check"].wall / figures["picklescan"].wall
    checks = [at_most("time {:.3f} of picklescan", share, MOST_OF_PICKLESCAN)]
    return report("the files that both read to their end", figures, checks)


def digested(place: Path, runs: int) -> bool:
    path = place / "large.pth"
    torch.save({"w": torch.randint(0, 255, (DIGESTED,), dtype=torch.uint8)}, path)
    checks = {options: [*CHECK, *options.split(), str(path)] for options in ("--deep", "--digest", "--deep --digest")}
    figures = processes_in_turn({"sha256sum": ["sha256sum", str(path)], **checks}, runs)
    share = figures["--digest"].cpu / (figures["sha256sum"].cpu + figures["--deep"].cpu)
    return report(
        "digests of 256 MiB",
        figures,
        [at_most("--digest takes {:.3f} of the CPU of sha256sum and --deep", share, MOST_OF_TWO_READINGS)],
    )


if __name__ == "__main__":
    sys.exit(main())
