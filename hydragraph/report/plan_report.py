"""Report of a plan for heterogeneous devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hydragraph.report import number_format
from hydragraph.report.device_diagram import diagram_of
from hydragraph.report.facts import ComparedStrategy, Diagram, Fact, RankMemory, ReportContents, StrategyPanel
from hydragraph.report.memory_held import most_memory
from hydragraph.spec.strategy import Strategy

MOST_RIVALS = 5


def plan_report(title: str, record: Mapping[str, Any], simulated: StrategyPanel | None = None) -> ReportContents:
    """Return the report of a plan's JSON record, and a timeline if `simulated`.

    Raises:
        ValueError: the record is not a plan.
    """
    try:
        return _report(title, record, simulated)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"not a plan for devices that differ ({error!r}): write one with hydragraph plan --cluster "
            "cluster.yaml --json > plan.json"
        ) from error


def _report(title: str, record: Mapping[str, Any], simulated: StrategyPanel | None) -> ReportContents:
    if len({len(record[name]) for name in ("nodes", "types", "rates", "memory", "limits")}) != 1:
        raise KeyError("nodes, types, rates, memory and limits of every rank")
    strategy = Strategy.from_dict(record["pipelines"])
    own = _held(record)
    shown = simulated or StrategyPanel(strategy.name, held=own)
    shown = replace(shown, name=strategy.name, diagram=_diagram(strategy, record))
    rivals = [(Strategy.from_dict(rival["pipelines"]), rival) for rival in record["rivals"][:MOST_RIVALS]]
    drawn = tuple(StrategyPanel(rival.name, diagram=_diagram(rival, record)) for rival, _ in rivals)
    contenders = (
        ComparedStrategy(strategy.name, record["seconds"], None, tuple(record["micro_batches"]), origin=_found(record)),
        *(ComparedStrategy(r["strategy"], r["seconds"], why=r["why"], origin=_found(r)) for r in record["rivals"]),
    )
    hint = () if simulated else ("hydragraph plan --report adds the plan's timeline, memory and traffic",)
    source = tuple(filter(None, (record["source"], *hint)))
    words = tuple(record["text"].splitlines())
    facts = _facts(record, strategy, own)
    return ReportContents("plan", title, source, facts, contenders, (shown, *drawn), words=words)


def _found(record: Mapping[str, Any]) -> str:
    return f"found by {record['origin']}"


def _diagram(strategy: Strategy, record: Mapping[str, Any]) -> Diagram:
    rates = [math.inf if rate is None else rate for rate in record["rates"]]
    return diagram_of(strategy, record["nodes"], record["types"], rates)


def _held(record: Mapping[str, Any]) -> tuple[RankMemory, ...]:
    return tuple(
        RankMemory((rank,), peak, limit)
        for rank, (peak, limit) in enumerate(zip(record["memory"], record["limits"], strict=True))
    )


def _facts(record: Mapping[str, Any], strategy: Strategy, held: tuple[RankMemory, ...]) -> tuple[Fact, ...]:
    ranks = len(record["nodes"])
    idle = ranks - len(strategy.devices)
    slow = sum(rate is None or rate > 1 for rate in record["rates"])
    gap = record["gap"]
    how = "simulated" if record["simulated"] else "estimated"
    types = ", ".join(f"{record['types'].count(kind)} {kind or 'devices'}" for kind in dict.fromkeys(record["types"]))
    return (
        Fact("iteration", number_format.seconds(record["seconds"]), how),
        Fact(
            "above the bound",
            number_format.share(gap) if gap is not None else "–",
            number_format.seconds(record["bound"]),
        ),
        Fact("devices", str(ranks), types),
        Fact("slow or lost", str(slow), f"{idle} compute nothing" if idle else "all others compute"),
        most_memory(held),
        Fact("strategies compared", str(len(record["rivals"]) + 1), f"in {number_format.seconds(record['took_s'])}"),
    )
