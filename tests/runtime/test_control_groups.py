"""Control groups, from made-up files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hydragraph.runtime import control_groups
from hydragraph.runtime.control_groups import memory_limit, throttled_seconds

SLURM = "0::/system.slice/job_5/step_0\n"
HYBRID = "4:memory:/jobs/a\n1:cpu,cpuacct:/jobs/a\n0::/\n"
CONTAINER = "4:memory:/kubepods/pod1\n"
NAMESPACE = "0::/../other\n"


@pytest.mark.parametrize(
    ("own", "files", "limit", "throttled"),
    [
        ("", {"memory.max": "5"}, math.inf, 0.0),
        (SLURM, {"system.slice/job_5/memory.max": "7", "system.slice/job_5/step_0/memory.max": "max"}, 7, 0.0),
        (SLURM, {"system.slice/cpu.stat": "nr_throttled 3\nthrottled_usec 1500000\n"}, math.inf, 1.5),
        (SLURM, {"system.slice/job_6/memory.max": "7"}, math.inf, 0.0),
        (HYBRID, {"memory/jobs/memory.limit_in_bytes": "9", "memory/memory.limit_in_bytes": "99"}, 9, 0.0),
        (HYBRID, {"cpu,cpuacct/jobs/a/cpu.stat": "throttled_time 2000000000\n"}, math.inf, 2.0),
        (CONTAINER, {"memory/memory.limit_in_bytes": "8\n"}, 8, 0.0),
        (NAMESPACE, {"memory.max": "6\n"}, 6, 0.0),
    ],
)
def test_limits_of_a_group_and_of_those_above_count(
    own: str,
    files: dict[str, str],
    limit: float,
    throttled: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "cgroup"
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_ROOT", root)
    assert memory_limit() == limit
    assert throttled_seconds() == throttled


def test_without_files_nothing_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "none")
    assert memory_limit() == math.inf
    assert throttled_seconds() == 0.0
