"""What was compared: counts, reasons, and the tests in which something differed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import ckptool


class Tally:
    """Counts of one kind of thing: files, or filled models."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.equal = 0
        self.refused: Counter[str] = Counter()
        self.different: list[str] = []
        self.more: list[str] = []
        """What torch refuses and ckptool does: for people to judge."""
        self.skipped: Counter[str] = Counter()

    def refuse(self, error: ckptool.CkptoolError) -> None:
        """Count a refusal; the numbers and names in its message do not matter."""
        self.refused[f"{type(error).__name__}: {error.message.splitlines()[0][:110]}"] += 1

    def differ(self, why: str) -> None:
        """Note a difference, with the test that met it."""
        self.different.append(f"{_test()}: {why[:300]}")

    def fill_more(self, why: str) -> None:
        """Note what torch refuses, and why."""
        self.more.append(f"{_test()}: {why[:300]}")

    def lines(self) -> Iterator[str]:
        """Yield the report."""
        refused = sum(self.refused.values())
        total = self.equal + refused + len(self.different) + len(self.more)
        yield (
            f"{self.kind}: {total}, {self.equal} equal, {refused} refused, {len(self.different)} different, "
            f"{len(self.more)} that torch refuses"
        )
        for reason, count in self.refused.most_common():
            yield f"  refused {count:5} {reason}"
        for reason, count in self.skipped.most_common():
            yield f"  left out {count:4} {reason}"
        yield from (f"  torch refuses {one}" for one in self.more)
        yield from (f"  different {one}" for one in self.different)


def _test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "?").removesuffix(" (call)")
