"""
What the benchmarks share: the files that they read, processes measured in turn, and how their figures are printed.

Times are the best of the runs, for us and for the peers alike: what else a machine does can only add to them. Each run
begins with another command, so that none of them always comes behind the same one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

# As a user runs it: an installed package has its bytecode compiled.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

BLOCKS = 288
BLOCK_SHAPE = (2048, 2048)  # 8 MiB of bfloat16
SMALL_TENSORS = 20_000
CKPTOOL = (sys.executable, "-m", "ckptool")

T = TypeVar("T")
Check: TypeAlias = tuple[bool, str]
"""Whether a bound holds, and what is said of it."""


class Figures(NamedTuple):
    """Of one command: best times in seconds, and the highest peak of memory in MiB."""

    wall: float
    cpu: float
    peak: float


def options(document: str | None) -> argparse.Namespace:
    return parser(document).parse_args()


def parser(document: str | None, runs: int = 5) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dir", type=Path, help="where the files are, or are made and kept (7 GB)")
    arguments.add_argument("--runs", type=int, default=runs)
    return arguments


@contextmanager
def benchmark_files(kept: Path | None, shape: tuple[int, int] = BLOCK_SHAPE) -> Iterator[tuple[Path, dict[str, Path]]]:
    """
    Give a folder to work in, and in it 2.3 GB of bfloat16 as a zip, a legacy stream and safetensors, and small files.

    The folder is a temporary one, unless one is named where they are kept. The large files are less with another
    ``shape`` of their 288 tensors.
    """
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        place = kept or Path(folder)
        files = {name: place / f"{name}.pth" for name in ("zip", "legacy", "safetensors", "many", "little")}
        if not all(path.exists() for path in files.values()):
            # In a process of its own, so that its memory is not ours.
            subprocess.run([sys.executable, __file__, str(place), *map(str, shape)], check=True)
        yield Path(folder), files


def write_files(folder: Path, shape: tuple[int, int]) -> None:
    import torch
    from safetensors.torch import save_file

    blocks = OrderedDict(
        (f"layers.{index}.weight", torch.full(shape, index / 7, dtype=torch.bfloat16)) for index in range(BLOCKS)
    )
    torch.save(blocks, folder / "zip.pth")
    torch.save(blocks, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    save_file(dict(blocks), folder / "safetensors.pth")
    little = OrderedDict((name, torch.zeros(128, 128, dtype=torch.bfloat16)) for name in blocks)
    torch.save(little, folder / "little.pth")
    many = OrderedDict((f"layers.{index}.weight", torch.full((4, 4), float(index))) for index in range(SMALL_TENSORS))
    torch.save(many, folder / "many.pth")


def in_turn(work: Mapping[str, Callable[[], T]], runs: int) -> dict[str, list[T]]:
    """Do each piece of work ``runs`` times, and once before for the caches; return what each run gave."""
    found: dict[str, list[T]] = {name: [] for name in work}
    names = list(work)
    for run in range(runs + 1):
        for name in names[run % len(names) :] + names[: run % len(names)]:
            result = work[name]()
            if run:
                found[name].append(result)
    return found


def best_in_turn(work: Mapping[str, Callable[[], Figures]], runs: int) -> dict[str, Figures]:
    """Return the best times and the highest peak of each piece of work, of so many runs."""
    return {
        name: Figures(min(one.wall for one in rows), min(one.cpu for one in rows), max(one.peak for one in rows))
        for name, rows in in_turn(work, runs).items()
    }


def processes_in_turn(
    commands: Mapping[str, Sequence[str]], runs: int, exit_code: int = 0, *, anew: Sequence[Path] = ()
) -> dict[str, Figures]:
    """
    Run each command as a process ``runs`` times, and once before for the caches; return the best of each.

    What is to be written ``anew`` is removed before each run: to truncate it would be on its bill.
    """

    def measured(command: Sequence[str]) -> Figures:
        for leftover in anew:
            remove(leftover)
        return measure(command, exit_code)

    return best_in_turn({name: partial(measured, command) for name, command in commands.items()}, runs)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def measure(command: Sequence[str], exit_code: int = 0) -> Figures:
    """Return a process's figures."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != exit_code:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return Figures(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


@contextmanager
def beside_busy(count: int) -> Iterator[None]:
    """Keep so many processes busy meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


def at_most(said: str, value: float, most: float) -> Check:
    """Return whether a value is within a bound, and the text that says so; ``said`` has braces where the value is."""
    return value <= most, f"{said.format(value)} (at most {most:.3g})"


def at_least(said: str, value: float, least: float) -> Check:
    return value >= least, f"{said.format(value)} (at least {least:.3g})"


def bounds(
    figures: Mapping[str, Figures],
    *,
    wall: Mapping[str, float | None] | None = None,
    cpu: Mapping[str, float | None] | None = None,
    peak: float | None = None,
) -> list[Check]:
    """Return which bounds the first command holds: its times as shares of those of others, and its memory in MiB."""
    ours = next(iter(figures.values()))
    shares = ((name, ours.wall / figures[name].wall, most) for name, most in (wall or {}).items() if most)
    checks = [at_most(f"time {{:.3f}} of {name}", *share) for name, *share in shares]
    shares = ((name, ours.cpu / figures[name].cpu, most) for name, most in (cpu or {}).items() if most)
    checks += [at_most(f"time of CPU {{:.3f}} of {name}", *share) for name, *share in shares]
    return checks + ([] if peak is None else [at_most("peak {:.1f} MiB", ours.peak, peak)])


def report(title: str, figures: Mapping[str, Figures | str], checks: Sequence[Check]) -> bool:
    """Print what was measured, and which bounds hold; say whether all do."""
    print(title)
    for name, one in figures.items():
        shown = one if isinstance(one, str) else f"{one.wall:8.3f} s  {one.cpu:8.3f} s of CPU  {one.peak:8.1f} MiB"
        print(f"  {name:36} {shown}")
    for held, text in checks:
        print(f"  {'ok  ' if held else 'MISS'} {text}", flush=True)
    return all(held for held, _ in checks)


if __name__ == "__main__":
    write_files(Path(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3])))
