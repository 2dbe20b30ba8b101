"""
Other tools beside ckptool, each as a process of its own, on the same files: the figures of docs/compared.md.

    python tests/benchmarks/bench_compared.py BIN [--dir DIR] [--runs 5]

BIN is the ``bin`` of an environment with ``pip install sft-cli ztensor picklescan``. Measured are a table of
the tensors of 2.3 GB, their conversion to safetensors, and a scan of those files of ``bench_gate`` that hold pickles
and are whole. Prints the rows of the tables; there are no bounds.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from measuring import CKPTOOL, benchmark_files, parser, processes_in_turn

OF_TORCH = "import sys, torch; torch.load(sys.argv[1], map_location='meta', weights_only=True)"
OF_SAFETENSORS = "import sys, safetensors; safetensors.safe_open(sys.argv[1], 'np').keys()"
OF_ZTENSOR = "import sys, ztensor; [print(one) for one in ztensor.open(sys.argv[1])]"
CONVERT = """
import sys, torch
from safetensors.torch import save_file
save_file(dict(torch.load(sys.argv[1], mmap=True, weights_only=True)), sys.argv[2])
"""
# In a process of its own, so that its memory is not ours.
MAKE = "import sys, pathlib, bench_gate; bench_gate.make(pathlib.Path(sys.argv[1]))"
UNREAD = ("cut*", "pointer*", "*.npy", "firmware*")


def table(title: str, commands: dict[str, Sequence[str]], runs: int, exit_code: int = 0) -> None:
    print(f"| {title} | time | of the processors | memory |\n|---|--:|--:|--:|")
    for name, one in processes_in_turn(commands, runs, exit_code).items():
        print(f"| {name} | {one.wall:.2f} s | {one.cpu:.2f} s | {one.peak:,.0f} MiB |", flush=True)
    print()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("bin", type=Path)
    given = arguments.parse_args()
    python = str(given.bin / "python")
    with benchmark_files(given.dir) as (place, files):
        zipped, plain = str(files["zip"]), str(place / "plain.safetensors")
        Path(plain).hardlink_to(files["safetensors"])
        commands = {
            "`ckptool inspect`": [*CKPTOOL, "inspect", zipped],
            "`torch.load(map_location='meta')`": [sys.executable, "-c", OF_TORCH, zipped],
            "ztensor, names": [python, "-c", OF_ZTENSOR, zipped],
        }
        table("tensors of 2.3 GB, `.pth`", commands, given.runs)
        commands = {
            "`ckptool inspect`": [*CKPTOOL, "inspect", plain],
            "`safe_open`, names": [sys.executable, "-c", OF_SAFETENSORS, plain],
            "`sft ls`": [str(given.bin / "sft"), "ls", plain],
            "ztensor, names": [python, "-c", OF_ZTENSOR, plain],
        }
        table("tensors of 2.3 GB, `.safetensors`", commands, given.runs)
        out = str(place / "out.safetensors")
        commands = {
            "`ckptool migrate`, verified": [*CKPTOOL, "migrate", "-q", "--force", zipped, out],
            "`torch.load(mmap=True)`, `save_file`": [sys.executable, "-c", CONVERT, zipped, out],
        }
        table("2.3 GB, `.pth` to `.safetensors`", commands, given.runs)
    with TemporaryDirectory(dir=given.dir) as folder:
        subprocess.run([sys.executable, "-c", MAKE, folder], cwd=Path(__file__).parent, check=True)
        for path in (one for glob in UNREAD for one in Path(folder).glob(glob)):
            path.unlink()
        check = [*CKPTOOL, "check", "-b", "-q", "-r", folder, "--fail-on", "system"]
        commands = {
            "`ckptool check -b -q --fail-on system`": check,
            "`picklescan -p`": [str(given.bin / "picklescan"), "-p", folder],
        }
        table(f"{len(list(Path(folder).iterdir()))} files, 15 of which run something", commands, given.runs, 1)


if __name__ == "__main__":
    main()
