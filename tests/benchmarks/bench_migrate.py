"""
How fast and how small ``ckptool migrate`` is, beside what people do today, in one run on one machine.

    python tests/benchmarks/bench_migrate.py [--dir DIR] [--runs 3]

Makes the files of bench_inspect.py (about 7 GB, and room for copies of them) in DIR or a temporary folder. Every figure
is of whole processes, run in turn; times are medians. Exits 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from bench_inspect import SMALL_TENSORS, make_files, measure

MAPPED = (
    "import sys, torch; from safetensors.torch import save_file; "
    "save_file(torch.load(sys.argv[1], mmap=True, weights_only=True), sys.argv[2])"
)
PLAIN = MAPPED.replace("mmap=True, ", "")
MIGRATE = [sys.executable, "-m", "ckptool", "migrate", "--force"]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dir", type=Path, help="where to make the files")
    arguments.add_argument("--runs", type=int, default=3)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        files = make_files(Path(folder))
        out = Path(folder)
        tags = ["--to", "cpu", "--strip-module"]
        held = [
            compare(
                "zip -> safetensors",
                files["zip"],
                out / "a.safetensors",
                [],
                options.runs,
                mapped=0.7,
                plain=0.4,
                copy=1.25,
            ),
            compare("zip -> zip", files["zip"], out / "a.pth", tags, options.runs, mapped=0.7, plain=0.4, copy=1.25),
            compare(
                "legacy -> safetensors", files["legacy"], out / "a.safetensors", [], options.runs, plain=0.4, copy=1.25
            ),
            compare(
                f"{SMALL_TENSORS:,} small -> safetensors",
                files["many"],
                out / "b.safetensors",
                [],
                options.runs,
                mapped=1 / 3,
                plain=1 / 3,
            ),
            compare(
                f"{SMALL_TENSORS:,} small -> zip",
                files["many"],
                out / "b.pth",
                tags,
                options.runs,
                mapped=1 / 3,
                plain=1 / 3,
            ),
        ]
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
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for run in range(runs + 1):  # the first warms the caches
        for name, command in commands.items():
            # Each writes a new file: truncating the last one would be on its bill.
            for leftover in (target, Path(peer[1])):
                leftover.unlink(missing_ok=True)
            figures = measure(command)
            if run:
                found[name].append(figures)
    wall = {name: statistics.median(figures[0] for figures in rows) for name, rows in found.items()}
    peak = {name: max(figures[1] for figures in rows) for name, rows in found.items()}
    checks = [(peak["migrate"] <= 96, f"peak {peak['migrate']:.1f} MiB (at most 96)")]
    for peer_name, bound in (("torch.load(mmap=True) + save_file", mapped), ("torch.load + save_file", plain)):
        if bound is not None:
            ratio = wall["migrate"] / wall[peer_name]
            checks.append((ratio <= bound, f"verified, {ratio:.2f} of {peer_name} (at most {bound:.2f})"))
    if copy is not None:
        ratio = wall["migrate --no-verify"] / wall["cat"]
        checks.append((ratio <= copy, f"not verified, {ratio:.2f} of cat (at most {copy})"))
    print(f"{title}: {source.stat().st_size:,} bytes")
    for name in commands:
        print(f"  {name:36} {wall[name]:7.3f} s  {peak[name]:8.1f} MiB")
    for held, text in checks:
        print(f"  {'ok  ' if held else 'MISS'} {text}")
    return all(held for held, _ in checks)


def ten_times_as_large(folder: Path) -> bool:
    """Plan and copy a file of 23 GB whose storages are holes: memory must not grow with the size."""
    import json

    source = folder / "huge.safetensors"
    block, count = 1 << 23, 2880
    header = {
        f"layers.{index:04}.weight": {
            "dtype": "BF16",
            "shape": [2048, 2048],
            "data_offsets": [index * block, (index + 1) * block],
        }
        for index in range(count)
    }
    encoded = json.dumps(header).encode()
    with source.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        stream.truncate(8 + len(encoded) + count * block)
    free = shutil.disk_usage(folder).free
    if free < 26_000_000_000:
        print(f"ten times as large: left out, {free:,} bytes are free")
        return True
    target = folder / "huge.pth"
    wall, peak = measure([*MIGRATE, "--no-verify", str(source), str(target)])
    target.unlink()
    print(f"ten times as large: {source.stat().st_size:,} bytes in {wall:.1f} s, peak {peak:.1f} MiB (at most 96)")
    return peak <= 96


if __name__ == "__main__":
    sys.exit(main())
