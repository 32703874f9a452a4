"""The strategies that a training chooses from, and what they are expected to cost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from hydragraph.cost.costs import Costs
from hydragraph.cost.profile import Profile, Scheme
from hydragraph.errors import Unsupported
from hydragraph.ir.program import Program
from hydragraph.passes.check_strategy import check_strategy
from hydragraph.planner.iteration import IterationPlanner
from hydragraph.planner.longest_first import rough_cost
from hydragraph.planner.policy import Policy, Settled, settle
from hydragraph.planner.setting import Setting
from hydragraph.spec.strategy import Strategy

Choices = Strategy | Sequence[Strategy] | Literal["auto"]

AUTO_CANDIDATES = 8  # that "auto" keeps
SAMPLE = 16  # mini-batches that they are improved and compared on

_log = logging.getLogger(__name__)


def candidates_of(
    given: Choices, program: Program, ranks: int, profile: Profile | None, batches: Sequence[Sequence[int]] | None
) -> tuple[Strategy, ...]:
    """Return the strategies to choose from, each checked.

    Args:
        given: one, several, or "auto": proposed for the data.
        batches: sequence lengths of sample mini-batches; "auto" needs them.

    Raises:
        Unsupported: "auto" lacks a profile or sample, or what was given is no strategy.
    """
    if isinstance(given, Strategy):
        found: tuple[Strategy, ...] = (given,)
    elif given == "auto":
        if profile is None or not batches:
            raise Unsupported(
                'strategy="auto" without a profile and a sample of the data',
                where="compile",
                remedy="pass profile= (measured by hydragraph profile) and lengths= (sequence lengths of some "
                "mini-batches), or a list of strategies",
            )
        found = proposed(program, ranks, profile, batches)
    elif isinstance(given, Sequence) and given and all(isinstance(s, Strategy) for s in given):
        found = tuple(dict.fromkeys(given))  # type: ignore[arg-type]
    else:
        raise Unsupported(
            f"strategy is {given!r}" if not isinstance(given, Sequence) else f"strategies are {list(given)!r}",
            where="compile",
            remedy='pass a Strategy, a list of them, or "auto"',
        )
    for strategy in found:
        check_strategy(program, strategy, ranks)
    return found


def proposed(program: Program, ranks: int, profile: Profile, batches: Sequence[Sequence[int]]) -> tuple[Strategy, ...]:
    """Return the best strategy for the sample, and those beside it that choosing every iteration gains most from.

    They are improved from the proposals for the data's lengths and the homogeneous strategies.
    """
    from hydragraph.planner.proposing import propose
    from hydragraph.planner.refining import homogeneous, refine

    usable = {s: k for s, k in profile.schemes.items() if s[0] * s[1] <= ranks and _fits(program, s)}
    fitting = replace(profile, schemes=usable, failed={})
    lengths = [n for batch in batches for n in batch if n]
    context = max(lengths, default=1)
    schemes = propose(fitting, lengths, ranks, context) + homogeneous(fitting, ranks)
    best = refine(schemes, fitting, batches[:SAMPLE], ranks, context=context)[:AUTO_CANDIDATES]
    return tuple(strategy_of(s, program.layers) for s in best)


def strategy_of(schemes: Sequence[Scheme], layers: int) -> Strategy:
    """Return pipelines of these schemes on devices 0, 1, ..., layers split evenly."""
    return Strategy.parse(" + ".join(f"<tp{tp},pp{pp}>" for tp, pp in schemes), layers=layers)


def _fits(program: Program, scheme: Scheme) -> bool:
    if scheme[1] > program.layers:
        return False
    try:
        check_strategy(program, strategy_of([scheme], program.layers), scheme[0] * scheme[1])
    except ValueError:
        return False
    return True


def setting_of(strategies: Sequence[Strategy], profile: Profile | None, ranks: int, seed: int) -> Setting:
    """Return what the planner needs of the candidates: measured costs, or rough ones without a profile."""
    if profile is None:
        rough = tuple(tuple(rough_cost(p) for p in s.pipelines) for s in strategies)
        return Setting(rough, (0.0,) * len(rough), seed, guessed=True)
    if not profile.blocks:  # published constants of whole schemes
        priced = tuple(tuple(profile.pipeline_of(p, ranks) for p in s.pipelines) for s in strategies)
        charges = tuple(profile.hetero_sync_s if len(set(c)) > 1 else 0.0 for c in priced)
        return Setting(priced, charges, seed)
    costs = Costs(profile, profile.cluster(ranks))
    every = tuple(tuple(costs.pipeline(p, s.schedule) for p in s.pipelines) for s in strategies)
    return Setting(every, tuple(costs.fixed(s) for s in strategies), seed)


def planner_of(
    strategies: Sequence[Strategy],
    profile: Profile | None,
    ranks: int,
    policy: Policy,
    batches: Sequence[Sequence[int]] | None,
) -> tuple[IterationPlanner, str]:
    """Return what plans every iteration, and a sentence about what was decided from the sample."""
    setting = setting_of(strategies, profile, ranks, policy.seed)
    if len(strategies) == 1 or not batches:
        return IterationPlanner(setting, policy), ""
    settled: Settled = settle(setting.candidates, setting.charges, batches, policy)
    sentence = settled.sentence([str(s) for s in strategies], policy.gain)
    _log.info(sentence)
    return IterationPlanner(setting, policy, None if settled.dynamic else settled.static), sentence
