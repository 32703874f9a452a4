"""Departures, slowdowns and returns of a run's ranks, and their costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from hydragraph.report import number_format
from hydragraph.report.facts import Fact, RankChanges
from hydragraph.train.goodput import WallTime, account
from hydragraph.train.step_metrics import Metrics
from hydragraph.train.stragglers.run_events import RunEvent, seconds_of


def happened(metrics: Sequence[Metrics], events: Sequence[RunEvent]) -> RankChanges | None:
    """Return a run's events and their costs, or None if checkpoints are the only events."""
    if all(event.event == "saved" for event in events):
        return None
    wall_time = account(metrics, events)
    return RankChanges(
        begin_s=seconds_of(metrics[0].time or events[0].time),
        events=tuple(event for event in events if event.event != "saved"),
        counts=_counts(metrics, events),
        parts=() if wall_time is None else _parts(wall_time),
    )


def cost_facts(metrics: Sequence[Metrics], events: Sequence[RunEvent]) -> tuple[Fact, ...]:
    wall_time = account(metrics, events)
    if wall_time is None:
        return ()
    facts = []
    if wall_time.goodput is not None:
        note = f"of {number_format.rate(wall_time.rate)} tokens/s at full speed"
        facts.append(Fact("goodput", number_format.share(wall_time.goodput), note))
    if wall_time.pauses:
        worst = f"{len(wall_time.pauses)}, the longest {number_format.seconds(max(wall_time.pauses))}"
        undone = f"{wall_time.lost_steps} step{'' if wall_time.lost_steps == 1 else 's'} undone"
        note = f"{worst}; {undone}, {number_format.size(wall_time.moved_bytes)} moved"
        facts.append(Fact("pauses", number_format.seconds(sum(wall_time.pauses)), note))
    return tuple(facts)


def _parts(found: WallTime) -> tuple[tuple[str, float], ...]:
    return (
        ("at full speed", found.full_s),
        ("pauses", found.paused_s),
        ("lost work", found.lost_s),
        ("slower steps", max(0.0, found.slower_s)),
    )


def _counts(metrics: Sequence[Metrics], events: Sequence[RunEvent]) -> tuple[tuple[int, int], ...]:
    counts: list[tuple[int, int]] = []
    # Ranks gained since the last "resumed"
    change = 0
    for event in events:
        change += len(event.ranks) * ((event.event == "join") - (event.event in ("fault", "leave")))
        if event.event == "resumed":
            # Derive the initial number of ranks from the first event and earlier changes.
            counts.append((event.step, len(event.ranks)))
            if len(counts) == 1:
                counts.insert(0, (metrics[0].step, len(event.ranks) - change))
            change = 0
    last = {step: list(group)[-1] for step, group in groupby(counts, key=lambda each: each[0])}
    return (*last.values(), (metrics[-1].step, counts[-1][1])) if len({count for _, count in counts}) > 1 else ()
