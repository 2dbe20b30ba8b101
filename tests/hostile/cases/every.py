"""All the cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.hostile.cases import Case, canaries, files, folders, headers, keys, pickles, shards, tensors, texts, zips

_ALL: tuple[Case, ...] = (
    *canaries.CASES,
    *pickles.CASES,
    *keys.CASES,
    *zips.CASES,
    *tensors.CASES,
    *headers.CASES,
    *shards.CASES,
    *folders.CASES,
    *files.CASES,
    *texts.CASES,
)


def _numbered() -> Iterator[Case]:
    """Yield all cases; those of one name get a number."""
    seen: Counter[str] = Counter()
    for case in _ALL:
        seen[case.label] += 1
        count = seen[case.label]
        yield case if count == 1 else case._replace(name=f"{case.name} ({count})")


CASES = tuple(_numbered())
