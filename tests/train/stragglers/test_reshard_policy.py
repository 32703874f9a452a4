"""State follows its ranks' speed: what is decided when, and a run that moves it in parts, to the same losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cluster.launch import World
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home, Rule
from hydragraph.spec.record import from_record
from hydragraph.train import loop
from hydragraph.train.config import TrainConfig
from hydragraph.train.step_metrics import read_metrics
from hydragraph.train.stragglers import reshard_policy
from hydragraph.train.stragglers.controller import Controller
from hydragraph.train.stragglers.reshard_plan import StateCosts
from hydragraph.train.stragglers.reshard_policy import COOLDOWN, MIX, ReshardPolicy, state_costs
from hydragraph.train.stragglers.run_events import RunEvent, read_events
from hydragraph.train.train_state import Run
from tests.cost.priced import cluster, costs, mixed
from tests.thorough import thorough
from tests.train.plain import PlainExecutor, Watched, compile_plain, settings
from tests.train.stragglers.test_reshard_plan import BUCKETS, COSTS

SLOW = Health({1: 5.0})
HOME_OF_SLOW = Home((1.0, 0.2, 1.0, 1.0))


def test_a_slow_rank_gives_state_away_in_parts_and_gets_it_back() -> None:
    following = ReshardPolicy(Home(), 4, BUCKETS, StateCosts(0.4, 12, 20_000), 10_000)
    assert following.stepped(5, Health(), 1.0) == ()
    (event,) = following.stepped(6, SLOW, 1.0)
    assert (event.event, event.ranks, event.done, event.rates) == ("migrate", (1,), True, {1: 5.0})
    assert event.before_s is not None
    assert event.after_s is not None
    assert event.after_s < event.before_s
    assert "parts while training continues" in event.why
    parts = 0
    while (home := following.next) is not None:
        following.begun()
        assert following.next is None, "one part at a time"
        assert following.home != home, "the part arrives at the end of the step"
        assert following.stepped(7, Health(), 1.0) == (), "one thing at a time"
        assert following.home == home
        parts += 1
    assert parts > 1
    assert following.home.shares == (1.0, 0.2, 1.0, 1.0)
    assert following.stepped(6 + COOLDOWN - 1, Health(), 1.0) == (), "rates are noisy"
    (back,) = following.stepped(6 + COOLDOWN, Health(), 100.0)
    assert back.event == "migrate"
    assert "in 1 parts" in back.why, "a longer step hides a larger part"


def test_the_users_home_is_restored_after_a_rank_was_slow() -> None:
    given = Home((3.0, 1.0, 1.0, 0.0))
    following = ReshardPolicy(given, 4, BUCKETS, StateCosts(0.4, 12, 1e9), 10_000)
    assert following.stepped(1, Health(), 1.0) == ()
    (_,) = following.stepped(2, SLOW, 1.0)
    while following.next is not None:
        following.begun()
        following.stepped(3, SLOW, 1.0)
    assert following.home != given
    (back,) = following.stepped(2 + COOLDOWN, Health(), 1.0)
    assert "no rank is slow" in back.why
    assert following.target == given


def test_state_goes_to_where_the_strategies_of_late_use_it_if_that_pays() -> None:
    where = cluster(2, 1, outer=Interconnect(1e6, 0.0))
    found = costs(4, where, home=Home())
    pipeline, both = (hg.Strategy.parse(text, 4) for text in ("<tp1,pp2>", "2*<tp1,pp1>"))
    of_stages = found.changed(home=Home(rule="auto")).of_strategies(pipeline).home

    def following(steps: int, rule: Rule | None = "auto") -> ReshardPolicy:
        return ReshardPolicy(Home(), 2, found.buckets, state_costs(found), steps, memory=found, rule=rule)

    moving = following(10_000)
    for step in range(1, MIX):
        assert moving.stepped(step, Health(), 100.0, [pipeline, both]) == (), "too few steps to tell"
    (event,) = moving.stepped(MIX, Health(), 100.0, [pipeline, both])
    assert "the state is placed for strategies that no longer run" in event.why
    assert moving.target == of_stages
    moving.begun()
    events = [e for step in range(MIX + 1, 4 * MIX) for e in moving.stepped(step, Health(), 100.0, [both, pipeline])]
    assert events
    assert all(event.event == "migrate" for event in events)
    # Where little is to come, or owners are not chosen, it stays.
    for still in (following(MIX), following(10_000, None)):
        assert not any(still.stepped(step, Health(), 100.0, [pipeline]) for step in range(1, 2 * MIX))


def test_a_choice_of_owners_counts_the_bytes_of_pushed_gradients() -> None:
    found = costs(4, cluster(2, 1), home=Home()).changed(push_itemsize=2)
    following = ReshardPolicy(Home(), 2, found.buckets, state_costs(found), 10, memory=found, rule="auto")
    following.stepped(1, Health(), 1.0, [hg.Strategy.parse("<tp1,pp2>", 4)])
    question = following._question(Health(), state_costs(found))
    assert question is not None
    assert question.push_itemsize == 2


def test_what_does_not_pay_a_dry_run_and_lost_ranks_move_nothing() -> None:
    assert ReshardPolicy(Home(), 4, BUCKETS, COSTS, 10).stepped(10, SLOW, 1.0) == ()
    assert ReshardPolicy(Home(), 4, BUCKETS, COSTS, 10_000).stepped(1, Health({1: float("inf")}), 1.0) == ()
    dry = ReshardPolicy(Home(), 4, BUCKETS, COSTS, 10_000, dry_run=True)
    (event,) = dry.stepped(1, SLOW, 1.0)
    assert not event.done
    assert event.why.startswith("dry run, not done")
    assert dry.next is None


def test_state_costs_are_the_profiles_and_the_slowest_links() -> None:
    found = costs(4, mixed())
    elements = sum(bucket.size for bucket in found.buckets)
    known = state_costs(found)
    updates = [found.piece_profile(rank).update for rank in range(4)]
    assert known.update_s == max(update[1] for update in updates if update is not None) * elements
    assert known.bytes_per_s == found.cluster.link(0, 2).bytes_per_s
    assert known.bytes_per_element == found.state_bytes


def roomy(strategy: hg.Strategy, of: Costs, room: Sequence[float], tokens: int) -> Costs:
    """Return costs on devices whose free memory is `room` times their part of the state."""
    need = of.beside(strategy, [tokens] * len(strategy.pipelines))
    sizes = [n + of.owned(rank) * 16 * (1 + room[rank]) for rank, n in enumerate(need)]
    devices = tuple(replace(d, memory_bytes=int(n)) for d, n in zip(of.cluster.devices, sizes, strict=True))
    return of.changed(cluster=replace(of.cluster, devices=devices))


@given(
    st.lists(st.sampled_from([1.0, 2.57, 5.42, 12.53]), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 1.0, 3.0, 5.0, 9.0]), min_size=4, max_size=4),
    st.sampled_from([64, 640, 6400]),
    st.sampled_from(["4*<tp1,pp1>", "<tp1,pp2> + 2*<tp1,pp1>", "<tp2,pp1>", "<[0]x2,[2]x2> + <[1]x2,[2]x2>"]),
)
def test_no_home_is_decided_that_does_not_fit(rates: list[float], room: list[float], tokens: int, text: str) -> None:
    """Against the memory that `max_len` walks, on the way and at last, of devices with room for more or less."""
    strategy = hg.Strategy.parse(text, layers=4)
    found = roomy(strategy, costs(4, cluster(4), elements=10_000), room, tokens)
    assume(all(found.max_len(p, strategy) >= tokens for p in strategy.pipelines))
    following = ReshardPolicy(Home(), 4, found.buckets, state_costs(found), 10**9, memory=found)
    following.stepped(1, Health(dict(enumerate(rates))), 1e-3, (strategy,), tokens)
    event("moves" if following.next else "stays")
    while (home := following.next) is not None:
        after = found.changed(home=home)
        assert all(after.max_len(p, strategy) >= tokens for p in strategy.pipelines)
        both = [after.owned(rank) * 16 for rank in range(4)]
        assert all(size <= after.memory_of(rank) for rank, size in enumerate(both))
        following.begun()
        following.stepped(2, Health(), 1.0)


@pytest.mark.parametrize(
    ("room", "shares"), [((0, 0, 0, 9), None), ((3, 3, 3, 9), (0.767, 0.08, 0.767, 1)), ((9, 9, 9, 9), (1, 0, 1, 1))]
)
def test_state_stays_or_goes_where_there_is_room(room: tuple[int, ...], shares: tuple[float, ...] | None) -> None:
    """A rank needs memory for its present state and, bucket by bucket, for the state that replaces it."""
    strategy = hg.Strategy.parse("4*<tp1,pp1>", layers=24)
    found = roomy(strategy, costs(24, cluster(4), elements=100_000), room, 640)
    following = ReshardPolicy(Home(), 4, found.buckets, state_costs(found), 10**9, memory=found)
    events = following.stepped(1, Health({1: 12.53}), 1e-9, (strategy,), 640)
    assert bool(events) == (shares is not None)
    assert following.target.shares == (shares if shares is None else pytest.approx(shares, abs=0.02))


class Judged:
    """A monitor for which rank 1 is slow from its third step on."""

    def __init__(self) -> None:
        self.steps = 0

    @property
    def health(self) -> Health:
        return SLOW if self.steps > 2 else Health()

    def baseline(self, *_: object) -> None:
        """Do nothing; a monitor has this method."""

    def observe(self, *_: object) -> tuple[()]:
        self.steps += 1
        return ()


def train(config: TrainConfig, follows: bool) -> list[tuple[float, ...]]:
    homes: list[tuple[float, ...]] = []

    def controller(config: TrainConfig, world: World, executor: Any) -> Controller:
        buckets = executor.program.buckets
        cost = StateCosts(1e6, 12, 1e4)  # parts of a bucket: steps take milliseconds
        following = ReshardPolicy(executor.owners, world.ranks, buckets, cost, config.steps)
        return Controller(Judged(), None, following if follows else None)  # pyrefly: ignore[bad-argument-type]

    class Watching:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    def compiled(*args: Any, **named: Any) -> hg.Executable:
        exe = hg.compile(*args, **named)
        homes.append(())
        rehome = exe.rehome

        def noted(home: Home | str) -> None:
            assert isinstance(home, Home), "the parts of a way are homes"
            homes.append(tuple(home.shares or ()))
            rehome(home)

        exe.rehome = noted  # pyrefly: ignore[method-assign]
        return exe

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "controller_of", controller)
        loop.train(config, "new", compiled, Watching())  # pyrefly: ignore[bad-argument-type]
    return homes


class Calling:
    """A controller that only says where state is to live."""

    def __init__(self, following: ReshardPolicy) -> None:
        self.following = following

    def stepped(self, report: Any) -> tuple[RunEvent, ...]:
        return self.following.stepped(report.step, SLOW, 1.0)

    def close(self) -> None:
        """Nothing to end."""


def test_the_loop_moves_one_part_beside_each_step_and_trains_every_step_once(tmp_path: Path) -> None:
    following = ReshardPolicy(Home(), 4, BUCKETS, StateCosts(1e6, 12, 20_000), 10_000)
    moves: list[tuple[int, Home]] = []
    promises: list[int] = []

    def compiled(*args: Any, **named: Any) -> PlainExecutor:
        exe = compile_plain(*args, **named)
        exe.rehome = lambda home: moves.append((exe.steps, home))
        exe.promise = lambda *_: promises.append(exe.steps)  # pyrefly: ignore[bad-assignment, method-assign]
        return exe

    seldom = {"evaluate_every": 0, "checkpoint_every": 0}
    config = from_record(TrainConfig, settings(tmp_path) | seldom | {"steps": 4, "elastic": {"monitor": True}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "controller_of", lambda *_: Calling(following))
        outcome = loop.train(config, "new", compiled, Watched())
    assert [metrics.step for metrics in outcome.history] == [1, 2, 3, 4]
    assert len(moves) > 1
    assert [steps for steps, _ in moves] == [*range(1, len(moves) + 1)], "a part during each step"
    assert promises == [0, *range(len(moves), 3)], (
        "all ranks agree before a part is sent, and no step follows the last one"
    )
    assert following.home == moves[-1][1] == HOME_OF_SLOW
    assert [event.event for event in read_events(tmp_path / "run" / "events.jsonl")].count("migrate") == 1


@thorough
def test_a_run_whose_state_moves_has_the_bits_of_one_whose_state_stays(tmp_path: Path) -> None:
    losses = []
    for follows in (True, False):
        changed = {"steps": 8, "ranks": 2, "strategies": ["2*<tp1,pp1>"], "check": "off", "deterministic": True}
        output = tmp_path / str(follows)
        raw = settings(tmp_path) | changed | {"elastic": {"monitor": True}, "output": str(output)}
        homes = hg.launch(train, 2, from_record(TrainConfig, raw), follows, timeout=timedelta(seconds=120))
        assert homes[0] == homes[1]
        assert (len(homes[0]) > 2) == follows
        losses.append([metrics.loss for metrics in read_metrics(output / "metrics.jsonl")])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


def train_in_phases(config: TrainConfig, prices: bool) -> list[Home]:
    """Train with a pipeline and then with data parallelism over a slow link; return the homes of the run."""
    homes: list[Home] = []

    class Watching:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    def compiled(*args: Any, **named: Any) -> hg.Executable:
        exe = hg.compile(*args, **named)
        homes.append(exe.owners)
        where = cluster(2, 1, outer=Interconnect(1e6, 0.0))
        if prices:
            exe.planning = replace(exe.planning, profile=Costs(datasheet(exe.program, where), where))
        rehome = exe.rehome

        def noted(home: Home | str) -> None:
            assert isinstance(home, Home), "the parts of a way are homes"
            homes.append(home)
            rehome(home)

        exe.rehome = noted  # pyrefly: ignore[method-assign]
        return exe

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard_policy, "MIX", 2)
        patch.setattr(reshard_policy, "COOLDOWN", 2)
        patch.setattr(Run, "strategy_of", lambda run, step: run.executor.strategies[step > 6])
        loop.train(config, "new", compiled, Watching())  # pyrefly: ignore[bad-argument-type]
    return homes


@thorough
def test_state_follows_the_strategies_that_a_run_chooses_and_no_bit_changes(tmp_path: Path) -> None:
    seen = []
    for prices in (True, False):
        strategies = {"strategies": ["<tp1,pp2>", "2*<tp1,pp1>"], "plan": {"choose": True}}
        changed = {"steps": 14, "ranks": 2, "check": "off", "deterministic": True, "max_grad_norm": 1.0}
        output = tmp_path / str(prices)
        raw = settings(tmp_path) | changed | strategies | {"output": str(output)}
        homes = hg.launch(train_in_phases, 2, from_record(TrainConfig, raw), prices, timeout=timedelta(seconds=120))
        assert homes[0] == homes[1]
        seen.append([(metrics.loss, metrics.grad_norm) for metrics in read_metrics(output / "metrics.jsonl")])
        assert homes[0][0].buckets, "each stage of the pipeline uses its own blocks"
        if prices:
            assert homes[0][-1] == Home((1.0, 1.0)), "data parallelism uses all blocks on all ranks"
        else:
            assert len(homes[0]) == 1, "without a prediction, the home must stay"
    assert seen[0] == seen[1]
    assert len(seen[0]) == 14
