from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.planner.generators.device_groups import forms_of, groupings, nodes_of
from hydragraph.planner.generators.group_prices import LayerPrices
from hydragraph.planner.generators.pipelines_of_groups import PipelinePricing, numbers
from hydragraph.spec.health import Health
from tests.cost import priced


def bench_of(
    rates: dict[int, float], micro_batches: int, memory: float = 1e9
) -> tuple[PipelinePricing, dict[int, int]]:
    costs = priced.costs(6, priced.mixed(), Health(rates))
    prices = LayerPrices(costs, [700])
    groups = groupings(costs, prices, nodes_of(costs))[0]
    forms = list(forms_of(groups))
    return PipelinePricing(prices, forms, [memory] * len(forms), micro_batches), {
        forms.index(form): count for form, count in forms_of(groups).items()
    }


@settings(max_examples=20)
@given(
    st.dictionaries(st.integers(0, 3), st.sampled_from([1.5, 2.57, 12.53]), max_size=3),
    st.integers(1, 20),
    st.integers(1, 4),
)
def test_exchanges_lose_no_group_and_never_slow_down(rates: dict[int, float], micro_batches: int, number: int) -> None:
    bench, counts = bench_of(rates, micro_batches)
    start = bench.balanced(counts, number)
    assert Counter(form for multiset, n in start.items() for form in multiset for _ in range(n)) == Counter(counts)
    assert sum(start.values()) == number
    better = bench.improved(start)
    used = Counter(form for multiset, n in better.pipelines for form in multiset for _ in range(n))
    assert used + Counter(better.idle) == Counter(counts)
    assert better.seconds <= bench.price(start)
    assert better.seconds == pytest.approx(bench.price(dict(better.pipelines)))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=4, max_size=4), st.integers(1, 30))
def test_the_quickest_groups_go_first_each_to_the_slowest_pipeline(counts: list[int], number: int) -> None:
    bench, forms = bench_of({0: 1.5, 2: 12.53}, 40)
    groups = dict(zip(forms, counts, strict=False))
    pipelines: list[list[int]] = [[] for _ in range(number)]
    for form in sorted(groups, key=lambda i: (-bench.speed[i], i)):
        for _ in range(groups[form]):
            min(pipelines, key=lambda each: (sum(bench.speed[i] for i in each), len(each))).append(form)
    assert bench.balanced(groups, number) == Counter(tuple(sorted(each)) for each in pipelines)


def test_the_slowest_group_comes_first_and_gets_the_fewest_layers() -> None:
    bench, counts = bench_of({0: 2.57}, 40)
    laid = bench.lay(tuple(sorted(form for form, n in counts.items() for _ in range(n)))[:4], 40)
    speeds = [bench.speed[form] for form in laid.order]
    assert speeds == sorted(speeds)
    assert sum(laid.layers) == 6
    assert laid.layers[0] == min(laid.layers)


def test_a_pipeline_that_does_not_fit_is_no_pipeline() -> None:
    bench, counts = bench_of({}, 4, memory=10.0)
    assert not bench.lay((next(iter(counts)),), 4).order
    assert bench.price({(next(iter(counts)),): 1}) == float("inf")


def test_where_only_one_order_fits_it_is_found_for_a_single_micro_batch() -> None:
    bench, counts = bench_of({}, 4)
    small = max(counts, key=lambda form: bench.speed[form])
    large = min(counts, key=lambda form: bench.speed[form])
    prices = LayerPrices(priced.costs(6, priced.mixed()), [700])

    def laid(memory: float) -> tuple[int, ...]:
        sizes = [memory if form == small else 1e9 for form in range(len(bench.forms))]
        return PipelinePricing(prices, bench.forms, sizes, 4).lay(tuple(sorted((small, large))), 1).order

    low, high = 1e3, 1e9
    while high > low * (1 + 1e-4):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if laid(middle) else (middle, high)
    # The last block is the larger one here: with the least memory that suffices, the small group comes first.
    assert laid(high) == (small, large)


def test_numbers_leave_no_pipeline_with_more_stages_than_layers() -> None:
    assert numbers(8, 100, 4) == [2, 3, 4, 5, 6, 7, 8]
    assert numbers(8, 3, 8) == [1, 2, 3]
    many = numbers(1024, 4096, 80)
    assert many[0] == 13
    assert {16, 32, 64, 512, 1024} <= set(many)


def test_a_pipeline_alone_waits_for_no_other() -> None:
    bench, counts = bench_of({}, 8)
    assert bench.awaited([bench.lay(tuple(sorted(counts))[:1], 8)]) == [0.0]


def test_a_layer_passes_as_slowly_as_in_the_pipeline_where_fewest_links_carry_it() -> None:
    bench, counts = bench_of({}, 8)
    form = next(iter(counts))
    quick = bench.lay((form,), 4)
    slow = replace(quick, passing_s=10 * quick.passing_s + 1.0)
    assert bench.awaited([quick, quick]) == [0.0, 0.0]
    waits, own = bench.awaited([quick, slow])
    # The whole model is in one stage: a third of the traffic is pulled, for which a third of the seconds hides it.
    passing = float(slow.passing_s.sum())
    hidden = [part * quick.stages_s[0] for part in (1 / 3, 2 / 3)]
    assert waits == pytest.approx(
        sum(max(0.0, part * passing - h) for part, h in zip((1 / 3, 2 / 3), hidden, strict=True))
    )
    assert own == 0.0
