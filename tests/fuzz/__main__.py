"""
``python -m tests.fuzz --seed 1 --seconds 60``: files from a seed, each held against the oracle; exits 1 on a bug.

``--family F --number N`` makes one of them again and writes it to ``--save``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from tests.fuzz.mutants import FAMILIES, Mutant, mutant, mutants
from tests.fuzz.oracle import judge

MEMORY = 4 << 30
SECONDS = 2.0
"""That no file of some thousand bytes may take."""


def run(seed: int, seconds: float, most: int | None = None) -> tuple[Counter[str], list[tuple[Mutant, str]]]:
    """Judge files for so many seconds of the processor, or so many files; return what became of them, and the bugs."""
    seen: Counter[str] = Counter()
    bugs: list[tuple[Mutant, str]] = []
    begin = time.process_time()
    for one in mutants(seed):
        start = time.process_time()
        try:
            seen[f"{one.family} {judge(one.data)}"] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            bugs.append((one, "".join(traceback.format_exception(error))))
        took = time.process_time() - start
        if took > SECONDS:
            bugs.append((one, f"took {took:.1f} s"))
        if time.process_time() - begin > seconds or (most is not None and one.number * len(FAMILIES) >= most):
            return seen, bugs
    raise AssertionError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--number", type=int)
    parser.add_argument("--save", type=Path, default=Path("mutant"))
    asked = parser.parse_args()
    if asked.family is not None:
        asked.save.write_bytes(mutant(asked.seed, asked.family, asked.number).data)
        return 0
    logging.disable()
    warnings.simplefilter("ignore")
    import resource  # POSIX

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    seen, bugs = run(asked.seed, asked.seconds)
    print(f"seed {asked.seed}: {sum(seen.values()) + len(bugs):,} files, {len(bugs)} bugs")
    for what, count in sorted(seen.items()):
        print(f"  {what:<20}{count:>9,}")
    for one, what in bugs[:20]:
        print(f"\n--family {one.family} --number {one.number}\n{what}")
    return 1 if bugs else 0


if __name__ == "__main__":
    sys.exit(main())
