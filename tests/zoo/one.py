"""Run in a group's own environment: one library saves, its files are compared, the result is written as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import isfunction
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", WANDB_DISABLED="true", MPLBACKEND="agg", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("KERAS_BACKEND", "torch")


def writers(group: str) -> dict[str, Callable[[Any], None]]:
    """Return a group's functions that save, by the name of their library."""
    module = import_module(f"tests.zoo.libraries.{group}")
    return {write.library: write for write in vars(module).values() if isfunction(write) and hasattr(write, "library")}


def declare_operators() -> object:
    """Declare operators of torchvision where its own are not loaded: the build for CUDA is not imported without it."""
    import torch

    found = find_spec("torchvision")
    places = found.submodule_search_locations if found is not None else None
    try:
        for path in Path(places[0]).glob("_C*.so") if places else ():
            torch.ops.load_library(str(path))
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return declared  # it ends with this object
    return None


def main() -> None:
    """Save with one library, and compare; or, without one, list those of a group."""
    if len(sys.argv) == 2:
        print("\n".join(writers(sys.argv[1])))
        return
    group, name, target = sys.argv[1:]
    import torch

    from tests.zoo.box import Box
    from tests.zoo.compare import clear, compare

    warnings.simplefilter("ignore")
    logging.getLogger("ckptool").setLevel(logging.ERROR)
    declared = declare_operators()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # nothing here has to survive a loss of power, and disks take their time
    started = time.monotonic()
    result: dict[str, Any] = {"library": name, "version": _version(name), "records": [], "error": None}
    with tempfile.TemporaryDirectory(prefix="ckptool-zoo-") as temporary:
        scratch = Path(temporary)
        box = Box(Path(target).with_suffix(""))
        clear(box.folder)
        here = Path.cwd()
        os.chdir(scratch)  # where libraries leave logs
        try:
            writers(group)[name](box)
        except Exception as error:  # noqa: BLE001 - a library's own trouble
            trace = traceback.extract_tb(error.__traceback__)
            lines = [str(frame.lineno) for frame in trace if "tests/zoo/libraries" in frame.filename]
            result["error"] = f"line {', '.join(lines)}: {type(error).__name__}: {str(error)[:300]}"
        os.chdir(here)
        declared = {one.path for one in box.expected}
        files = [path for path in sorted(box.folder.rglob("*")) if path.is_file() and not path.is_symlink()]
        files = [path for path in files if path.suffix != ".distcp"]  # items, of which torch.load() opens the first
        for path in [*files, *sorted(path for path in declared if path.is_dir())]:
            expected = [one for one in box.expected if one.path == path]
            shown = str(path.relative_to(box.folder)) + ("/" if path.is_dir() else "")
            found = compare(path, shown, expected, scratch)
            if found is not None:
                result["records"].append(found.record())
        lost = [str(path) for path in declared if not path.exists()]
        result["failed"] = box.failed + [f"{path}: was not written" for path in lost]
    del declared
    result["seconds"] = round(time.monotonic() - started, 1)
    Path(target).write_text(json.dumps(result, indent=1))


def _version(name: str) -> str | None:
    try:
        return version(name.split(":")[0])
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # libraries leave threads behind
