"""Types of devices, from made-up reports."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join
from hydragraph.runtime import device_reports
from hydragraph.runtime.device_reports import (
    DeviceReport,
    check_versions,
    product_flops_per_s,
    report_devices,
    types_of,
)

VERSIONS = (("hydragraph", "1"), ("torch", "2"))
ONE = DeviceReport("n0", "host0", "a100", 40 * 10**9, 100.0, 1e12, 5e12, 1e12, 0, "", VERSIONS)


def test_devices_are_told_apart_by_name_speed_and_memory() -> None:
    reports = [
        ONE,
        replace(ONE, products_per_s=98.0),
        replace(ONE, products_per_s=51.0),  # throttled
        replace(ONE, name="v100", products_per_s=51.0),
        replace(ONE, memory_bytes=80 * 10**9, products_per_s=99.0),
        replace(ONE, products_per_s=49.0),
    ]
    assert types_of(reports) == ("a100", "a100", "a100-51", "v100", "a100-99", "a100-51")
    assert types_of(reports[::-1]) == types_of(reports)[::-1]


def test_a_rank_that_was_fast_for_a_moment_is_no_type_of_its_own() -> None:
    speeds = (100.0, 81.0, 80.5, 66.0, 65.9, 40.0)
    reports = [replace(ONE, products_per_s=speed) for speed in speeds]
    assert types_of(reports) == ("a100",) * 5 + ("a100-40",), "65.9 reaches 0.8 of the median of the first four"
    assert types_of([replace(ONE, products_per_s=speed) for speed in (100.0, 79.9)]) == ("a100", "a100-80")


@given(st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=12))
def test_types_are_of_ranks_next_to_each_other_in_speed(speeds: list[float]) -> None:
    names = types_of([replace(ONE, products_per_s=speed) for speed in speeds])
    in_order = [names[rank] for rank in sorted(range(len(speeds)), key=lambda rank: (-speeds[rank], rank))]
    assert len([name for name, _ in groupby(in_order)]) == len(set(names))
    for name in set(names):
        members = sorted((speed for speed, own in zip(speeds, names, strict=True) if own == name), reverse=True)
        assert all(speed >= 0.8 * median(members[:i]) for i, speed in enumerate(members) if i)


@pytest.mark.parametrize(
    ("probes", "memory", "count", "types"),
    [
        ((100.0,), 1.0, 1, 1),  # equal at once
        ((50.0, 60.0, 95.0), 1.0, 3, 1),  # slowed by others for a moment
        ((50.0, 60.0, 40.0, 55.0, 50.0, 50.0), 1.0, 6, 2),  # slow
        ((100.0,), 0.5, 1, 2),  # types by memory, which probes do not change
    ],
)
def test_devices_are_probed_again_only_while_speed_makes_types(
    probes: tuple[float, ...], memory: float, count: int, types: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank is probed together with one that reaches 100 products per second every time."""
    monkeypatch.setattr(device_reports, "device_memories", lambda groups: [1e9])
    gathered: list[float] = []

    def gather(own: DeviceReport) -> list[DeviceReport]:
        gathered.append(own.products_per_s)
        return [own, replace(own, products_per_s=100.0, memory_bytes=int(own.memory_bytes * memory))]

    groups: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu"), rank=0, node="n0"), gather=gather)
    measured = iter(probes)
    reports = report_devices(groups, lambda: next(measured))
    assert gathered == [max(probes[: i + 1]) for i in range(count)]
    assert len(set(types_of(reports))) == types


def test_types_of_equal_speed_and_other_memory_have_names_of_their_own() -> None:
    every = [replace(ONE, memory_bytes=n * 10**9) for n in (40, 80, 160)]
    assert types_of(every) == ("a100", "a100-100", "a100-100-160gb")


def test_other_versions_are_refused() -> None:
    other = replace(ONE, host="host1", versions=(("hydragraph", "1"), ("torch", "3")))
    check_versions([ONE, ONE])
    with pytest.raises(ValueError, match="rank 1 on host1 has torch 3, and rank 0 on host0 has torch 2: install"):
        check_versions([ONE, other])


def test_this_machine_reports_itself() -> None:
    groups = Groups(join("cpu"), timedelta(minutes=2))
    (report,) = report_devices(groups, lambda: 1000.0)
    groups.close()
    assert report.products_per_s == 1000.0
    assert report.memory_bytes > 10**8
    assert report.memory_bytes_per_s > 0
    assert report.threads >= 1
    assert "core" in report.details
    assert "lo" not in report.details.partition("network ")[2].split(" and ")


def test_a_gpu_reports_where_it_is_and_whom_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(major=9, minor=0, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: (own, other) != (1, 3))
    monkeypatch.setattr(device_reports, "nvlink_peers", lambda own: {3, 2} if own == 1 else set())
    details = device_reports._details(torch.device("cuda", 1))
    assert details.startswith("compute capability 9.0, PCI 0000:1b:00, NVLink to GPU 2 and 3, PCIe to GPU 0")


def test_the_speed_of_products_is_that_of_the_counted_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(i * 0.1 for i in range(100))
    monkeypatch.setattr(device_reports.time, "perf_counter", lambda: next(seconds))
    # Each product takes 0.1 s, so two products pass MOST_S / 2.
    assert product_flops_per_s(torch.device("cpu"), torch.bfloat16, 8) == pytest.approx(2 * 8**3 / 0.1)
