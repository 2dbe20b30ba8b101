"""How all tests run: Hypothesis without deadlines, and the same examples each time unless asked to explore."""

from __future__ import annotations

from hypothesis import settings

# The clock of a busy machine is nobody's bug, and a failure that comes and goes helps nobody.
settings.register_profile("ckptool", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=20_000)
settings.load_profile("ckptool")
