"""Limits of failure detection that depend on each other."""

from __future__ import annotations

from hydragraph.cluster.failure import time_limits as limits

OUTAGE_S = 3.0  # no failure
PROBED_AGAIN_S = 2.0  # after an outage
LAST_RETRY_S = 6.2  # of TCP, after an outage


def test_limits_are_in_their_order() -> None:
    assert limits.ENDED_S < limits.SUSPECT_S < limits.PATIENCE_S
    assert OUTAGE_S + limits.UNHEARD_S + PROBED_AGAIN_S <= limits.CUT_S
    assert LAST_RETRY_S < limits.UNREACHABLE_S < limits.SILENT_S
    assert max(limits.STOPPED_S, limits.CUT_S, limits.SILENT_S) < 10 < limits.PROGRESS_S
