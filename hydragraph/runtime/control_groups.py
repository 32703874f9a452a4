"""Limits of Linux control groups (v1 and v2)."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from os.path import normpath
from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_PER_S = {"usec": 1e6, "time": 1e9}


def memory_limit() -> float:
    """Return this process's memory limit in bytes."""
    limits = [math.inf]
    for folder in _folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
    return min(limits)


def throttled_seconds() -> float:
    """Return how long CPU quotas stopped this process."""
    total = 0.0
    for folder in _folders("cpu"):
        with suppress(OSError):
            if found := re.search(r"throttled_(usec|time) (\d+)", (folder / "cpu.stat").read_text()):
                total += int(found[2]) / _PER_S[found[1]]
    return total


def _folders(controller: str) -> set[Path]:
    """Return the folders of this process's group and its ancestors."""
    folders: set[Path] = set()
    with suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller not in controllers.split(",") and controllers:
                continue
            for base in (_ROOT / controllers, _ROOT / (controller if controllers else "unified")):
                group = base / normpath(path).lstrip("/")
                folders |= {folder for folder in (group, *group.parents) if folder.is_relative_to(base)}
    return folders
