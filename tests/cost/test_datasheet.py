"""The datasheet's work of a small Llama against sums by hand."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from hydragraph.cost.compiled_blocks import CompiledBlocks
from hydragraph.cost.costed_work import CostedWork
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import ROOFLINE, _Rates, datasheet, operations
from hydragraph.ir.instruction import Op
from hydragraph.ir.program import Program
from hydragraph.passes.variants import Variants
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, Device, Interconnect
from hydragraph.spec.known_devices import UNKNOWN
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy import Strategy
from hydragraph.train.model_flops import step_flops
from tests.cost.explicit_work import ExplicitWork, explicit
from tests.models import captured

TOKENS = 10
LINK = Interconnect(bytes_per_s=100.0, latency_s=0.5)
LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 102 * 64  # elements of a layer's matrices: q and o, k and v, gate, up and down
HEAD = 101 * 64
FORWARD = 2 * LAYER * TOKENS + 2 * TOKENS * TOKENS * 64  # products, and causal attention over four heads of 16
HIDDEN_BYTES = TOKENS * 64 * 4


def cluster(ranks: int, *speeds: float) -> Cluster:
    devices = tuple(Device(speeds[i] if i < len(speeds) else 1.0, 10**9, 7.0) for i in range(ranks))
    return Cluster(devices, LINK, LINK)


def llama() -> Program:
    return captured("llama")[0]


def frozen(program: Program, learns: Callable[[str], bool]) -> Program:
    """Return the program with only those parameters trained whose names `learns` accepts."""
    buckets = []
    for bucket in program.buckets:
        trained = tuple(p for p in bucket.parameters if learns(p.name))
        others = tuple(p for p in bucket.parameters if p not in trained)
        buckets += [replace(bucket, parameters=trained)] if trained else []
        buckets += [replace(bucket, name=f"{bucket.name}.frozen", parameters=others, learns=False)] if others else []
    return replace(program, buckets=tuple(buckets))


def costed(strategy: Strategy, tokens: list[int], devices: Cluster) -> CostedWork:
    costs = Costs(datasheet(llama(), devices, efficiency=1.0), devices)
    return costs.work(strategy, Assignment.even([int(n > 0) for n in tokens], tokens))


def work(strategy: Strategy, tokens: list[int], devices: Cluster) -> ExplicitWork:
    return explicit(costed(strategy, tokens, devices))


def test_one_rank_computes_six_operations_per_weight_and_token() -> None:
    found = work(Strategy.parse("<tp1,pp1>", 2), [TOKENS], cluster(1, 4.0))
    assert found.seconds[Op.FORWARD, "layer.0", 0, 0] == pytest.approx(FORWARD / 4)
    assert found.seconds[Op.BACKWARD, "layer.1", 0, 0] == pytest.approx(2 * FORWARD / 4)
    assert found.seconds[Op.FORWARD, "embed", 0, 0] == 0
    assert found.seconds[Op.FORWARD, "head", 0, 0] == pytest.approx(2 * HEAD * TOKENS / 4)
    assert found.seconds[Op.UPDATE, "", 0] == pytest.approx(sum(p.size for p in llama().parameters.values()) * 28 / 7)
    assert all(not pairs for moved in (found.pull_bytes, found.push_bytes) for pairs in moved.values())


def test_frozen_weights_take_no_gradients() -> None:
    program = frozen(llama(), lambda name: "down_proj" in name)
    piece = datasheet(program, cluster(1), efficiency=1.0).pieces[StageKind()][program.blocks[1].template]
    assert piece.backward.b == pytest.approx(2 * LAYER + 2 * 102 * 64)


def test_attention_with_a_window_computes_only_the_keys_that_queries_see() -> None:
    program = captured("mistral")[0]  # its window is 8
    profile = datasheet(program, cluster(1, 1.0), efficiency=1.0)
    tokens = 1000
    keys = sum(min(i + 1, 8) for i in range(tokens))
    heads_by_size = 64
    ignored = 8  # of each query the diagonal counts half: without a window, l / 2 of l (l + 1) / 2
    layer = profile.pieces[StageKind(1)][profile.blocks[1]]
    products = 2 * LAYER * tokens
    attention = 4 * heads_by_size * (keys - ignored / 2)
    assert layer.forward.seconds([tokens]) == pytest.approx(products + attention)
    assert layer.backward.seconds([tokens]) == pytest.approx(2 * (products + attention))
    assert step_flops(program, [tokens]) == pytest.approx(
        3 * (program.layers * (products + attention) + 2 * HEAD * tokens)
    )


@pytest.mark.parametrize(("model", "window", "ratio"), [("mistral", [8], 1.001), ("llama", [], 7.01)])
def test_with_a_window_a_long_sequence_takes_no_longer_than_short_ones(
    model: str, window: list[int], ratio: float
) -> None:
    """Simulate one sequence of 4,000 tokens, and forty of 100, in one micro-batch each."""
    devices = cluster(1, 1.0)
    costs = Costs(datasheet(captured(model)[0], devices, efficiency=1.0), devices)
    strategy = Strategy.parse("<tp1,pp1>", 2)
    assert [reach.window for reach, _ in costs.pipeline(strategy.pipelines[0]).near] == window
    long = costs.simulate(strategy, Assignment((((0,),),), (4000,))).seconds
    short = costs.simulate(strategy, Assignment(((tuple(range(40)),),), (100,) * 40)).seconds
    assert long / short == pytest.approx(ratio, rel=1e-2)


def test_tensor_parallel_ranks_share_the_work_and_add_up_parts() -> None:
    found = work(Strategy.parse("<tp2,pp1>", 2), [TOKENS], cluster(2, 1.0, 2.0))
    ring = 2 * (0.5 + HIDDEN_BYTES / 2 / 100)  # each of two ranks sends two halves
    # The slower rank's pace; of the backward's sums, only latencies do not overlap with weight gradients.
    assert found.seconds[Op.FORWARD, "layer.0", 0, 0] == pytest.approx(FORWARD / 2 + 2 * ring)
    assert found.seconds[Op.BACKWARD, "layer.0", 1, 0] == pytest.approx(FORWARD + 2 * 2 * 0.5)
    assert found.seconds[Op.FORWARD, "head", 0, 0] == pytest.approx(2 * 64 * 51 * TOKENS)  # 51 of 101 words
    assert found.seconds[Op.FORWARD, "embed", 0, 0] == pytest.approx(ring)


@pytest.mark.parametrize("bytes_per_s", [1.0, 100.0, 1e4])
def test_sums_of_the_backward_run_while_weight_gradients_are_computed(bytes_per_s: float) -> None:
    devices = Cluster(cluster(2, 4.0, 4.0).devices, Interconnect(bytes_per_s, 0.0), Interconnect(bytes_per_s, 0.0))
    found = work(Strategy.parse("<tp2,pp1>", 2), [TOKENS], devices)
    sums = HIDDEN_BYTES / bytes_per_s  # two ranks: half of the hidden state, there and back
    attention, mlp = (2 * TOKENS * matrices / 2 / 4 for matrices in (2 * 64 * 64 + 2 * 32 * 64, 3 * 102 * 64))
    exposed = max(0.0, sums - attention) + max(0.0, sums - mlp)
    forward = FORWARD / 2 / 4
    assert found.seconds[Op.FORWARD, "layer.0", 0, 0] == pytest.approx(forward + 2 * sums)
    assert found.seconds[Op.BACKWARD, "layer.0", 0, 0] == pytest.approx(2 * forward + exposed)


@pytest.mark.parametrize("bytes_per_s", [1.0, 300.0, 1e4])
def test_pieces_of_sums_run_while_the_next_piece_of_their_product_is_computed(bytes_per_s: float) -> None:
    devices = Cluster(cluster(2, 4.0, 4.0).devices, Interconnect(bytes_per_s, 0.5), Interconnect(bytes_per_s, 0.5))
    found = work(Strategy.parse("<tp2,pp1>p", 2), [TOKENS], devices)
    piece = 2 * (0.5 + HIDDEN_BYTES / 2 / 2 / bytes_per_s)

    def left(*matrices: int) -> float:
        return 2 * piece - min(piece, 2 * TOKENS * sum(matrices) / 2 / 4 / 2)

    forward = FORWARD / 2 / 4
    assert found.seconds[Op.FORWARD, "layer.0", 0, 0] == pytest.approx(forward + left(64 * 64) + left(102 * 64))
    attention, mlp = left(64 * 64, 2 * 32 * 64), left(2 * 102 * 64)
    # The rest of the backward's sums overlaps with weight gradients, except a latency of each.
    exposed = found.seconds[Op.BACKWARD, "layer.0", 0, 0] - 2 * forward
    assert 2 * 2 * 0.5 <= exposed <= attention + mlp
    halves = work(Strategy.parse("<[0,1]x1p,[2]x1> zb-h1", 2), [TOKENS], cluster(3, 4.0, 4.0))
    assert halves.seconds


def test_recomputation_runs_the_forward_again() -> None:
    strategy = Strategy((Pipeline((Stage((0,), 1, recompute=True), Stage((1,), 1))),))
    found = work(strategy, [TOKENS], cluster(2))
    assert found.seconds[Op.BACKWARD, "layer.0", 0, 0] == pytest.approx(3 * FORWARD)
    assert found.seconds[Op.BACKWARD, "layer.1", 1, 0] == pytest.approx(2 * FORWARD)


def test_every_rank_pulls_what_others_own_and_pushes_it_back() -> None:
    found = work(Strategy.parse("2*<tp1,pp1>", 2), [TOKENS, TOKENS], cluster(2))
    for bucket in llama().buckets:
        assert found.pull_bytes[bucket.name] == found.push_bytes[bucket.name]
        assert sum(found.pull_bytes[bucket.name].values()) == bucket.size * 4
    idle = work(Strategy.parse("2*<tp1,pp1>", 2), [TOKENS, 0], cluster(2))
    assert {pair for pairs in idle.pull_bytes.values() for pair in pairs} == {(1, 0)}
    assert {pair for pairs in idle.push_bytes.values() for pair in pairs} == {(0, 1)}


def test_a_strategy_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank 1"):
        work(Strategy.parse("2*<tp1,pp1>", 2), [TOKENS, TOKENS], cluster(1))


def test_a_whole_iteration_is_priced() -> None:
    strategy, devices = Strategy.parse("<tp2,pp1> + <tp1,pp2>", 2), cluster(4)
    costs = Costs(datasheet(llama(), devices, efficiency=1.0), devices)
    found = costs.simulate(strategy, Assignment.even([2, 1], TOKENS))
    assert found.seconds > 2 * 3 * FORWARD  # pipeline 0: two micro-batches of two layers on two ranks


def test_with_compiled_graphs_it_has_the_memory_of_blocks() -> None:
    program, devices = llama(), cluster(2)
    variants = Variants(program)
    strategy = Strategy.parse("<tp1,pp2>", 2)
    assignment = Assignment.even([3], 1500)
    plain = datasheet(program, devices)
    compiled = datasheet(program, devices, degrees=[1], compiled=variants.get)
    found = Costs(compiled, devices).memory(strategy, assignment)
    costs = Costs(plain, devices, blocks=CompiledBlocks(program, variants.get))
    exact = costs.memory(strategy, assignment)
    assert pickle.loads(pickle.dumps(costs)).memory(strategy, assignment) == exact
    without = Costs(plain, devices).memory(strategy, assignment)
    for one, two, none in zip(found, exact, without, strict=True):
        assert one.total == pytest.approx(two.total, rel=0.005)
        assert none.activations < 0.3 * two.activations


def test_a_roofline_is_slower_than_its_peak_and_nears_it_for_large_products() -> None:
    program = llama()
    fast = cluster(1, 312e12)
    roofline, flat = datasheet(program, fast), datasheet(program, fast, efficiency=UNKNOWN)
    kind = StageKind(1)
    for name, piece in flat.pieces[kind].items():
        found = roofline.pieces[kind][name]
        for slower, faster in ((found.forward, piece.forward), (found.backward, piece.backward)):
            assert slower.b >= faster.b
            assert slower.a >= faster.a
    rates = _Rates(1e14, 1e12, 2, ROOFLINE)
    times = [rates.product(n, n) / (2 * n * n / 1e14) for n in (256, 4096, 65536)]
    assert times[0] > times[1] > times[2] > 1
    assert times[2] < 1.05
    few, many = ((rates.fixed([(1, 4096, 4096)]) + n * rates.product(4096, 4096)) / n for n in (128, 65536))
    assert few > 3 * many  # per token


def test_a_types_own_efficiency_counts_unless_another_is_given() -> None:
    program = llama()
    measured = Cluster((replace(cluster(1, 1e11).devices[0], efficiency=1.0),), LINK, LINK)
    profile, flat = datasheet(program, measured), datasheet(program, cluster(1, 1e11), efficiency=1.0)
    assert profile.pieces == flat.pieces
    assert (profile.efficiency, profile.roofline) == (1.0, False)
    halved = datasheet(program, measured, efficiency=0.5)
    assert halved.pieces == datasheet(program, cluster(1, 1e11), efficiency=0.5).pieces


@pytest.mark.parametrize("tp", [1, 2])
def test_a_token_is_multiplied_by_its_own_experts_only(tp: int) -> None:
    program, _ = captured("mixtral")  # two of four experts, of 96, for each token
    found = operations(program, program.blocks[1], tp)
    assert {(2.0, 2 * 96 // tp, 64), (2.0, 64, 96 // tp)} <= set(found.products)
    assert all(times == 1 for times, n, k in found.products if {n, k}.isdisjoint({192 // tp, 96 // tp}))
