"""Cluster: links, the homogeneous constructor, lossless YAML and errors that name the field."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.spec.cluster import Cluster, Device, DeviceType, Interconnect, Node, Pair
from hydragraph.spec.known_devices import KNOWN

FAST, SLOW = Interconnect(450e9, 5e-6), Interconnect(50e9, 1e-5)
DEVICE = Device(flops_per_s=9.89e14, memory_bytes=80_000_000_000, memory_bytes_per_s=3.35e12)

positive = st.floats(1e7, 1e300)
links = st.builds(Interconnect, positive, st.floats(0, 1))
devices = st.builds(Device, positive, st.integers(10**5, 10**13), positive, st.integers(0, 3))
clusters = st.builds(Cluster, st.lists(devices, min_size=1, max_size=4).map(tuple), links, links)

NODES_OF = (
    "nodes: [{{type: {}, devices: 8, inner: {{bytes_per_s: 1e9, latency_s: 0}}, "
    "outer: {{bytes_per_s: 1e9, latency_s: 0}}}}]"
)


@given(clusters)
def test_yaml_reads_back(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        cluster.save(path)
        assert Cluster.load(path) == cluster


def test_yaml_takes_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "devices:\n"
        "  - &h100 {flops_per_s: 9.89e14, memory_bytes: 80e9, memory_bytes_per_s: 335e+10}\n"
        "  - {<<: *h100, node: 1}\n"
        "within_node: {bytes_per_s: 450e9, latency_s: .5e-5}\n"
        "between_nodes: {bytes_per_s: 50000000000, latency_s: 1E-5}\n"
    )
    loaded = Cluster.load(path)
    assert loaded == Cluster.homogeneous(2, device=DEVICE, within_node=FAST, between_nodes=SLOW, ranks_per_node=1)
    assert isinstance(loaded.devices[0].memory_bytes, int)
    assert isinstance(loaded.between_nodes.bytes_per_s, float)


@given(st.integers(1, 12), st.integers(1, 5))
def test_homogeneous_fills_nodes_in_order(ranks: int, per_node: int) -> None:
    cluster = Cluster.homogeneous(ranks, device=DEVICE, within_node=FAST, between_nodes=SLOW, ranks_per_node=per_node)
    groups = [list(range(ranks))[start : start + per_node] for start in range(0, ranks, per_node)]
    assert [device.node for device in cluster.devices] == [i for i, group in enumerate(groups) for _ in group]
    for a in range(ranks):
        for b in set(range(ranks)) - {a}:
            together = any(a in group and b in group for group in groups)
            assert cluster.link(a, b) == (FAST if together else SLOW)


def test_one_node_needs_one_link_only() -> None:
    cluster = Cluster.homogeneous(4, device=DEVICE, within_node=FAST)
    assert {device.node for device in cluster.devices} == {0}
    assert cluster.link(0, 3) == FAST
    with pytest.raises(ValueError, match="4 ranks with 2 per node need several nodes: set between_nodes"):
        Cluster.homogeneous(4, device=DEVICE, within_node=FAST, ranks_per_node=2)
    with pytest.raises(ValueError, match="'ranks' is 0"):
        Cluster.homogeneous(0, device=DEVICE, within_node=FAST)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [(0, 4, "device 4 is unknown: the cluster has 4 devices"), (-1, 0, "device -1"), (2, 2, "no link to itself")],
)
def test_link_refuses(a: int, b: int, message: str) -> None:
    cluster = Cluster.homogeneous(4, device=DEVICE, within_node=FAST)
    with pytest.raises(ValueError, match=message):
        cluster.link(a, b)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Interconnect, (0, 0), "'bytes_per_s' is 0"),
        (Interconnect, (1, -1e-6), "'latency_s' is -1e-06: give a finite number of at least 0"),
        (Interconnect, (float("nan"), 0), "'bytes_per_s' is nan"),
        (Interconnect, (float("inf"), 0), "'bytes_per_s' is inf: give a finite number above 0"),
        (Interconnect, (True, 0), "'bytes_per_s' is True"),
        (Device, (0, 1, 1), "'flops_per_s' is 0"),
        (Device, (-1, 1, 1), "'flops_per_s' is -1: give a finite number above 0"),
        (Device, (1, 0, 1), "'memory_bytes' is 0"),
        (Device, (1, 1.5, 1), "'memory_bytes' is 1.5: give a whole number"),
        (Device, (1, 1, 0), "'memory_bytes_per_s' is 0"),
        (Device, (1, 1, 1, -1), "'node' is -1"),
        (Cluster, ((), FAST, SLOW), "'devices' is empty"),
        (Cluster, ((FAST,), FAST, SLOW), "use Device(...)"),
        (Cluster, ((DEVICE,), FAST, None), "use Interconnect(...)"),
        (Cluster, ((DEVICE,), FAST, SLOW, (), [Pair(("", ""), 1, 0)] * 2), "have more than one link: give one"),
    ],
)
def test_values_are_checked(make: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(*arguments)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes: 9e9", "memory: 9e9", "devices[1]: unknown field 'memory': did you mean 'memory_bytes'?"),
        (
            "memory_bytes: 9e9",
            "memory_bytes: 80 GB",
            "devices[1]: 'memory_bytes' is '80 GB': give bytes, such as 80e9",
        ),
        ("memory_bytes: 9e9", "memory_bytes: 80", "devices[1]: 'memory_bytes' is 80: give bytes, such as 80e9"),
        ("flops_per_s: 2e14", "flops_per_s: 312", "devices[1]: 'flops_per_s' is 312: give FLOP/s, such as 989e12"),
        (
            "memory_bytes: 9e9",
            "memory_bytes: 9e9, efficiency: 45",
            "devices[1]: 'efficiency' is 45: give a fraction of the peak FLOP/s, above 0 and at most 1",
        ),
        ("memory_bytes: 9e9", "memory_bytes: 9e9, efficiency: high", "devices[1]: 'efficiency' is 'high': "),
        ("latency_s: 0.7", "latency_ms: 7", "between_nodes: unknown field 'latency_ms': did you mean 'latency_s'?"),
        ("{bytes_per_s: 5e9, latency_s: 0.7}", "5", "between_nodes: expected a mapping with bytes_per_s, latency_s"),
        ("within_node: ", "within: ", "cluster: unknown field 'within': did you mean 'within_node'?"),
        ("within_node: {bytes_per_s: 4e9, latency_s: 0.6}\n", "", "cluster: missing field 'within_node'"),
    ],
)
def test_yaml_errors_name_the_file_and_the_field(old: str, new: str, message: str, tmp_path: Path) -> None:
    good = (
        "devices:\n"
        "  - {flops_per_s: 1e14, memory_bytes: 2e9, memory_bytes_per_s: 3e9}\n"
        "  - {flops_per_s: 2e14, memory_bytes: 9e9, memory_bytes_per_s: 3e9}\n"
        "within_node: {bytes_per_s: 4e9, latency_s: 0.6}\n"
        "between_nodes: {bytes_per_s: 5e9, latency_s: 0.7}\n"
    )
    path = tmp_path / "c.yaml"
    path.write_text(good)
    assert len(Cluster.load(path).devices) == 2
    assert good.count(old) == 1
    path.write_text(good.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        Cluster.load(path)


NODES = """\
types:
  h100: {flops_per_s: 9.89e14, memory_bytes: 80e9, memory_bytes_per_s: 3.35e12}
  l4: {flops_per_s: 1.2e14, memory_bytes: 24e9, memory_bytes_per_s: 3e11}
nodes:
  - {type: h100, devices: 4, inner: {bytes_per_s: 450e9, latency_s: 5e-6}, outer: {bytes_per_s: 50e9, latency_s: 1e-5}}
  - {type: l4, devices: 2, count: 2, inner: {bytes_per_s: 16e9, latency_s: 1e-5}, cards: 2,
     outer: {bytes_per_s: 3e9, latency_s: 2e-5, points: [[1e3, 1e8], [1e6, 3e9]]}}
pairs: [{types: [h100, l4], bytes_per_s: 2e9, latency_s: 3e-5}]
"""


def nodes(tmp_path: Path, text: str = NODES) -> Cluster:
    (tmp_path / "c.yaml").write_text(text)
    return Cluster.load(tmp_path / "c.yaml")


def test_ranks_count_through_nodes_of_types(tmp_path: Path) -> None:
    cluster = nodes(tmp_path)
    assert [cluster.type_of(rank) for rank in range(8)] == ["h100"] * 4 + ["l4"] * 4
    assert [cluster.node_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert cluster.devices[5].memory_bytes == 24_000_000_000
    assert cluster.link(0, 3) == Interconnect(450e9, 5e-6)
    assert cluster.link(2, 7) == cluster.link(7, 2) == Interconnect(2e9, 3e-5)  # the pair's own
    assert cluster.link(4, 6).latency_s == 2e-5
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster


def test_ranks_of_a_node_share_its_cards(tmp_path: Path) -> None:
    cluster = nodes(tmp_path)
    assert [cluster.card_of(rank) for rank in range(8)] == [0, 0, 0, 0, 0, 1, 0, 1]
    assert cluster.resources(0, 1) == (("port out", 0, 0), ("port in", 1, 0))
    assert cluster.resources(1, 5)[2:] == (("card out", 0, 0), ("card in", 1, 1))
    alike = Cluster.homogeneous(4, device=DEVICE, within_node=FAST, between_nodes=SLOW, ranks_per_node=2)
    assert [alike.card_of(rank) for rank in range(4)] == [0, 1, 0, 1]  # a card each, where links are every rank's own


def test_bandwidth_by_message_size_is_interpolated_over_the_logarithm() -> None:
    link = Interconnect(4e9, 0.5, ((1e2, 1e8), (1e6, 3e8)))
    assert [link.bandwidth(size) for size in (1, 1e2, 1e4, 1e6, 1e9)] == pytest.approx([1e8, 1e8, 2e8, 3e8, 3e8])
    assert link.seconds(1e6) == pytest.approx(0.5 + 1e6 / 3e8)
    assert link.times(2).bandwidth(1e4) == pytest.approx(4e8)
    mixed = Cluster.of(
        {"t": DeviceType(1, 1, 1)}, (Node("t", 1, FAST, link), Node("t", 1, FAST, Interconnect(2e8, 0.7)))
    ).link(0, 1)
    assert mixed.latency_s == 0.7
    assert mixed.bandwidth(1e2) == pytest.approx(1e8)
    assert mixed.bandwidth(1e6) == pytest.approx(2e8)


def test_links_can_be_scaled(tmp_path: Path) -> None:
    cluster = nodes(tmp_path).scaled("between_nodes", 0.5)
    assert cluster.link(0, 7).bytes_per_s == 1e9
    assert cluster.link(0, 1) == Interconnect(450e9, 5e-6)
    both = Cluster.homogeneous(4, device=DEVICE, within_node=FAST, between_nodes=SLOW, ranks_per_node=2)
    assert both.scaled("within_node", 2).link(0, 1).bytes_per_s == 900e9
    with pytest.raises(ValueError, match="scale 'within_node' or 'between_nodes'"):
        both.scaled("nvlink", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty: list nodes"),
        ("h100-sxm: 8", "cluster: unknown field 'h100-sxm': known fields are nodes, types, pairs"),
        ("[1]", "cluster: expected a mapping with nodes, types, pairs"),
        (NODES_OF.format("A100"), "or a built-in type: a100-40gb, a100-80gb"),
        (NODES_OF.format("h100-sxmm"), "or a built-in type: h100-sxm"),
        (NODES_OF.format("mine"), "or a built-in type: a100-40gb, a100-80gb, h100-sxm, "),
    ],
)
def test_a_file_that_is_no_cluster_is_refused_in_the_form_of_the_docs(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        Cluster.load(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{type: l4,", "{type: l40,", "nodes[1]: unknown device type 'l40': use h100, l4"),
        ("[h100, l4]", "[h100, a100]", "pairs: unknown device type 'a100'"),
        ("[h100, l4]", "[h100]", "pairs[0]: 'types' is ['h100']: name two types"),
        ("cards: 2", "cards: 3", "nodes[1]: 'cards' is 3, 'devices' is 2"),
        ("[1e6, 3e9]", "[1e2, 3e9]", "nodes[1].outer: points: sort them by bytes"),
        ("  l4: {flops_per_s: 1.2e14, ", "  l4: {", "types.l4: missing field 'flops_per_s'"),
        ("memory_bytes: 80e9", "memory_bytes: 80", "types.h100: 'memory_bytes' is 80: give bytes, such as 80e9"),
        ("latency_s: 5e-6", "latency_s: 5", "nodes[0].inner: 'latency_s' is 5: give seconds, such as 5e-6"),
        ("devices: 4", "devices: 40000000", "devices in all: list at most 65,536"),
        ("devices: 4", "device: 4", "nodes[0]: unknown field 'device': did you mean 'devices'?"),
    ],
)
def test_errors_of_nodes_name_the_field(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in NODES
    with pytest.raises(ValueError, match=re.escape(message)):
        nodes(tmp_path, NODES.replace(old, new))


def test_an_empty_entry_of_a_built_in_type_means_its_datasheet(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    link = "{bytes_per_s: 16e9, latency_s: 1e-5}"
    for entry in ("", "types: {l4: {}}\n", "types: {l4: }\n"):
        path.write_text(f"{entry}nodes: [{{type: l4, devices: 2, inner: {link}, outer: {link}}}]\n")
        assert Cluster.load(path).devices[0].flops_per_s == KNOWN["l4"].flops_per_s


def test_some_of_its_devices_keep_their_types_and_links(tmp_path: Path) -> None:
    types = {name: DeviceType(flops, 10**10, 1e12) for name, flops in (("a", 1e14), ("b", 2e14), ("c", 3e14))}
    nodes = tuple(Node(name, 2, FAST, SLOW.times(1 + i)) for i, name in enumerate(types))
    whole = Cluster.of(types, nodes, (Pair(("a", "b"), 1e9, 1e-4), Pair(("b", "c"), 2e9, 1e-4)))
    kept = [4, 0, 1, 5]
    some = whole.of_ranks(kept)
    assert [some.type_of(rank) for rank in range(4)] == ["c", "a", "a", "c"]
    assert all(some.link(i, j) == whole.link(kept[i], kept[j]) for i in range(4) for j in range(4) if i != j)
    with pytest.raises(ValueError, match=r"ranks are on nodes \[2, 0, 0, 2\]"):
        some.save(tmp_path / "some.yaml")
    fewer = whole.of_ranks([0, 4, 5])
    fewer.save(tmp_path / "fewer.yaml")
    again = Cluster.load(tmp_path / "fewer.yaml")
    assert [again.type_of(rank) for rank in range(3)] == ["a", "c", "c"]
    assert all(again.link(i, j) == fewer.link(i, j) for i in range(3) for j in range(3) if i != j)
    other = whole.reordered([4, 5, 1, 0, 2, 3])
    assert [other.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [other.type_of(rank) for rank in range(6)] == ["c", "c", "a", "a", "b", "b"]
    assert [node.type for node in other.nodes] == ["c", "a", "b"]
    unnamed = Cluster((replace(DEVICE, flops_per_s=1.0), DEVICE, DEVICE), FAST, SLOW)
    assert [unnamed.of_ranks([2, 1]).type_of(rank) for rank in range(2)] == ["other 1", "other 1"]


def test_a_type_may_be_written_as_a_number(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    text = (
        "types: {4090: {flops_per_s: 1e14, memory_bytes: 24e9, memory_bytes_per_s: 1e12}}\n"
        "nodes: [{type: NAME, devices: 2, inner: {bytes_per_s: 2e10, latency_s: 1e-5}, "
        "outer: {bytes_per_s: 1e9, latency_s: 1e-5}}]\n"
    )
    path.write_text(text.replace("NAME", "4090"))
    assert Cluster.load(path).type_of(1) == "4090"
    path.write_text(text.replace("NAME", "[4090]"))
    with pytest.raises(ValueError, match=r"'type' is .*: give the name of a device type"):
        Cluster.load(path)


def test_devices_keep_their_cards_when_others_leave() -> None:
    node = Node("a100-80gb", 8, FAST, SLOW, cards=2)
    cluster = Cluster.of({}, (node,))
    left = cluster.of_ranks([2, 3, 4, 5])
    assert [left.card_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [left.of_ranks([3, 0]).card_of(rank) for rank in range(2)] == [1, 0]


def test_a_file_lists_only_the_cards_in_use(tmp_path: Path) -> None:
    cluster = Cluster.of({}, (Node("a100-80gb", 8, FAST, SLOW, cards=2, count=2),))
    some = cluster.of_ranks([0, 1, 2, 3, 8, 9, 14, 15])
    some.save(tmp_path / "some.yaml")
    read = Cluster.load(tmp_path / "some.yaml")
    assert [read.card_of(rank) for rank in range(8)] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert [read.card_of(rank) for rank in range(8)] == [some.card_of(rank) for rank in range(8)]
