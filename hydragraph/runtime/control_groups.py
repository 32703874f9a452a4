"""Limits of Linux control groups (v1 and v2)."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from functools import lru_cache
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
    """Return the seconds for which CPU quotas stopped this process."""
    total = 0.0
    for folder in _folders("cpu"):
        with suppress(OSError):
            if found := re.search(r"throttled_(usec|time) (\d+)", (folder / "cpu.stat").read_text()):
                total += int(found[2]) / _PER_S[found[1]]
    return total


def _folders(controller: str) -> frozenset[Path]:
    try:
        return _folders_of(_OWN.read_text(), _ROOT, controller)
    except OSError:
        return frozenset()


@lru_cache(maxsize=8)
def _folders_of(groups: str, root: Path, controller: str) -> frozenset[Path]:
    folders: set[Path] = set()
    for line in groups.splitlines():
        # A line is number:controllers:path. v1 has a tree per controller; v2 names none, and its tree
        # is the root or, next to v1, `unified`. All parents' limits apply.
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(",") and controllers:
            continue
        for base in (root / controllers, root / (controller if controllers else "unified")):
            group = base / normpath(path).lstrip("/")
            folders |= {folder for folder in (group, *group.parents) if folder.is_relative_to(base)}
    return frozenset(folders)
