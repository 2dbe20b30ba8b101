"""What tests of stores need."""

from __future__ import annotations

import pytest

from tests.remote.buckets import KEY, SECRET


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process the keys of the bucket."""
    for name, value in (("ACCESS_KEY_ID", KEY), ("SECRET_ACCESS_KEY", SECRET), ("EC2_METADATA_DISABLED", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
