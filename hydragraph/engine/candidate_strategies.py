"""Strategies that training chooses from, and their expected costs."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.failure.rank_watch import agreed
from hydragraph.cluster.launch import World
from hydragraph.cluster.once_per_node import OfferedFile
from hydragraph.cost.chosen_home import question_of
from hydragraph.cost.costs import Costs
from hydragraph.cost.home_choice import Question, choose_home
from hydragraph.cost.measured_profile import Profile, Scheme
from hydragraph.cost.schemes import schemes_of
from hydragraph.engine.background_compile import Beforehand, Readying
from hydragraph.engine.step_planner import IterationPlan, IterationPlanner
from hydragraph.errors import Unsupported
from hydragraph.frontend.mini_batch import Planned
from hydragraph.ir.program import Program
from hydragraph.passes.check_strategy import check_strategy
from hydragraph.planner.policy import Decision, Policy, static_or_dynamic
from hydragraph.planner.quick_plan import assign, rough_costs
from hydragraph.planner.request import PlanRequest
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.default_cluster import cluster_on
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

if TYPE_CHECKING:
    from hydragraph.planner.plan import Plan

Choices = Strategy | str | Sequence[Strategy | str] | Literal["auto"]  # texts as for `Strategy.parse`

AUTO_CANDIDATES = 8  # kept by "auto"
SAMPLE = 16  # mini-batches used to improve and compare them

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planning:
    """Inputs of the choice of strategies.

    Attributes:
        profile: measured costs of identical devices; or `Costs`, which describe how devices differ; None: rough costs.
        lengths: sequence lengths of sample mini-batches.
        policy: how iterations are planned.
        strategies: candidates that were planned already, for "auto"; none: they are proposed when they are needed.
        explanation: lines on devices and plan, for users.
    """

    profile: Profile | Costs | None = None
    lengths: Sequence[Sequence[int]] | None = None
    policy: Policy = field(default_factory=Policy)
    strategies: tuple[Strategy, ...] = ()
    explanation: tuple[str, ...] = ()


@dataclass(frozen=True)
class IterationChoice:
    """Strategy and assignment of one iteration.

    Attributes:
        strategy: strategy of the iteration.
        assignment: which pipeline computes which sequence.
        planned: how long choosing took, and the expected time.
    """

    strategy: Strategy
    assignment: Assignment
    planned: Planned


@dataclass(frozen=True)
class _Change:
    """Candidates that rank 0 will choose from once all ranks are ready for them."""

    strategies: tuple[Strategy, ...]
    request: PlanRequest
    static: int | None
    ready_first: bool


@dataclass(frozen=True)
class _Told:
    """Message from rank 0 to all others before each step; rank 0 does not wait for replies.

    Attributes:
        plan: the plan, or the reason why there is none.
        coming: new candidates, used from the next step on, or, with `ready_first`, once all ranks are ready.
    """

    plan: IterationPlan | ValueError | None
    coming: tuple[Strategy, ...]
    ready_first: bool


@dataclass(frozen=True)
class _Made:
    """Message from each rank to all others while they prepare for new strategies.

    Attributes:
        node: node of this rank.
        settled: whether no preparation is running on this rank.
        offer: result of the preparation.
    """

    node: str
    settled: bool
    offer: OfferedFile | None


class Chooser:
    """Chooses every iteration's strategy and assignment: rank 0 plans and broadcasts the plan.

    Args:
        strategies: candidates.
        groups: communicators of this process; only rank 0 has a planner.
        planner: rank 0's planner; None: use the first strategy, or the one that the caller passes.
        decision: on rank 0, a sentence on whether one strategy is kept; "" without a decision.
        refused: why the last change was rejected; "" if it was accepted or is in progress.
        planned: whether rank 0 plans.
        measured: whether it plans with measured costs, so that its expectations are in seconds.
        readying: prepares this rank for new strategies.
    """

    def __init__(
        self,
        strategies: tuple[Strategy, ...],
        groups: Groups,
        planner: IterationPlanner | None,
        decision: str,
        planned: bool,
        measured: bool,
        readying: Readying,
    ) -> None:
        self.decision = decision
        self._strategies = strategies
        self._groups = groups
        self._planner = planner
        self._planned = planned
        self._measured = measured
        self._readying = readying
        self._change: _Change | None = None  # on rank 0, until all ranks have applied it
        self._coming: tuple[Strategy, ...] = ()  # strategies that ranks prepare for, or are ready for
        self._making: Beforehand | None = None
        self._ready = False  # whether all ranks are ready
        self.refused = ""

    @staticmethod
    def of(
        strategies: tuple[Strategy, ...],
        groups: Groups,
        planning: Planning,
        home: Home,
        readying: Readying,
        before: Chooser | None = None,
    ) -> Chooser:
        """Create this rank's chooser, with a planner on rank 0 if there is anything to plan.

        Args:
            strategies, groups, readying: see `Chooser`.
            planning: inputs of the choice.
            home: where state lives.
            before: the previous chooser, which is closed; its planning processes, which are slow to start, are re-used.
        """
        measured = planning.profile is not None
        planned = measured or len(strategies) > 1
        planner: IterationPlanner | None = None
        decision = ""
        if planned and groups.world.rank == 0:
            ranks = groups.world.ranks
            planner, decision = planner_of(strategies, planning.profile, ranks, planning.policy, planning.lengths, home)
            if before is not None:
                planner.take_over(before._planner)
        if before is not None:
            before.close()
        return Chooser(strategies, groups, planner, decision, planned, measured, readying)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Current candidates."""
        return self._strategies

    @property
    def plans(self) -> bool:
        """Whether this rank plans."""
        return self._planner is not None

    def announce(self, lengths: tuple[int, ...]) -> None:
        """Plan a later mini-batch with sequences of these lengths while earlier ones run."""
        if self._planner is not None:
            self._planner.announce(lengths)

    def choose(self, lengths: tuple[int, ...], strategy: Strategy | None) -> IterationChoice:
        """Choose the strategy and assignment of a mini-batch; all ranks call it.

        Args:
            lengths: sequence lengths in tokens.
            strategy: the strategy to run; None: the best.

        Raises:
            ValueError: agreed on every rank: planning failed.
        """
        began = time.perf_counter()
        if strategy is not None or not self._planned:
            strategy = strategy or self._strategies[0]
            assignment = assign(strategy, lengths)
            return IterationChoice(strategy, assignment, Planned(time.perf_counter() - began))
        plan = self._plan(lengths)
        if isinstance(plan, ValueError):
            raise agreed(plan)
        expected = plan.seconds if self._measured else 0.0
        planned = Planned(time.perf_counter() - began, plan.hidden_s, expected)
        return IterationChoice(self._strategies[plan.candidate], plan.assignment, planned)

    def change(
        self, strategies: tuple[Strategy, ...], request: PlanRequest, static: int | None, ready_first: bool
    ) -> None:
        """Choose from other strategies. The planning rank calls it; its next plan informs the others.

        Args:
            strategies: new candidates.
            request: their costs, in the same order.
            static: index of the candidate to keep; None: choose every time.
            ready_first: wait until all ranks have the graphs they need, which are compiled in the background.

        Raises:
            Unsupported: the previous request has just become ready.
        """
        assert self._planner is not None, "the rank that plans changes what it chooses from"
        if self._ready:
            raise Unsupported(
                "what was asked for before has just got ready, and is chosen from in the next step",
                where="choose_from",
                remedy="ask again after that step",
            )
        self._change = _Change(strategies, request, static, ready_first)
        self.refused = ""

    @property
    def changing(self) -> bool:
        """On the planning rank: whether a change is pending."""
        return self._change is not None or self._ready

    def close(self) -> None:
        """Stop the planner's workers and any preparation."""
        if self._planner is not None:
            self._planner.close()
        self._drop()

    def _plan(self, lengths: tuple[int, ...]) -> IterationPlan | ValueError:
        """Return rank 0's plan, or the reason why there is none, on every rank."""
        if self._ready:
            self._strategies = self._coming
            self._replan()
            self._drop()
        change = self._change
        if change is not None and not change.ready_first:
            self._replan()
        plan: IterationPlan | ValueError | None = None
        if self._planner is not None:
            try:
                plan = self._planner.plan(lengths)
            except ValueError as error:
                plan = error
        told = self._groups.tell(
            _Told(
                plan,
                () if change is None else change.strategies,
                change is not None and change.ready_first,
            )
        )
        self._follow(told)
        assert told.plan is not None, "rank 0 plans"
        return told.plan

    def _replan(self) -> None:
        """Apply the pending change to the planner, if this rank has one."""
        if self._planner is not None and self._change is not None:
            self._planner.change(self._change.request, self._change.static)
        self._change = None

    def _follow(self, told: _Told) -> None:
        """Prepare for new strategies, or check whether all ranks are ready; all ranks act on the same message."""
        coming = told.coming
        if coming and not told.ready_first:  # this plan's candidate index refers to these
            self._drop()
            self._strategies = coming
        elif coming and coming != self._coming:
            self._drop()
            self._coming = coming
            self._making = self._readying.begin(coming)
        elif coming:
            self._see()

    def _see(self) -> None:
        """Check whether all ranks are ready for the new strategies."""
        making, node = self._making, self._groups.world.node
        settled = making is None or making.settled
        every = self._groups.gather_objects(_Made(node, settled, None if making is None else making.offer))
        if all(each.settled for each in every):
            here = [each.offer for each in every if each.offer is not None and each.node == node]
            refused = self._groups.gather_objects("".join(map(self._readying.take, here)))
            self.refused = next(filter(None, refused), "")
            self._ready = not self.refused
            if self.refused:
                self._change = None
                self._drop()

    def _drop(self) -> None:
        """Discard the new strategies and their preparation."""
        if self._making is not None:
            self._making.close()
        self._coming = ()
        self._making = None
        self._ready = False


def candidates_of(
    given: Choices,
    program: Program,
    ranks: int,
    profile: Profile | Costs | None,
    batches: Sequence[Sequence[int]] | None,
    home: Home | None = None,
    passed: Collection[Strategy] = (),
    streaming: bool = True,
) -> tuple[Strategy, ...]:
    """Return the checked strategies to choose from.

    Args:
        given: one strategy, several, or "auto": proposed for the data, or planned for devices that differ. Texts are
            parsed for the model's number of layers.
        batches: sequence lengths of sample mini-batches; required by "auto".
        home: where state lives, so that "auto" can judge what fits in memory; None: equal shares.
        passed: strategies that another rank of this run has already checked for the same program.
        streaming: whether stages of planned strategies may stream.

    Raises:
        Unsupported: "auto" without a profile or sample, costs for another number of ranks, or `given` is not a
            strategy.
        ValueError: a text cannot be parsed as a strategy.
    """
    if isinstance(profile, Costs) and profile.ranks != ranks:
        raise Unsupported(
            f"costs of {profile.ranks} devices on {ranks} ranks",
            where="compile",
            remedy="give costs whose cluster has one device per rank",
        )
    several = [given] if isinstance(given, Strategy | str) else given
    if isinstance(given, str) and given == "auto":
        if profile is None or not batches:
            raise Unsupported(
                'strategy="auto" with a profile and without a sample of the data',
                where="compile",
                remedy="pass lengths= (sequence lengths of some mini-batches) too, or leave out the profile",
            )
        if isinstance(profile, Costs):
            found = _able(program, profile, planned_for(program, profile, batches, home, streaming=streaming))
        else:
            found = proposed(program, ranks, profile, batches, home)
    elif isinstance(several, Sequence) and several and all(isinstance(s, Strategy | str) for s in several):
        found = tuple(dict.fromkeys(strategy_for(s, program) for s in several))
    else:
        raise Unsupported(
            f"strategy is {given!r}" if not isinstance(given, Sequence) else f"strategies are {list(given)!r}",
            where="compile",
            remedy='pass a Strategy, a text such as "<tp2,pp1> + 2*<tp1,pp1>", a list of them, or "auto"',
        )
    for strategy in found:
        if strategy not in passed:
            check_strategy(program, strategy, ranks)
    return found


def candidates_among(world: World, given: Choices, *how: Any) -> tuple[Strategy, ...]:
    """Return `candidates_of(given, *how)` on every rank of a world; for "auto", only rank 0 searches.

    Raises:
        ValueError: as for `candidates_of`, on all ranks.
    """
    if not (isinstance(given, str) and given == "auto"):
        return candidates_of(given, *how)
    found: tuple[Strategy, ...] | ValueError | None = None
    if world.rank == 0:
        try:
            found = candidates_of(given, *how)
        except ValueError as refused:
            found = refused
    found = world.gather(found)[0]
    if isinstance(found, ValueError):
        raise found
    assert found is not None, "rank 0 searches"
    return found


def home_among(
    world: World,
    program: Program,
    home: Home,
    strategies: Sequence[Strategy],
    planning: Planning,
    weights: Sequence[float] | None = None,
) -> Home:
    """Choose owners for the strategies; rank 0 chooses, and all ranks of the world return its home.

    Args:
        world: all its ranks call this function.
        program: the model.
        home: a home with a rule; one without a rule is returned unchanged.
        strategies: strategies that run.
        planning: measured costs, if available, which describe links, rates and memory.
        weights: how often each strategy runs.

    Raises:
        ValueError: on all ranks: the home does not fit them.
    """
    if home.rule is None:
        return home
    nodes = world.gather(world.node)
    chosen: Home | ValueError | None = None
    if world.rank == 0:
        try:
            question = _question(program, home, strategies, planning, [nodes.index(node) for node in nodes])
            chosen = choose_home(replace(question, weights=None if weights is None else tuple(weights)))
        except ValueError as refused:
            chosen = refused
    chosen = world.gather(chosen)[0]
    if isinstance(chosen, ValueError):
        raise chosen
    assert chosen is not None, "rank 0 chooses"
    return chosen


def _question(
    program: Program, home: Home, strategies: Sequence[Strategy], planning: Planning, nodes: Sequence[int]
) -> Question:
    """Return the inputs for choosing a home on ranks of these nodes."""
    costs = planning.profile
    if isinstance(costs, Profile):
        known = costs.blocks and costs.device is not None and len(set(nodes)) == 1
        costs = Costs(costs, costs.cluster(len(nodes))) if known else None
    if home.copies > 1 and len(set(nodes)) > 1:  # on one node, each rank counts as one
        home = replace(home, nodes=home.nodes or tuple(nodes))
    if costs is None:
        return _unmeasured(program, strategies, home, nodes)
    longest = max((n for batch in planning.lengths or () for n in batch), default=None)
    question = question_of(costs, strategies, home, longest)
    return replace(question, outline=program.outline, buckets=program.buckets)


def home_on(program: Program, strategies: Sequence[Strategy], home: Home, nodes: Sequence[int]) -> Home:
    """Choose owners for the strategies on ranks of these nodes, without measurements.

    Strategies that do not fit the ranks or the model are ignored.
    """
    fitting = [strategy for strategy in strategies if runs(program, strategy, len(nodes))]
    if home.rule is None or not fitting:
        return home.without_rule
    return choose_home(_unmeasured(program, fitting, home, nodes))


def _unmeasured(program: Program, strategies: Sequence[Strategy], home: Home, nodes: Sequence[int]) -> Question:
    size = program.dtype.itemsize
    return Question(program.outline, program.buckets, tuple(strategies), cluster_on(nodes), home, size)


def strategy_for(given: Strategy | str, program: Program) -> Strategy:
    """Return a strategy; a text is parsed for the program's layers.

    Raises:
        ValueError: it is neither a Strategy nor the text of one.
    """
    if isinstance(given, Strategy):
        return given
    if not isinstance(given, str):
        raise ValueError(f"strategy is {given!r}; pass a Strategy, or its text such as '<tp2,pp1>'")
    return Strategy.parse(given, program.layers)


def proposed(
    program: Program, ranks: int, profile: Profile, batches: Sequence[Sequence[int]], home: Home | None = None
) -> tuple[Strategy, ...]:
    """Return the best strategy for the sample, and those that add most when one is chosen every iteration.

    The search starts from the proposals for the data's lengths and from the homogeneous strategies.
    """
    from hydragraph.planner.generators.hydraulis import propose
    from hydragraph.planner.improve_schemes import homogeneous, refine

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
    schedules: Sequence[str] = ("1f1b",),
    streaming: bool = True,
) -> Plan:
    """Return the plan that `hg.plan` finds for a sample on devices that differ.

    Args:
        schedules: the pipeline schedules that the run can use.
        streaming: whether its stages may stream.

    Raises:
        Unsupported: no strategy fits both these devices and this model, or the costs are of another model.
    """
    from hydragraph.planner.plan import plan
    from hydragraph.spec.training_workload import Workload

    if costs.profile.layers not in (None, program.layers):
        raise Unsupported(
            f"costs of a model of {costs.profile.layers} layers, and this one has {program.layers}",
            where="compile",
            remedy="measure this model: hydragraph profile",
        )
    sample = sample_of(batches)
    if not sample:
        raise Unsupported(
            'strategy="auto" with mini-batches that hold no tokens',
            where="compile",
            remedy="pass lengths= of mini-batches that do",
        )
    workload = Workload(lengths=sample)
    return plan(costs.changed(home=home), workload, schedules=schedules, streaming=streaming)


def _able(program: Program, costs: Costs, plan: Plan) -> tuple[Strategy, ...]:
    """Return a plan's strategies that the program can run, best first.

    Raises:
        ValueError: there are none.
    """
    able = tuple(strategy for strategy in plan.strategies if runs(program, strategy, costs.ranks))
    if not able:
        check_strategy(program, plan.strategies[0], costs.ranks)  # raises the reason
    return able


def at_once_among(
    world: World,
    program: Program,
    costs: Costs,
    batches: Sequence[Sequence[int]],
    home: Home,
    running: Sequence[Strategy],
) -> Strategy | None:
    """Return a good strategy for devices that differ, on all ranks, which wait for the search; None: search more
    carefully.

    Args:
        world: its rank 0 searches.
        batches: sequence lengths of sample mini-batches.
        home: where state lives.
        running: strategies that ran before, best first; their ranks beyond those of the costs are lost.
    """
    found = _at_once(program, costs, batches, home, running) if world.rank == 0 else None
    return world.gather(found)[0]


def _at_once(
    program: Program, costs: Costs, batches: Sequence[Sequence[int]], home: Home, running: Sequence[Strategy]
) -> Strategy | None:
    from hydragraph.planner.immediate_plan import plan_at_once
    from hydragraph.spec.training_workload import Workload

    sample = sample_of(batches)
    if not sample or costs.profile.layers not in (None, program.layers):
        return None
    try:
        found = plan_at_once(costs.changed(home=home), Workload(lengths=sample), running)
    except Unsupported:
        return None
    return found.strategy if found is not None and runs(program, found.strategy, costs.ranks) else None


def sample_of(batches: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the first mini-batches without empty sequences."""
    return tuple(lengths for batch in batches if (lengths := tuple(n for n in batch if n)))[:SAMPLE]


def runs(program: Program, strategy: Strategy, ranks: int) -> bool:
    """Return whether a program can run a strategy on so many ranks."""
    try:
        check_strategy(program, strategy, ranks)
    except ValueError:
        return False
    return True


def strategy_of(schemes: Sequence[Scheme], layers: int) -> Strategy:
    """Return a strategy with pipelines of these schemes on devices 0, 1, ..., with layers split evenly."""
    return Strategy.parse(" + ".join(f"<tp{tp},pp{pp}>" for tp, pp in schemes), layers=layers)


def _fits(program: Program, scheme: Scheme) -> bool:
    if scheme[1] > program.layers:
        return False
    return runs(program, strategy_of([scheme], program.layers), scheme[0] * scheme[1])


def request_of(
    strategies: Sequence[Strategy], profile: Profile | Costs | None, ranks: int, seed: int, home: Home | None = None
) -> PlanRequest:
    """Return the costs of the candidates that the planner needs: measured, or rough ones without a profile."""
    if profile is None:
        rough = tuple(rough_costs(s) for s in strategies)
        return PlanRequest(rough, (0.0,) * len(rough), seed, guessed=True)
    if isinstance(profile, Profile) and not profile.blocks:  # published constants of whole schemes
        for strategy in strategies:
            if strategy.shares:
                raise Unsupported(
                    "its pipelines share stages, and the profile knows constants of whole pipelines only",
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
    every = tuple(costs.pipelines(s) for s in strategies)
    return PlanRequest(every, tuple(costs.fixed(s) for s in strategies), seed)


def planner_of(
    strategies: Sequence[Strategy],
    profile: Profile | Costs | None,
    ranks: int,
    policy: Policy,
    batches: Sequence[Sequence[int]] | None,
    home: Home | None = None,
) -> tuple[IterationPlanner, str]:
    """Return the planner of every iteration, and a sentence on the decision made from the sample."""
    request = request_of(strategies, profile, ranks, policy.seed, home)
    if len(strategies) == 1 or not batches:
        return IterationPlanner(request, policy), ""
    decision: Decision = static_or_dynamic(request.candidates, request.charges, batches, policy)
    sentence = decision.sentence([str(s) for s in strategies], policy.gain)
    _log.info(sentence)
    return IterationPlanner(request, policy, None if decision.dynamic else decision.static), sentence
