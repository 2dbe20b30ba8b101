"""A migration that is refused, or fails: the error, and that nothing is left of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptool import CkptoolError, migrate


def refused(
    *arguments: Any, kind: str | None = None, match: str | None = None, error: Any = CkptoolError, **options: Any
) -> Any:
    """Return the error for a migration that is refused, which leaves the folders of its files as they were."""
    folders = {one for one in (Path(os.fspath(path)).absolute().parent for path in arguments) if one.is_dir()}
    before = {one: sorted(one.iterdir()) for one in folders}
    with pytest.raises(error, match=match) as caught:
        migrate(*arguments, **options)
    assert kind in (None, caught.value.kind)
    assert {one: sorted(one.iterdir()) for one in folders} == before
    return caught.value
