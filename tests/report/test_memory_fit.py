"""Memory fits of made-up models: the advice works when followed, and "nothing fits" is reported only if true."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.report.memory_fit import advice, fit, packed_in, recomputing, streaming_more, wider
from hydragraph.spec.assignment import Assignment
from tests.cost.priced import cluster, costs


def with_memory(priced: Costs, size: int) -> Costs:
    devices = tuple(replace(device, memory_bytes=size) for device in priced.cluster.devices)
    return priced.changed(cluster=replace(priced.cluster, devices=devices))


def measured(
    priced: Costs, strategy: hg.Strategy, assignment: Assignment, sequence_parallel: bool
) -> list[tuple[hg.Strategy, Assignment]]:
    with suppress(hg.Unsupported):
        found = list(wider(priced, strategy, assignment, sequence_parallel))
        for wide, merged in found:
            fit(priced, wide, merged)
        return found
    return []


def number(words: str) -> int:
    return int(next(word for word in words.replace(",", "").split() if word.isdecimal()))


@given(
    text=st.sampled_from(["2*<tp1,pp2>", "4*<tp1,pp1>", "<tp2,pp2>", "<[0,1]x1,[2]x1> + <[3]x2>"]),
    lengths=st.lists(st.integers(2, 1500), min_size=4, max_size=8),
    part=st.floats(0.05, 1.2),
    elements=st.sampled_from([100, 10_000]),
)
@example(text="4*<tp1,pp1>", lengths=[2] * 4, part=0.9, elements=10_000)  # streaming is enough
@example(text="<tp2,pp2>", lengths=[900] * 4, part=1.1, elements=10_000)  # it fits
@settings(max_examples=max(4, settings.default.max_examples // 5 - 4))
def test_advice_that_is_followed_works(text: str, lengths: list[int], part: float, elements: int) -> None:
    strategy = hg.Strategy.parse(text, layers=2)
    count = len(strategy.pipelines)
    assignment = Assignment(
        tuple((tuple(range(p, len(lengths), count)),) for p in range(count)), tuple(lengths)
    )  # all of a pipeline's sequences in one micro-batch
    rich = costs(2, cluster(4), elements=elements)
    most = max(memory.total for memory in fit(rich, strategy, assignment).memory)
    poor = with_memory(rich, int(most * part))
    found = fit(poor, strategy, assignment)
    words, _, offloading = advice(poor, found, assignment).partition("; or offload activations")
    if offloading:
        offloaded = hg.Strategy.parse(offloading.partition(": ")[2].partition(" fits")[0], layers=2)
        assert all(stage.offload for pipeline in offloaded.pipelines for stage in pipeline.stages)
        assert fit(poor, offloaded, assignment).fits
    again = recomputing(strategy)
    *_, least = streaming_more(strategy)  # streamed and recomputed
    assert found.fits == (not words)
    assert found.fits or int(most * part) < most  # within less memory, another home may fit
    if words.startswith(("recompute", "stream")):
        name = words.partition(": ")[2].partition(" fits")[0]
        tried = fit(poor, hg.Strategy.parse(name, layers=2), assignment)
        assert tried.fits
        assert f"a step takes {tried.seconds:.3g} s instead of {found.seconds:.3g} s" in words
        for other in (again, *streaming_more(strategy)):
            rival = fit(poor, other, assignment)
            assert not rival.fits or rival.seconds >= tried.seconds
    elif words.startswith("micro-batches"):
        chosen = least if "streaming" in words else again if "recomputation" in words else strategy
        assert fit(poor, chosen, packed_in(assignment, number(words))).fits
    elif words.startswith("sequences"):
        cut = replace(assignment, lengths=tuple(min(n, number(words)) for n in lengths))
        chosen = least if "streaming" in words else again
        assert fit(poor, chosen, packed_in(cut, number(words))).fits
    elif " fits, " in words:  # of a higher degree
        name = words.partition(": ")[2].partition(" fits")[0]
        doubled = [w for sp in (True, False) for w in measured(poor, strategy, assignment, sp)]
        wide, merged = next(w for w in doubled if hg.Strategy.parse(name, layers=2).devices == w[0].devices)
        assert len(wide.pipelines) < count
        assert fit(poor, hg.Strategy.parse(name, layers=2), merged).fits
    elif words:
        assert not fit(poor, least, packed_in(assignment, max(lengths))).fits
        assert "more ranks to share the state" in words or "higher tensor-parallel degree" in words


@given(lengths=st.lists(st.integers(1, 900), min_size=1, max_size=20), tokens=st.integers(1, 2000))
def test_packed_in_keeps_every_sequence_and_the_bound(lengths: list[int], tokens: int) -> None:
    everyone = Assignment((tuple((i,) for i in range(len(lengths))), ()), tuple(lengths))
    found = packed_in(everyone, tokens)
    assert [i for micro_batch in found.micro_batches[0] for i in micro_batch] == list(range(len(lengths)))
    assert found.micro_batches[1] == ()
    assert all(sum(m) <= tokens or len(m) == 1 for m in found.tokens[0])


def test_streaming_is_advised_with_what_it_costs_unless_the_run_refuses_it() -> None:
    strategy = hg.Strategy.parse("4*<tp1,pp1>", layers=4)
    assignment = Assignment.even([1] * 4, 1000)
    rich = costs(4, cluster(4), elements=100_000)
    most = max(memory.total for memory in fit(rich, strategy, assignment).memory)
    poor = with_memory(rich, int(most * 0.9))
    found = fit(poor, strategy, assignment)
    words = advice(poor, found, assignment)
    assert words.startswith("stream the weights and gradients of all stages: 4*<tp1,pp1>w fits, a step takes ")
    assert "stream" not in advice(poor, found, assignment, may_stream=False)


def test_a_home_alone_that_is_too_much_asks_for_ranks_that_are_enough() -> None:
    strategy = hg.Strategy.parse("2*<tp1,pp1>", layers=4)
    priced = with_memory(costs(4, cluster(2), elements=10**6), 90 * 10**6)
    assignment = Assignment.even([1, 1], 64)
    found = fit(priced, strategy, assignment)
    assert found.memory[0].home == 12 * 10**6 * 16 / 2
    words = advice(priced, found, assignment)
    assert "at least" in words or "higher tensor-parallel degree" in words


def test_offloading_is_advised_with_its_seconds_where_it_fits() -> None:
    strategy = hg.Strategy.parse("<tp1,pp1>", layers=12)
    offloaded = hg.Strategy.parse("<tp1,pp1>o", layers=12)
    priced, assignment = costs(12, cluster(1)), Assignment.even([2], 700)
    plain, copied = (fit(priced, each, assignment) for each in (strategy, offloaded))
    assert copied.memory[0].total < plain.memory[0].total
    assert copied.memory[0].host > 0 == plain.memory[0].host
    poor = with_memory(priced, (copied.memory[0].total + plain.memory[0].total) // 2)
    words = advice(poor, fit(poor, strategy, assignment), assignment)
    assert f"; or offload activations: <tp1,pp1>o fits, a step takes {copied.seconds:.3g} s instead of" in words
    halved = fit(poor, hg.Strategy.parse("<tp1,pp1> zb-h1", layers=12), assignment)
    assert "; or offload activations: <tp1,pp1>o fits" in advice(poor, halved, assignment)


def test_a_fit_is_told_rank_by_rank() -> None:
    strategy = hg.Strategy.parse("<tp1,pp2>", layers=4)
    priced = costs(4, cluster(2))
    found = fit(priced, strategy, Assignment.even([4], 700))
    record = json.loads(json.dumps(found.as_dict()))
    assert record["fits"] is True
    assert record["seconds"] == pytest.approx(priced.simulate(strategy, Assignment.even([4], 700)).seconds)
    for rank, row in enumerate(record["ranks"]):
        assert row["rank"] == rank
        rest = ("weights", "gradients", "activations", "working", "messages")
        for home in (("home_weights", "optimizer_state", "home_gradients"), ("state", "shard")):
            assert row["peak_bytes"] == sum(row[part] for part in (*home, *rest))


def test_an_optimizer_that_keeps_less_takes_less() -> None:
    strategy = hg.Strategy.parse("2*<tp1,pp1>", layers=4)
    where = cluster(2)
    usual = costs(4, where, elements=1000)
    plain = Costs(usual.profile, where, state_bytes=4)
    one, two = (each.memory(strategy, Assignment.even([1, 1], 64))[0] for each in (usual, plain))
    assert one.optimizer_state == 2 * two.home_weights
    assert two.optimizer_state == 0
    assert one.total - two.total == one.optimizer_state
