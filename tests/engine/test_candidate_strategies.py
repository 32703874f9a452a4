"""Choosing a strategy every step, over gloo processes: the losses are those of one device, whatever is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import hydragraph as hg
from hydragraph.cost.block_pieces import Constants
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.measured_profile import Profile
from hydragraph.engine import candidate_strategies
from hydragraph.engine.strategy_selector import StrategySelector
from hydragraph.spec.cluster import Cluster, Device, Interconnect
from tests import models
from tests.engine.test_planning_service import pids_of
from tests.generations import regroup
from tests.own_models import small
from tests.ready import Ready
from tests.thorough import thorough

Ways = dict[str, list[tuple[float, str]]]
Datasheets = tuple[list[tuple[int, ...]], bool]

TEXTS = ("<tp2,pp1>", "2*<tp1,pp1>", "<tp1,pp2>")
WIDER = ("<tp2,pp1> + <tp1,pp2>", "4*<tp1,pp1>", "<tp2,pp2>")
LAYERS = 2
# made up so that short mini-batches prefer several pipelines, and long sequences fit two devices only
PROFILE = Profile(
    "made up",
    {(1, 1): Constants(1e-6, 1e-4, 1e-4), (2, 1): Constants(5e-7, 7e-5, 4e-4), (1, 2): Constants(5e-7, 5e-5, 3e-4)},
    {1: 16, 2: 16},
    limits={(1, 1): 64, (2, 1): 120, (1, 2): 110},
)


def mini_batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [[9, 30, 17, 60, 2, 44], [110, 20, 7], [64] * 4, [5, 3]]
    return [[torch.randint(0, 97, (n,), generator=generator) for n in each] for each in sizes]


@pytest.fixture(scope="module")
def prepared() -> Ready:
    return Ready.of(small(LAYERS), TEXTS)


def trained(prepared: Ready, how: str) -> list[tuple[float, str]]:
    layers = {"layers": LAYERS}
    candidates = [hg.Strategy.parse(t, **layers) for t in TEXTS]
    given = {"alone": "<tp1,pp1>", "auto": "auto"}.get(how, candidates)
    planning = {"profile": PROFILE, "lengths": [[len(s) for s in b] for b in mini_batches()]} if how == "auto" else {}
    executable = prepared.executable(
        given,
        lambda named: torch.optim.SGD(named, lr=0.1),
        policy=hg.Policy(workers=int(how == "ahead"), gain=0.0),
        **planning,
    )
    found = []
    try:
        for i, batch in enumerate(mini_batches()):
            if how == "ahead":
                for later in mini_batches()[i : i + 2]:
                    executable.announce(later)
            report = executable.step(batch)
            found.append((report.loss, report.strategy))
        if how == "auto":
            said = executable.decision
            assert said.startswith("a strategy is chosen every iteration") if executable.rank == 0 else not said
            with pytest.raises(hg.Unsupported, match="125 tokens, more than any pipeline can hold"):
                executable.step([torch.zeros(125, dtype=torch.int64)])
            assert executable.step(mini_batches()[0]).loss > 0  # all ranks refused together, so they stay usable
        return found
    finally:
        executable.close()


def planning_processes(prepared: Ready) -> list[int]:
    """Move to another choice, in the same world and then after a failure; say which processes planned."""
    exe = prepared.executable(
        [hg.Strategy.parse(t, layers=LAYERS) for t in WIDER], lambda named: torch.optim.SGD(named, lr=0.1)
    )
    pids = []
    world, everybody = exe.world, range(exe.ranks)
    for number, batch in enumerate(mini_batches()[:3]):
        if number == 1:
            exe.move(world, hg.Home(), everybody, strategy=list(WIDER[:2]))
        if number == 2:
            exe.leave()
            again = regroup(1, everybody)
            assert again is not None
            exe.move(again, hg.Home(), everybody)
        exe.announce(batch)
        exe.step(batch)
        chooser: StrategySelector = exe._chooser
        planner = chooser._planner
        if planner is not None:
            assert planner._service is not None
            pids += pids_of(planner._service)
    exe.close()
    return pids


@thorough
def test_the_process_that_plans_stays_where_strategies_and_ranks_change(prepared: Ready) -> None:
    first, *others = hg.launch(planning_processes, 4, prepared)
    assert others == [[]] * 3
    assert len(first) == 3
    assert len(set(first)) == 1


def by_datasheets(prepared: Ready) -> Datasheets:
    """Train a step on a slow and a fast device; return each pipeline's tokens, and whether losses are equal."""
    link = Interconnect(1e11, 1e-6)
    devices = (Device(1e9, 10**10, 1e12, type="slow"), Device(3e9, 10**10, 1e12, node=1, type="fast"))
    cluster = hg.Cluster(devices, link, link)
    batch = [torch.arange(97)] * 40
    found = []
    lengths = [[len(sequence) for sequence in batch]]
    for strategy in ("2*<tp1,pp1>", "auto", ["2*<tp1,pp1>", "<tp2,pp1>"]):  # the last one across nodes
        exe = prepared.executable(
            strategy, lambda named: torch.optim.SGD(named, lr=0.1), profile=cluster, lengths=lengths
        )
        found.append(exe.step(batch))
        exe.close()
    tokens = [tuple(sum(map(sum, pipeline)) for pipeline in report.assignment.tokens) for report in found]
    return tokens, all(report.loss == pytest.approx(found[0].loss, rel=1e-5) for report in found)


def on_ranks(prepared: Ready) -> tuple[Ways, Datasheets]:
    return {how: trained(prepared, how) for how in ("ahead", "auto")}, by_datasheets(prepared)


@pytest.fixture(scope="module")
def ranks(prepared: Ready) -> list[tuple[Ways, Datasheets]]:
    return hg.launch(on_ranks, 2, prepared)


@pytest.fixture(scope="module")
def alone(prepared: Ready) -> list[tuple[float, str]]:
    return trained(prepared, "alone")


@pytest.mark.parametrize("how", ["ahead", "auto"])
def test_losses_are_those_of_one_device_whatever_is_chosen(
    how: str, ranks: list[tuple[Ways, Datasheets]], alone: list[tuple[float, str]]
) -> None:
    every = [ways[how] for ways, _ in ranks]
    assert every == [every[0]] * 2
    for (loss, _), (expected, _) in zip(every[0], alone, strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
    if how == "auto":
        assert len({strategy for _, strategy in every[0]}) > 1


def test_owners_without_costs_are_chosen_by_the_bytes_of_pushed_gradients() -> None:
    program = replace(models.captured("llama")[0], push_dtype=torch.bfloat16)
    asked = candidate_strategies._unmeasured(program, [hg.Strategy.parse("<tp1,pp1>", 2)], hg.Home(), [0])
    assert asked.push_itemsize == 2


def test_a_cluster_gives_costs_by_its_datasheets(
    ranks: list[tuple[Ways, Datasheets]],
) -> None:
    (first, equal), other = (found for _, found in ranks)
    assert other == (first, equal)
    assert 0 < 2 * first[0][0] < first[0][1]
    assert equal


def test_auto_by_a_profile_needs_data() -> None:
    with pytest.raises(hg.Unsupported, match=r"with a profile needs a sample.*lengths"):
        hg.compile(models.llama(layers=LAYERS, vocab=97), "auto", profile=PROFILE)
    with pytest.raises(hg.Unsupported, match=r"pass a Strategy, a text.*, a list of them"):
        hg.compile(models.llama(layers=LAYERS, vocab=97), [("<tp1,pp1>",)])  # pyrefly: ignore[bad-argument-type]


def test_costs_are_those_of_the_runs_pushes(prepared: Ready) -> None:
    cluster = Cluster.homogeneous(1, device=Device(1e12, 10**10, 1e11), within_node=Interconnect(1e10, 1e-6))
    costs = hg.Costs(datasheet(prepared.variants.program, cluster), cluster)
    exe = prepared.executable("<tp1,pp1>", profile=costs, push_dtype=torch.bfloat16, check="off")
    try:
        assert isinstance(exe.profile, hg.Costs)
        assert (costs.push_itemsize, exe.profile.push_itemsize) == (4, 2)
    finally:
        exe.close()
