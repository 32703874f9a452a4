"""Measuring a tiny model on two local ranks; the tests do not depend on their speed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import mean, median, stdev
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hydragraph as hg
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join, launch
from hydragraph.cost.block_pieces import AUX, BlockPiece, MemoryLines, PricedDevice
from hydragraph.cost.compiled_blocks import CompiledBlocks
from hydragraph.cost.costs import Costs
from hydragraph.cost.curves import ZERO
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.measured_profile import Profile
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.ir.program import Program
from hydragraph.passes.variants import Variants
from hydragraph.runtime import profile_measurement
from hydragraph.runtime.link_measurement import SIZES
from hydragraph.runtime.profile_measurement import (
    CHAIN,
    PRECISE,
    USABLE,
    Bench,
    DevicePlace,
    MeasuredModel,
    MeasureSettings,
    _Timing,
    device_memories,
    host_memory,
    measure,
    memory_shares,
    stages_measured_at_once,
    standard_error,
)
from hydragraph.spec.stage_kind import StageKind
from tests.cost.walked import rank_memory
from tests.models import captured

LAYERS, RANKS = 2, 2
SETTINGS = MeasureSettings(
    ((1, 1), (2, 1), (1, 2)), (StageKind(2, True), StageKind(1, False, True)), longest=128, repeats=2
)


def measured_rank(
    program: Program, model: nn.Module, variants: Variants, settings: MeasureSettings
) -> tuple[Profile, list[str]]:
    """Return the profile and the progress messages."""
    groups = Groups(join("cpu"), timedelta(minutes=2))
    told: list[str] = []
    subject = MeasuredModel(program, initial_buffers(model), 101, 256)
    profile = measure(subject, settings, groups, lambda done, total, what: told.append(f"{done}/{total} {what}"))
    groups.close()
    return profile, told


@pytest.fixture(scope="module")
def variants() -> Variants:
    texts = ("<tp1,pp1>", "<tp1,pp1>r", "<tp2,pp1>", "<tp2,pp1>s")
    return hg.precompile(captured("llama")[0], [hg.Strategy.parse(text, layers=LAYERS) for text in texts])


@pytest.fixture(scope="module")
def ranks(variants: Variants) -> list[tuple[Profile, list[str]]]:
    return launch(measured_rank, RANKS, *captured("llama"), variants, SETTINGS, timeout=timedelta(minutes=15))


def test_every_rank_gets_the_same_profile(ranks: list[tuple[Profile, list[str]]], tmp_path: Path) -> None:
    profile = ranks[0][0]
    assert profile == ranks[1][0]
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def test_everything_asked_for_is_measured_or_failed(ranks: list[tuple[Profile, list[str]]]) -> None:
    profile, told = ranks[0]
    assert {*profile.schemes, *profile.failed} == set(SETTINGS.schemes)
    assert not set(profile.schemes) & set(profile.failed)
    assert {*profile.pieces, *profile.unfit} == {
        StageKind(1),
        StageKind(2),
        StageKind(2, True),
        StageKind(1, False, True),
    }
    assert set(profile.util) == {1, 2}
    assert [size for size, _ in profile.messages] == list(SIZES)
    assert all(seconds > 0 for _, seconds in profile.messages)
    assert profile.commit_s > 0 or profile.norm_s > 0
    assert len(profile.blocks) == LAYERS + 2
    for pieces in profile.pieces.values():
        assert set(pieces) == {*profile.blocks, AUX}
    assert told[0].startswith("0/20 tp1 embed")
    assert told[16] == "16/20 repetition 1 of at most 2"
    assert told[-3:] == ["18/20 messages", "19/20 update", "20/20 "]


def test_only_layers_have_a_quadratic_part(ranks: list[tuple[Profile, list[str]]]) -> None:
    profile = ranks[0][0]
    for pieces in profile.pieces.values():
        # Noise may hide the layers' part: test_profile_fitting has the exact cases.
        for template in (profile.blocks[0], profile.blocks[-1], AUX):
            assert pieces[template].forward.a == pieces[template].backward.a == 0


def test_halves_cut_weights_and_most_of_what_is_kept(ranks: list[tuple[Profile, list[str]]]) -> None:
    profile = ranks[0][0]
    if not {StageKind(1), StageKind(2)} <= set(profile.pieces):
        pytest.skip(f"this machine is too busy to measure: {profile.unfit}")
    layer = profile.blocks[1]
    one, two = (profile.pieces[StageKind(tp)][layer] for tp in (1, 2))
    assert two.parameters == pytest.approx(one.parameters / 2, rel=0.02)  # norms are whole on both
    assert one.held is not None
    assert two.held is not None
    assert one.held.saved[1] / 2 < two.held.saved[1] < one.held.saved[1]


@pytest.mark.parametrize("text", ["<tp1,pp1>", "<[0]x1r,[1]x1r>", "<tp1,pp2>", "<tp2,pp1>"])
def test_max_len_is_what_the_memory_model_says(
    ranks: list[tuple[Profile, list[str]]], variants: Variants, text: str
) -> None:
    profile = ranks[0][0]
    strategy = hg.Strategy.parse(text, layers=LAYERS)
    kinds = {StageKind(s.tp, s.sequence_parallel, s.recompute) for s in strategy.pipelines[0].stages}
    if not kinds <= set(profile.pieces):
        pytest.skip(f"this machine is too busy to measure: {profile.unfit}")
    assert profile.device is not None
    small = replace(profile, device=replace(profile.device, memory=2e8))
    count = len(strategy.devices)
    tokens = Costs(small, small.cluster(count)).pipeline(strategy.pipelines[0]).max_len
    blocks, batches = CompiledBlocks(variants.program, variants.get), [[MicroBatch(tokens, 1)] * 4]
    most = max(rank_memory(blocks, strategy, batches, r, count, messages=False).total for r in range(count))
    assert 0.75 * 2e8 < most <= 1.05 * 2e8


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (MeasureSettings(((4, 1),)), "scheme tp4pp1 needs 4 ranks for one stage, but there are 2: add ranks"),
        (MeasureSettings(((1, 3),)), "scheme tp1pp3 has 3 stages for 2 layers"),
        (MeasureSettings(((1, 1),), (StageKind(4, True),)), "tensor-parallel degree 4 does not fit 2 ranks"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: MeasureSettings, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        settings.check(captured("llama")[0], 2)


def test_micro_batches_divide_for_sequence_parallelism() -> None:
    rows = MeasureSettings(((1, 1), (2, 1), (3, 1)), longest=1000).micro_batches
    assert all(sum(row) % 6 == 0 for row in rows)
    assert {len(row) for row in rows} == {1, 4}


@pytest.mark.parametrize(
    ("found", "share"),
    [
        ([("a", 80, 0)], 80),
        ([("a", 80, 0), ("b", 60, 0)], 60),
        ([("a", 70, 4), ("a", 68, 6)], 39),  # one device of 80: 2 + 2 elsewhere, 10 held, 68 left
        ([("a", 70, 4), ("a", 68, 6), ("b", 30, 5)], 35),
    ],
)
def test_a_share_leaves_out_what_others_hold(found: list[tuple[str, int, int]], share: float) -> None:
    assert min(memory_shares(found)) == share


def test_ranks_split_a_gpus_memory_only_if_it_is_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process may see only its own GPU, as cuda:0."""
    uuids = iter("abb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=next(uuids)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    reports: list[object] = []

    def gather(report: object) -> list[object]:
        reports.append(report)
        return reports

    groups: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cuda:0")), gather=gather)
    found = [device_memories(groups) for _ in range(3)]
    assert found[-1] == [USABLE * memory for memory in (80, 40, 40)]


def test_the_limit_of_a_job_or_container_is_that_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_memory() > 10**8
    monkeypatch.setattr(profile_measurement, "memory_limit", lambda: 6e9)
    groups: Any = SimpleNamespace(
        world=SimpleNamespace(device=torch.device("cpu"), rank=0), gather=lambda report: [report] * 2
    )
    assert device_memories(groups) == [USABLE * 3e9] * 2


def timing(*seconds: float) -> _Timing:
    """Return a timing of one micro-batch on one rank, with the seconds of these repetitions."""
    bench: Any = mock.Mock()
    bench.turn.side_effect = [[[(each / 3, each * 2 / 3)]] for each in seconds]
    piece = BlockPiece(ZERO, ZERO)
    made = _Timing(bench, mock.Mock(), {"a": ((8,),)}, ((8,),), [1], [piece], {"a": [(0,)]}, frozenset())
    for _ in seconds:
        made.repeat()
    return made


@pytest.mark.parametrize(
    ("seconds", "median"),
    [([9.0, 1.0, 1.2, 9.0], 1.2), ([9.0, 1.2], 1.2), ([1.2, 1.204], 1.202), ([1.2, 1.0], 1.0)],
)
def test_a_warm_up_that_takes_another_time_does_not_count(seconds: list[float], median: float) -> None:
    measured = timing(*seconds).of("a")
    assert measured.seconds == pytest.approx((median,))
    assert measured.forward == pytest.approx((median / 3,))


@pytest.mark.parametrize(
    ("seconds", "precise"),
    [
        ([1.0, 1.01], True),
        ([1.0, 1.1], False),
        ([9.0, 1.0, 1.01], True),  # after a warm-up
        ([9.0, 1.0, 1.1, 1.0, 1.0], True),  # a temporary load
        ([9.0, 0.9, 1.0, 1.1, 1.2, 0.8], False),
        ([0.0, 0.0], True),  # a rank outside all stages
    ],
)
def test_repetitions_end_when_their_error_is_small(seconds: list[float], precise: bool) -> None:
    assert (timing(*seconds).error < PRECISE) == precise


def test_the_error_is_that_of_the_median_of_normal_times() -> None:
    draw = random.Random(0)
    samples = [[draw.gauss(1.0, 0.05) for _ in range(15)] for _ in range(2000)]
    assert mean(map(standard_error, samples)) == pytest.approx(stdev(map(median, samples)), rel=0.1)


def test_stages_are_within_a_node_and_a_type() -> None:
    places = [
        DevicePlace("a", "fast"),
        DevicePlace("a", "slow"),
        DevicePlace("a", "fast"),
        DevicePlace("b", "fast"),
        DevicePlace("b", "fast"),
    ]
    assert stages_measured_at_once(places, 1) == ((0,), (2,), (1,), (3,), (4,))
    assert stages_measured_at_once(places, 2) == ((0, 2), (3, 4))
    assert stages_measured_at_once(places, 3) == ()


def test_blocks_are_measured_in_chains_of_as_many_as_the_memory_takes() -> None:
    program, _ = captured("llama")
    groups = Groups(join("cpu"), timedelta(minutes=2))
    held = MemoryLines(saved=(0.0, 50.0), backward=(1000.0, 10.0))
    piece = BlockPiece(ZERO, ZERO, parameters=100, held=held)
    device = PricedDevice("here", 1000.0 + 100 * 10.0 + 3 * (100 * 12 + 100 * 50.0), 4)
    bench = Bench(MeasuredModel(program, {}, 101, 256), StageKind(1), groups, [DevicePlace("", "")], device)
    layer = program.blocks[1]
    assert len(bench._chain(layer, 9)) == min(CHAIN, sum(b.template == layer.template for b in program.blocks))
    assert len(bench._chain(layer, 1)) == len(bench._chain(program.blocks[0], 9)) == 1
    rows = [(100,), (50, 50), (400,)]
    assert bench._links(piece, rows, 3) == [3, 3, 1]
    assert bench._links(piece, rows, 2) == [3, 3, 0]
    groups.close()


def test_a_small_device_does_not_shorten_what_others_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    program, model = captured("llama")
    groups = Groups(join("cpu"), timedelta(minutes=2))
    places = [DevicePlace("a", "large"), DevicePlace("b", "small")]
    subject = MeasuredModel(program, initial_buffers(model), 101, 256)
    bench = Bench(subject, StageKind(1), groups, places, PricedDevice("here", 1e9, 4))
    reduce = mock.Mock(side_effect=groups.all_reduce)
    with monkeypatch.context() as patched:
        patched.setattr(groups, "gather", lambda own: [own, 16.0])
        rows = bench.that_fit([(8,), (32,)], program.blocks[:2])
    assert rows == {"large": ((8,), (32,)), "small": ((8,),)}
    monkeypatch.setattr(groups, "all_reduce", reduce)
    ((short, long),) = bench.turn(program.blocks[1], rows["large"], [1, 0])
    groups.close()
    assert short[0] > 0
    assert long == (0.0, 0.0)
    assert reduce.call_count == 3, "as many as on the other ranks"


def test_ranks_whose_blocks_take_other_times_become_types_of_their_own() -> None:
    program, _ = captured("llama")
    places = [DevicePlace("a", "g"), DevicePlace("a", "g"), DevicePlace("b", "g"), DevicePlace("b", "g")]
    piece = BlockPiece(ZERO, ZERO)
    rows = {"g": ((8,), (16,))}
    seconds = [1.0, 1.01, 1.2, 1.21]
    timings = []
    for block in program.blocks[:2]:
        for kind, stages in ((StageKind(1), [(0,), (1,), (2,), (3,)]), (StageKind(2), [(0, 1), (2, 3)])):
            bench: Any = SimpleNamespace(kind=kind)
            turns = [[[(s, 2 * s)] * 2 for s in seconds]] * 3
            timings.append(
                _Timing(bench, block, rows, rows["g"], [1, 1], [piece] * 4, {"g": stages}, frozenset(), [*turns])
            )
    types = profile_measurement._split(program, timings, places)
    assert types == ("g", "g", "g-83.4", "g-83.4")
    plain, paired = (timing.divided(types) for timing in timings[:2])
    assert plain.of("g").seconds == pytest.approx((3.015, 3.015))
    assert plain.of("g-83.4").seconds == pytest.approx((3.615, 3.615))
    assert paired.stages == {"g": [(0, 1)], "g-83.4": [(2, 3)]}
    mixed = timings[1].divided(("g", "g", "g", "h"))
    assert mixed.stages == {"g": [(0, 1)], "h": [(2, 3)]}


def test_a_single_repetition_divides_no_type() -> None:
    assert timing(1.0, 1.2).seconds(0, 2) == (2.4, math.inf)
    middle, error = timing(9.0, 1.0, 1.1, 1.2).seconds(0, 1)
    assert middle == pytest.approx(1.1)
    assert error == pytest.approx(0.1 * math.sqrt(math.pi / 6))
