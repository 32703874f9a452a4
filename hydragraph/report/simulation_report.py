"""Report of simulated strategies."""

from __future__ import annotations

from collections.abc import Sequence

from hydragraph.cost.costs import Costs
from hydragraph.ir.instruction import Stream
from hydragraph.report import number_format
from hydragraph.report.bytes_moved import matrices
from hydragraph.report.device_diagram import diagram
from hydragraph.report.facts import ComparedStrategy, Fact, ReportContents, StrategyPanel
from hydragraph.report.memory_held import held, most_memory
from hydragraph.report.simulation_price import PricedStrategy
from hydragraph.report.timelines import simulated_course

MOST_PANELS = 6


def simulation_report(title: str, costs: Costs, simulated: Sequence[PricedStrategy]) -> ReportContents:
    ordered = sorted(simulated, key=lambda each: -each.tokens_per_s)
    best = ordered[0]
    panels = tuple(panel(costs, priced) for priced in ordered[:MOST_PANELS])
    contenders = tuple(contender(priced, best) for priced in ordered)
    source = costs.source_of(*(each.strategy for each in ordered))
    return ReportContents("simulation", title, (source,), facts(costs, best, panels[0]), contenders, panels)


def panel(costs: Costs, simulated: PricedStrategy) -> StrategyPanel:
    strategy, timeline = simulated.strategy, simulated.timeline
    memory, note = held(costs, timeline)
    return StrategyPanel(
        strategy.name,
        (simulated_course(timeline),),
        diagram(strategy, costs.cluster, costs.health),
        memory,
        timeline.seconds,
        note,
        matrices(costs, strategy, simulated.assignment, timeline),
    )


def facts(costs: Costs, best: PricedStrategy, shown: StrategyPanel) -> tuple[Fact, ...]:
    timeline = best.timeline
    by_kind = timeline.critical_path.by_kind
    kind, most = next(iter(by_kind.items()), ("", 0.0))
    return (
        Fact("best strategy", best.strategy.name, f"on {costs.ranks} devices"),
        Fact("iteration", number_format.seconds(timeline.seconds), f"{best.tokens:,} tokens"),
        Fact("tokens/s", number_format.rate(best.tokens_per_s), "of all ranks"),
        Fact("largest part", kind, f"{number_format.share(most / timeline.seconds)} of the critical path"),
        Fact("idle", number_format.share(timeline.bubble), "of ranks that compute"),
        most_memory(shown.held),
    )


def contender(simulated: PricedStrategy, best: PricedStrategy) -> ComparedStrategy:
    busy = simulated.busy()
    waits = ((Stream.PULL, "waits: pull"), (Stream.PUSH, "push"), (Stream.P2P, "p2p"))
    shares = [("busy", sum(busy) / len(busy))]
    shares += [(name, simulated.exposed_s(stream) / simulated.seconds) for stream, name in waits]
    return ComparedStrategy(
        simulated.strategy.name,
        simulated.seconds,
        simulated.tokens_per_s,
        simulated.assignment.counts,
        tuple(shares),
        "" if simulated is best else why_lost(simulated, best),
    )


def why_lost(loser: PricedStrategy, best: PricedStrategy) -> str:
    """Say, by kind, how much longer a strategy's critical path per token is than the best one's."""
    scale = best.tokens / loser.tokens
    mine = loser.timeline.critical_path.by_kind
    its = best.timeline.critical_path.by_kind
    differences = {kind: mine.get(kind, 0.0) * scale - its.get(kind, 0.0) for kind in (*mine, *its)}
    longer = loser.timeline.seconds * scale / best.timeline.seconds - 1
    if longer < 5e-4:
        return "as good as the best"
    least = 0.05 * longer * best.timeline.seconds
    terms = sorted(((s, kind) for kind, s in differences.items() if abs(s) > least), key=lambda pair: -pair[0])
    parts = ", ".join(f"{'+' if s > 0 else ''}{number_format.seconds(s)} {kind}" for s, kind in terms)
    slower = f"{longer:.1%} longer" if longer < 1 else f"{longer + 1:.2g} × as long"
    return f"takes {slower} per token: {parts}"
