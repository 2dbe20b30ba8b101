"""Mutants that no test could tell from the code: why, for each."""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str, str], str] = {}
"""``(module, function, before, after)``, and the reason."""
