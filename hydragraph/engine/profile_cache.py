"""Cache of measured profiles, which are discarded if the ratios of devices' speeds change."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydragraph.cost.measured_profile import Profile
from hydragraph.frontend import user_cache
from hydragraph.runtime.device_reports import ALIKE, DeviceReport

# Minimum ratio of a device's stored and current speeds,
# slower by faster. A CPU may be half as fast in another run.
UNCHANGED = 0.5

_LOG = logging.getLogger(__name__)


def folder() -> Path:
    return user_cache.folder("profiles")


def profile_key(report: DeviceReport, together: int, others: Sequence[object]) -> str:
    """Return a digest of a profile's dependencies, except the device's speed.

    Args:
        together: most ranks of this device type on one node, which share its cores.
        others: the model, dtype, backend and settings, with a stable `repr`.
    """
    memory = round(report.memory_bytes / 1e9, 1)
    parts = (report.name, memory, report.threads, report.versions, together, *others)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class CachedProfile:
    """Stored profile; `speedup` is the device's current speed / its measured speed."""

    profile: Profile
    speedup: float


def recall_profile(key: str, report: DeviceReport, type_: str | None = None) -> CachedProfile | None:
    """Return the stored profile of the closest speed, at a ratio of at least `UNCHANGED`."""
    best: tuple[float, float, Path] | None = None
    for path in folder().glob(f"{key}-*.json"):
        try:
            # File names end with the measured speed, as in "KEY-1234.5.json".
            speedup = report.products_per_s / float(path.stem.rpartition("-")[2])
        except (ValueError, ZeroDivisionError):
            continue
        ratio = min(speedup, 1 / speedup)
        if ratio >= UNCHANGED and (best is None or ratio > best[0]):
            best = ratio, speedup, path
    if best is None:
        return None
    _, speedup, path = best
    try:
        profile = Profile.load(path)
    except (ValueError, OSError) as error:
        _LOG.info("the cached profile %s is not readable, so the device is measured again: %s", path, error)
        return None
    return CachedProfile(profile if type_ is None else replace(profile, type=type_), speedup)


def equally_changed(devices: Sequence[CachedProfile]) -> bool:
    """Return whether all speeds changed by the same factor, within `ALIKE`."""
    speedups = [device.speedup for device in devices]
    return min(speedups) >= ALIKE * max(speedups)


def remember_profile(key: str, report: DeviceReport, profile: Profile) -> None:
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder(), delete=False) as file:
            profile.save(file.name)
        os.replace(file.name, folder() / f"{key}-{report.products_per_s:.1f}.json")
    except OSError as error:
        _LOG.info("the profile cannot be cached: %s", error)
