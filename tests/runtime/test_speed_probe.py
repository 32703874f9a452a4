"""The probe of an idle device: it ends in time, counts, and knows a device that is stopped in periods by whole ones."""

from __future__ import annotations

import time

import pytest
import torch

from hydragraph.runtime.speed_probe import MOST_S, ProbeResult, SpeedProbe
from tests.thorough import first, only

PERIOD_S = 0.1
LOOK_S = 5e-5  # between two looks at the clock: half a product, as the probe looks once for each


class Stopped:
    """The clocks of a device that runs for the first part of every period; others have its core for a part of that."""

    def __init__(self, began: float, share: float, queued: float = 0.0) -> None:
        self._now = began
        self._share = share
        self._queued = queued
        self._ready = 0.0

    def clock(self) -> float:
        self._now += LOOK_S
        self._ready += LOOK_S
        if self._now % PERIOD_S > self._share * PERIOD_S:
            self._now += PERIOD_S - self._now % PERIOD_S
        return self._now

    def scheduled(self) -> tuple[float, float]:
        return self._ready * (1 - self._queued), self._ready * self._queued


def probed(began: float, share: float, queued: float = 0.0, most_s: float = MOST_S) -> ProbeResult:
    stopped = Stopped(began, share, queued)
    probe = SpeedProbe(torch.device("cpu"), stopped.clock, stopped.scheduled)
    probe.most_s = most_s
    return probe()


def test_a_probe_counts_products_for_a_bounded_time() -> None:
    probe = SpeedProbe(torch.device("cpu"))
    assert probe() == ProbeResult()
    probe.most_s = 0.02
    began = time.process_time()
    assert probe().per_s > 0
    assert time.process_time() - began < 5


@only("0-12.53", "3-12.53", "6-12.53")
@pytest.mark.parametrize("rate", first([2.57, 12.53], [1.6, 2.57, 5.42, 12.53]))
@pytest.mark.parametrize("when", first([0, 3, 6], range(8)))
def test_a_stopped_device_is_as_slow_as_it_is_whenever_a_probe_begins(rate: float, when: int) -> None:
    """By all that it did in the time that it took, 12.53 may be found as 17.7."""
    healthy = probed(0.0, 1.0).per_s
    slow = probed(when / 8 * PERIOD_S / rate, 1 / rate).per_s
    assert healthy / slow == pytest.approx(rate, rel=0.05)


def test_what_others_take_of_the_core_is_told_apart() -> None:
    found = probed(0.0, 1 / 5.42, queued=0.5)
    assert found.per_s == pytest.approx(2 * probed(0.0, 1 / 5.42).per_s, rel=1e-6), "on a core of its own"
    assert found.queued == pytest.approx(found.ran)


def test_a_probe_that_sees_no_two_stops_counts_all_that_it_did() -> None:
    assert probed(0.0, 0.5, most_s=0.03).per_s == pytest.approx(probed(0.0, 1.0).per_s, rel=0.01)
