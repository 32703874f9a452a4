"""Setup of the leading rank's straggler controller."""

from __future__ import annotations

from collections.abc import Mapping

from hydragraph.cluster.launch import World
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.engine.executable import Executable
from hydragraph.planner.policy import Policy
from hydragraph.spec.default_cluster import default_cluster
from hydragraph.spec.health import Health
from hydragraph.train.config import TrainConfig
from hydragraph.train.stragglers.background_replanning import Replanned, Replanner, ReplanQuestion
from hydragraph.train.stragglers.controller import Controller, Replanning
from hydragraph.train.stragglers.lateness import Lateness
from hydragraph.train.stragglers.monitor import Monitor
from hydragraph.train.stragglers.rate_estimator import Sensitivity
from hydragraph.train.stragglers.reshard_policy import ReshardPolicy, state_costs
from hydragraph.train.stragglers.straggler_state import SlowRank


def controller_of(
    config: TrainConfig,
    world: World,
    executor: Executable,
    before: Controller | None = None,
    numbers: Mapping[int, int] | None = None,
    hurried: bool = False,
    slow: Mapping[int, SlowRank] | None = None,
) -> Controller:
    """Return a controller with measured costs, or datasheet costs of equal devices.

    Args:
        before: previous controller, whose measurements are reused.
        slow: slow ranks found by a lost rank's controller.
    """
    slow = slow or {}
    profile, home = executor.profile, executor.owners
    if isinstance(profile, Costs):
        costs = profile.changed(home=home)
    elif profile is not None:
        costs = Costs(profile, profile.cluster(world.ranks), home=home)
    else:
        cluster = default_cluster(world.ranks)
        costs = Costs(datasheet(executor.program, cluster), cluster, home=home)
    if not config.watches:
        monitor = None
    elif before is None or before.monitor is None:
        monitor = Monitor(costs, Sensitivity(config.elastic.enter, config.elastic.leave), slow)
    else:
        # After a recovery, the remaining ranks' measurements continue under new numbers.
        monitor = before.monitor.among(costs, numbers or {})
    planner = None if before is None else before.released()
    following = None
    if world.ranks > 1 and (config.replans or follows(config, executor)):
        following = ReshardPolicy(
            executor.owners,
            world.ranks,
            executor.program.buckets,
            state_costs(costs),
            config.steps,
            config.elastic.dry_run,
            costs,
            config.home.rule,
        )
    if monitor is None or not config.replans:
        return Controller(monitor, following=following)
    # A recovery's strategies come from a quick plan for the known slow ranks.
    switched = hurried and bool(monitor.health.rates)
    if before is None:
        late = Lateness(
            switched, {rank: straggler.learned for rank, straggler in slow.items() if straggler.learned is not None}
        )
    else:
        late = before.late_among(numbers or {}, switched)

    def switch(answer: Replanned) -> None:
        assert answer.request is not None, "an answer with strategies has a request"
        executor.choose_from(answer.strategies, answer.request, answer.static, ready_first=True)

    running = executor.strategies
    sample = tuple(tuple(lengths) for lengths in executor.planning.lengths or ())
    may_stream = executor.may_stream
    question = ReplanQuestion(
        costs, sample, running, running, executor.request, policy_of(config), streaming=may_stream
    )
    return Controller(
        monitor,
        Replanning(
            question,
            planner or Replanner(),
            None if config.elastic.dry_run else switch,
            config.steps,
            changing=lambda: executor.changing,
            refused=lambda: executor.change_refused,
            hurried=hurried,
            static=executor.static,
            planned_for=late.planned(monitor.health) if hurried else Health(),
            late=late,
        ),
        following,
    )


def follows(config: TrainConfig, executor: Executable) -> bool:
    """Return whether the owners of state depend on strategies (`home: auto` with measured costs)."""
    if config.home.rule != "auto" or not config.plan.choose:
        return False
    profile = executor.profile
    return isinstance(profile, Costs) or (profile is not None and bool(profile.blocks) and profile.device is not None)


def policy_of(config: TrainConfig) -> Policy:
    plan = config.plan
    # `Policy` also counts the current mini-batch as planned ahead.
    return Policy(plan.gain, plan.sample, plan.workers, plan.ahead + 1, plan.patience_s, config.seed)
