"""
How fast and how small ``ckptool migrate`` is, beside what people do today, in one run on one machine.

    python tests/benchmarks/bench_migrate.py [--dir DIR] [--runs 5]

Makes the files of bench_inspect.py (about 7 GB, and room for copies of them) in DIR or a temporary folder. Every figure
is of whole processes, run in turn; times are the best of the runs. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from measuring import (
    CKPTOOL,
    SMALL_TENSORS,
    at_most,
    benchmark_files,
    bounds,
    measure,
    options,
    processes_in_turn,
    report,
)

MAPPED = (
    "import sys, torch; from safetensors.torch import save_file; "
    "save_file(torch.load(sys.argv[1], mmap=True, weights_only=True), sys.argv[2])"
)
PLAIN = MAPPED.replace("mmap=True, ", "")
FLOATS = '{f"layers.{at}.weight": torch.randn(2048, 2048) / 50 for at in range(120)}'
MIGRATE = [*CKPTOOL, "migrate", "--force"]


def main() -> int:
    given = options(__doc__)
    with benchmark_files(given.dir) as (out, files):
        tags, small = ["--to", "cpu", "--strip-module"], f"{SMALL_TENSORS:,} small"
        large = {"mapped": 0.7, "plain": 0.4, "copy": 1.25}
        plain = {"plain": 0.4, "copy": 1.25}
        third = {"mapped": 1 / 3, "plain": 1 / 3}
        held = [
            compare("zip -> safetensors", files["zip"], out / "a.safetensors", [], given.runs, **large),
            compare("zip -> zip", files["zip"], out / "a.pth", tags, given.runs, **large),
            compare("legacy -> safetensors", files["legacy"], out / "a.safetensors", [], given.runs, **plain),
            compare(f"{small} -> safetensors", files["many"], out / "b.safetensors", [], given.runs, **third),
            compare(f"{small} -> zip", files["many"], out / "b.pth", tags, given.runs, **third),
        ]
        held.append(folders(files["zip"], out, given.runs))
        held.append(experts(out, given.runs))
        held.append(casts(out, given.runs))
        held.append(ten_times_as_large(out))
    return 0 if all(held) else 1


def compare(
    title: str,
    source: Path,
    target: Path,
    changes: list[str],
    runs: int,
    *,
    mapped: float | None = None,
    plain: float | None = None,
    copy: float | None = None,
) -> bool:
    ours = [*MIGRATE, *changes, str(source), str(target)]
    commands = {"migrate": ours, "migrate --no-verify": [*ours, "--no-verify"]}
    peer = [str(source), str(target.with_suffix(".peer"))]
    if mapped is not None:
        commands["torch.load(mmap=True) + save_file"] = [sys.executable, "-c", MAPPED, *peer]
    commands["torch.load + save_file"] = [sys.executable, "-c", PLAIN, *peer]
    commands["cat"] = ["sh", "-c", 'cat "$0" > "$1"', *peer]
    commands["cat and sync"] = ["sh", "-c", 'cat "$0" > "$1"; sync "$1"', *peer]
    figures = processes_in_turn(commands, runs, anew=(target, Path(peer[1])))
    wall = {"torch.load(mmap=True) + save_file": mapped, "torch.load + save_file": plain}
    checks = bounds(figures, wall=wall, peak=96)
    if copy is not None:
        ratio = figures["migrate --no-verify"].wall / figures["cat"].wall
        checks.append(at_most("not verified, {:.2f} of cat", ratio, copy))
        ratio = figures["migrate"].wall / figures["cat and sync"].wall
        checks.append(at_most("verified and on the disk, {:.2f} of cat and sync", ratio, 1.2))
    return report(f"{title}: {source.stat().st_size:,} bytes", figures, checks)


def folders(source: Path, out: Path, runs: int) -> bool:
    """Compare one file with four shards, and with a folder of torch.distributed.checkpoint."""
    file, folder = out / "a.safetensors", out / "folder"
    quarter = -(-source.stat().st_size // 4)
    commands = {
        "one file": [*MIGRATE, str(source), str(file)],
        "four shards": [*MIGRATE, str(source), str(folder), "--max-shard-size", str(quarter)],
        "DCP": [*MIGRATE, str(source), str(folder), "--form", "dcp"],
    }
    figures = processes_in_turn(commands, runs, anew=(file, folder))
    shutil.rmtree(folder)
    one, *others = figures
    checks = [at_most(f"{name}: {{:.2f}} of one file", figures[name].wall / figures[one].wall, 1.3) for name in others]
    checks += [at_most(f"{name}: peak {{:.1f}} MiB", figures[name].peak, 96) for name in others]
    return report(f"folders: {source.stat().st_size:,} bytes", figures, checks)


def experts(folder: Path, runs: int) -> bool:
    """Compare one file with stacks of its 128 experts, gate and up in one tensor, and with the way back."""
    source, stacked, apart = (folder / f"{name}.safetensors" for name in ("experts", "stacked", "apart"))
    names = [f"layers.{i}.{e}.{name}" for i in range(3) for e in range(128) for name in ("down", "gate", "up")]
    with source.open("wb") as stream:
        stream.write(header(names, [1024, 1024]))
        for at in range(len(names)):
            stream.write(at.to_bytes(2, "little") * (1 << 20))
    recipe = folder / "experts.toml"
    recipe.write_text(
        '[[rule]]\nfrom = ["layers.{i}.{e*}.gate", "layers.{i}.{e*}.up"]\nto = "layers.{i}.gate_up"\n'
        'steps = [{ op = "stack" }, { op = "concat", dim = 1 }]\n'
        '[[rule]]\nfrom = "layers.{i}.{e*}.down"\nto = "layers.{i}.down"\nop = "stack"\n'
    )
    by_recipe = ["--recipe", str(recipe)]
    commands = {
        "stacked": [*MIGRATE, str(source), str(stacked), *by_recipe],
        "apart": [*MIGRATE, str(stacked), str(apart), *by_recipe, "--reverse"],
        "one file": [*MIGRATE, str(source), str(folder / "a.safetensors")],
        "cat and sync": ["sh", "-c", f"cat {source} > {folder}/a.safetensors; sync {folder}/a.safetensors"],
    }
    measure(commands["stacked"])
    figures = processes_in_turn(commands, runs, anew=(apart, folder / "a.safetensors"))
    checks = [
        at_most(f"{name}: {{:.2f}} of {other}", figures[name].wall / figures[other].wall, 1.15)
        for name in list(commands)[:2]
        for other in list(commands)[2:]
    ]
    checks += [at_most(f"{name}: peak {{:.1f}} MiB", figures[name].peak, 64) for name in list(commands)[:2]]
    return report(f"experts: {source.stat().st_size:,} bytes", figures, checks)


def casts(folder: Path, runs: int) -> bool:
    """Compare a cast of 2 GB of float32 with a migration that casts nothing."""
    source, target = folder / "float32.safetensors", folder / "cast.safetensors"
    made = f"import torch; from safetensors.torch import save_file; save_file({FLOATS}, {str(source)!r})"
    subprocess.run([sys.executable, "-c", made], check=True)
    ours = [*MIGRATE, str(source), str(target)]
    commands = {"--dtype bfloat16": [*ours, "--dtype", "bfloat16"], "no cast": ours}
    commands["import torch"] = [sys.executable, "-c", "import torch"]
    figures = processes_in_turn(commands, runs, anew=(target,))
    cast, plain, importing = (one.cpu for one in figures.values())
    checks = [at_most("{:.2f} of no cast, without the import of torch", (cast - importing) / plain, 1.3)]
    return report(f"cast: {source.stat().st_size:,} bytes", figures, checks)


def header(names: list[str], shape: list[int]) -> bytes:
    """Return the header of a safetensors file of tensors of bfloat16 of one shape."""
    nbytes = 2 * shape[0] * shape[1]
    entries = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [at * nbytes, (at + 1) * nbytes]}
        for at, name in enumerate(names)
    }
    encoded = json.dumps(entries).encode()
    return len(encoded).to_bytes(8, "little") + encoded


def ten_times_as_large(folder: Path) -> bool:
    """Plan and copy a file of 23 GB whose storages are holes: memory must not grow with the size."""
    source = folder / "huge.safetensors"
    count = 2880
    with source.open("wb") as stream:
        start = stream.write(header([f"layers.{at:04}.weight" for at in range(count)], [2048, 2048]))
        stream.truncate(start + count * (1 << 23))
    free = shutil.disk_usage(folder).free
    if free < 26_000_000_000:
        print(f"ten times as large: left out, {free:,} bytes are free")
        return True
    target = folder / "huge.pth"
    figures = {"migrate --no-verify": measure([*MIGRATE, "--no-verify", str(source), str(target)])}
    return report(f"ten times as large: {source.stat().st_size:,} bytes", figures, bounds(figures, peak=96))


if __name__ == "__main__":
    sys.exit(main())
