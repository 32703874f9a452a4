"""Cache of measured profiles in the user's cache folder, so that a second start measures no blocks.

A profile is stored under a digest of everything that it depends on, and the speed that the device had is part of the
file's name: a device that is much slower today than it was then is measured again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydragraph.cost.measured_profile import Profile
from hydragraph.frontend import user_cache
from hydragraph.runtime.device_reports import ALIKE, DeviceReport

# Fraction of its former speed from which the profile of the only type of device is used: it changes no order of plans
# as long as communication is slowed as well.
ALONE = 0.5

_LOG = logging.getLogger(__name__)


def folder() -> Path:
    """Return the folder of the cache."""
    return user_cache.folder("profiles")


def profile_key(report: DeviceReport, together: int, others: Sequence[object]) -> str:
    """Return the digest of what a profile depends on, except the device's speed.

    Args:
        together: most ranks of this type on one node, which share its cores and links.
        others: the model, dtype, backend and settings of the measurement; their `repr` must be the same every time.
    """
    memory = round(report.memory_bytes / 1e9, 1)
    parts = (report.name, memory, report.threads, report.versions, together, *others)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def recall_profile(key: str, report: DeviceReport, type_: str, alone: bool) -> Profile | None:
    """Return the stored profile of a device of this speed, as that of a type; None if there is none.

    A file that cannot be read counts as none: it may be of another version.

    Args:
        alone: whether there is one type of device only; then all may be slower than they were, by other work.
    """
    least = ALONE if alone else ALIKE
    best: tuple[float, Path] | None = None
    for path in folder().glob(f"{key}-*.json"):
        try:
            then = float(path.stem.rpartition("-")[2])
        except ValueError:
            continue
        ratio = min(then, report.products_per_s) / max(then, report.products_per_s)
        if ratio >= least and (best is None or ratio > best[0]):
            best = ratio, path
    if best is None:
        return None
    try:
        return replace(Profile.load(best[1]), type=type_)
    except (ValueError, OSError) as error:
        _LOG.info("the cached profile %s is not readable, so the device is measured again: %s", best[1], error)
        return None


def remember_profile(key: str, report: DeviceReport, profile: Profile) -> None:
    """Store a profile; if it cannot be written, the device is measured again next time."""
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder(), delete=False) as file:
            profile.save(file.name)
        os.replace(file.name, folder() / f"{key}-{report.products_per_s:.1f}.json")
    except OSError as error:
        _LOG.info("the profile cannot be cached: %s", error)
