"""Cache of measured profiles.

Devices are measured again if the ratios of their speeds have changed.
"""

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

# Minimum ratio between a device's stored and current speeds, the slower divided by the faster. A CPU may be half as
# fast in another run.
UNCHANGED = 0.5

_LOG = logging.getLogger(__name__)


def folder() -> Path:
    return user_cache.folder("profiles")


def profile_key(report: DeviceReport, together: int, others: Sequence[object]) -> str:
    """Return a digest of everything that a profile depends on, except the device's speed.

    Args:
        together: largest number of ranks with this device type on one node; these ranks share the node's cores.
        others: the model, dtype, backend and settings, with a stable `repr`.
    """
    memory = round(report.memory_bytes / 1e9, 1)
    parts = (report.name, memory, report.threads, report.versions, together, *others)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class CachedProfile:
    """A stored profile.

    Attributes:
        speedup: current speed of the device / its speed when the profile was measured.
    """

    profile: Profile
    speedup: float


def recall_profile(key: str, report: DeviceReport, type_: str | None = None) -> CachedProfile | None:
    """Return the stored profile whose speed is closest to the device's, if their ratio is at least `UNCHANGED`."""
    best: tuple[float, float, Path] | None = None
    for path in folder().glob(f"{key}-*.json"):
        try:
            # The file's name ends with the measured device's speed, as in "KEY-1234.5.json".
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
    """Return whether all devices' speeds have changed by the same factor, within `ALIKE`, since they were measured."""
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
