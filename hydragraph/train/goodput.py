"""Goodput: the fraction of a run's wall time at full speed (docs/design/elastic.md).

The time between two logged steps has three parts:

    full speed  the trained tokens, divided by the tokens per second of undisturbed steps
    pauses      the seconds of `resumed` events
    rest        lost work if there was a pause; otherwise, extra time due to missing or slow ranks

A step is undisturbed if no rank is missing or slow and no pause occurs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hydragraph.train.step_metrics import Metrics
from hydragraph.train.stragglers.run_events import RunEvent, seconds_of


@dataclass(frozen=True)
class WallTime:
    """A run's wall time: the sum of `full_s`, `paused_s`, `lost_s` and `slower_s`.

    Attributes:
        seconds: time between the ends of the first and last step, without gaps between sessions.
        rate: tokens per second in undisturbed steps; 0: unknown.
        lost_s: time to detect failures and repeat work.
        slower_s: extra time of disturbed steps over undisturbed ones; may be negative.
    """

    seconds: float
    tokens: int
    rate: float
    full_s: float
    paused_s: float
    lost_s: float
    slower_s: float
    pauses: tuple[float, ...]
    lost_steps: int
    moved_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def goodput(self) -> float | None:
        return self.full_s / self.seconds if self.rate else None


@dataclass(frozen=True)
class _Gap:
    seconds: float
    tokens: int
    paused_s: float
    broken: bool
    whole: bool


def account(metrics: Sequence[Metrics], events: Sequence[RunEvent] = (), rate: float | None = None) -> WallTime | None:
    """Split a run's wall time; return None if fewer than two steps have an end time.

    Args:
        rate: tokens per second without disturbances; None: the rate of this run's undisturbed steps.
    """
    gaps = list(_gaps(metrics, events))
    seconds = sum(gap.seconds for gap in gaps)
    if not seconds > 0:
        return None
    # full: seconds that each gap's tokens take at full speed.
    # rest: what neither full speed nor a pause explains.
    whole = [gap for gap in gaps if gap.whole]
    if rate is None:
        rate = sum(gap.tokens for gap in whole) / sum(gap.seconds for gap in whole) if whole else 0.0
    full = [gap.tokens / rate if rate else gap.seconds - gap.paused_s for gap in gaps]
    rest = [gap.seconds - gap.paused_s - full_s for gap, full_s in zip(gaps, full, strict=True)]
    lost_s = sum(rest_s for gap, rest_s in zip(gaps, rest, strict=True) if gap.broken)
    return WallTime(
        seconds,
        sum(gap.tokens for gap in gaps),
        rate,
        sum(full),
        sum(gap.paused_s for gap in gaps),
        lost_s,
        sum(rest) - lost_s,
        tuple(event.seconds for event in events if event.event == "resumed"),
        sum(event.lost_steps for event in events),
        sum(event.moved_bytes for event in events),
    )


def _gaps(metrics: Sequence[Metrics], events: Sequence[RunEvent]) -> Iterator[_Gap]:
    # ends: (time, tokens) of each logged step. pauses and stops: (since, until), in seconds.
    ends = [(seconds_of(m.time), m.processed) for m in metrics if m.time]
    pauses = _joined([(event.at - event.seconds, event.at) for event in events if event.event == "resumed"])
    stops = list(_stops(events))
    for (begin, _), (end, tokens) in pairwise(ends):
        if not end > begin:
            # Another rank's clock may differ
            continue
        broken = any(since < end and till >= begin for since, till in pauses)
        away_s, paused_s = (_overlap(begin, end, intervals) for intervals in (stops, pauses))
        yield _Gap(end - begin - away_s, tokens, paused_s, broken, not broken and _undisturbed(events, end))


def _overlap(begin: float, end: float, intervals: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, till) - max(begin, since)) for since, till in intervals)


def _stops(events: Sequence[RunEvent]) -> Iterator[tuple[float, float]]:
    for last, event in pairwise(events):
        # From a session's last checkpoint to the next session: no training time.
        if last.event == "saved" and event.event == "resumed" and not event.seconds and event.step == last.step:
            yield last.at, event.at


def _undisturbed(events: Sequence[RunEvent], until: float) -> bool:
    missing = 0
    slow: set[int] = set()
    for event in events:
        if event.at > until:
            break
        if event.event in ("fault", "leave"):
            missing += len(event.ranks)
        elif event.event == "join":
            missing = max(0, missing - len(event.ranks))
        elif event.event == "straggler":
            slow.update(event.ranks)
        elif event.event == "recovered":
            slow.difference_update(event.ranks)
        elif event.event == "resumed":
            slow.clear()
            # Without a pause, "resumed" starts a session with all ranks.
            missing = missing if event.seconds else 0
    return not missing and not slow


def _joined(pauses: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for since, till in sorted(pauses):
        if joined and since <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(till, joined[-1][1]))
        else:
            joined.append((since, till))
    return joined
