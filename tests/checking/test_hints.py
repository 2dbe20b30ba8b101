"""What a hint tells people to run works, and does what it is for."""

from __future__ import annotations

import json
import shlex
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckptool.checking.check import check
from ckptool.checking.finding import Finding
from ckptool.cli import cli
from tests.corpus.test_corpus import FOLDER, ROWS
from tests.scale import one_of_twins, some

FIXTURES = Path(__file__).parents[2] / "fixtures" / "valid"
OURS = [path for path in sorted(FIXTURES.iterdir()) if path.suffix != ".json"]


def run(finding: Finding) -> str:
    """Run what a hint says, and return what was printed."""
    assert finding.command is not None
    assert finding.command not in (finding.hint or "")
    program, verb, *arguments = shlex.split(finding.command)
    assert program == "ckptool"
    extra = ["--force", "--json"] if verb == "migrate" else []
    result = CliRunner().invoke(cli, [verb, *arguments, *extra])
    assert result.exit_code == 0, (finding, result.output)
    return result.output


def run_all(path: Path, folder: Path) -> None:
    copied = folder / path.name
    shutil.copyfile(path, copied)
    for finding in check(copied).findings:
        if finding.command is None:
            continue
        printed = run(finding)
        if finding.code in ("CK202", "CK301", "CK405", "CK501", "CK503"):
            target = json.loads(printed)["target"]
            assert finding.code not in {one.code for one in check(target).findings}
        if finding.code == "CK202":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.load(target, map_location="cpu", weights_only=True)


@pytest.mark.parametrize("path", one_of_twins(OURS), ids=lambda path: path.name)
def test_every_command_in_a_hint_works_and_mends_it(path: Path, tmp_path: Path) -> None:
    run_all(path, tmp_path)


@pytest.mark.corpus
@pytest.mark.skipif(not ROWS, reason=f"no folder of real files at {FOLDER}")
@pytest.mark.parametrize("row", some(ROWS, 10), ids=lambda row: row["file"])
def test_every_command_works_on_real_files(row: dict[str, str], tmp_path: Path) -> None:
    run_all(FOLDER / row["file"], tmp_path)


def test_a_path_that_a_shell_would_take_apart_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my model; rm -rf $HOME.pth", "-x.pth", "it's.pth"):
        shutil.copyfile(FIXTURES / "device-forged-cuda0-zip.pth", name)
        (finding,) = [one for one in check(name).findings if one.code == "CK503"]
        run(finding)
