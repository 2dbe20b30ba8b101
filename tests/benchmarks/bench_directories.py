"""
How fast and how small ckptool is with directories of torch.distributed.checkpoint, beside torch's own ways.

    python tests/benchmarks/bench_directories.py [--dir DIR] [--runs 3] [--gb 2]

Makes its own directories in DIR or a temporary folder, and removes them: an index of 2,000 tensors on 128 ranks, one of
20,000 tiny values, one of 20,000 small tensors, 2 GB on 4 ranks, cut in rows and in columns, and a file of 2 GB (and
room for copies of them). Every figure is of whole processes, run in turn; times are the best of the runs. Exits 1 if a
bound does not hold.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import CKPTOOL, at_most, bounds, parser, processes_in_turn, remove, report

TENSORS, RANKS, VALUES = 2_000, 128, 20_000
BLOCK = (4096, 2048)  # 32 MiB
INSPECT = [*CKPTOOL, "inspect"]
MIGRATE = [*CKPTOOL, "migrate", "--force"]
READ_METADATA = (
    "import sys; from torch.distributed.checkpoint import FileSystemReader; "
    "FileSystemReader(sys.argv[1]).read_metadata()"
)
LOAD = """
import sys, torch, torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
reader = dcp.FileSystemReader(sys.argv[1])
state = {
    name: torch.empty(one.size, dtype=one.properties.dtype)
    for name, one in reader.read_metadata().state_dict_metadata.items()
}
dcp.load(state, storage_reader=reader, no_dist=True)
save_file(state, sys.argv[2])
"""
TO_TORCH = """
import sys, torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from safetensors.torch import save_file
dcp_to_torch_save(sys.argv[1], sys.argv[2] + ".pt")
save_file(torch.load(sys.argv[2] + ".pt", weights_only=True)["model"], sys.argv[2])
"""


def main() -> int:
    arguments = parser(__doc__, runs=3)
    arguments.add_argument("--gb", type=float, default=2)
    arguments.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.write is not None:
        WRITERS[given.write[0]](Path(given.write[1]), given.gb)
        return 0
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        work = Path(name)
        held = [large_index(work, given.runs), many_values(work, given.runs), small_tensors(work, given.runs)]
        held.append(one_file(work, given.gb, given.runs))
        held += [migration(work, cut, given.gb, given.runs) for cut in ("rows", "columns")]
    return 0 if all(held) else 1


def made(work: Path, kind: str, gb: float = 0) -> Path:
    """Write a directory in a process of its own, so that its memory is not ours."""
    command = [sys.executable, "-W", "ignore", __file__, "--gb", str(gb), "--write", kind, str(work / kind)]
    subprocess.run(command, check=True)
    return work / kind


def large_index(work: Path, runs: int) -> bool:
    folder = str(made(work, "index"))
    commands = {"inspect": [*INSPECT, folder], "read_metadata": [sys.executable, "-c", READ_METADATA, folder]}
    figures = processes_in_turn(commands, runs)
    checks = bounds(figures, wall={"read_metadata": 1}, peak=600)
    return report(f"index of {TENSORS:,} tensors on {RANKS} ranks", figures, checks)


def many_values(work: Path, runs: int) -> bool:
    figures = processes_in_turn({"inspect": [*INSPECT, str(made(work, "values"))]}, runs)
    return report(f"{VALUES:,} values", figures, [at_most("{:.2f} s of CPU", figures["inspect"].cpu, 2)])


def small_tensors(work: Path, runs: int) -> bool:
    folder, target = str(made(work, "small")), str(work / "out.safetensors")
    commands = {
        "python": [sys.executable, "-c", ""],
        "migrate": [*MIGRATE, folder, target],
        "load + save_file": [sys.executable, "-W", "ignore", "-c", LOAD, folder, target],
    }
    figures = processes_in_turn(commands, runs)
    own = figures["migrate"].peak - figures["python"].peak
    checks = [at_most("peak {:.1f} MiB beside python's own", own, 96)]
    return report(f"{VALUES:,} small tensors -> safetensors", figures, checks)


def one_file(work: Path, gb: float, runs: int) -> bool:
    """A file of safetensors → a file, shards, and DCP."""
    source, target = made(work, "file", gb), work / "out"
    size = str(-(-source.stat().st_size // 4 // 10**6 + 1) * 10**6)
    commands = {
        "file": [*MIGRATE, str(source), f"{target}.safetensors"],
        "4 shards": [*MIGRATE, "--max-shard-size", size, str(source), str(target)],
        "DCP": [*MIGRATE, "--form", "dcp", str(source), str(target)],
    }
    figures = processes_in_turn(commands, runs, anew=(target, target.with_suffix(".safetensors")))
    one = figures["file"].wall
    checks = [at_most(f"{name}: {{:.2f}} of one file", figures[name].wall / one, 1.3) for name in ("4 shards", "DCP")]
    remove(target)
    source.unlink()
    return report(f"one file of {gb:g} GB -> another form", figures, checks)


def migration(work: Path, cut: str, gb: float, runs: int) -> bool:
    folder, target = str(made(work, cut, gb)), work / "out.safetensors"
    commands = {
        "migrate": [*MIGRATE, folder, str(target)],
        "load + save_file": [sys.executable, "-W", "ignore", "-c", LOAD, folder, str(target)],
        "dcp_to_torch_save + save_file": [sys.executable, "-W", "ignore", "-c", TO_TORCH, folder, str(target)],
    }
    left = (target, Path(f"{target}.pt"))
    figures = processes_in_turn(commands, runs, anew=left)
    for path in (Path(folder), *left):
        remove(path)
    checks = bounds(figures, wall={"load + save_file": 0.6, "dcp_to_torch_save + save_file": 0.25}, peak=96)
    return report(f"{gb:g} GB on 4 ranks, cut in {cut} -> safetensors", figures, checks)


def write_index(folder: Path, _: float) -> None:
    import pickle

    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder.mkdir()
    metadata = Metadata({}, planner_data={}, storage_data={}, version="1.0.0")
    for number in range(TENSORS):
        name = f"model.layers.{number // 10}.attention.block{number % 10}.weight"
        boxes = [(torch.Size([rank * 8, 0]), torch.Size([8, 16])) for rank in range(RANKS)]
        chunks = [ChunkStorageMetadata(*box) for box in boxes]
        properties = TensorProperties(dtype=torch.float32)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size([8 * RANKS, 16]), chunks)
        metadata.planner_data[name] = ("model", name.removeprefix("model."))
        for rank in range(RANKS):
            index = MetadataIndex(name, torch.Size([rank * 8, 0]), rank)
            metadata.storage_data[index] = _StorageInfo(f"__{rank}_0.distcp", number * 2_000, 2_000)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    for rank in range(RANKS):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(TENSORS * 2_000)  # a hole: no item is opened


def write_values(folder: Path, _: float) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    state: dict[str, object] = {f"param_groups.layers.{number}.weight.lr": 0.125 for number in range(VALUES)}
    dcp.save(state | {"weight": torch.ones(3)}, checkpoint_id=folder, no_dist=True)


def write_small(folder: Path, _: float) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {f"layers.{number}.weight": torch.full((4, 4), float(number)) for number in range(VALUES)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def write_file(path: Path, gb: float) -> None:
    import torch
    from safetensors.torch import save_file

    block = torch.randn(BLOCK)
    count = max(1, round(gb * 1e9 / block.nbytes))
    save_file({f"model.layers.{number}.weight": block + number for number in range(count)}, path)


def write_pieces(folder: Path, gb: float, axis: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import torch

    from tests.formats.dcp_folder import Writer, rows

    writer = Writer(folder)
    shape = BLOCK
    block = torch.randn(shape)
    for number in range(max(1, round(gb * 1e9 / block.nbytes))):
        writer.tensor(f"model.layers.{number}.weight", block + number, rows(shape, 4, axis))
    writer.close()


WRITERS = {
    "index": write_index,
    "values": write_values,
    "small": write_small,
    "file": write_file,
    "rows": lambda folder, gb: write_pieces(folder, gb, 0),
    "columns": lambda folder, gb: write_pieces(folder, gb, 1),
}

if __name__ == "__main__":
    sys.exit(main())
