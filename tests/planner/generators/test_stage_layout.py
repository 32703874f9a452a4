import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.planner.generators.device_groups import GroupForm, forms_of, groupings, nodes_of
from hydragraph.planner.generators.group_prices import LayerPrices
from hydragraph.planner.generators.pipelines_of_groups import PipelinePricing
from hydragraph.planner.generators.stage_layout import (
    NUMBERS,
    Option,
    awaited,
    exposed,
    most_layers,
    spread_over,
    timed,
)
from hydragraph.spec.health import Health
from tests.cost import priced

SECONDS = st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4)


def row(option: Option) -> np.ndarray:
    return np.array(option[1:])


def prices_of() -> tuple[LayerPrices, list[GroupForm]]:
    costs = priced.costs(6, priced.mixed(), Health({0: 2.57}))
    prices = LayerPrices(costs, [700])
    return prices, list(forms_of(groupings(costs, prices, nodes_of(costs))[0]))


@given(st.sampled_from([0.0, 1e5, 1e6, 1e7, 1e8]), st.booleans(), st.booleans(), st.integers(1, 6))
def test_one_layer_more_than_the_most_does_not_fit(memory: float, first: bool, last: bool, flying: int) -> None:
    prices, forms = prices_of()
    held = prices.held_by_flight[flying, int(not first)]
    for option in prices.options(forms[0].site, forms[0].tp):

        def fits(layers: int, o: Option = option) -> bool:
            owned = layers * o.state_bytes + first * o.first_bytes + last * o.last_bytes
            kept = (flying * o.kept_bytes * layers, 0.0)
            return all(h * owned + k + o.own_bytes <= memory for h, k in zip(held, kept, strict=True))

        most = most_layers(row(option), memory, first, last, held, flying, 6)
        assert most == max((n for n in range(1, 7) if fits(n)), default=0)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 9))
def test_a_pipeline_takes_what_its_options_say(places: list[int], count: int) -> None:
    prices, forms = prices_of()
    bench = PipelinePricing(prices, forms, [1e9] * len(forms), 8)
    order = tuple(place % len(forms) for place in places)
    laid = bench.lay(tuple(sorted(order)), count)
    assert sum(laid.layers) == 6
    found = []
    passing = []
    for s, (form, layers, kind) in enumerate(zip(laid.order, laid.layers, laid.kinds, strict=True)):
        option = next(o for o in bench.options[form] if o.kind == kind)
        first, last = s == 0, s == len(order) - 1
        seconds = option.aux_s + first * option.first_s + last * option.last_s + layers * option.layer_s
        size = layers * option.state_bytes + first * option.first_bytes + last * option.last_bytes
        found.append(forms[form].rate * seconds)
        passing.append(bench.passing(form, size))
    assert laid.stages_s == pytest.approx(found)
    assert laid.each_s == pytest.approx(max(found))
    assert laid.first_s == pytest.approx(sum(found) + laid.exposed_s)
    assert laid.traffic_s == pytest.approx(max(passing))
    assert laid.passing_s.sum() == pytest.approx(sum(passing))


def test_what_does_not_fit_has_no_layers() -> None:
    prices, forms = prices_of()
    options = np.full((1, 1, len(NUMBERS)), math.inf)
    options[0, 0] = row(prices.options(forms[0].site, forms[0].tp)[0])
    order = np.zeros(2, np.int64)
    held = prices.held_by_flight
    for memory in (0.0, 1e12):
        numbers = np.array([[1.0, memory, 0.0]])
        layers, chosen = spread_over(order, 6, 4, options, numbers, held)
        assert layers.sum() == chosen.size * 3 == (6 if memory else 0)
    assert timed(order, layers, chosen, options, numbers)[2] == 0.0  # no traffic, so no waiting


@given(SECONDS)
def test_traffic_is_waited_for_beyond_what_computes_meanwhile(seconds: list[float]) -> None:
    taken = np.array(seconds)
    # A third of each passes before the first forward, which takes a third; so all is hidden, or all but that.
    assert exposed(taken, np.cumsum(taken)) == pytest.approx(0.0)
    assert exposed(taken, np.cumsum(taken) + 3.0) == pytest.approx(3.0)


def test_a_layer_passes_as_slowly_as_where_it_is_slowest() -> None:
    seconds, layers = np.array([3.0, 3.0]), np.array([1, 2])
    alone = np.array([3.0, 1.0, 1.0])
    assert awaited(seconds, layers, alone, alone) == 0.0
    # The first stage's layer now takes 6 s of pull and push; the first stage's 3 s of computation hide half of it.
    assert awaited(seconds, layers, alone, np.array([6.0, 1.0, 1.0])) == pytest.approx(3.0)
