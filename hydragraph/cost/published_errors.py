"""Errors of predictions on published runs (`benchmarks/published_runs.py`, 2026-11-30)."""

from __future__ import annotations

from hydragraph.spec.cluster import Cluster
from hydragraph.spec.known_devices import known
from hydragraph.spec.strategy import Strategy

# kind of run -> number of held-out runs, and mean error
PUBLISHED = {
    "without pipelines": (20, 0.070),
    "with pipelines": (22, 0.134),
    "on A100s without pipelines": (11, 0.058),
    "on A100s with pipelines": (13, 0.120),
    "on H100s without pipelines": (6, 0.108),
    "on H100s": (8, 0.123),
    "on T4s": (3, 0.118),
    "on V100s mixed with T4s": (7, 0.116),
}
MIXED = ("V100", "T4")
FLAT = "the error with one efficiency for all operations is unknown"
MEMORY = "memory from the sizes of compiled graphs (mean error 11% on 11 published runs, at most 28%)"


def published_error(cluster: Cluster, strategy: Strategy) -> str:
    types = {name: cluster.types[name] for name in map(cluster.type_of, strategy.devices)}
    sheets = {name: known(device.flops_per_s, device.memory_bytes_per_s, name) for name, device in types.items()}
    families = {name: sheet.published if sheet else "" for name, sheet in sheets.items()}
    mixed = len({family or name for name, family in families.items()}) > 1
    used = MIXED if mixed else tuple({*families.values()} - {""})
    where = f"on {'s mixed with '.join(used)}s"
    how = "with pipelines" if any(len(p.stages) > 1 for p in strategy.pipelines) else "without pipelines"
    kind = next(kind for kind in (f"{where} {how}", where, how) if kind in PUBLISHED)
    runs, error = PUBLISHED[kind]
    others = " or ".join(name or "these devices" for name, family in families.items() if family not in used)
    return f"{error:.0%} on {runs} published runs {kind}" + f", none of them on {others}" * bool(others)
