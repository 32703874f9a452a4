"""The text of a plan: the work of pipelines, and the reasons of idle devices, rivals and warnings."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import hydragraph as hg
from hydragraph.cost.published_errors import FLAT
from hydragraph.planner.brief_explanation import brief_explanation, with_causes
from hydragraph.planner.explanation import SHOWN, explanation
from hydragraph.planner.price_candidate import PricedPlan
from hydragraph.spec.cluster import Interconnect
from tests.cost import priced

WORK = hg.Workload(sequences=8, length=700)


def test_pipelines_say_how_many_sequences_and_tokens_their_micro_batches_have() -> None:
    work = hg.Workload(lengths=[[64] * 8 + [90, 17, 200, 33]])
    found = hg.plan(priced.costs(4, priced.cluster(2)), work, streaming=False)
    said = re.findall(r"(\d+) micro-batch(?:es)? of ([\d,]+)(?: to ([\d,]+))? sequences? \(([\d,]+)", found.explain())
    each = [count for count in found.assignment.counts if count]
    assert sum(int(count) for count, *_ in said) in (sum(each), *set(each))  # equal pipelines share a line
    assert min(len(m) for p in found.assignment.micro_batches for m in p) == min(int(least) for _, least, *_ in said)


def test_a_plan_states_the_error_of_its_prediction() -> None:
    costs = priced.costs(4, priced.cluster(2))
    assert "published runs" not in hg.plan(costs, WORK, streaming=False).explain()
    assumed = costs.changed(profile=replace(costs.profile, efficiency=0.4))
    plan = hg.plan(assumed, WORK, streaming=False)
    assert plan.explain().splitlines()[0].endswith(f" s; {FLAT}")
    assert brief_explanation(assumed, WORK, plan)[1].endswith(f" GB; {FLAT}")


def test_rivals_say_what_they_spend_more_time_on() -> None:
    costs = priced.costs(4, priced.cluster(8, 4))
    plan = hg.plan(costs, hg.Workload(sequences=12, length=700), streaming=False)
    unexplained = with_causes(costs, hg.Workload(sequences=12, length=700), plan, -1.0)
    assert {rival.why for rival in unexplained.rivals} == {rival.why for rival in plan.rivals}
    lost = with_causes(costs, hg.Workload(sequences=12, length=700), plan, 60.0).explain().splitlines()[-SHOWN - 1 :]
    assert all(line.startswith("rejected: ") for line in lost)
    causes = "computation|computation and tensor-parallel sums|traffic|bubble|imbalance|idle devices"
    found = [re.search(rf"(takes the same time|takes \d+% longer \(mostly ({causes})\))$", line) for line in lost[:-1]]
    assert all(found)
    more = [int(percent) for percent in re.findall(r"takes (\d+)% longer", "\n".join(lost))]
    assert more == sorted(more)
    assert len({each.group(2) for each in found if each}) > 1


def test_idle_devices_have_a_reason() -> None:
    slow = Interconnect(1e3, 1.0)  # a message between nodes takes longer than a step
    text = hg.plan(priced.costs(4, priced.mixed(slow)), WORK, streaming=False).explain()
    assert "  idle: 2, 3, 2 slow\n" in text
    assert re.search(
        r"\nno work for ranks 2, 3: the best plan found that uses any of them takes [\d,.]+% longer\n", text
    )
    lost = hg.plan(priced.costs(4, priced.mixed(), hg.Health({3: math.inf})), WORK, streaming=False).explain()
    assert "idle: 3 (1 lost), 1 slow\n" in lost
    assert "no work for" not in lost


def test_devices_without_layers_that_own_state_are_not_idle() -> None:
    costs = priced.costs(4, priced.mixed())
    plan = hg.plan(costs, WORK, deadline_s=0.0)
    assignment = hg.Assignment.even([8], 700)
    chosen = PricedPlan(
        hg.Strategy.parse("<[0]x4>", 4), hg.Home((1, 0, 0, 1)), (assignment,), (1.0,), (1,) * 4, "", simulated=True
    )
    text = explanation(costs, WORK, chosen, plan.bound, 0, 0.0)
    assert "  only own state: 3, 1 slow\n  idle: 1, 2, 1 fast + 1 slow\n" in text


def test_idle_devices_with_little_memory_say_so() -> None:
    costs = priced.costs(4, priced.mixed())
    devices = [replace(d, memory_bytes=50_000) if d.type == "slow" else d for d in costs.cluster.devices]
    found = hg.plan(costs.changed(cluster=replace(costs.cluster, devices=tuple(devices))), WORK, streaming=False)
    assert re.search(
        r"no work for ranks 2, 3: they have at most 5e-05 GB each, but every working rank needs", found.explain()
    )


def test_state_changes_its_owner_only_where_a_plan_runs() -> None:
    costs = priced.costs(4, priced.mixed())
    first = hg.plan(costs, WORK, streaming=False)
    assert "change owners" not in first.explain()
    later = hg.plan(costs.changed(health=hg.Health({0: math.inf})), WORK, running=first, streaming=False)
    assert "change owners" in later.explain()


def test_a_tight_memory_warns_unless_measured() -> None:
    costs = priced.costs(4, priced.cluster(2))
    guessed = costs.changed(profile=replace(costs.profile, efficiency=0.5))
    most = max(hg.plan(costs, WORK, streaming=False).memory)
    for each, warns in ((costs, False), (guessed, True)):
        devices = tuple(replace(device, memory_bytes=int(1.02 * most)) for device in each.cluster.devices)
        text = hg.plan(each.changed(cluster=replace(each.cluster, devices=devices)), WORK, streaming=False).explain()
        assert ("allocator needs additional memory" in text) == warns
