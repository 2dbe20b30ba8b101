"""What a release goes by: the jobs of CI, the oldest packages that are promised, the menu of the site."""

from __future__ import annotations

import re
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest

from tests.install.test_small_install import PYTHONS

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path.read_text("utf-8") for path in sorted((GITHUB / "workflows").glob("*.yml"))}

GRANTED = {
    "ci": ["{ contents: read }"],
    "release": ["{ contents: read }", "{ id-token: write }"],
    "site": ["{ contents: read, pages: write, id-token: write }"],
}
"""What each workflow may do, then what its jobs may: only what uploads can prove who it is."""


def test_workflows_may_do_no_more_than_they_need_and_say_which_release_of_an_action_they_run() -> None:
    for name, text in WORKFLOWS.items():
        assert re.findall(r"^ *permissions: (.*)$", text, re.MULTILINE) == GRANTED[name]
        assert text.index("permissions:") < text.index("jobs:")
        for action in re.findall(r"uses: (\S+)", text):
            assert re.fullmatch(r"actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v1", action)
    assert "secrets." not in "".join(WORKFLOWS.values())


def test_ci_runs_tests_that_are_there_on_every_python() -> None:
    ci = WORKFLOWS["ci"]
    (pythons,) = re.findall(r"python: \[(.*)\]", ci)

    assert re.findall(r"[\d.]+", pythons) == PYTHONS
    for path in re.findall(r"\btests/[\w/.]+", ci):
        assert (ROOT / path).exists(), path


@pytest.mark.skipif(not any(distributions(name="ckptool")), reason="ckptool is not installed here")
def test_the_oldest_packages_that_are_promised_are_those_that_a_job_runs_with() -> None:
    wanted = [line.replace('"', "'") for line in requires("ckptool") or []]
    lines = [line.partition(";")[0] for line in wanted if "extra" not in line or line.endswith("extra == 'torch'")]
    promised = {name: _release(bound) for name, _, bound in (line.partition(">=") for line in lines)}
    pinned = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "tests" / "minima.txt").read_text("utf-8"), re.MULTILINE)

    assert {name: _release(version) for name, version in pinned} == promised
    assert f'python-version: "{PYTHONS[0]}"' in WORKFLOWS["ci"]


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.sub(r"(\.0)+$", "", version.strip()).split("."))


def test_the_menu_of_the_site_has_every_page() -> None:
    menu = re.findall(r"^ +- .*: ([\w.]+\.md)$", (ROOT / ".mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    pages = [*(ROOT / "docs").glob("*.md"), *GITHUB.glob("*.md"), *ROOT.glob("C*.md")]

    assert sorted(menu) == sorted(["index.md", *(path.name for path in pages if not path.name.startswith("pull"))])
