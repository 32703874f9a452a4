"""`hg.compile(model, "auto")` over two gloo ranks: it measures, plans, explains, trains, and starts from the cache.

Speeds of devices are made up. Blocks are really timed once, but the tests do not depend on the result.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import hydragraph as hg
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join
from hydragraph.cluster.rendezvous.member import comes_late, here
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.measured_profile import Profile
from hydragraph.engine import automatic_plan, profile_cache
from hydragraph.engine.candidate_strategies import Planning
from hydragraph.engine.discovery import DiscoveredCluster, cluster_of, discover
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.planner import plan as planning
from hydragraph.runtime.device_reports import DeviceReport, types_of
from hydragraph.runtime.link_measurement import MeasuredLinks
from hydragraph.runtime.profile_fitting import TOO_SMALL
from hydragraph.runtime.profile_measurement import DevicePlace, MeasuredModel, MeasureSettings, measure_types
from hydragraph.spec.cluster import Cluster, Device, Interconnect
from hydragraph.spec.home import Home
from hydragraph.spec.stage_kind import StageKind
from tests.cost import priced
from tests.models import captured, llama, sequences
from tests.ready import Ready
from tests.thorough import thorough

LENGTHS = [[40, 12, 33, 64]] * 2
REPORTS = "hydragraph.runtime.device_reports._products_per_s"


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


@dataclass(frozen=True)
class Trained:
    """What one rank found: lines of the explanation, strategies, losses, and types that were measured."""

    lines: tuple[str, ...]
    strategies: tuple[str, ...]
    losses: tuple[float, ...]
    measured: tuple[str, ...]


def test_costs_have_the_state_of_the_optimizer() -> None:
    where = Cluster((Device(1e11, 8 * 10**9, 1e10),), Interconnect(1e9, 1e-5), Interconnect(1e9, 1e-5))
    program, model = captured("llama")
    exe = hg.compile(model, "<tp1,pp1>", sgd, device="cpu", program=program, profile=where)
    assert isinstance(exe.profile, Costs)
    assert exe.profile.state_bytes == 4
    exe.close()


def ready() -> Ready:
    return Ready.of(llama(layers=2), ["<tp1,pp1>", "<tp2,pp1>"])


def trained(prepared: Ready, speeds: tuple[float, ...], measuring: object, **options: Any) -> Trained:
    """Compile for ranks of these pretended speeds, and train two steps."""
    rank = int(os.environ["RANK"])
    counted = mock.Mock(side_effect=measuring)
    with mock.patch(REPORTS, return_value=speeds[rank]), mock.patch.object(automatic_plan, "measure_types", counted):
        exe = prepared.executable("auto", sgd, **options)
    batch = sequences(LENGTHS[0])
    try:
        losses = tuple(exe.step(batch).loss for _ in range(2))
        types = tuple(place.type for call in counted.call_args_list for place in call.args[4])
        return Trained(exe.explanation, tuple(s.name for s in exe.strategies), losses, types)
    finally:
        exe.close()


def pretended(
    subject: MeasuredModel,
    settings: MeasureSettings,
    groups: object,
    tell: object,
    places: list[DevicePlace],
    *_: object,
    **__: object,
) -> tuple[Profile, tuple[str, ...]]:
    """Return the costs of operations at the speeds that devices pretend to have, as if they had been measured."""
    speeds = {name: 4e10 if name.endswith("-25") else 1.6e11 for name in Counter(place.type for place in places)}
    cluster = Cluster(
        tuple(Device(speed, 8 * 10**9, 1e10, i, name) for i, (name, speed) in enumerate(speeds.items())),
        Interconnect(1e9, 1e-5),
        Interconnect(1e9, 1e-5),
    )
    profile = datasheet(subject.program, cluster, 1.0, [tp for tp, _ in settings.schemes])
    merged = Profile.merge([replace(each, others=(), efficiency=None) for each in (profile, *profile.others)])
    return merged, tuple(place.type for place in places)


def measured(*given: Any, **options: Any) -> tuple[Profile, tuple[str, ...]]:
    """Return measured costs, or pretended ones if the machine was too busy to measure."""
    profile, types = measure_types(*given, **options)
    return pretended(*given) if profile.unfit or profile.others else (profile, types)


def on_ranks(prepared: Ready, cache: Path) -> tuple[Trained, ...]:
    cheap: dict[str, Any] = {"LEAST_TOKENS": 128, "ATTEMPTS": ((1, 3),), "ASSUMED": (4, 64)}  # times decide nothing
    profiles = mock.patch.object(profile_cache, "folder", return_value=cache)  # graphs may come from other tests
    with profiles, mock.patch.multiple(automatic_plan, **cheap):
        return _on_ranks(prepared)


def _on_ranks(prepared: Ready) -> tuple[Trained, ...]:
    alike = (1000.0, 950.0)
    hurried = partial(planning.plan, deadline_s=0.0)
    with mock.patch.object(planning, "plan", hurried):
        first = trained(prepared, alike, measured, lengths=LENGTHS)
        again = trained(prepared, alike, AssertionError("it was measured before"), lengths=LENGTHS)
        uneven = trained(prepared, (250.0, 1000.0), pretended, lengths=LENGTHS)  # rank 1 plans
    return first, again, uneven


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Trained, ...]]:
    cache = tmp_path_factory.mktemp("profiles")
    return hg.launch(on_ranks, 2, ready(), cache, timeout=timedelta(minutes=15))


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    program, model = captured("llama")
    exe = hg.compile(model, "<tp1,pp1>", sgd, device="cpu", program=program)
    losses = tuple(exe.step(sequences(LENGTHS[0])).loss for _ in range(2))
    exe.close()
    return losses


def test_losses_are_those_of_one_device(ranks: list[tuple[Trained, ...]], alone: tuple[float, ...]) -> None:
    for every in ranks:
        for each in every:
            assert each.losses == pytest.approx(alone, rel=1e-5)


def test_all_ranks_have_one_plan_and_explain_it_in_at_most_eight_lines(ranks: list[tuple[Trained, ...]]) -> None:
    for mine, other in zip(*ranks, strict=True):
        assert mine == other
        assert 5 <= len(mine.lines) <= 8
        assert mine.lines[0].startswith("devices: ")
        assert mine.lines[1].startswith(f"plan: {mine.strategies[0]}: ")
        assert mine.lines[2].startswith("expected: ")
        assert any(line.startswith("plain ") for line in mine.lines)  # a usual strategy, and why it loses


def test_a_second_start_measures_no_blocks(ranks: list[tuple[Trained, ...]]) -> None:
    first, again, _ = ranks[0]
    assert len(set(first.measured)) == 1
    assert again.measured == ()
    assert again.lines[-1].startswith("costs: from the cache")


def test_a_throttled_device_is_a_type_of_its_own_and_gets_less(ranks: list[tuple[Trained, ...]]) -> None:
    uneven = ranks[0][2]
    slow, fast = uneven.measured
    assert slow == f"{fast}-25"
    assert f"1 x {fast} (" in uneven.lines[0]
    assert f"1 x {slow} (" in uneven.lines[0]


def joined(prepared: Ready, speeds: tuple[float, ...]) -> tuple[dict[int, float], tuple[str, ...]]:
    """Train until rank 1 is killed and another process has trained in its place, at the speed of the last one."""
    late = comes_late()
    rank = 2 if late else int(os.environ["RANK"])
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    with (
        mock.patch(REPORTS, return_value=speeds[rank]),
        mock.patch.object(automatic_plan, "measure_types", side_effect=pretended),
    ):
        exe = prepared.executable("auto", sgd, lengths=LENGTHS, home="equal copies=2")
        losses: dict[int, float] = {}
        while exe.steps < 4:
            try:
                if exe.steps == 1 and rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                while exe.steps == 3 and exe.ranks < 2:  # until the newcomer is here
                    exe.evaluate(sequences(LENGTHS[0]))
                    if (member := here()) is not None and exe.world.gather(member.called)[0]:
                        raise hg.Stopped(1000)
                losses[exe.steps] = exe.step(sequences(LENGTHS[0])).loss
            except (hg.RankFailure, hg.Stopped) as failure:
                hg.survive(exe, failure)
        assert isinstance(exe.profile, Costs)
        types = tuple(exe.profile.cluster.type_of(rank) for rank in range(exe.ranks))
        exe.close()
        return losses, types


@thorough
@pytest.mark.parametrize("speed", [1000.0, 250.0])
def test_a_device_of_a_new_type_that_joins_is_measured(speed: float, alone: tuple[float, ...]) -> None:
    speeds = (1000.0, 1000.0, speed)
    found = hg.launch(joined, 2, speeds, timeout=timedelta(minutes=10), prepare=ready, elastic=hg.Elastic())
    losses, types = found[0]
    assert found[1][1] == types
    assert (types[1] == types[0]) == (speed == 1000.0)
    assert types[1].endswith("-25") == (speed == 250.0)
    assert [losses[1], losses[2]] == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(("why", "stored"), [("noise hides the cost of attention", 0), (TOO_SMALL, 1)])
def test_times_that_a_busy_machine_made_useless_are_measured_again(why: str, stored: int, tmp_path: Path) -> None:
    program, model = captured("llama")

    def disturbed(*args: Any, **options: Any) -> tuple[Profile, tuple[str, ...]]:
        profile, types = pretended(*args, **options)
        return replace(profile, unfit={StageKind(2): why}), types

    groups = Groups(join("cpu"), timedelta(minutes=2))
    subject = automatic_plan.PlanningSubject.of(program, initial_buffers(model), "eager", Home(), None)
    found = discover(groups, lambda: 1000.0)
    with mock.patch.object(profile_cache, "folder", return_value=tmp_path):
        for _ in range(2):
            measured = mock.Mock(side_effect=disturbed)
            with mock.patch.multiple(automatic_plan, measure_types=measured, ATTEMPTS=((1, 3),)):
                automatic_plan._costs(subject, found, groups, Planning(lengths=LENGTHS), False)
    groups.close()
    assert measured.call_count == 1 - stored
    assert len(list(tmp_path.glob("*.json"))) == stored


def test_types_divided_by_the_times_of_blocks_are_planned_and_cached(tmp_path: Path) -> None:
    program, model = captured("llama")
    groups = Groups(join("cpu"), timedelta(minutes=2))
    subject = automatic_plan.PlanningSubject.of(program, initial_buffers(model), "eager", Home(), None)
    found = discover(groups, lambda: 1000.0)
    name = found.types[0]
    found = replace(found, reports=found.reports * 2, types=()).divided((name, name))
    types = (name, f"{name}-83.4")

    def uneven(*args: Any, **_: Any) -> tuple[Profile, tuple[str, ...]]:
        places = [replace(place, type=own) for place, own in zip(args[4], types, strict=True)]
        return pretended(args[0], args[1], args[2], args[3], places)

    planning = Planning(lengths=LENGTHS)
    with mock.patch.object(profile_cache, "folder", return_value=tmp_path):
        for source in (uneven, AssertionError("it was measured before")):
            with mock.patch.object(automatic_plan, "measure_types", side_effect=source):
                costs, _ = automatic_plan._costs(subject, found, groups, planning, False)
            assert tuple(costs.cluster.type_of(rank) for rank in range(2)) == types
            assert {costs.profile.type, *(other.type for other in costs.profile.others)} == {*types}
    groups.close()


@pytest.mark.parametrize(("speeds", "recalled"), [((127.0, 55.0), True), ((100.0, 60.0), False)])
def test_two_types_are_measured_again_only_if_their_ratio_has_changed(
    speeds: tuple[float, float], recalled: bool, tmp_path: Path
) -> None:
    def starting(*products_per_s: float) -> DiscoveredCluster:
        reports = tuple(
            DeviceReport(f"n{i}", f"h{i}", "cpu", 10**9, per_s, 1e9, 0.0, 1e9, 1, "", ())
            for i, per_s in enumerate(products_per_s)
        )
        network = (Interconnect(1e9, 1e-5),) * 2
        links = MeasuredLinks((None, None), network, network, (1, 1))
        return DiscoveredCluster(reports, types := types_of(reports), links, cluster_of(reports, types, links))

    first, later = starting(102.0, 38.0), starting(*speeds)
    keys = [automatic_plan._Keys("shared", f"own{rank}") for rank in range(2)]
    profile = Profile.merge([replace(priced.profile(2), type=name) for name in first.types])
    with mock.patch.object(profile_cache, "folder", return_value=tmp_path):
        automatic_plan._remember(keys, first, profile, first.types)
        found = automatic_plan._recalled(keys, later)
    assert (found is not None) == recalled
    if found is not None:
        assert found[1] == later.types
        assert {found[0].type, *(other.type for other in found[0].others)} == {*later.types}


@pytest.mark.parametrize(
    ("flops", "threads", "rank"),
    [
        ((1e9, 1e9, 2.5e9, 2.5e9), 1, 2),
        ((1e9, 1.1e9), 1, 0),  # nearly as fast
        ((1e9, 9e9), 0, 0),  # GPUs
    ],
)
def test_the_rank_with_the_fastest_cpu_plans(flops: tuple[float, ...], threads: int, rank: int) -> None:
    reports = [DeviceReport("n", "h", "cpu", 10**9, 1e3, each, 0.0, 1e9, threads, "", ()) for each in flops]
    assert automatic_plan.planning_rank(reports) == rank


@pytest.mark.parametrize(("full", "tries"), [(0.5, [False]), (0.9, [False, True])])
def test_recomputation_is_measured_if_the_plan_fills_a_device(full: float, tries: list[bool]) -> None:
    program, model = captured("llama")
    subject = automatic_plan.PlanningSubject.of(program, initial_buffers(model), "eager", Home(), None)
    where = Cluster((Device(1e11, 8 * 10**9, 1e10, type="g"),), Interconnect(1e9, 1e-5), Interconnect(1e9, 1e-5))
    costs = mock.Mock(return_value=(Costs(datasheet(program, where, 1.0, [1]), where), "made up"))
    plan = automatic_plan._Plan((hg.Strategy.parse("<tp1,pp1>", program.layers),), ("plan",), 0.0, full)
    with (
        mock.patch.multiple(automatic_plan, _costs=costs, _planned=mock.Mock(return_value=plan)),
        mock.patch(REPORTS, return_value=1000.0),
    ):
        found = automatic_plan.plan_automatically(subject, join("cpu"), Planning(lengths=LENGTHS))
    assert found.strategies == plan.strategies
    assert [call.args[4] for call in costs.call_args_list] == tries


def test_without_lengths_the_assumed_ones_are_told(tmp_path: Path) -> None:
    program, model = captured("llama")
    with (
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path)}),
        mock.patch.multiple(automatic_plan, ASSUMED=(4, 64), measure_types=pretended),
        mock.patch(REPORTS, return_value=1000.0),
    ):
        exe = hg.compile(model, "auto", device="cpu", program=program)
    assert exe.explanation[-1] == "no lengths were given: planned for 4 sequences of 64 tokens"
    exe.close()


def test_the_longest_measured_micro_batch_takes_at_most_a_second_unless_sequences_are_longer() -> None:
    program, _ = captured("llama")
    block = max(bucket.size for bucket in program.buckets)

    def longest(tokens_per_s: float) -> int:
        found: Any = SimpleNamespace(reports=[SimpleNamespace(flops_per_s=6.0 * block * tokens_per_s)])
        return automatic_plan._longest(program, found, required=64)

    with mock.patch.object(automatic_plan, "hidden_size", return_value=8192):
        assert [longest(tokens) for tokens in (0, 2100, 10**6)] == [64, 2100, 32768]


@thorough
def test_different_models_are_refused_before_they_are_measured() -> None:
    with pytest.raises(ValueError, match=r"rank 1 on .* and rank 0 on .* have different models .*: give every host"):
        hg.launch(of_other_depth, 2, timeout=timedelta(minutes=5))


def of_other_depth() -> None:
    with mock.patch(REPORTS, return_value=1000.0), mock.patch.object(automatic_plan, "measure_types", None):
        hg.compile(llama(layers=1 + int(os.environ["RANK"])), "auto", device="cpu", check="off", lengths=LENGTHS)


def test_a_device_too_small_for_any_layer_is_refused_with_a_remedy(tmp_path: Path) -> None:
    def small(groups: Any, probe: Any = None) -> DiscoveredCluster:
        found = discover(groups, lambda: 1000.0)
        devices = tuple(replace(device, memory_bytes=200_000) for device in found.cluster.devices)
        return replace(found, cluster=replace(found.cluster, devices=devices))

    program, model = captured("llama")
    with (
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path)}),
        mock.patch.object(automatic_plan, "discover", small),
        mock.patch.object(automatic_plan, "measure_types", pretended),
        pytest.raises(hg.Unsupported, match=r"nothing fits.*add devices"),
    ):
        hg.compile(model, "auto", device="cpu", program=program, lengths=LENGTHS)
