"""Planning for heterogeneous devices: `hg.plan`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from hydragraph.cost.costs import Costs
from hydragraph.cost.traffic_bytes import WEIGHT_BYTES
from hydragraph.errors import Unsupported
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.link import copy
from hydragraph.planner.canonical_order import as_told, order_of, places_of, told
from hydragraph.planner.cluster_parts import with_fewer
from hydragraph.planner.deadline import is_late
from hydragraph.planner.explanation import SHOWN, Rival, explanation
from hydragraph.planner.finalists import Exactly, Finalists, Moved, Proposal, TimeEstimates, finalists, proposals
from hydragraph.planner.generators.group_prices import SAFETY, GroupPrices, healthy, state_bytes
from hydragraph.planner.generators.malleus_autohet import (
    MIXED,
    PUBLISHED,
    STRAGGLER,
    TOGETHER,
    SearchMethod,
    search,
    sizes_of,
)
from hydragraph.planner.generators.memory_pooling import pooled
from hydragraph.planner.generators.metis_stages import staged
from hydragraph.planner.generators.symmetric import simple
from hydragraph.planner.improve_devices import DeviceMoves, climbed
from hydragraph.planner.infeasibility import check_labels, nothing_fits
from hydragraph.planner.iteration_bound import bound as bound_of
from hydragraph.planner.metis.metis_search import Order
from hydragraph.planner.price_candidate import (
    Candidate,
    PricedPlan,
    SearchCandidate,
    Shortage,
    placed_candidates,
    simulated,
    unlike,
)
from hydragraph.planner.price_mini_batches import MiniBatchPrices, mean, settle_best
from hydragraph.planner.refinements import as_run, one_by_one, refined
from hydragraph.planner.request import Method as Method
from hydragraph.planner.request import Solver, check_nodes, check_question
from hydragraph.planner.state_shares import home_by_block, home_nodes
from hydragraph.planner.streamed_data_parallelism import streamed
from hydragraph.planner.streamed_pipelines import owned_pipelines
from hydragraph.planner.uncollected import uncollected
from hydragraph.spec.argument_types import typed
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.pipeline import GRADIENTS
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE, SCHEDULES
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

WAYS: dict[str, tuple[SearchMethod, ...]] = {
    "mixed": (MIXED,),
    "straggler": (STRAGGLER,),
    "search": (),
    "metis": (),
    "auto": (TOGETHER, MIXED, STRAGGLER),
}

ORDERS: dict[str, Order] = {"search": "exact", "metis": "memory", "auto": "exact"}

# Usable fractions of memory, tried in turn until a plan fits.
SAFETIES = (SAFETY, 0.88, 0.7)
# If the state exceeds the fraction TIGHT of memory, search again with ROOMY times the usable
# memory.
TIGHT = 0.1
ROOMY = 1.2
# Maximum candidates that each search keeps.
SETTLED = 6
FEW = 64
# Maximum plans that "auto" keeps from Metis's search.
STAGED = 2
# Within this fraction of the best time, the plan that moves the fewest bytes is chosen.
NEAR = 0.005
# Within this fraction of the best time, plans for varying lengths are simulated again with the
# given rank numbers.
AGAIN = 0.01
# No work starts after SEARCHING of the deadline, and no search after SEARCHED. Searches may use FINDING of the
# rest.
SEARCHING = 0.9
SEARCHED = 0.75
FINDING = 0.65
CLIMBS = 3
# Maximum candidates for the iteration planner; each must save the fraction WORTH.
CANDIDATES = 4
WORTH = 1e-3


@dataclass(frozen=True)
class Plan:
    """A training plan for heterogeneous devices.

    Attributes:
        strategy: run it with `hg.compile(model, plan.strategy, home=plan.home)`.
        home: owners of the state.
        strategies: candidates for varying lengths, `strategy` first.
        seconds: mean iteration time.
        choosing_s: mean iteration time if each mini-batch runs under its fastest candidate.
        memory: peak bytes of each rank.
        limits: bytes that each rank may use.
        bound: lower bound on `seconds`.
        rivals: rejected strategies, the closest first.
        assignment: assignment of the first mini-batch.
        moved_bytes: bytes of state that change owner relative to the running plan.
        simulated: whether `seconds` was simulated; if not, traffic is estimated.
        text: result of `explain` without rivals and idle devices.
        spare: unused ranks that are not lost.
    """

    strategy: Strategy
    home: Home
    strategies: tuple[Strategy, ...]
    seconds: float
    choosing_s: float
    memory: tuple[int, ...]
    limits: tuple[float, ...]
    bound: float
    rivals: tuple[Rival, ...]
    assignment: Assignment
    moved_bytes: int
    origin: str
    simulated: bool
    took_s: float
    text: str
    spare: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """Relative distance of `seconds` from `bound`."""
        return self.seconds / self.bound - 1

    def explain(self) -> str:
        """Describe the plan, and why its rivals were rejected."""
        lost = [f"rejected: {rival.strategy.name} {rival.why}" for rival in self.rivals[:SHOWN]]
        if more := len(self.rivals[SHOWN:]):
            lost.append(f"rejected: {more} more {'strategy' if more == 1 else 'strategies'}")
        ranks = f"rank{'s' * (len(self.spare) > 1)} {', '.join(map(str, self.spare))}"
        spare = [f"no work for {ranks}: {self._why_spare()}"] if self.spare else []
        return "\n".join([self.text, *spare, *lost])

    def _why_spare(self) -> str:
        using = [r.seconds for r in self.rivals if not set(self.spare).isdisjoint(r.strategy.devices)]
        if any(map(math.isfinite, using)):
            more = min(using) / self.seconds - 1
            return (
                f"the best plan found that uses any of them takes {more:.1%} longer"
                if more > 0.0005
                else "a plan that uses more devices is no faster"
            )
        most = max(self.limits[rank] for rank in self.spare)
        smallest = min(self.memory[rank] for rank in self.strategy.devices)
        if most < smallest:
            return (
                f"they have at most {most / 1e9:.3g} GB each, but every working rank needs at least "
                f"{smallest / 1e9:.3g} GB"
            )
        return "the search found no plan that uses any of them and fits in memory"

    def __str__(self) -> str:
        return self.explain()


@typed("costs", "workload")
def plan(
    costs: Costs,
    workload: Workload,
    method: Method = "auto",
    running: Plan | Strategy | str | None = None,
    deadline_s: float | None = None,
    solver: Solver | None = None,
    schedules: Collection[str] = (DEFAULT_SCHEDULE,),
    streaming: bool = True,
    improved: Callable[[float, str], None] | None = None,
    deterministic: bool = False,
) -> Plan:
    """Plan training on devices that differ by type, memory or current speed.

    Args:
        method: "mixed" is for several types of devices (AutoHet), "straggler" for slow devices (Malleus). "search"
            finds the least cost in Metis's search space; "metis" runs Metis's memory-aware search. "auto" runs all but
            "metis", and "search" only for up to 64 ranks without a deadline.
        running: current plan, strategy or strategy text. If given, the plan that moves the fewest bytes of state is
            chosen from nearly equally fast plans.
        deadline_s: seconds after which the best plan so far is returned. With None, the search completes and is
            deterministic.
        solver: "scip" groups devices by AutoHet's equation 3, through cvxpy; only for method "mixed" and few devices.
        schedules: schedules that the run can use; "zb-h1" needs `backend="eager"`.
        streaming: whether "auto" may propose streamed stages or tensor-parallel sums in pieces, which deterministic
            runs do not support.
        improved: called with the seconds and text of each new best strategy.
        deterministic: plan a run with one sequence per micro-batch and one tensor-parallel degree.

    Raises:
        Unsupported: no plan fits, a type was not measured, or all devices are lost.
        ValueError: the method, solver, deadline, a schedule or `running` is invalid.
    """
    check_question(method, deadline_s, solver)
    for name in schedules:
        if name not in SCHEDULES:
            raise ValueError(f"schedules has {name!r}: use {' or '.join(map(repr, SCHEDULES))}")
    if isinstance(running, str):
        running = Strategy.parse(running, costs.outline.layers)
    if isinstance(running, Strategy):
        running.check(costs.outline.layers, costs.ranks)
    elif not (running is None or isinstance(running, Plan)):
        raise ValueError(f"'running' is {running!r}: give a plan, a strategy or its text, or leave it out")
    question = _Question(
        workload,
        method,
        WAYS[method] if solver is None else (PUBLISHED,),
        running,
        schedules,
        streaming and method == "auto" and not deterministic,
        deterministic,
        _telling(None if deterministic else improved),
    )
    with uncollected():
        return _of_one_cut(costs, question, deadline_s) if deterministic else _plan(costs, question, deadline_s)


@dataclass(frozen=True)
class _Question:
    workload: Workload
    method: Method
    ways: tuple[SearchMethod, ...]
    running: Plan | Strategy | None
    schedules: Collection[str]
    streaming: bool
    deterministic: bool
    seen: Callable[[PricedPlan], PricedPlan]
    until: float | None = None

    @property
    def near(self) -> float:
        return 0.0 if self.running is None else NEAR


def _telling(improved: Callable[[float, str], None] | None) -> Callable[[PricedPlan], PricedPlan]:
    best_s = math.inf

    def seen(each: PricedPlan) -> PricedPlan:
        nonlocal best_s
        if improved is not None and each.simulated and each.seconds < best_s:
            best_s = each.seconds
            improved(best_s, each.strategy.name)
        return each

    return seen


def _of_one_cut(costs: Costs, asked: _Question, deadline_s: float | None) -> Plan:
    cuts = costs.profile.cuts
    each_s = None if deadline_s is None else deadline_s / len(cuts)
    plans: list[Plan] = []
    refused: Unsupported | None = None
    for cut in cuts:
        some = costs.changed(profile=costs.profile.of_cut(*cut))
        try:
            plans.append(_plan(some, asked, each_s))
        except Unsupported as error:
            refused = refused or error
    if refused is not None and not plans:
        raise refused
    return min(plans, key=lambda each: each.seconds)


def _plan(costs: Costs, asked: _Question, deadline_s: float | None) -> Plan:
    began = time.monotonic()
    workload = asked.workload
    running = asked.running
    _check_copies(costs)
    check_nodes(costs.cluster, costs.health)
    check_labels(costs, workload)
    until = None if deadline_s is None else began + SEARCHING * deadline_s
    asked = replace(asked, until=until)
    before = running.strategy if isinstance(running, Plan) else running
    home_before = running.home if isinstance(running, Plan) else costs.home.without_rule
    if isinstance(running, Strategy) and costs.home.rule is not None:
        home_before = home_by_block(healthy(costs), running, costs.home)

    @cache
    def moved(home: Home) -> int:
        return moved_bytes(costs, home_before, home)

    # During replanning, the order ignores rates, so a rank that becomes slow keeps its state.
    order = order_of(costs if running is None else healthy(costs))
    listed = order == list(range(costs.ranks))
    # `_extended` takes little time and may find the best plan, so the searches leave it some.
    searching = replace(asked, until=None if deadline_s is None else began + SEARCHED * deadline_s)
    looked, safety = _searched(costs, searching, order, None if running is None else moved)
    looked = _extended(costs, asked, looked)
    if asked.deterministic:
        looked = replace(looked, settled=tuple(one_by_one(costs, each) for each in looked.settled), passed=())
    if workload.lengths and not listed and until is None:
        looked = _exact(costs, looked)
    for settled in looked.settled:
        asked.seen(settled)
    # A strategy that does not fit the longest sequence may be best for others.
    able = [settled for settled in looked.settled if math.isfinite(settled.seconds)]
    if not able:
        raise nothing_fits(costs, workload, looked.short, safety, asked.streaming)
    least = bound_of(costs, workload.batches)
    best = min(settled.seconds for settled in able)

    def preference(each: PricedPlan) -> tuple[float, ...]:
        streams = each.strategy.streams
        return moved(each.home), each.strategy != before, each.seconds, streams, streams and max(each.memory)

    chosen = min((settled for settled in able if settled.seconds <= best * (1 + asked.near)), key=preference)
    if until is None and not (chosen.simulated or workload.lengths):
        chosen = simulated(costs, chosen)
    if chosen.simulated and not (workload.lengths or is_late(until) or asked.deterministic):
        chosen = as_run(costs, chosen)
    useful = _useful(costs, asked, chosen, looked.settled) if workload.lengths else [chosen]
    took = time.monotonic() - began
    used = {*chosen.strategy.devices, *costs.health.lost}
    return Plan(
        chosen.strategy,
        chosen.home,
        tuple(settled.strategy for settled in useful),
        chosen.seconds,
        mean([min(seconds) for seconds in zip(*(settled.by_batch for settled in useful), strict=True)]),
        chosen.memory,
        tuple(costs.memory_of(rank) for rank in range(costs.ranks)),
        least,
        _rivals(chosen, looked, running is not None),
        chosen.assignments[0],
        moved(chosen.home),
        chosen.origin,
        chosen.simulated,
        took,
        explanation(costs, workload, chosen, least, 0 if running is None else moved(chosen.home), took),
        tuple(rank for rank in range(costs.ranks) if rank not in used),
    )


def _searched(costs: Costs, asked: _Question, order: Sequence[int], moved: Moved | None) -> tuple[Finalists, float]:
    began = time.monotonic()
    listed = order == list(range(costs.ranks))
    ordered = costs if listed else costs.reordered(order)
    places = places_of(order)

    def exactly(each: PricedPlan) -> PricedPlan:
        exact_plan = asked.seen(simulated(costs, each if listed else as_told(each, order)))
        return replace(each, by_batch=exact_plan.by_batch, simulated=True)

    ask = partial(
        _looked_at, moved=moved and (lambda home: moved(home if listed else home.reordered(places))), exactly=exactly
    )
    group_prices = GroupPrices(ordered)
    looked = Finalists()
    short: list[Shortage] = []
    for safety in SAFETIES:
        looked = ask(ordered, asked, safety=safety, group_prices=group_prices)
        short += looked.short
        if any(math.isfinite(settled.seconds) for settled in looked.settled) or not looked.short:
            break
    if asked.ways and PUBLISHED not in asked.ways:
        # Only the broadest search tries fewer nodes.
        quickly = partial(ask, asked=replace(asked, ways=asked.ways[:1], method="mixed"), safety=safety)
        least = bound_of(costs, asked.workload.batches) if looked.settled else math.inf
        looked = _on_fewer(ordered, looked, least, quickly, asked.until, time.monotonic() - began)
    looked = replace(looked, short=tuple(short))
    return (looked if listed else told(looked, order)), safety


def _extended(costs: Costs, asked: _Question, looked: Finalists) -> Finalists:
    workload = asked.workload
    until = asked.until
    below_s = min((candidate.seconds for candidate in looked.settled), default=math.inf)
    # Owners by block are often the last resort; streaming may be faster.
    is_roomy = any(math.isfinite(each.seconds) and not each.home.buckets for each in looked.settled)
    if asked.ways and PUBLISHED not in asked.ways and _tight(costs):
        owned = owned_pipelines(costs, workload, below_s, until)
        looked = replace(looked, settled=(*looked.settled, *(each for each in owned if isinstance(each, PricedPlan))))
    if asked.streaming:
        below_s = min((candidate.seconds for candidate in looked.settled), default=math.inf)
        streamed_plans = streamed(costs, workload, below_s, until)
        if not is_roomy:
            of_one_stage = (each.seconds for each in streamed_plans if isinstance(each, PricedPlan))
            below_s = min(*of_one_stage, below_s, math.inf)
            streamed_plans += owned_pipelines(costs, workload, below_s, until, (GRADIENTS, True))
        settled = tuple(streamed_plan for streamed_plan in streamed_plans if isinstance(streamed_plan, PricedPlan))
        short = tuple(streamed_plan for streamed_plan in streamed_plans if isinstance(streamed_plan, Shortage))
        looked = replace(looked, settled=looked.settled + settled, short=looked.short + short)
    if asked.ways and PUBLISHED not in asked.ways:
        able = [candidate for candidate in looked.settled if math.isfinite(candidate.seconds)]
        further = refined(costs, able, asked.schedules, until, asked.streaming)
        looked = replace(looked, settled=(*looked.settled, *further))
    return looked


def _looked_at(
    costs: Costs, asked: _Question, safety: float, group_prices: GroupPrices, moved: Moved | None, exactly: Exactly
) -> Finalists:
    """Select finalists from each search separately, so that "auto" is never worse than one search."""
    workload, method, ways, until = asked.workload, asked.method, asked.ways, asked.until
    typical = workload.typical
    reaches = _reaches(workload)
    now = time.monotonic()
    ended = None if until is None else now + FINDING * (until - now)
    ask = partial(search, costs, typical.sequences, typical.length, until=ended, group_prices=group_prices)
    every: list[list[Candidate]] = []
    for way in ways:
        searched: list[SearchCandidate] = []
        for reach in reaches:
            searched += unlike(ask(way, reach=reach, safety=safety))[:SETTLED]
        if not workload.lengths and not way.published:
            searched += _pooled(costs, workload, searched, ended)
            if _tight(costs) and not is_late(ended):
                searched += _pooled(costs, workload, unlike(ask(way, safety=ROOMY * safety))[:SETTLED], ended)
        every.append(placed_candidates(searched))
    if method in ("search", "metis") or (method == "auto" and until is None and costs.ranks <= FEW):
        every.append(_staged(costs, typical, method, until))
    plain = [] if PUBLISHED in ways else _simple(costs, workload, safety, group_prices, apart=until is not None)
    every = [[*candidates, *plain] for candidates in every]
    if workload.lengths:
        return _varying(costs, asked, every, safety)
    outcomes: dict[tuple[Strategy, Assignment], PricedPlan | Shortage] = {}
    passed: list[Proposal] = []
    clock = TimeEstimates(costs)
    for candidates in every:
        proposed = proposals(costs, workload.batches[0], candidates)
        passed += finalists(costs, proposed, asked.near, until, outcomes, moved, exactly, clock)
    return Finalists.of(outcomes.values(), passed)


def _on_fewer(
    costs: Costs, looked: Finalists, least: float, ask: Callable[..., Finalists], until: float | None, whole_s: float
) -> Finalists:
    settled = list(looked.settled)
    passed = list(looked.passed)
    took_s = 0.0
    for some, part in with_fewer(costs):
        best = min((candidate.seconds for candidate in settled), default=0.0)
        if is_late(until, took_s or part * whole_s) or least >= part * best:
            continue
        began = time.monotonic()
        also = ask(some, group_prices=GroupPrices(some))
        took_s = max(took_s, time.monotonic() - began)
        settled += also.settled
        passed += also.passed
    return replace(Finalists.of(settled, passed), short=looked.short)


def _tight(costs: Costs) -> bool:
    running = [rank for rank in range(costs.ranks) if math.isfinite(costs.health.rate(rank))]
    return costs.home.copies * state_bytes(costs) > TIGHT * sum(map(costs.memory_of, running))


def _pooled(
    costs: Costs, workload: Workload, candidates: Sequence[SearchCandidate], until: float | None
) -> list[SearchCandidate]:
    variants: list[SearchCandidate] = []
    for candidate in candidates:
        if is_late(until):
            break
        variants += pooled(costs, candidate, workload.typical.sequences * workload.typical.length)
    return variants


def _check_copies(costs: Costs) -> None:
    nodes = home_nodes(costs, costs.home)
    running = {nodes[r] for r in range(costs.ranks) if math.isfinite(costs.health.rate(r))}
    if costs.home.copies > 1 and len(running) == 1:
        what = "rank" if isinstance(nodes, range) else "node"
        raise Unsupported(
            f"{costs.home.copies} copies of the state need different {what}s, but only {what} {running.pop()} is "
            "running",
            where="plan",
            remedy="plan with a home of one copy, or add a device on another node",
        )


def _reaches(workload: Workload) -> list[int]:
    if not workload.lengths:
        return [0]
    return list(dict.fromkeys((workload.longest, workload.typical.length)))


def _staged(costs: Costs, typical: Workload, method: Method, until: float | None) -> list[Candidate]:
    try:
        plans = staged(costs, typical.sequences, typical.length, ORDERS[method], until)
    except Unsupported:
        if method != "auto":
            raise
        return []
    return plans[:STAGED] if method == "auto" else plans


def _varying(costs: Costs, asked: _Question, every: Sequence[Sequence[Candidate]], safety: float) -> Finalists:
    workload = asked.workload
    until = asked.until
    varied = MiniBatchPrices(costs, workload.batches)
    outcomes: dict[Strategy, PricedPlan | Shortage] = {}
    origins: dict[Strategy, str] = {}
    for candidates in every:
        search_origins: dict[Strategy, str] = {}
        for candidate in candidates:
            search_origins.setdefault(candidate.strategy, candidate.origin)
        settle_best(varied, search_origins, until, outcomes)
        origins = {**search_origins, **origins}
    able = [s for s, outcome in outcomes.items() if isinstance(outcome, PricedPlan) and math.isfinite(outcome.seconds)]
    if asked.method == "auto" and able:
        sources = [DeviceMoves(costs, workload, reach, safety) for reach in _reaches(workload)]
        for start in _starts(varied):
            climbed(varied, sources, start, until)
        better = {s: "auto" for s in sorted(varied.priced, key=varied.seconds) if s not in origins}
        settle_best(varied, better, until, outcomes)
    passed = [
        Proposal(s, Assignment(()), mean(seconds), mean(seconds), origins.get(s, "auto"))
        for s, seconds in varied.priced.items()
        if s in origins and s not in outcomes
    ]
    return Finalists.of(outcomes.values(), passed)


def _starts(varied: MiniBatchPrices) -> list[Strategy]:
    able = [s for s in varied.priced if not s.shares and math.isfinite(varied.seconds(s))]
    order = sorted(able, key=varied.seconds)
    alike = [s for s in order if len({tuple(stage.tp for stage in pipeline.stages) for pipeline in s.pipelines}) == 1]
    return list(dict.fromkeys([*order[:1], *alike]))[:CLIMBS]


def _simple(costs: Costs, workload: Workload, safety: float, group_prices: GroupPrices, apart: bool) -> list[Candidate]:
    typical = workload.typical
    sizes, _ = sizes_of(costs, typical.sequences, typical.length)
    return simple(costs, typical.sequences, typical.length, sizes, _reaches(workload)[0], safety, group_prices, apart)


def _exact(costs: Costs, looked: Finalists) -> Finalists:
    most = (1 + AGAIN) * min((each.seconds for each in looked.settled), default=math.inf)
    again = (
        simulated(costs, e) if e.simulated and math.isfinite(e.seconds) and e.seconds <= most else e
        for e in looked.settled
    )
    return replace(looked, settled=tuple(again))


def _rivals(chosen: PricedPlan, looked: Finalists, running: bool) -> tuple[Rival, ...]:
    rivals = []
    but = "but moves more state" if running else "but only with micro-batches that a run would not form"
    for settled in sorted(looked.settled, key=lambda one: one.seconds):
        if settled.strategy != chosen.strategy:
            more = settled.seconds / chosen.seconds - 1
            why = f"takes {more:.1%} longer" if more >= 0 else f"takes {-more:.1%} less time, {but}"
            if math.isinf(more):
                why = "does not fit the longest sequence"
            rivals.append(Rival(settled.strategy, settled.seconds, settled.origin, why, settled))
    for proposal in looked.passed:
        more = proposal.expected_s / chosen.seconds - 1
        why = f"would take about {more:.1%} longer" if more >= 0 else "was not simulated before the search ended"
        rivals.append(Rival(proposal.strategy, proposal.expected_s, proposal.origin, why))
    rivals += [Rival(shortage.strategy, math.inf, "", f"does not fit: {shortage}") for shortage in looked.short]
    return tuple(rivals)


def _useful(costs: Costs, asked: _Question, chosen: PricedPlan, settled: Sequence[PricedPlan]) -> list[PricedPlan]:
    varied = MiniBatchPrices(costs, asked.workload.batches)
    kept = [chosen]
    now = list(chosen.by_batch)
    left = list(settled)
    while left and len(kept) < CANDIDATES:
        saved = [sum(max(0.0, a - b) for a, b in zip(now, each.by_batch, strict=True)) for each in left]
        best = saved.index(max(saved))
        if saved[best] <= WORTH * sum(now):
            break
        owned: PricedPlan | Shortage = left.pop(best)
        if isinstance(owned, PricedPlan) and owned.home != chosen.home:
            owned = varied.settle(owned.strategy, owned.origin, chosen.home)
        if isinstance(owned, Shortage):
            continue
        owned = one_by_one(costs, owned) if asked.deterministic else owned
        kept.append(owned)
        now = [min(a, b) for a, b in zip(now, owned.by_batch, strict=True)]
    return kept


def moved_bytes(costs: Costs, before: Home, after: Home) -> int:
    if before == after:
        return 0
    nodes = [device.node for device in costs.cluster.devices]
    old, new = (HomeLayouts(home.on(nodes), costs.ranks) for home in (before, after))
    moved_elements: dict[object, int] = {}
    total = 0
    for bucket in costs.buckets:
        key = (bucket.size, old.of(bucket), new.of(bucket))
        if key not in moved_elements:
            there = copy(*key[1:]).travelling
            moved_elements[key] = int((there.hi - there.lo).sum())
        total += (costs.state_bytes if bucket.learns else WEIGHT_BYTES) * moved_elements[key]
    return total
