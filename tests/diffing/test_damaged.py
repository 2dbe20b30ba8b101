"""Files that are damaged, cut, or change under the reader's eyes: a typed error that names the file, never another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptool
from ckptool import CkptoolError, FileUnavailable, LimitExceeded, SourceChanged, diff
from ckptool.diffing import values
from tests import build
from tests.process import ROOT
from tests.scale import examples, scaled, times

FORMS = build.one_of_each()


@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(form=st.sampled_from(sorted(FORMS)), data=st.data())
def test_any_damage_gives_a_report_or_a_typed_error(form: str, data: st.DataObject, tmp_path: Path) -> None:
    whole = FORMS[form]
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.just(len(whole)) | st.integers(0, len(whole)))
    paths = tmp_path / "a", tmp_path / "b"
    paths[0].write_bytes(whole)
    paths[1].write_bytes(damaged[:cut])
    for pair in (paths, paths[::-1]):
        try:
            report = diff(*pair)
        except CkptoolError as error:
            assert error.path == str(paths[1])  # noqa: PT017 - either outcome is fine
        else:
            assert report.tensors or not report.same or report.scope == "everything"


@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_form_is_equal_to_itself(form: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(FORMS[form])

    assert diff(tmp_path / "a", tmp_path / "a").same


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(FORMS["torch_zip"])
    with pytest.raises(FileUnavailable) as caught:
        diff(tmp_path / "a", tmp_path / "b")

    assert caught.value.path == str(tmp_path / "b")


@pytest.mark.parametrize("which", ["a", "b"])
def test_a_file_that_is_cut_while_it_is_compared_is_named(which: str, tmp_path: Path) -> None:
    for name in "ab":
        torch.save({"w": torch.ones(1 << 20), "v": torch.ones(1 << 20)}, tmp_path / name)
    original = values.ValueComparer.difference

    def cutting(self: Any, name: str, *infos: Any) -> Any:
        os.truncate(tmp_path / which, 1 << 20)
        return original(self, name, *infos)

    with mock.patch.object(values.ValueComparer, "difference", cutting), pytest.raises(SourceChanged) as caught:
        diff(tmp_path / "a", tmp_path / "b")
    assert caught.value.path == str(tmp_path / which)


def test_a_file_that_is_written_to_meanwhile_is_no_result(tmp_path: Path) -> None:
    for name in "ab":
        torch.save({"w": torch.ones(8)}, tmp_path / name)
    original = values.ValueComparer.difference

    def touching(self: Any, name: str, *infos: Any) -> Any:
        os.utime(tmp_path / "b", (1, 1))
        return original(self, name, *infos)

    with mock.patch.object(values.ValueComparer, "difference", touching), pytest.raises(SourceChanged) as caught:
        diff(tmp_path / "a", tmp_path / "b")
    assert caught.value.path == str(tmp_path / "b")


def test_a_small_storage_repeated_without_end_is_compared_where_it_stands_or_refused(tmp_path: Path) -> None:
    def repeated(numel: int) -> bytes:
        return build.torch_zip({"w": build.tensor(build.storage(), (numel, 4), (0, 1))}, {"0": build.floats()})

    (tmp_path / "a").write_bytes(repeated(1 << 40))
    (tmp_path / "b").write_bytes(repeated(1 << 40))
    assert diff(tmp_path / "a", tmp_path / "b").same

    changed = build.torch_zip({"w": build.tensor(build.storage(), (1 << 40, 4), (0, 1))}, {"0": build.floats(5)[4:]})
    (tmp_path / "b").write_bytes(changed)
    with pytest.raises(LimitExceeded):
        diff(tmp_path / "a", tmp_path / "b")


def test_an_index_that_does_not_match_its_checksum_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "a")
    data = (tmp_path / "a").read_bytes().replace(b"weight", b"weigth")
    (tmp_path / "b").write_bytes(data)
    with pytest.raises(CkptoolError) as caught:
        diff(tmp_path / "a", tmp_path / "b")

    assert (caught.value.kind, caught.value.path) == ("damaged-record", str(tmp_path / "b"))


PEAKS = """
import sys, ckptool
from tests.process import peak_nbytes
for name in ("small", "large"):
    ckptool.diff(f"{sys.argv[1]}/{name}-a", f"{sys.argv[1]}/{name}-b")
    print(peak_nbytes() >> 10)
"""


def peaks_kib(folder: Path) -> tuple[int, int]:
    """Return how much memory a process had at most after comparing two small files, and then two large ones."""
    said = subprocess.check_output([sys.executable, "-c", PEAKS, str(folder)], cwd=ROOT)
    small, large = map(int, said.split())
    return small, large


@scaled
def test_memory_does_not_grow_with_the_size(tmp_path: Path) -> None:
    for name, numel in (("small", 1 << 10), ("large", times(1 << 23, 1 << 26))):
        for copy in "ab":
            torch.save({"w": torch.ones(numel)}, tmp_path / f"{name}-{copy}")
    small, large = peaks_kib(tmp_path)

    assert large < small + 8 * 1024


@scaled
def test_nor_does_it_where_everything_differs(tmp_path: Path) -> None:
    most = times(1 << 23, 1 << 25)
    for name, numel in (("small", 1 << 10), ("large", most)):
        torch.save({"w": torch.zeros(numel)}, tmp_path / f"{name}-a")
        torch.save({"w": torch.ones(numel)}, tmp_path / f"{name}-b")
    small, large = peaks_kib(tmp_path)  # with torch

    assert large < small + 48 * 1024
    assert ckptool.diff(tmp_path / "large-a", tmp_path / "large-b").values[0].differing == most
