"""
Run somebody's tests, and compare whatever they save and load with what ckptool makes of it.

    python -m tests.zoo.suites FOLDER test_serialization.py nn/test_lazy_modules.py
    python -m tests.zoo.suites SAFETENSORS/bindings/python/tests test_pt_comparison.py -- -k dtype

FOLDER is where PyTorch's or safetensors' own tests lie; what follows ``--`` goes to pytest. While they run, each file
that ``torch.save`` writes or ``torch.load`` reads, and each of safetensors, is opened by ckptool, too; and each model
that ``load_state_dict`` fills is filled once more by ``load_into``, as a copy. The tests' own results do not matter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.zoo import environments

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def main() -> int:
    """Run the tests in an environment of their own; 1 if something differed."""
    words, rest = sys.argv[1:], []
    if "--" in words:
        words, rest = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.suites", description=__doc__.strip().splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the tests lie")
    parser.add_argument("files", nargs="+", help="files of tests in it")
    parser.add_argument("--here", action="store_true", help="in this environment; nothing is installed")
    arguments = parser.parse_args(words)
    cache = Path("~/.cache/ckptool-zoo").expanduser()
    python = Path(sys.executable) if arguments.here else environments.python("suites", cache, REQUIREMENTS)
    folder = arguments.folder.absolute()
    paths = os.pathsep.join([str(environments.REPOSITORY), str(folder)])
    options = ["-p", "tests.zoo.suites.plugin", "-q", "--no-header", "--tb=no", "--noconftest"]
    command = [str(python), "-m", "pytest", *options, "-c", os.devnull, f"--rootdir={folder}", *rest, *arguments.files]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
