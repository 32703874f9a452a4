import re
from dataclasses import replace

import pytest

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.planner.infeasibility import nothing_fits
from hydragraph.spec.cluster import Interconnect
from tests.cost import priced
from tests.thorough import only

WORK = hg.Workload(sequences=4, length=2000)


def with_memory(size: float) -> Costs:
    cluster = priced.cluster(2)
    return priced.costs(3, replace(cluster, devices=tuple(replace(d, memory_bytes=int(size)) for d in cluster.devices)))


@only("5000000")
@pytest.mark.parametrize("size", [1_500_000, 5_000_000])
def test_what_is_said_to_help_helps(size: int) -> None:
    with pytest.raises(hg.Unsupported, match="nothing fits") as caught:
        hg.plan(with_memory(size), WORK)
    said = str(caught.value)
    memory = float(re.search(r"the model may fit with ([\d.]+) times the memory", said).group(1))
    assert memory > 1
    assert hg.plan(with_memory(1.03 * memory * size), WORK).seconds > 0
    with pytest.raises(hg.Unsupported, match="nothing fits"):
        hg.plan(with_memory(0.9 * memory * size), WORK)
    shorter = int(re.search(r"sequences of at most ([\d,]+) tokens", said).group(1).replace(",", ""))
    assert hg.plan(with_memory(size), hg.Workload(sequences=4, length=int(0.95 * shorter))).seconds > 0


def test_nodes_with_devices_of_several_types_are_refused() -> None:
    devices = priced.mixed().devices
    link = Interconnect(1e11, 1e-6)
    cluster = hg.Cluster(tuple(replace(device, node=0) for device in devices), link, link)
    with pytest.raises(hg.Unsupported, match="the devices of node 0 have different types; list the devices of each"):
        hg.plan(priced.costs(3, cluster), WORK)
    # On nodes of their own, types need no names.
    apart = tuple(replace(device, type="", memory_bytes=10**9 + device.node) for device in devices)
    hg.plan(Costs(priced.profile(3), hg.Cluster(apart, link, link)), WORK, deadline_s=0.0)


def test_lost_devices_are_no_room() -> None:
    costs = with_memory(5_000_000).changed(health=hg.Health({1: float("inf")}), home=hg.Home())
    assert "0.005 GB" in str(nothing_fits(costs, WORK, []))
    with pytest.raises(hg.Unsupported, match="nothing fits"):
        hg.plan(costs, WORK)


@only("work0")
@pytest.mark.parametrize("work", [WORK, hg.Workload(lengths=[[2000, *[500] * 12]])])
def test_devices_too_small_for_the_labels_are_named_and_lost_ones_stop_nobody(work: hg.Workload) -> None:
    devices = priced.cluster(3).devices
    cluster = replace(priced.cluster(3), devices=(*devices[:2], replace(devices[2], memory_bytes=1000)))
    with pytest.raises(hg.Unsupported, match=r"exceed the memory of rank 2[^0-9].*run without ranks 2"):
        hg.plan(priced.costs(3, cluster), work)
    without = hg.plan(priced.costs(3, cluster, hg.Health({2: float("inf")})), work)
    assert without.memory[2] == 0
    with pytest.raises(hg.Unsupported, match=r"memory of ranks 0, 1, 2; give smaller mini-batches"):
        hg.plan(priced.costs(3, cluster), hg.Workload(sequences=10**5, length=10_000))
    assert without.seconds == pytest.approx(hg.plan(priced.costs(3, priced.cluster(2)), work).seconds, rel=0.02)
