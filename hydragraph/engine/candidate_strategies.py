"""Strategies from which training chooses, and their expected costs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from hydragraph.cluster.agreement import from_one
from hydragraph.cluster.launch import World
from hydragraph.cost.costs import Costs
from hydragraph.cost.home_choice import HomeQuestion, choose_home
from hydragraph.cost.measured_profile import Profile, Scheme
from hydragraph.cost.schemes import schemes_of
from hydragraph.engine.step_planner import IterationPlanner
from hydragraph.errors import Unsupported
from hydragraph.ir.program import Program
from hydragraph.passes.check_strategy import check_strategy
from hydragraph.planner.policy import Policy, static_or_dynamic
from hydragraph.planner.quick_plan import rough_costs
from hydragraph.planner.request import PlanRequest
from hydragraph.spec.default_cluster import cluster_on
from hydragraph.spec.home import Home
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

if TYPE_CHECKING:
    from hydragraph.planner.plan import Plan

Choices = Strategy | str | Sequence[Strategy | str] | Literal["auto"]

AUTO_CANDIDATES = 8
SAMPLE = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planning:
    """Inputs for the choice of strategies.

    Attributes:
        profile: `Profile` (identical devices), `Costs`, or None for rough costs.
        strategies: planned candidates for "auto".
    """

    profile: Profile | Costs | None = None
    lengths: Sequence[Sequence[int]] | None = None
    policy: Policy = field(default_factory=Policy)
    strategies: tuple[Strategy, ...] = ()
    explanation: tuple[str, ...] = ()


def candidates_of(
    given: Choices,
    program: Program,
    ranks: int,
    planning: Planning,
    home: Home | None = None,
    passed: Collection[Strategy] = (),
    streaming: bool = True,
) -> tuple[Strategy, ...]:
    """Return the checked strategies to choose from.

    Args:
        given: strategies, or "auto" to search (with `hg.plan` if devices differ).
        planning: "auto" requires its profile and sample mini-batches.
        home: owners of the state; None means equal shares.

    Raises:
        Unsupported: an input is missing, or costs and ranks differ.
        ValueError: a text is not a strategy.
    """
    profile = planning.profile
    batches = planning.lengths
    if isinstance(profile, Costs) and profile.ranks != ranks:
        raise Unsupported(
            f"the costs are for {profile.ranks} devices, but there are {ranks} ranks",
            where="compile",
            remedy="give costs whose cluster has one device per rank",
        )
    several = [given] if isinstance(given, Strategy | str) else given
    if isinstance(given, str) and given == "auto":
        if profile is None or not batches:
            raise Unsupported(
                'strategy="auto" with a profile needs a sample of the data',
                where="compile",
                remedy="also pass lengths= (sequence lengths of some mini-batches), or omit the profile",
            )
        if isinstance(profile, Costs):
            plan = planned_for(program, profile, batches, home, streaming=streaming)
            candidates = tuple(strategy for strategy in plan.strategies if runs(program, strategy, ranks))
            if not candidates:
                # Raises the reason
                check_strategy(program, plan.strategies[0], ranks)
        else:
            candidates = proposed(program, ranks, profile, batches, home)
    elif isinstance(several, Sequence) and several and all(isinstance(s, Strategy | str) for s in several):
        candidates = tuple(dict.fromkeys(strategy_for(s, program) for s in several))
    else:
        raise Unsupported(
            f"'strategy' is {given!r}" if not isinstance(given, Sequence) else f"'strategy' is {list(given)!r}",
            where="compile",
            remedy='pass a Strategy, a text such as "<tp2,pp1> + 2*<tp1,pp1>", a list of them, or "auto"',
        )
    for strategy in candidates:
        if strategy not in passed:
            check_strategy(program, strategy, ranks)
    return candidates


def candidates_among(world: World, given: Choices, *how: Any) -> tuple[Strategy, ...]:
    """Return `candidates_of(given, *how)` on every rank; for "auto", rank 0 searches."""
    if not (isinstance(given, str) and given == "auto"):
        return candidates_of(given, *how)
    return from_one(world, lambda: candidates_of(given, *how))


def home_among(world: World, program: Program, home: Home, strategies: Sequence[Strategy], planning: Planning) -> Home:
    """Return the home; rank 0 applies a rule such as "auto". All ranks raise the same ValueError."""
    if home.rule is None:
        return home
    hosts = world.gather(world.node)
    # two hosts with ranks 0, 2 and 1, 3: nodes = [0, 1, 0, 1]; a node's number is its first rank's
    nodes = [hosts.index(host) for host in hosts]
    return from_one(world, lambda: choose_home(_question(program, home, strategies, planning, nodes)))


def _question(
    program: Program, home: Home, strategies: Sequence[Strategy], planning: Planning, nodes: Sequence[int]
) -> HomeQuestion:
    costs = planning.profile
    if isinstance(costs, Profile):
        measured = costs.blocks and costs.device is not None and len(set(nodes)) == 1
        costs = Costs(costs, costs.cluster(len(nodes))) if measured else None
    # On a single host, each rank counts as a node
    if home.copies > 1 and len(set(nodes)) > 1:
        home = replace(home, nodes=home.nodes or tuple(nodes))
    if costs is None:
        return _unmeasured(program, strategies, home, nodes)
    longest = max((n for batch in planning.lengths or () for n in batch), default=None)
    question = costs.home_question(strategies, home, longest)
    return replace(question, outline=program.outline, buckets=program.buckets)


def home_on(program: Program, strategies: Sequence[Strategy], home: Home, nodes: Sequence[int]) -> Home:
    fitting = [strategy for strategy in strategies if runs(program, strategy, len(nodes))]
    if home.rule is None or not fitting:
        return home.without_rule
    return choose_home(_unmeasured(program, fitting, home, nodes))


def _unmeasured(program: Program, strategies: Sequence[Strategy], home: Home, nodes: Sequence[int]) -> HomeQuestion:
    asked = (tuple(strategies), cluster_on(nodes), home, program.dtype.itemsize)
    return HomeQuestion(program.outline, program.buckets, *asked, push_itemsize=program.push_dtype.itemsize)


def strategy_for(given: Strategy | str, program: Program) -> Strategy:
    """Parse a strategy's text for the program's layers; return a Strategy unchanged."""
    if isinstance(given, Strategy):
        return given
    if not isinstance(given, str):
        raise ValueError(f"'strategy' is {given!r}; pass a Strategy, or its text such as '<tp2,pp1>'")
    return Strategy.parse(given, program.layers)


def proposed(
    program: Program, ranks: int, profile: Profile, batches: Sequence[Sequence[int]], home: Home | None = None
) -> tuple[Strategy, ...]:
    """Return the best single strategy for the sample, then strategies that are faster for some mini-batches."""
    from hydragraph.planner.generators.hydraulis import propose
    from hydragraph.planner.improve_schemes import homogeneous, refine

    # usable, schemes: (tensor-parallel degree, stages) of single pipelines
    usable = [s for s in profile.schemes if s[0] * s[1] <= ranks and _fits(program, s)]
    fitting = schemes_of(profile, ranks, home, usable)
    lengths = [n for batch in batches for n in batch if n]
    context = max(lengths, default=1)
    schemes = propose(fitting, lengths, ranks, context) + homogeneous(fitting, ranks)
    best = refine(schemes, fitting, batches[:SAMPLE], ranks, context=context)[:AUTO_CANDIDATES]
    return tuple(strategy_of(s, program.layers) for s in best)


def planned_for(
    program: Program,
    costs: Costs,
    batches: Sequence[Sequence[int]],
    home: Home | None = None,
    schedules: Sequence[str] = (DEFAULT_SCHEDULE,),
    streaming: bool = True,
) -> Plan:
    """Return `hg.plan`'s plan for a sample.

    Raises:
        Unsupported: no strategy fits, or the costs are for another model.
    """
    from hydragraph.planner.plan import plan

    if costs.profile.layers not in (None, program.layers):
        raise Unsupported(
            f"the costs are for a model of {costs.profile.layers} layers, but this model has {program.layers}",
            where="compile",
            remedy="measure this model: hydragraph profile",
        )
    sample = sample_of(batches)
    if not sample:
        raise Unsupported(
            'strategy="auto" needs tokens, but the mini-batches of lengths= have none',
            where="compile",
            remedy="pass lengths= with a nonempty mini-batch",
        )
    return plan(costs.changed(home=home), Workload(lengths=sample), schedules=schedules, streaming=streaming)


def at_once_among(
    world: World, program: Program, costs: Costs, batches: Sequence[Sequence[int]], running: Sequence[Strategy]
) -> Strategy | None:
    """Quickly find a good strategy for unequal devices while ranks wait; return None if none fits.

    Args:
        running: earlier strategies, those of the current ranks first.
    """

    def search() -> Strategy | None:
        from hydragraph.planner.immediate_plan import plan_at_once

        sample = sample_of(batches)
        if not sample or costs.profile.layers not in (None, program.layers):
            return None
        try:
            plan = plan_at_once(costs, Workload(lengths=sample), running)
        except Unsupported:
            return None
        return plan.strategy if plan is not None and runs(program, plan.strategy, costs.ranks) else None

    return world.gather(search() if world.rank == 0 else None)[0]


def sample_of(batches: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(lengths for batch in batches if (lengths := tuple(n for n in batch if n)))[:SAMPLE]


def runs(program: Program, strategy: Strategy, ranks: int) -> bool:
    try:
        check_strategy(program, strategy, ranks)
    except ValueError:
        return False
    return True


def strategy_of(schemes: Sequence[Scheme], layers: int) -> Strategy:
    return Strategy.parse(" + ".join(f"<tp{tp},pp{pp}>" for tp, pp in schemes), layers=layers)


def _fits(program: Program, scheme: Scheme) -> bool:
    tp, pp = scheme
    return pp <= program.layers and runs(program, strategy_of([scheme], program.layers), tp * pp)


def request_of(strategies: Sequence[Strategy], planning: Planning, ranks: int, home: Home | None = None) -> PlanRequest:
    """Return the planner's input; without a profile, costs are rough."""
    profile = planning.profile
    seed = planning.policy.seed
    if profile is None:
        rough = tuple(rough_costs(s) for s in strategies)
        return PlanRequest(rough, (0.0,) * len(rough), seed, guessed=True)
    # Without blocks, a profile has constants only for whole pipelines,
    # and cannot price single stages.
    if isinstance(profile, Profile) and not profile.blocks:
        for strategy in strategies:
            if strategy.shares:
                raise Unsupported(
                    "its pipelines share stages, but the profile has constants only for complete pipelines",
                    where=f"strategy {strategy}",
                    remedy="measure the model with hydragraph profile, or compile without a profile",
                )
        priced = tuple(tuple(profile.pipeline_of(p, ranks) for p in s.pipelines) for s in strategies)
        charges = tuple(profile.hetero_sync_s if len(set(c)) > 1 else 0.0 for c in priced)
        return PlanRequest(priced, charges, seed)
    if isinstance(profile, Costs):
        costs = profile.changed(home=home)
    else:
        costs = Costs(profile, profile.cluster(ranks), home=home)
    return PlanRequest(tuple(map(costs.pipelines, strategies)), tuple(map(costs.fixed, strategies)), seed)


def planner_of(
    strategies: Sequence[Strategy], planning: Planning, ranks: int, home: Home | None = None
) -> tuple[IterationPlanner, str]:
    """Return the iteration planner, and a sentence on whether each step chooses a strategy, or ""."""
    policy = planning.policy
    request = request_of(strategies, planning, ranks, home)
    if len(strategies) == 1 or not planning.lengths:
        return IterationPlanner(request, policy), ""
    decision = static_or_dynamic(request.candidates, request.charges, planning.lengths, policy)
    sentence = decision.sentence([str(s) for s in strategies], policy.gain)
    _log.info(sentence)
    return IterationPlanner(request, policy, None if decision.dynamic else decision.static), sentence
