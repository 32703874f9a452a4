"""Events of a run's ranks: for the table, the marks in charts, and their costs in time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from hydragraph.report import number_format
from hydragraph.report.facts import Fact, Happened
from hydragraph.train.goodput import WallTime, account
from hydragraph.train.step_metrics import Metrics
from hydragraph.train.stragglers.run_events import RunEvent, seconds_of


def happened(metrics: Sequence[Metrics], events: Sequence[RunEvent]) -> Happened | None:
    """Return the events and their costs; None if checkpoints are the only events.

    Args:
        metrics: metrics of all steps that count, at least one.
        events: events of the run, in order of time.
    """
    if all(event.event == "saved" for event in events):
        return None
    found = account(metrics, events)
    return Happened(
        begin_s=seconds_of(metrics[0].time or events[0].time),
        events=tuple(event for event in events if event.event != "saved"),
        counts=_counts(metrics, events),
        parts=() if found is None else _parts(found),
    )


def cost_facts(metrics: Sequence[Metrics], events: Sequence[RunEvent]) -> tuple[Fact, ...]:
    """Return the numbers for the top of the page: goodput, and the costs of changes of ranks."""
    found = account(metrics, events)
    if found is None:
        return ()
    facts = []
    if found.goodput is not None:
        note = f"of the undisturbed {number_format.rate(found.rate)} tokens/s"
        facts.append(Fact("goodput", number_format.share(found.goodput), note))
    if found.pauses:
        worst = f"{len(found.pauses)}, at most {number_format.seconds(max(found.pauses))}"
        undone = f"{found.lost_steps} step{'' if found.lost_steps == 1 else 's'} undone"
        note = f"{worst}; {undone}, {number_format.size(found.moved_bytes)} moved"
        facts.append(Fact("pauses", number_format.seconds(sum(found.pauses)), note))
    return tuple(facts)


def _parts(found: WallTime) -> tuple[tuple[str, float], ...]:
    return (
        ("at full speed", found.full_s),
        ("pauses", found.paused_s),
        ("lost work", found.lost_s),
        ("slower steps", max(0.0, found.slower_s)),
    )


def _counts(metrics: Sequence[Metrics], events: Sequence[RunEvent]) -> tuple[tuple[int, int], ...]:
    """Return (step, number of ranks from then on); empty if the number never changed."""
    found: list[tuple[int, int]] = []
    change = 0  # net change by the events since the last "resumed"
    for event in events:
        change += len(event.ranks) * ((event.event == "join") - (event.event in ("fault", "leave")))
        if event.event == "resumed":
            found.append((event.step, len(event.ranks)))
            if len(found) == 1:
                found.insert(0, (metrics[0].step, len(event.ranks) - change))
            change = 0
    last = {step: list(group)[-1] for step, group in groupby(found, key=lambda each: each[0])}
    return (*last.values(), (metrics[-1].step, found[-1][1])) if len({count for _, count in found}) > 1 else ()
