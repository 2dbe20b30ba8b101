"""
The pages are promises: what they show is what the program prints, and what they name exists.

CKPTOOL_WRITE_DOCS=1 writes all output in the pages anew, to be read in review.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptool.cli import cli
from tests.docs.pages import BLOCK, FRESH, PAGES, PART, PASTED, ROOT, SHOWN_FILE, text_of
from tests.each import each
from tests.missing import lead_to, on_windows, skip_if_missing
from tests.program import invoke

HERE = re.compile(r"`(\w+)(?:\(\))?`\s(?:in|of)\s`((?:ckptool|tests)/[\w/]+\.py)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
SHELL = re.compile(r"(?<=^```sh\n)(?:(?!```).*\n)*", re.MULTILINE)
VERBS = sorted(cli.list_commands(None))  # type: ignore[arg-type]  # it needs no context


@pytest.mark.parametrize("kind", FRESH)
@pytest.mark.parametrize("page", PAGES)
def test_what_looks_like_output_is_output(
    page: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_to(ROOT / "fixtures", tmp_path / "fixtures")
    (tmp_path / "tests").mkdir()
    lead_to(ROOT / "tests" / "ci", tmp_path / "tests" / "ci")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    found = FRESH[kind](text_of(page))
    if os.environ.get("CKPTOOL_WRITE_DOCS"):
        (ROOT / page).write_text(found, encoding="utf-8")

    skip_if_missing(found)
    if "files are not edited in place on Windows" in found:
        pytest.skip("Windows: files are not edited in place")
    shown, found = (text.replace(os.sep, "/") for text in (text_of(page), found))
    assert shown == found


@on_windows("it has no POSIX terminal")
def test_the_picture_of_a_terminal_is_what_one_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    from tests.docs.picture import picture

    lead_to(ROOT / "fixtures", tmp_path / "fixtures")
    monkeypatch.chdir(tmp_path)
    invoke(["example"])
    found, kept = picture(), ROOT / "docs" / "terminal.svg"
    if os.environ.get("CKPTOOL_WRITE_DOCS"):
        kept.write_text(found, encoding="utf-8")

    assert kept.read_text(encoding="utf-8") == found
    assert len(found) < 60_000


@each("page", PAGES)
def test_every_block_is_of_a_kind_that_is_verified(page: str) -> None:
    text = text_of(page)
    blocks = BLOCK.findall(text)

    assert len(blocks) * 2 == len(re.findall("^ *```", text, re.MULTILINE))
    files = {"python", "toml", "yaml", "groovy"}
    assert {language for language, _ in blocks} <= {"console", "pycon", "sh", "text", *files}
    # Sessions are run; Python that is not a session is a file that the tests run; so are a shell's lines with output.
    assert sum(language == "text" for language, _ in blocks) == len(PASTED.findall(text))
    assert sum(language in files for language, _ in blocks) == len(SHOWN_FILE.findall(text))
    for language, block in blocks:
        assert language != "console" or block.startswith("$ ckptool ")
        assert language != "pycon" or block.startswith(">>> ")
    assert len(re.findall("^<!--", text, re.MULTILINE)) == 2 * len(PART.findall(text))


def test_the_readme_is_a_page_and_not_a_book() -> None:
    assert len(text_of("README.md").encode()) <= 10_752


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall(text_of("README.md")))

    assert set(PAGES[1:]) - linked == set()


@each("page", [*PAGES, *(f".github/{path.name}" for path in sorted((ROOT / ".github").glob("*.md")))])
def test_every_link_leads_somewhere_in_the_repository(page: str) -> None:
    for link in LINK.findall(text_of(page)):
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page

        assert target.exists(), link
        assert not heading or heading in headings(target), link


def headings(page: Path) -> set[str]:
    """Return what a link may name after ``#``, by the rule that readers of Markdown go by."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each("page", PAGES)
def test_every_file_that_is_named_exists(page: str) -> None:
    named = re.findall(r"`((?:ckptool|tests|docs|\.ci)/[\w./-]*)`", text_of(page))

    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_promise_has_a_test() -> None:
    rows = re.findall(r"^\| (?!promise|---)(.+) \| \[.+\]\(.+\) \| (.+) \|$", text_of("docs/promises.md"), re.MULTILINE)
    assert len(rows) > 60
    for promise, tests in rows:
        for named in re.findall("`(.+?)`", tests):
            path, _, name = named.partition("::")
            there = ROOT / path
            assert there.exists(), (promise, named)
            assert not name or f"def {name}(" in there.read_text("utf-8"), (promise, named)


def test_what_is_to_be_changed_stands_in_the_module_that_is_named() -> None:
    named = HERE.findall(text_of("CONTRIBUTING.md"))
    assert len(named) > 8
    for name, module in named:
        text = (ROOT / module).read_text("utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", text, re.MULTILINE), (name, module)


@each("page", PAGES)
def test_every_option_that_is_named_exists(page: str) -> None:
    for verb, options in written_commands(page):
        assert options <= options_of(verb), verb


def options_of(verb: str) -> set[str]:
    command = cli.get_command(None, verb)  # type: ignore[arg-type]
    assert command is not None
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help",
        "-h",
    }


def written_commands(page: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the verb and the options of each command of ours in a page; the page of a verb may leave the verb out."""
    text, own = text_of(page), Path(page).stem
    lines = [line for block in SHELL.findall(text) for line in re.split(r"\n|&&", block)]
    for written in (*lines, *CODE.findall(BLOCK.sub("", text))):
        try:
            words = shlex.split(written, comments=True)
        except ValueError:  # an apostrophe in other code
            continue
        if written.startswith("-") and own in VERBS:
            words = ["ckptool", own, *words]
        if words[:1] == ["ckptool"] and words[1:2] and words[1] in VERBS:
            yield words[1], {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)}


@each("verb", VERBS)
def test_every_command_is_on_a_page_and_its_help_on_none(verb: str) -> None:
    assert any(f"ckptool {verb} " in text_of(page) or f"`ckptool {verb}`" in text_of(page) for page in PAGES)
    assert not any(f"\n$ ckptool {verb} --help\n" in text_of(page) for page in PAGES)


def test_every_recipe_is_named_and_says_what_it_was_run_with() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", text_of("tests/constraints.txt"), re.MULTILINE))
    for path in (ROOT / "tests/serving/recipes").glob("*.py"):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        versions = re.findall(r"([\w-]+) (\d[\w.]*\d)", first)

        assert f"`{path.stem}`" in text_of("docs/serving.md")
        assert first.startswith("# Run with ")
        assert versions
        assert all(pinned.get(name.lower(), version) == version for name, version in versions)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    (command,) = re.findall(r"^pip install (.*\"\.\[test\]\") && (.*)$", text_of("README.md"), re.MULTILINE)
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    # It may add options that run more.
    assert any(f"{line} ".startswith(f"{command[1]} ") for line in script.splitlines())
    assert "--editable '.[test]'" in script
    assert "--constraint tests/constraints.txt" in script
