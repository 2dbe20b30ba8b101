"""The table of ``README.md``: one row for each library, from the results of real runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- begin table, written by python -m tests.zoo -->", "<!-- end table -->"
HEADER = ("group", "library", "version", "files", "tensors", "equal", "refused", "wrong", "unreadable", "bad advice")


def row(group: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one library's row."""
    records = result["records"]
    verdicts = Counter(one["verdict"] for one in records)
    advice = sum(len(one["bad_advice"]) for one in records)
    tensors = sum(one["tensors"] for one in records)
    counts = [len(records), tensors, *(verdicts[kind] for kind in ("equal", "refused", "wrong", "unreadable")), advice]
    return (group, result["library"], result["version"] or "", *map(str, counts))


def worse(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return what is worse than in the page: fewer files that are equal, or more that are not as they should be."""
    known = _rows(PAGE.read_text().split(BEGIN)[1].split(END)[0])
    found = []
    for one in rows:
        before = known.get(one[:2], ("", "", "", *["0"] * 7))
        now, then = [int(cell) for cell in one[5:]], [int(cell) for cell in before[5:]]
        if now[0] < then[0] or any(mine > theirs for mine, theirs in zip(now[2:], then[2:], strict=True)):
            counts = ", ".join(f"{name} {count}" for name, count in zip(HEADER[5:], now, strict=True))
            found.append(f"{one[0]} {one[1]}: {counts}")
    return found


def _rows(table: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    lines = [line for line in table.strip().splitlines()[2:] if not line.startswith("| **")]
    cells = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines]
    return {one[:2]: one for one in cells}


def written(rows: Iterable[tuple[str, ...]]) -> None:
    """Put rows into the page; those of libraries that were not run now stay as they are."""
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    table, tail = rest.split(END)
    kept = _rows(table)
    kept.update({one[:2]: one for one in rows})
    PAGE.write_text(f"{head}{BEGIN}\n{text(kept.values())}\n{END}{tail}")


def text(rows: Iterable[tuple[str, ...]]) -> str:
    """Return rows as a table, with a sum below."""
    rows = sorted(rows, key=lambda one: (one[0] != "torch", one[0], one[1].lower()))
    sums = [str(sum(int(one[place]) for one in rows)) for place in range(3, len(HEADER))]
    bold = [f"**{cell}**" if cell else "" for cell in (f"{len(rows)} libraries", "", "", *sums)]
    lines = [HEADER, ("---",) * 3 + ("--:",) * len(sums), *rows, tuple(bold)]
    return "\n".join(f"| {' | '.join(one)} |" for one in lines)


def complaints(result: Mapping[str, Any]) -> list[str]:
    """Return a line for everything about one library that is not equal."""
    lines = [f"  ! {result['error']}"] if result["error"] else []
    lines += [f"  ! {one}" for one in result.get("failed", ())]
    for one in result["records"]:
        said = [*one["wrong"], *one["refused"], *([one["unreadable"]] if one["unreadable"] else [])]
        lines += [f"  {one['verdict']:10} {one['file']}: {reason}" for reason in dict.fromkeys(said)]
        lines += [f"  bad advice {one['file']}: {reason}" for reason in one["bad_advice"]]
    return lines


def results(folder: Path) -> list[dict[str, Any]]:
    """Return the results that were left in a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
