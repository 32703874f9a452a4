"""Types of devices, from made-up reports."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join
from hydragraph.runtime.device_reports import DeviceReport, check_versions, report_devices, types_of

VERSIONS = (("hydragraph", "1"), ("torch", "2"))
ONE = DeviceReport("n0", "host0", "a100", 40 * 10**9, 100.0, 1e12, 1e12, 0, "", VERSIONS)


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
