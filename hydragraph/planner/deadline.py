"""Deadlines of searches, as values of `time.monotonic` (None: no deadline)."""

from __future__ import annotations

import time


def is_late(until: float | None, needed_s: float = 0.0) -> bool:
    return until is not None and time.monotonic() + needed_s > until
