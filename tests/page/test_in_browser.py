"""The page in a real browser: looking, searching, sorting, going into boxes, with a mouse and with keys alone."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.checking.value_survey import ValueRow
from ckptool.cli.page import add_values, document, packed
from ckptool.torch_ops.statistics import Statistics
from tests.page.browser import MISSING, Browser
from tests.page.pages import HOSTILE, content_of, mixture, report, rows_of, write_safetensors
from tests.program import VALID
from tests.scale import exhaustive

pytestmark = [exhaustive, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

FINE = VALID / "lenet-state-dict-cpu-zip.pth"
TRAINING = VALID / "checkpoint-ddp-forged-cuda0-zip.pth"
MODEL = VALID / "lenet-model-forged-cuda0-legacy.pth"

ROWS = "return [...document.querySelectorAll('#table tbody tr[data-at] td.name')].map((one) => one.textContent)"
CRUMBS = (
    "return [...document.querySelectorAll('#crumbs > :not(span:not([aria-current]))')].map((one) => one.textContent)"
)
PANEL = "return document.querySelector('#panel h3').textContent"
CURRENT = "return document.querySelector('#table tr.current td.name')?.textContent ?? null"
SEARCH = """
const one = document.querySelector("#search");
one.value = arguments[0];
one.dispatchEvent(new Event("input"))
"""
ROOM = "const box = document.querySelector('#treemap').getBoundingClientRect(); return [box.width, box.height]"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the pages that are looked at."""
    folder = tmp_path_factory.mktemp("pages")
    torch.save({name: torch.ones(number + 2) for number, name in enumerate(HOSTILE)}, folder / "hostile.pth")
    weights = torch.load(FINE)
    changed = {**weights, "fc1.weight": weights["fc1.weight"] * 1.5, "fc2.bias": torch.ones(7)}
    torch.save({name: one for name, one in changed.items() if name != "out.bias"}, folder / "b.pth")
    torch.save({"state_dict": {"model": {"w": torch.ones(30, 30)}}}, folder / "one.pth")
    (folder / "cut.pth").write_bytes(FINE.read_bytes()[:90_000])
    for name, content in (("10", TRAINING.read_bytes()), ("9", FINE.read_bytes()), ("8", FINE.read_bytes()[:90_000])):
        (folder / "many" / f"run{name}").mkdir(parents=True)
        (folder / "many" / f"run{name}" / "model.pth").write_bytes(content)
    layers = {f"blocks.{at}.{name}.weight": ("F32", [8, 8]) for at in range(200) for name in ("up", "down")}
    write_safetensors(folder / "layers.safetensors", dict(sorted(layers.items())))
    write_safetensors(folder / "moe.safetensors", mixture())
    asked: dict[str, list[object]] = {
        "fine": [FINE, "--values"],
        "training": [TRAINING],
        "one": [folder / "one.pth"],
        "two": [FINE, folder / "b.pth", "--values"],
        "hostile": [folder / "hostile.pth", "--values"],
        "cut": [folder / "cut.pth"],
        "moe": [folder / "moe.safetensors"],
        "many": [folder / "many"],
        "model": [MODEL],
        "layers": [folder / "layers.safetensors"],
    }
    found = {name: folder / f"{name}.html" for name in asked}
    for name, arguments in asked.items():
        assert report(*arguments, "-o", found[name]).exit_code == (2 if name == "cut" else 0)
    found["values"] = folder / "values.html"
    found["values"].write_bytes(_with_values(found["moe"].read_bytes()))
    return found


def _with_values(page: bytes) -> bytes:
    """Return a page with statistics as irregular as they can be: those of 20,000 tensors take ``stat`` a while."""
    chance = random.Random(1)
    content, rows = content_of(page), rows_of(page)
    values = [
        ValueRow(
            "",
            1,
            ("bfloat16",),
            (1,),
            Statistics(
                1 << 24,
                chance.randrange(9),
                0,
                chance.randrange(1000),
                *(chance.gauss(0, 1) for _ in range(5)),
                histogram=tuple(chance.randrange(1 << 22) for _ in range(8)),
            ),
        )
        for _ in rows
    ]
    add_values(rows, values)
    return document("values", {**content, "tensors": packed(rows)})


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def browser(session: Browser) -> Iterator[Browser]:
    session.dark(on=False)
    session.resize(1400, 1000)
    session.console()
    yield session
    assert session.console() == []


def search(browser: Browser, text: str) -> list[str]:
    browser.run(SEARCH, text)
    browser.settle()
    names: list[str] = browser.run(ROWS)
    return names


def point(browser: Browser, kind: str, x: float, y: float) -> None:
    """Click or hover at a place in the treemap, as shares of its width and height."""
    width, height = browser.run(ROOM)
    {"click": browser.click, "hover": browser.hover}[kind]("#treemap", (x - 0.5) * width, (y - 0.5) * height)


def test_the_head_says_what_the_file_is(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["training"])
    text = browser.run("return document.querySelector('#head').innerText")

    assert TRAINING.name in text
    assert "checkpoint: weights and more" in text
    assert "CK301" in text
    assert "argparse.Namespace" in text
    commands = browser.run("return [...document.querySelectorAll('.command code')].map((one) => one.textContent)")
    assert f"ckptool migrate {TRAINING} --form state_dict --to cpu" in commands
    assert len(set(commands)) == len(commands)
    browser.click(".command button")
    browser.wait("return document.querySelector('.command button').textContent !== 'Copy'")


def test_findings_with_the_same_command_are_one_card(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["model"])
    cards = browser.run("return [...document.querySelectorAll('.finding')].map((one) => one.innerText)")
    (card,) = (one for one in cards if f"{MODEL} --form state_dict --to cpu\n" in f"{one}\n".replace("\nCopy", "\n"))

    assert all(code in card for code in ("CK202", "CK206", "CK404", "CK503"))
    assert browser.run("return document.querySelector('.finding').className") == "finding warning"


def test_searching_keeps_what_has_all_words(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["moe"])
    assert any("model" in name for name in browser.run(ROWS))

    found = search(browser, "LAYERS.7.  experts.99.w2")
    assert found[-1].endswith("w2.weight")
    assert browser.run("return document.querySelector('#count').textContent").startswith("1 of 20,419 tensors")
    browser.run("document.querySelector('#by-module').click()")
    assert browser.run(ROWS) == ["model.layers.7.block_sparse_moe.experts.99.w2.weight"]
    search(browser, "float32 gate")
    assert browser.run("return document.querySelector('#count').textContent").startswith("58 of")
    assert search(browser, "nothing has this") == []
    assert len(search(browser, "")) > 20


def test_sorting_by_a_column(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["fine"])
    browser.run("document.querySelector('#by-module').click()")
    header = "[...document.querySelectorAll('#table th')].find((one) => one.textContent.startsWith('{}'))"

    def sort(title: str) -> list[str]:
        browser.run(f"{header.format(title)}.querySelector('button').click()")
        names: list[str] = browser.run(ROWS)
        return names

    in_file = browser.run(ROWS)
    weights: dict[str, Any] = torch.load(FINE)
    assert in_file == list(weights)
    assert sort("size")[0] == "fc1.weight"
    assert browser.run(f"return {header.format('size')}.ariaSort") == "descending"
    assert sort("size")[-1] == "fc1.weight"
    assert sort("size") == in_file
    assert sort("name") == sorted(weights)
    assert sort("mean") == sorted(weights, key=lambda name: -weights[name].mean())


def test_modules_are_sorted_by_what_they_come_to(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["fine"])
    browser.run("document.querySelector('#refold').click()")
    titles = "[...document.querySelectorAll('#table th button')]"
    browser.run(f"{titles}.find((one) => one.textContent === 'size').click()")

    assert [name.split(" ")[0].lstrip("▸") for name in browser.run(ROWS)] == ["fc1", "fc2", "conv2", "out", "conv1"]


def test_modules_open_and_close(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["fine"])
    everything = browser.run(ROWS)
    browser.run("document.querySelector('#refold').click()")
    closed = browser.run(ROWS)
    browser.click("#row-2 .name")

    assert (len(everything), len(closed)) == (15, 5)
    assert len(browser.run(ROWS)) == 7
    assert browser.run(PANEL) == "fc1"
    browser.run("document.querySelector('#unfold').click()")
    assert browser.run(ROWS) == everything


def test_a_click_goes_into_the_module_that_was_pointed_at(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["fine"])
    point(browser, "hover", 0.3, 0.5)
    assert browser.run(PANEL) == "fc1.weight"
    point(browser, "click", 0.3, 0.5)

    assert browser.run(CRUMBS) == ["everything", "fc1"]
    assert browser.run(PANEL) == "fc1.weight"
    assert "weight" in browser.run(CURRENT)
    browser.run("document.querySelector('#crumbs button').click()")
    assert browser.run(CRUMBS) == ["everything"]


def test_deep_boxes_are_reached_at_once_and_equal_layers_are_one(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["moe"])
    assert browser.run("return document.querySelector('#fold').checked")
    point(browser, "hover", 0.1, 0.6)
    assert browser.run(PANEL) == "model.layers.0–57.block_sparse_moe.experts.0–114.w1.weight"
    point(browser, "click", 0.1, 0.6)
    assert browser.run(CRUMBS)[-1] == "experts.0–114 × 6,670"

    browser.run("document.querySelector('#fold').click()")
    assert browser.run(CRUMBS) == ["everything"]
    point(browser, "click", 0.1, 0.6)
    assert len(browser.run(CRUMBS)) > 3


def test_keys_alone_are_enough(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["fine"])
    browser.run("document.querySelector('#treemap').focus()")
    browser.press("Right")
    first = browser.run(PANEL)
    browser.press("Right")
    second = browser.run(PANEL)
    assert (first, second) == ("fc1", "fc2")
    browser.press("Enter")
    assert browser.run(CRUMBS) == ["everything", "fc2"]
    browser.press("Escape")
    assert browser.run(CRUMBS) == ["everything"]

    browser.press("/")
    assert browser.run("return document.activeElement.id") == "search"
    browser.run("document.querySelector('#table').focus()")
    browser.press("Home", "Down")
    assert "weight" in browser.run(CURRENT)
    browser.press("Left", "Left")
    assert len(browser.run(ROWS)) == 13
    browser.press("Right", "Right", "Right")
    assert (len(browser.run(ROWS)), browser.run(PANEL)) == (15, "conv1.bias")
    browser.press("End")
    assert browser.run(PANEL) == "out.bias"
    current = "document.querySelector('#table').getAttribute('aria-activedescendant')"
    assert browser.run(f"return document.getElementById({current}).getAttribute('aria-selected')") == "true"


def test_a_file_of_one_tensor_shows_it(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    assert browser.run(ROWS) == ["state_dict.model.w"]
    point(browser, "hover", 0.5, 0.5)
    assert browser.run(PANEL) == "state_dict.model.w"
    point(browser, "click", 0.5, 0.5)
    assert browser.run(CURRENT) == "state_dict.model.w"


def test_only_rows_that_can_be_seen_are_on_the_page(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["moe"])
    browser.run("document.querySelector('#by-module').click()")
    browser.run("const one = document.querySelector('#scroller'); one.scrollTop = one.scrollHeight")
    browser.wait("return [...document.querySelectorAll('#table td.name')].at(-1).textContent === 'lm_head.weight'")

    assert len(browser.run(ROWS)) < 80
    assert browser.run("return document.querySelector('#table').getAttribute('aria-rowcount')") == "20420"
    edges = "[...document.querySelectorAll('{}')].map((one) => one.getBoundingClientRect().left)"
    heads = browser.run(f"return {edges.format('#table th')}")
    cells = browser.run(f"return {edges.format('#table tr[data-at]:nth-last-child(2) td')}")
    assert heads == cells


def test_two_files_show_what_changed_and_by_how_much(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["two"])
    assert browser.run("return document.querySelector('#scheme').value") == "change"
    assert browser.run("return document.querySelector('.verdict').textContent").startswith("Different: ")
    order = "return [...document.querySelectorAll('main > section:not([hidden])')].map((one) => one.id)"
    assert browser.run(order) == ["map", "about", "tensors"]
    rows = browser.run("return [...document.querySelectorAll('#about tbody th')].map((one) => one.textContent)")
    assert "tensors" in rows
    assert "form" not in rows
    legend = browser.run("return [...document.querySelectorAll('#legend li')].map((one) => one.textContent)")
    assert legend[0] == "same"
    assert {"shape", "only in A"} < set(legend)
    point(browser, "hover", 0.3, 0.5)
    panel = browser.run("return document.querySelector('#panel').innerText")
    assert "23,040 of 23,040, 100 %" in panel
    assert "0.3333" in panel
    names = search(browser, "only in a")
    assert names[-1] == "bias"


def test_names_are_nothing_but_text(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    browser.run("document.querySelector('#by-module').click()")
    names = browser.run(
        "return [...document.querySelectorAll('#table td.name')].map((one) => one.title || one.textContent)"
    )

    assert browser.run("return document.title") == "hostile.pth"
    assert browser.run("return document.querySelectorAll('img, iframe, main script').length") == 0
    assert len(names) == len(HOSTILE)
    assert HOSTILE[0] in names
    assert "n\\x00ul.x" in names
    assert "a\\u202egnp.c" in names
    assert max(map(len, names)) < 1100
    for name in ("constructor", "<script>", "\U0001f600"):
        assert search(browser, name)


def test_a_file_that_cannot_be_opened_shows_why(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["cut"])

    assert "truncated" in browser.run("return document.body.innerText")
    assert browser.run("return document.querySelector('#tensors').hidden")


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(browser: Browser, pages: dict[str, Path], dark: bool) -> None:
    browser.dark(on=dark)
    browser.open(pages["training"])
    browser.run("document.querySelector('#row-0').click()")

    assert browser.run(CONTRASTS) == []


CONTRASTS = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const luminance = (colour, below) => {
  canvas.fillStyle = below; canvas.fillRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  const linear = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const below = (one) => {
  for (let at = one; at; at = at.parentElement) {
    const found = getComputedStyle(at).backgroundColor;
    if (!found.endsWith(", 0)")) return found;
  }
  return "white";
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let text = walker.nextNode(); text; text = walker.nextNode()) {
  const one = text.parentElement;
  if (!text.data.trim() || one.closest("script, style, noscript, [hidden]")) continue;
  const back = below(one);
  const [light, dark] = [luminance(getComputedStyle(one).color, back), luminance(back, back)].sort((a, b) => b - a);
  if ((light + 0.05) / (dark + 0.05) < 4.5) faint.push(text.data);
}
return faint;
"""
"""The texts whose contrast is less than 4.5: WCAG 2.2, 1.4.3."""


@pytest.mark.parametrize("width", [360, 800, 1400])
def test_nothing_is_wider_than_the_window(browser: Browser, pages: dict[str, Path], width: int) -> None:
    browser.resize(width, 800)
    for page in ("training", "hostile", "two"):
        browser.open(pages[page])
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run(ROWS)


def test_all_rows_are_printed(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["moe"])
    browser.run("document.querySelector('#by-module').click(); dispatchEvent(new Event('beforeprint'))")
    printed = browser.run(ROWS)
    browser.run("dispatchEvent(new Event('afterprint'))")

    assert len(printed) == 2000
    assert len(browser.run(ROWS)) < 80


SWEEP = """
const map = document.querySelector("#treemap");
const { left, top, width, height } = map.getBoundingClientRect();
for (let at = 0; at < 100; at += 1) {
  const place = { clientX: left + (width * ((at * 7) % 40)) / 40, clientY: top + (height * ((at * 13) % 40)) / 40 };
  map.dispatchEvent(new PointerEvent("pointermove", place));
}
"""


def test_20000_tensors_with_values_are_quick_and_small(browser: Browser, pages: dict[str, Path]) -> None:
    assert pages["moe"].stat().st_size <= 200_000
    assert pages["values"].stat().st_size <= 2_500_000
    ready = [browser.milliseconds_to_open(pages["values"]) for _ in range(3)]
    while min(ready) > 1000 and len(ready) < 9:  # the bound on a quiet machine; other processes have the processors too
        ready.append(browser.milliseconds_to_open(pages["values"]))
    clock = browser.run("return performance.getEntriesByName('ready')[0].startTime")
    browser.run("document.querySelector('#fold').click()")  # now there are thousands of boxes
    texts = ("w", "w1", "layers.3", "float32", "nothing", "")
    rounds = [[browser.milliseconds(SEARCH, text) for text in texts] for _ in range(3)]
    searched = [min(times) for times in zip(*rounds, strict=True)]
    while max(searched) > 50 and len(rounds) < 9:
        rounds.append([browser.milliseconds(SEARCH, text) for text in texts])
        searched = [min(times) for times in zip(*rounds, strict=True)]
    hover = browser.milliseconds(SWEEP) / 100
    print(f"ready {min(ready):.0f} ms ({clock:.0f} by the clock), hover {hover:.1f} ms, search {max(searched):.0f} ms")

    assert min(ready) <= 2000
    assert hover <= 32
    assert max(searched) <= 100


COLOURS = """
return [...document.querySelectorAll("#legend li")].map((one) =>
	[one.textContent, getComputedStyle(one.querySelector("i")).backgroundColor])
"""
PIXELS = """
const canvas = document.querySelector("#treemap canvas");
const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
const seen = document.createElement("canvas").getContext("2d");
seen.fillStyle = arguments[0];
seen.fillRect(0, 0, 1, 1);
const [r, g, b] = seen.getImageData(0, 0, 1, 1).data;
let count = 0;
for (let at = 0; at < data.length; at += 4) if (data[at] === r && data[at + 1] === g && data[at + 2] === b) count += 1;
return count / (data.length / 4);
"""
VERDICTS = """
return [...document.querySelectorAll(".verdict")].map((one) => [one.className, getComputedStyle(one).color])
"""


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return pages of weights of which one tensor has NaN, one is zero, and one has an infinity."""
    folder = tmp_path_factory.mktemp("diverged")
    names = [f"model.layers.{layer}.{name}" for layer in range(12) for name in ("up.weight", "down.weight")]
    good = {
        name: torch.randn(8, 8, generator=torch.Generator().manual_seed(at)) for at, name in enumerate(sorted(names))
    }
    bad = {name: tensor.clone() for name, tensor in good.items()}
    bad["model.layers.3.up.weight"][0, :2] = float("nan")
    bad["model.layers.4.up.weight"].zero_()
    bad["model.layers.5.up.weight"][0, 0] = float("inf")
    bad["model.layers.6.up.weight"] *= 1.01
    bad["model.layers.7.up.weight"] *= 1.5
    torch.save(good, folder / "good.pth")
    torch.save(bad, folder / "bad.pth")
    asked = {
        "good": ["good.pth", "--values"],
        "bad": ["bad.pth", "--values"],
        "two": ["good.pth", "bad.pth"],
        "two, likeness": ["good.pth", "bad.pth", "--values"],
        "back": ["bad.pth", "good.pth", "--values"],
    }
    for name, arguments in asked.items():
        given = [folder / one if one.endswith(".pth") else one for one in arguments]
        assert report(*given, "-o", folder / f"{name}.html").exit_code == 0
    return {name: folder / f"{name}.html" for name in asked}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("which", ["bad", "two", "two, likeness", "back"])
def test_nan_has_a_colour_of_its_own(which: str, dark: bool, browser: Browser, diverged: dict[str, Path]) -> None:
    browser.dark(on=dark)
    browser.open(diverged[which])
    legend = dict(browser.run(COLOURS))

    assert next(iter(legend)) == "NaN"
    assert len(set(legend.values())) == len(legend)
    assert 1 / 24 / 2 < browser.run(PIXELS, legend["NaN"]) < 1 / 24 * 1.1


def test_equal_layers_are_one_box_but_for_those_with_nan(browser: Browser, diverged: dict[str, Path]) -> None:
    def labels() -> list[str]:
        return [one for one in browser.run(ROWS) if one]

    browser.open(diverged["good"])
    assert "NaN" not in dict(browser.run(COLOURS))
    browser.open(diverged["bad"])
    assert browser.run("return document.querySelector('#fold').checked") is True
    legend = dict(browser.run(COLOURS))
    assert browser.run(PIXELS, legend["NaN"]) > 1 / 24 / 2
    numbers = [one for one in labels() if re.fullmatch(r"[▾▸]?\s*\d+.*tensors", one)]
    assert [int(re.findall(r"\d+", one)[0]) for one in numbers] == sorted(
        int(re.findall(r"\d+", one)[0]) for one in numbers
    )


@pytest.mark.parametrize("which", ["two", "two, likeness"])
def test_what_has_become_nan_has_changed_most(which: str, browser: Browser, diverged: dict[str, Path]) -> None:
    browser.open(diverged[which])
    browser.run("document.querySelector('#by-module').click()")
    header = "[...document.querySelectorAll('#table th')].find((one) => one.textContent === 'change')"
    browser.run(f"{header}.querySelector('button').click()")
    browser.settle()
    first = [re.findall(r"layers\.(\d+)", one)[0] for one in browser.run(ROWS)[:5]]

    beyond = {"3", "4", "5"} if "likeness" in which else {"3", "5"}
    assert set(first[: len(beyond)]) == beyond
    assert first.index("7") < first.index("6")


def test_the_headline_says_by_its_colour_how_it_is(browser: Browser, diverged: dict[str, Path], pages: Any) -> None:
    found = {}
    for name, path in (("fine", diverged["good"]), ("warning", diverged["bad"]), ("error", pages["cut"])):
        browser.open(path)
        ((classes, found[name]),) = browser.run(VERDICTS)
        assert classes == f"verdict {name}"
    assert len(set(found.values())) == 3
    browser.open(diverged["two, likeness"])
    assert [one for one, _ in browser.run(VERDICTS)] == ["verdict different", "verdict fine", "verdict warning"]


def test_a_button_at_the_top_leads_to_the_tensor_with_nan(browser: Browser, diverged: dict[str, Path]) -> None:
    for which in ("bad", "two", "two, likeness"):
        browser.open(diverged[which])
        browser.click(".nan")
        assert browser.run("return document.querySelector('.nan').textContent").startswith(
            "NaN in 1 tensor: model.layers.3"
        )
        assert browser.run(PANEL) == "model.layers.3.up.weight"
        assert "weight" in browser.run(CURRENT)
    browser.open(diverged["good"])
    assert browser.run("return document.querySelector('.nan')") is None


FILES = "return [...document.querySelectorAll('#file-table tbody tr')].map((one) => one.dataset.name)"


def test_the_files_of_a_folder_are_sorted_and_searched(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["many"])
    nine, ten, eight = (f"run{one}/model.pth" for one in (9, 10, 8))
    assert browser.run(FILES) == [eight, ten, nine]
    button = "[...document.querySelectorAll('#file-table th button')].find((one) => one.textContent.startsWith('{}'))"
    browser.run(f"{button.format('file')}.click()")
    assert browser.run(FILES) == [eight, nine, ten]
    browser.run(f"{button.format('tensors')}.click()")
    assert browser.run(FILES) == [ten, nine, eight]

    browser.run("[...document.querySelectorAll('.finding button')].find((one) => one.textContent === 'Show').click()")
    assert browser.run(FILES) == [eight]
    browser.run("document.querySelector('#file-table tbody tr').click()")
    assert browser.run("return document.querySelector('#search').value") == eight
    assert browser.run("return document.querySelector('.verdict').className") == "verdict error"
    assert "0 B" not in browser.run("return document.body.innerText").split()


def test_layers_that_are_sorted_as_text_are_one_box(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["layers"])
    point(browser, "hover", 0.3, 0.5)
    assert browser.run(PANEL).startswith("blocks.0–199.")
    browser.run("document.querySelector('#table th button').click()")
    assert [one.lstrip("▸▾").split(" ")[0] for one in browser.run(ROWS)[1:4]] == ["0", "1", "2"]
