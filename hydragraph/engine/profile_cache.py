"""Cache of measured profiles; a device whose speed has changed much is measured again."""

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

# Minimum ratio of the stored and the current speed with one type of device. Probes of the same CPU differ by up to a
# quarter, and a run compares expected with measured times.
ALONE = 0.5

_LOG = logging.getLogger(__name__)


def folder() -> Path:
    return user_cache.folder("profiles")


def profile_key(report: DeviceReport, together: int, others: Sequence[object]) -> str:
    """Return a digest of everything that a profile depends on, except the device's speed.

    Args:
        together: largest number of ranks of this type on one node, which share the node's cores.
        others: the model, dtype, backend and settings, with a stable `repr`.
    """
    memory = round(report.memory_bytes / 1e9, 1)
    parts = (report.name, memory, report.threads, report.versions, together, *others)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def recall_profile(key: str, report: DeviceReport, type_: str | None = None, least: float = ALIKE) -> Profile | None:
    """Return the stored profile of a device of similar speed (slower / faster is at least `least`), if any."""
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
        profile = Profile.load(best[1])
        return profile if type_ is None else replace(profile, type=type_)
    except (ValueError, OSError) as error:
        _LOG.info("the cached profile %s is not readable, so the device is measured again: %s", best[1], error)
        return None


def remember_profile(key: str, report: DeviceReport, profile: Profile) -> None:
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder(), delete=False) as file:
            profile.save(file.name)
        os.replace(file.name, folder() / f"{key}-{report.products_per_s:.1f}.json")
    except OSError as error:
        _LOG.info("the profile cannot be cached: %s", error)
