"""Timelines against schedules computed by hand, and bounds on random strategies."""

# pyrefly: ignore-errors[bad-argument-type]
from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.cost.actors import Actor, ActorProgram, stage_actors
from hydragraph.cost.instruction_work import ExcludedCosts
from hydragraph.cost.timeline import Timeline, run
from hydragraph.ir.instruction import Op, Stream
from hydragraph.ir.program_outline import Outline
from hydragraph.passes.pipeline import rank_programs
from hydragraph.spec.cluster import Cluster, Device, Interconnect
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy import Strategy
from tests.cost.explicit_work import ExplicitWork
from tests.passes.test_pipeline import iterations, model

INSTANT, DEVICE = Interconnect(1e300, 0.0), Device(1.0, 1, 1.0)


def cluster(ranks: int, link: Interconnect = INSTANT) -> Cluster:
    return Cluster.homogeneous(ranks, device=DEVICE, within_node=link)


def compute(outline: Outline, ranks: int, forward: float, backward: float) -> dict[tuple[Op, str, int], float]:
    """Give every layer the same seconds on every rank."""
    layers = [block for block in outline.blocks if block.startswith("layer")]
    both = ((Op.FORWARD, forward), (Op.BACKWARD, backward))
    return {(op, block, rank): seconds for op, seconds in both for block in layers for rank in range(ranks)}


def timeline(
    strategy: Strategy, counts: list[int], work: ExplicitWork, link: Interconnect = INSTANT, mode: str = "train"
) -> Timeline:
    ranks = max(strategy.devices) + 1
    actors = stage_actors(model(strategy.layers), strategy, counts, ranks, mode)
    return run(actors, cluster(ranks, link), work)


def chain(stages: int, schedule: str, layers: int = 1) -> Strategy:
    return Strategy((Pipeline(tuple(Stage((i,), layers) for i in range(stages))),), schedule)


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 5), st.integers(1, 7), st.integers(1, 4), st.integers(1, 4))
def test_equal_stages_take_m_plus_p_minus_1_rounds(schedule: str, p: int, m: int, f: int, b: int) -> None:
    strategy = chain(p, schedule, layers=2)
    found = timeline(strategy, [m], ExplicitWork(compute(model(2 * p), p, f / 2, b / 2), {}, {}, {}))
    assert found.seconds == pytest.approx((m + p - 1) * (f + b))
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1))


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 4), st.integers(1, 4))
def test_halved_backwards_leave_a_bubble_without_weight_gradients(p: int, m: int, f: int, b: int) -> None:
    strategy = chain(p, "zb-h1", layers=2)
    found = timeline(strategy, [m], ExplicitWork(compute(model(2 * p), p, f / 2, b / 2), {}, {}, {}))
    assert found.seconds == pytest.approx(m * (f + b) + (p - 1) * (f + b / 2))


def starts(found: Timeline, rank: int) -> list[tuple[str, int | None, float, float]]:
    spans = (s for s in found.ranks[rank] if s.instruction.op in (Op.FORWARD, Op.BACKWARD) and s.seconds)
    return [(s.instruction.op.name[0], s.instruction.micro_batch, s.start_s, s.end_s) for s in spans]


def test_the_example_of_the_engine() -> None:
    work = ExplicitWork(compute(model(2), 2, 1, 2), {}, {}, {0: 0.5})
    found = timeline(chain(2, "1f1b"), [1], work, Interconnect(1.0, 0.0))
    assert starts(found, 0) == [("F", 0, 0, 1), ("B", 0, 5, 7)]
    assert starts(found, 1) == [("F", 0, 1.5, 2.5), ("B", 0, 2.5, 4.5)]


def test_two_stages_of_one_forward_one_backward_by_hand() -> None:
    found = timeline(chain(2, "1f1b"), [3], ExplicitWork(compute(model(2), 2, 1, 2), {}, {}, {}))
    assert starts(found, 0) == [
        ("F", 0, 0, 1),
        ("F", 1, 1, 2),
        ("B", 0, 4, 6),
        ("F", 2, 6, 7),
        ("B", 1, 7, 9),
        ("B", 2, 10, 12),
    ]
    assert starts(found, 1) == [
        ("F", 0, 1, 2),
        ("B", 0, 2, 4),
        ("F", 1, 4, 5),
        ("B", 1, 5, 7),
        ("F", 2, 7, 8),
        ("B", 2, 8, 10),
    ]


def test_two_stages_of_gpipe_by_hand_with_a_slow_second_stage() -> None:
    seconds = compute(model(2), 2, 1, 2) | {(Op.FORWARD, "layer.1", 1): 3.0}
    found = timeline(chain(2, "gpipe"), [2], ExplicitWork(seconds, {}, {}, {}))
    assert starts(found, 1) == [("F", 0, 1, 4), ("F", 1, 4, 7), ("B", 0, 7, 9), ("B", 1, 9, 11)]
    assert starts(found, 0) == [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 0, 9, 11), ("B", 1, 11, 13)]


def test_activations_travel_with_latency_and_bandwidth() -> None:
    work = ExplicitWork(compute(model(2), 2, 1, 1), {}, {}, {0: 8.0})
    assert timeline(chain(2, "1f1b"), [1], work, Interconnect(4.0, 0.5)).seconds == pytest.approx(1 + 2.5 + 2 + 2.5 + 1)


def test_tensor_parallel_ranks_go_at_the_pace_of_the_slowest() -> None:
    strategy = Strategy((Pipeline((Stage((0, 1), 2),)),))
    seconds = compute(model(2), 2, 1, 1) | {(Op.FORWARD, "layer.0", 1): 5.0, (Op.BACKWARD, "layer.1", 0): 3.0}
    found = timeline(strategy, [1], ExplicitWork(seconds, {}, {}, {}))
    assert found.seconds == 5 + 1 + 3 + 1
    assert [s[2:] for s in starts(found, 0)] == [s[2:] for s in starts(found, 1)] == [(0, 5), (5, 6), (6, 9), (9, 10)]


def test_pipelines_meet_at_the_commit_and_then_update() -> None:
    strategy = Strategy((Pipeline((Stage((0,), 2),)), Pipeline((Stage((1,), 2),))))
    seconds = compute(model(2), 2, 1, 1) | {(Op.UPDATE, "", rank): 0.25 for rank in range(2)}
    found = timeline(strategy, [1, 3], ExplicitWork(seconds, {}, {}, {}))
    assert found.seconds == 12.25
    commits = [s for spans in found.ranks for s in spans if s.instruction.op is Op.COMMIT]
    assert [(s.start_s, s.end_s) for s in commits] == [(12, 12), (12, 12)]


def test_computation_waits_for_its_weights_only() -> None:
    """Rank 1 sends rank 0 each layer's weights in 2 s: the second layer's arrive while the first one computes."""
    pulls = {"layer.0": {(1, 0): 8.0}, "layer.1": {(1, 0): 8.0}}
    strategy = Strategy((Pipeline((Stage((0,), 2),)), Pipeline((Stage((1,), 2),))))
    found = timeline(strategy, [1, 0], ExplicitWork(compute(model(2), 2, 1, 1), pulls, {}, {}), Interconnect(4.0, 0.0))
    assert [s[2:] for s in starts(found, 0)] == [(2, 3), (4, 5), (5, 6), (6, 7)]
    assert found.busy_s(0, Stream.PULL) == found.busy_s(1, Stream.PULL) == 4.0


def test_pushes_overlap_with_backward_and_the_commit_waits_for_them() -> None:
    pushes = {"layer.1": {(0, 1): 4.0}, "layer.0": {(0, 1): 12.0}}
    strategy = Strategy((Pipeline((Stage((0,), 2),)), Pipeline((Stage((1,), 2),))))
    found = timeline(strategy, [1, 0], ExplicitWork(compute(model(2), 2, 1, 1), {}, pushes, {}), Interconnect(4.0, 0.0))
    spans = {s.instruction.target: (s.start_s, s.end_s) for s in found.ranks[0] if s.instruction.op is Op.PUSH}
    assert spans["layer.1"] == (3, 4)
    assert spans["layer.0"] == (4, 7)
    assert found.seconds == 7


@pytest.mark.parametrize(("copy", "waits"), [(1.0, 0.0), (3.0, 15.0)])
def test_copies_to_the_host_run_beside_computation(copy: float, waits: float) -> None:
    # Six layers, forward 1 s and backward 2 s each. Copies of 3 s, one after another: five out from 1 to 16 s, of which
    # each delays the layer after the next; five back from 16 to 31 s; then the backward of layer 0.
    strategy = Strategy.parse("<tp1,pp1>o", 6)
    seconds = compute(model(6), 1, 1, 2) | {(Op.OFFLOAD, f"layer.{i}", 0): copy for i in range(5)}
    found = timeline(strategy, [1], ExplicitWork(seconds, {}, {}, {}))
    assert found.seconds == 18 + waits
    assert found.exposed_s(0, Stream.OFFLOAD) == pytest.approx(waits)
    assert found.busy_s(0, Stream.OFFLOAD) == 10 * copy
    assert found.critical_path.by_kind.get("copying to and from the host", 0.0) == (30 if waits else 0)
    assert "offload" in str(found)


def test_sums_are_handed_on_while_the_next_push_goes_on() -> None:
    """Layer 1's sums are there at 4 and at rank 1 at 6; layer 0's at 7 and, as ports share nothing else, at 9."""
    pushes = {"layer.1": {(0, 1): 4.0}, "layer.0": {(0, 1): 12.0}}
    handed = {bucket: {(1, 0): 8.0} for bucket in pushes}
    strategy = Strategy((Pipeline((Stage((0,), 2),)), Pipeline((Stage((1,), 2),))))
    work = ExplicitWork(compute(model(2), 2, 1, 1), {}, pushes, {}, handed_bytes=handed)
    found = timeline(strategy, [1, 0], work, Interconnect(4.0, 0.0))
    spans = {s.instruction.target: (s.start_s, s.end_s) for s in found.ranks[0] if s.instruction.op is Op.PUSH}
    assert (spans["layer.1"], spans["layer.0"]) == ((3, 6), (4, 9))
    assert found.busy_s(0, Stream.PUSH) == 6
    assert found.seconds == sum(found.critical_path.by_kind.values()) == 9
    assert timeline(strategy, [1, 0], ExcludedCosts(work, "push"), Interconnect(4.0, 0.0)).seconds == 4


def test_messages_in_and_out_run_at_once_and_one_after_another() -> None:
    strategy = Strategy.parse("3*<tp1,pp1>", 1)
    pulls = {"layer.0": {(0, 1): 4.0, (0, 2): 4.0, (1, 0): 4.0}}
    found = timeline(strategy, [1, 1, 1], ExplicitWork({}, pulls, {}, {}), Interconnect(4.0, 0.0), mode="evaluate")
    assert [found.busy_s(rank, Stream.PULL) for rank in range(3)] == [2, 1, 1]


@settings(max_examples=max(20, settings.default.max_examples // 20))
@given(iterations(), st.floats(0, 9), st.floats(0, 9))
def test_any_iteration_ends_and_takes_no_less_than_its_busiest_stream(iteration, fast, slow) -> None:  # pyrefly: ignore[implicit-any-parameter]
    outline, strategy, counts, mode, ranks = iteration
    programs = rank_programs(outline, strategy, counts, mode, ranks=ranks)
    seconds = {
        (op, block, rank): fast if (rank + len(block)) % 2 else slow
        for op in (Op.FORWARD, Op.BACKWARD)
        for block in outline.blocks
        for rank in range(ranks)
    }
    pairs = {(a, b): 1.0 for a in range(ranks) for b in range(ranks) if a != b}
    moved = {bucket: pairs for bucket, _ in outline.buckets}
    handed = moved if fast > slow else {}
    work = ExplicitWork(seconds, moved, moved, dict.fromkeys(range(len(counts)), 1.0), handed_bytes=handed)
    actors = stage_actors(outline, strategy, counts, ranks, mode)
    found = run(actors, cluster(ranks, Interconnect(1.0, 0.1)), work)
    for rank, spans in enumerate(found.ranks):
        assert [s.instruction for s in spans] == list(programs[rank].instructions)
        own = sum(seconds.get((s.instruction.op, s.instruction.target, rank), 0.0) for s in spans)
        assert found.seconds >= own - 1e-9
        for stream in Stream:
            queue = [s for s in spans if s.instruction.stream is stream and s.instruction.op is not Op.RECEIVE]
            for a, b in pairwise(queue):
                # A push begins when the sums of the previous one have arrived, and ends after these were handed on.
                beside = handed and stream is Stream.PUSH
                assert (a.start_s if beside else a.end_s) <= b.start_s <= b.end_s
                assert a.end_s <= b.end_s
            assert found.seconds >= found.busy_s(rank, stream) - 1e-9
    assert 0 <= found.bubble <= 1


def test_the_table() -> None:
    found = timeline(chain(2, "1f1b"), [3], ExplicitWork(compute(model(2), 2, 1, 2), {}, {}, {}))
    assert str(found).splitlines() == [
        "rank        pull     compute         p2p        push        idle",
        "   0    0.000 ms 9000.000 ms    0.000 ms    0.000 ms      25.0%",
        "   1    0.000 ms 9000.000 ms    0.000 ms    0.000 ms      25.0%",
        "iteration 12000.000 ms, bubble 25.0%",
    ]


def test_nothing_to_do_takes_no_time() -> None:
    found = run([Actor((0,), (), (), ActorProgram.of(()), lambda _: ())], cluster(1), ExplicitWork({}, {}, {}, {}))
    assert (found.seconds, found.bubble) == (0.0, 0.0)


def test_what_never_ends_is_refused() -> None:
    first, last = stage_actors(model(2), chain(2, "1f1b"), [1], 2)
    silent = replace(first, program=ActorProgram.of([i for i in first.of(0) if i.op is not Op.SEND]))
    with pytest.raises(ValueError, match=r"rank 0 never ends, .*: pass these programs to verify"):
        run([silent, last], cluster(2), ExplicitWork({}, {}, {}, {}))
