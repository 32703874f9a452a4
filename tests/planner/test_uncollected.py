"""Garbage collection is off within the context, and as before after it."""

from __future__ import annotations

import gc
from contextlib import suppress

from hydragraph.planner.uncollected import uncollected


def test_collection_is_off_within_and_as_before_afterwards() -> None:
    assert gc.isenabled()
    with suppress(ValueError), uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled(), "an inner context leaves it off"
        raise ValueError
    assert gc.isenabled()
