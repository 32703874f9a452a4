"""Prices of plans against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hydragraph as hg
from hydragraph.planner.explanation import Rival
from hydragraph.planner.price_candidate import PricedPlan
from hydragraph.planner.rental_price import RentalPrices, per_million_tokens
from hydragraph.spec.strategy import Strategy
from tests.cost import priced

WORK = hg.Workload(lengths=[[600, 400], [3000]])  # 2,000 tokens on average


def test_devices_that_are_used_cost_their_types_prices() -> None:
    prices = RentalPrices.parse(["fast=3.6", "0.9"], priced.mixed())
    both = Strategy.parse("<[0,1]x2,[2]x2>", 4)
    assert prices.hour(both.devices) == pytest.approx(3.6 * 2 + 0.9)
    assert per_million_tokens(8.1, 4.0, WORK) == pytest.approx(8.1 * 4 / 3600 * 500)
    shared = Strategy.parse("<[0]x2,[1]x2> + <[0]x2,[2]x2>", 4)  # a device of two pipelines costs once
    assert prices.hour(shared.devices) == prices.hour(both.devices)


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["fast"], "'fast': give dollars per hour, as in h100-sxm=2.5"),
        (["fast=-1"], "give dollars per hour"),
        (["fast=inf"], "give dollars per hour"),
        (["a100=1"], "the cluster has no type 'a100', only fast, slow"),
        (["fast=1"], "slow has no price: add --price slow=DOLLARS"),
    ],
)
def test_wrong_prices_are_refused(texts: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RentalPrices.parse(texts, priced.mixed())


def test_the_cheapest_rival_is_named_only_if_it_costs_less() -> None:
    costs = priced.costs(4, priced.mixed())
    plan = hg.plan(costs, WORK, deadline_s=0.0)
    cheap = Rival(Strategy.parse("<[2]x4>", 4), 2 * plan.seconds, "", "takes 100.0% longer")
    dear = Rival(Strategy.parse("2*<tp2,pp1>", 4), 2 * plan.seconds, "", "takes 100.0% longer")
    free = Rival(Strategy.parse("<[3]x4>", 4), float("inf"), "", "does not fit")
    prices = RentalPrices.parse(["fast=9", "slow=1"], costs.cluster)
    found = prices.sentences(costs, replace(plan, rivals=(dear, cheap, free)), WORK)
    assert found[0].startswith("price: $20 an hour for 4 devices, $")
    assert found[1] == "price: <[2]x4> costs 90.0% less per token, and takes 100.0% longer"
    assert prices.sentences(costs, replace(plan, rivals=(dear, free)), WORK)[1:] == [
        "price: none of the rivals costs less per token"
    ]
    faster = replace(cheap, seconds=0.9 * plan.seconds)
    assert prices.sentences(costs, replace(plan, rivals=(faster,)), WORK)[1].endswith(" and takes 10.0% less time")


def test_devices_that_only_own_state_cost_their_price_too() -> None:
    costs = priced.costs(4, priced.mixed())
    plan = replace(hg.plan(costs, WORK, deadline_s=0.0), strategy=Strategy.parse("<[0]x4>", 4), rivals=())
    prices = RentalPrices.parse(["fast=2", "slow=1"], costs.cluster)
    for home, hour in ((hg.Home((1, 0, 0, 1)), "$3 an hour for 2"), (hg.Home((1, 0, 0, 0)), "$2 an hour for 1")):
        assert prices.sentences(costs, replace(plan, home=home), WORK)[0].startswith(f"price: {hour} device")
    rest = {bucket.name: (1, 0, 1, 0) for bucket in costs.buckets}
    settled = PricedPlan(plan.strategy, hg.Home(buckets=rest), (), (plan.seconds,), (), "", simulated=True)
    rival = Rival(plan.strategy, 0.9 * plan.seconds, "", "", settled)
    same = replace(plan, home=hg.Home((1, 1, 1, 1)), rivals=(rival,))
    assert "costs 55.0% less per token" in prices.sentences(costs, same, WORK)[1]
