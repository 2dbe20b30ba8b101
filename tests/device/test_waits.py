"""No place in the code makes something wait for a device without a case that goes wrong when it does not."""

from __future__ import annotations

from tests.device.waits import WAITS, places


def test_every_wait_in_the_code_is_among_those_that_are_tried() -> None:
    assert set(places()) == set(WAITS)
