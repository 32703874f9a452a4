"""Packing against all partitions, against the integer program, and its promises on random input."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hydragraph as hg
from benchmarks.published.packing import Packing, pack, pack_pipeline
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.planner.exact.integer_programs import exact_packing
from tests.planner.examples import PROFILE, lengths, pipelines
from tests.thorough import only


def eq1(pipeline: PipelineCost, sizes: list[int], batches: list[list[int]] | tuple[tuple[int, ...], ...]) -> float:
    slowest = max(pipeline.micro_batch_seconds([sizes[i] for i in batch]) for batch in batches)
    return slowest * (pipeline.stages - 1 + len(batches))


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]
        yield [[items[0]], *rest]


def best_of_all(pipeline: PipelineCost, sizes: list[int]) -> float:
    """Return Eq. 1's optimum over V in its range, by looking at every partition."""
    used = [i for i, n in enumerate(sizes) if n]
    total = sum(sizes)
    low = max(1, math.ceil(total / pipeline.max_len))
    high = min(max(low, total // pipeline.util_len), len(used))
    by_count: dict[int, float] = {}
    for p in partitions(used):
        if all(sum(sizes[i] for i in b) <= pipeline.max_len for b in p):
            by_count[len(p)] = min(by_count.get(len(p), math.inf), eq1(pipeline, sizes, p))
    inside = [v for n, v in by_count.items() if low <= n <= high]
    return min(inside) if inside else by_count[min(n for n in by_count if n > high)]


def check(pipeline: PipelineCost, sizes: list[int], packed: Packing) -> None:
    assert sorted(itertools.chain(*packed.micro_batches)) == [i for i, n in enumerate(sizes) if n]
    assert all(0 < sum(sizes[i] for i in b) <= pipeline.max_len for b in packed.micro_batches)

    assert packed.bound <= packed.seconds * (1 + 1e-9)


@given(pipelines(most=1), st.lists(st.integers(0, 2000), min_size=1, max_size=7))
@settings(max_examples=max(20, settings.default.max_examples // 16))
def test_it_is_within_a_few_percent_of_the_best_of_all_partitions(
    kinds: tuple[PipelineCost, ...], sizes: list[int]
) -> None:
    packed = pack_pipeline(kinds[0], sizes)
    check(kinds[0], sizes, packed)
    if any(sizes):
        best = best_of_all(kinds[0], sizes)
        assert packed.seconds == pytest.approx(eq1(kinds[0], sizes, packed.micro_batches), rel=1e-9)
        assert best * (1 - 1e-9) <= packed.seconds <= best * 1.02
        assert packed.bound <= best * (1 + 1e-9)


@only("1")
@pytest.mark.parametrize("seed", range(3))
def test_the_integer_program_finds_little_more(seed: int) -> None:
    sizes = lengths(7, seed, 4000)
    pipeline = PROFILE.pipeline((2, 2), 16)
    exact = pack((2, 2), PROFILE, sizes, devices=16, method="exact")
    found = pack((2, 2), PROFILE, sizes, devices=16)
    check(pipeline, sizes, exact)
    assert exact.seconds == pytest.approx(best_of_all(pipeline, sizes), rel=1e-6)
    assert exact.seconds * (1 - 1e-6) <= found.seconds <= exact.seconds * 1.003


def test_all_at_max_len_and_one_sequence() -> None:
    longest = PROFILE.max_len((2, 1), 2)
    assert sorted(pack((2, 1), PROFILE, [longest] * 3).micro_batches) == [(0,), (1,), (2,)]
    assert pack((2, 1), PROFILE, [5]).micro_batches == ((0,),)
    assert pack((2, 1), PROFILE, []).micro_batches == ()
    assert pack((2, 1), PROFILE, [0, 7, 0]).micro_batches == ((1,),)


def test_what_does_not_fit_is_refused() -> None:
    longest = PROFILE.max_len((2, 1), 2)
    with pytest.raises(hg.Unsupported, match=rf"sequence 1 has {longest + 1} tokens, more than any pipeline can hold"):
        pack((2, 1), PROFILE, [5, longest + 1])
    with pytest.raises(ValueError, match="whole numbers"):
        pack((2, 1), PROFILE, [-1])


def test_tight_capacity_takes_more_micro_batches() -> None:
    pipeline = PipelineCost(1e-6, 1e-3, 0.1, 2, 10, 5, 1)
    packed = pack_pipeline(pipeline, [6, 6, 6])  # 18 tokens would fit two micro-batches of 10, three sequences do not
    assert len(packed.micro_batches) == 3
    assert exact_packing(pipeline, [6, 6, 6])[1] == pytest.approx(packed.seconds)
