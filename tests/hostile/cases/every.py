"""All the cases."""

from __future__ import annotations

from tests.hostile.cases import Case, canaries, files, headers, keys, pickles, tensors, zips

CASES: tuple[Case, ...] = (
    *canaries.CASES,
    *pickles.CASES,
    *keys.CASES,
    *zips.CASES,
    *tensors.CASES,
    *headers.CASES,
    *files.CASES,
)
