"""Report of a run, compared with its simulation if the run was traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from hydragraph.cost.costs import Costs
from hydragraph.cost.trace_file import Trace, TracedStep
from hydragraph.report import number_format
from hydragraph.report.facts import WAITED, ComparedStrategy, Fact, ReportContents, StrategyPanel
from hydragraph.report.measured_beside_predicted import compare
from hydragraph.report.rank_changes import cost_facts, happened
from hydragraph.report.simulation_price import PricedStrategy
from hydragraph.report.simulation_report import MOST_PANELS, panel
from hydragraph.report.timelines import measured_course
from hydragraph.spec.strategy import Strategy
from hydragraph.train.step_metrics import Metrics, strategy_names
from hydragraph.train.stragglers.run_events import RunEvent

_UNTRACED = (
    "This run has no trace: train with --trace for timelines, memory, traffic, and a comparison of predicted and "
    "measured times"
)
_TRACED = "Timelines show the last traced step of each strategy and its simulation; memory and traffic are simulated"


def run_report(
    title: str, metrics: Sequence[Metrics], traced: tuple[Costs, Trace] | None, events: Sequence[RunEvent] = ()
) -> ReportContents:
    """Return the report of a run with steps; `traced` has its costs and trace."""
    names = strategy_names(metrics)
    metrics = [replace(m, strategy=names[m.strategy]) for m in metrics]
    contenders = _contenders(metrics)
    changes = happened(metrics, events)
    facts = _facts(metrics) if changes is None else (*_facts(metrics), *cost_facts(metrics, events))
    words = _explanations(metrics)
    contents = ReportContents("run", title, (_UNTRACED,), facts, contenders, (), tuple(metrics), changes, words=words)
    if traced is None:
        return contents
    costs, trace = traced
    order = {contender.name: i for i, contender in enumerate(contenders)}
    # A strategy's last step includes no compilation
    last = {step.strategy: step for step in trace.steps}
    chosen = sorted(last.values(), key=lambda step: order.get(names.get(step.strategy, ""), len(order)))
    panels = tuple(_panel(costs, trace, step) for step in chosen[:MOST_PANELS])
    return replace(contents, source=(_TRACED,), panels=panels, against=compare(costs, trace))


def _explanations(metrics: Sequence[Metrics]) -> tuple[str, ...]:
    lines: list[str] = []
    for m in metrics:
        if m.plan:
            lines += ["", f"planned before step {m.step:,}:", *m.plan]
        if m.comparison:
            lines += ["", f"after step {m.step:,}: {m.comparison}"]
    return tuple(lines[1:])


def _facts(metrics: Sequence[Metrics]) -> tuple[Fact, ...]:
    first, last = metrics[0], metrics[-1]
    evaluated = [m for m in metrics if m.eval_loss is not None]
    facts = [
        Fact("steps", f"{last.step:,}", f"{sum(m.processed for m in metrics):,} tokens, {_strategies(metrics)}"),
        Fact("loss", f"{last.loss:.3f}", f"from {first.loss:.3f}"),
    ]
    if evaluated:
        newest = evaluated[-1]
        name = "held-out loss" if newest.evaluated == "held out" else f"loss, {newest.evaluated}"
        facts.append(Fact(name, f"{newest.eval_loss:.3f}", f"after step {newest.step:,}"))
    facts += [
        Fact("tokens/s", number_format.rate(median(m.tokens_per_s for m in metrics)), "median of all steps"),
        Fact("a step", number_format.seconds(median(m.seconds for m in metrics)), "median of all steps"),
    ]
    peak = max(m.peak_memory_bytes for m in metrics)
    return (*facts, Fact("most memory", number_format.size(peak), "rank 0")) if peak else tuple(facts)


def _strategies(metrics: Sequence[Metrics]) -> str:
    count = len({m.strategy for m in metrics})
    return "one strategy" if count == 1 else f"{count} strategies"


def _contenders(metrics: Sequence[Metrics]) -> tuple[ComparedStrategy, ...]:
    contenders = []
    for name in dict.fromkeys(m.strategy for m in metrics):
        own = [m for m in metrics if m.strategy == name]
        # The first step includes compilation.
        warm = own[1:] or own
        whole = sum(m.seconds for m in warm)
        waits = (sum(getattr(m, f"exposed_{kind}_s") for m in warm) for kind in WAITED)
        shares = tuple(zip(("waits: pull", "push", "p2p"), (seconds / whole for seconds in waits), strict=True))
        seconds = median(m.seconds for m in warm)
        rate = median(m.tokens_per_s for m in warm)
        contenders.append(
            ComparedStrategy(name, seconds, rate, own[-1].micro_batches, shares, origin=f"{len(own)} steps")
        )
    contenders.sort(key=lambda row: -(row.tokens_per_s or 0.0))
    return (contenders[0], *(replace(row, why=_slower(row, contenders[0])) for row in contenders[1:]))


def _slower(row: ComparedStrategy, best: ComparedStrategy) -> str:
    longer = (best.tokens_per_s or 0.0) / (row.tokens_per_s or 1.0)
    waited = sum(part for _, part in row.shares) * longer - sum(part for _, part in best.shares)
    text = f"takes {longer - 1:.1%} longer per token" if longer < 2 else f"takes {longer:.2g} × as long per token"
    if longer - 1 < 5e-4:
        return "as fast as the best"
    part = waited / (longer - 1)
    return (
        f"{text}; {number_format.share(min(part, 1.0))} of the difference is waiting for other ranks"
        if part > 0.05
        else text
    )


def _panel(costs: Costs, trace: Trace, step: TracedStep) -> StrategyPanel:
    strategy = Strategy.parse(step.strategy, costs.outline.layers)
    simulated = PricedStrategy(strategy, step.assignment, costs.simulate(strategy, step.assignment))
    simulated_panel = panel(costs, simulated)
    measured = measured_course(f"measured, step {step.step}", trace.of(step.step))
    predicted = replace(simulated_panel.courses[0], title=f"simulated, step {step.step}")
    return replace(simulated_panel, courses=(measured, predicted))
