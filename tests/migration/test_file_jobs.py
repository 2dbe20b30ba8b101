"""
Folders whose files are jobs: whoever does them, in any order, once or again, the result is that of one process.

Here the jobs are done in this process, each after a way through a pickle. ``tests/cli/test_migrate_workers``
does them by processes.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool import Changes, SourceChanged, migrate
from ckptool.errors import CkptoolError, DamagedFile, OutputExists, OutputFailed
from ckptool.migration import dcp_plan
from ckptool.migration.file_jobs import Job, Opened, Tell, Written
from ckptool.migration.migrate import WriteOptions, migrate_by
from ckptool.names import renaming
from tests.each import each
from tests.migration.kills import assert_same
from tests.scale import in_turn, scale

Done = Generator[Written, None, None]


def write(job: Job) -> Written:
    with Opened(job) as opened:
        return opened.write(job)


def elsewhere(jobs: Sequence[Job], tell: Tell) -> Done:
    """Do the last one first, and each again."""
    for job in reversed(jobs):
        write(job)
        written = pickle.loads(pickle.dumps(write(pickle.loads(pickle.dumps(job)))))
        tell(job.number, job.nbytes, job.nbytes)
        yield written
        yield written


def state_dict(count: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"layers.{number}.weight": torch.randn(8, 9) for number in range(count)}
    flat = torch.randn(200)
    tensors |= {
        "turned": torch.randn(9, 8).t(),
        "view": flat[3:90],
        "other view": flat[80:],
        "long": torch.randn(70, 8),
    }
    return tensors | {"tied": tensors["layers.0.weight"], "counter": torch.tensor(3)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the same tensors as one file, with more beside them, compressed, as shards and as folders of DCP."""
    folder = tmp_path_factory.mktemp("sources")
    tensors = state_dict()
    torch.save(tensors, folder / "file.pth")
    torch.save({"model": tensors, "epoch": 3, "history": [1, {"best": torch.ones(3)}]}, folder / "training.pth")
    torch.save(tensors, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    migrate(folder / "file.pth", folder / "shards", max_shard_size=1200)
    migrate(folder / "training.pth", folder / "dcp", form="dcp")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dcp_plan, "_ITEM_NBYTES", 500)
        migrate(folder / "file.pth", folder / "pieces", form="dcp", max_shard_size=1 << 14)
    found = ("file.pth", "training.pth", "legacy.pth", "shards/model.safetensors.index.json", "shards", "dcp", "pieces")
    return {name: folder / name for name in found}


CHANGES = {
    "shards": Changes(max_shard_size=1200),
    "one shard": Changes(max_shard_size="1GB"),
    "items": Changes(form="dcp"),
    "files of items": Changes(form="dcp", max_shard_size=1 << 14),
    "names": Changes(
        max_shard_size=1200,
        rename=[renaming.add_prefix("a"), (r"^a\.layers", "a.b"), renaming.strip_prefix("a")],
        exclude=["counter"],
    ),
    "cast": Changes(max_shard_size=1200, dtype="bfloat16", keep_dtype=["long"]),
    "cast items": Changes(form="dcp", max_shard_size=1 << 14, dtype="float16"),
}
CASES = [("file.pth", change) for change in CHANGES] + [("training.pth", "items"), ("training.pth", "cast")]
CASES += [("shards", "shards"), ("dcp", "names"), ("pieces", "cast items"), ("pieces", "shards")]
if scale:
    others = ("training.pth", "legacy.pth", "shards/model.safetensors.index.json", "shards", "dcp", "pieces")
    CASES += [(source, change) for source in others for change in CHANGES]


@each(("source", "change"), CASES)
def test_the_bytes_and_the_report_are_those_of_one_process(
    source: str, change: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    told: dict[str, list[tuple[str, int, int]]] = {"one": [], "two": []}

    def telling(name: str) -> dict[str, Any]:
        return {
            "progress": lambda done, total: told[name].append(("written", done, total)),
            "read_back": lambda done, total: told[name].append(("read back", done, total)),
        }

    expected = migrate(sources[source], tmp_path / "one", CHANGES[change], **telling("one"))
    target = str(tmp_path / "two")
    found = migrate_by(elsewhere, str(sources[source]), target, CHANGES[change], WriteOptions(**telling("two")))

    assert_same(tmp_path / "one", tmp_path / "two")
    assert found == expected._replace(target=target)
    for what in ("written", "read back"):
        one, two = ([line for line in told[name] if line[0] == what] for name in told)
        assert two == sorted(two)
        assert two[-1] == one[-1]


def assert_nothing_there(target: Path) -> None:
    assert not target.exists()
    assert not [path.name for path in target.parent.iterdir() if path.name.startswith(f".{target.name}.")]


def with_shards(writers: Callable[[Sequence[Job], Tell], Done], source: Path, target: Path, **options: Any) -> Any:
    return migrate_by(writers, str(source), str(target), Changes(max_shard_size=1200), WriteOptions(**options))


@pytest.mark.parametrize("named", [False, True])
def test_two_that_write_one_file_at_once(
    named: bool, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)

    def at_once(jobs: Sequence[Job], tell: Tell) -> Done:
        with ThreadPoolExecutor(3) as pool:
            for job in jobs:
                yield list(pool.map(write, [job] * 3))[1]

    migrate(sources["file.pth"], tmp_path / "one", max_shard_size=1200)
    with_shards(at_once, sources["file.pth"], tmp_path / "two")

    assert_same(tmp_path / "one", tmp_path / "two")


def test_the_index_and_the_name_come_last(sources: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "out"

    def watched(jobs: Sequence[Job], tell: Tell) -> Done:
        for job in jobs:
            yield write(job)
            assert not target.exists()
            assert not list(Path(job.place.path).parent.glob("*.json"))

    with_shards(watched, sources["file.pth"], target)

    assert (target / "model.safetensors.index.json").exists()


def test_what_a_process_left_that_died_is_not_in_the_folder(sources: dict[str, Path], tmp_path: Path) -> None:
    def died(jobs: Sequence[Job], tell: Tell) -> Done:
        place = Path(jobs[0].place.path)
        (place.parent / f".{place.name}.ckptool-1-0123abcd.part").write_bytes(b"half of it")
        place.write_bytes(b"what another began")
        yield from map(write, jobs)

    migrate(sources["file.pth"], tmp_path / "one", max_shard_size=1200)
    with_shards(died, sources["file.pth"], tmp_path / "two")

    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(("kind", "how"), in_turn(["file.pth", "shards", "pieces"], ["written", "replaced"]))
def test_a_source_that_changes_under_way_is_refused(
    kind: str, how: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    source, target = tmp_path / kind, tmp_path / "out"
    if sources[kind].is_dir():
        shutil.copytree(sources[kind], source)
        changed = max(path for path in source.iterdir() if path.suffix in (".safetensors", ".distcp"))
    else:
        changed = shutil.copyfile(sources[kind], source)
    before = changed.stat()

    def disturbed(jobs: Sequence[Job], tell: Tell) -> Done:
        yield write(jobs[0])
        yield write(jobs[-1])
        if how == "written":
            os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        else:
            shutil.copyfile(changed, tmp_path / "new")
            (tmp_path / "new").replace(changed)
        yield from map(write, jobs[1:])

    with pytest.raises(SourceChanged):
        with_shards(disturbed, source, target)

    assert_nothing_there(target)


def skip_one(jobs: Sequence[Job], tell: Tell) -> Done:
    yield from map(write, jobs[1:])


def lose_one(jobs: Sequence[Job], tell: Tell) -> Done:
    yield from map(write, jobs)
    Path(jobs[0].place.path).unlink()


def cut_one(jobs: Sequence[Job], tell: Tell) -> Done:
    yield from map(write, jobs)
    os.truncate(jobs[0].place.path, 100)


def another_plan(jobs: Sequence[Job], tell: Tell) -> Done:
    yield write(jobs[0]._replace(changes=jobs[0].changes._replace(max_shard_size=2400)))


@each(
    ("writers", "error"),
    [(skip_one, OutputFailed), (lose_one, OutputFailed), (cut_one, OutputFailed), (another_plan, SourceChanged)],
)
def test_what_was_not_done_as_planned_is_found(
    writers: Any, error: type[CkptoolError], sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(error):
        with_shards(writers, sources["file.pth"], tmp_path / "out")

    assert_nothing_there(tmp_path / "out")


@pytest.mark.parametrize("part", ["whole", "view"])
def test_a_damaged_source_is_found(part: str, tmp_path: Path) -> None:
    values = torch.arange(300.0)
    torch.save({"w": values if part == "whole" else values[10:200], "v": torch.ones(9)}, tmp_path / "source.pth")
    data = bytearray((tmp_path / "source.pth").read_bytes())
    data[data.index(values[20:200].numpy().tobytes()) + 77] ^= 4
    (tmp_path / "source.pth").write_bytes(data)

    with pytest.raises(DamagedFile):
        with_shards(elsewhere, tmp_path / "source.pth", tmp_path / "out")

    assert_nothing_there(tmp_path / "out")


def test_what_exists_stays_unless_it_is_to_be_replaced(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_bytes(b"{}")
    with pytest.raises(OutputExists):
        with_shards(elsewhere, sources["file.pth"], tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"

    with_shards(elsewhere, sources["file.pth"], tmp_path / "out", force=True, verify=False)

    migrate(sources["file.pth"], tmp_path / "one", max_shard_size=1200)
    assert_same(tmp_path / "one", tmp_path / "out")
