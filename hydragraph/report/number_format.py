"""Number formats with three digits and units."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hydragraph.spec.home_text import consecutive

_SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_COUNTS = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k"))


def seconds(value: float | None) -> str:
    """Format a time: "12.3 ms"; "–" if unknown or infinite."""
    if value is None or not math.isfinite(value):
        return "–"
    return _scaled(value, _SECONDS, "s")


def size(value: float) -> str:
    """Format bytes: "1.35 GB"."""
    return _scaled(value, _BYTES, "B")


def rate(value: float | None) -> str:
    """Format a count: "3.46 M", "8,210"."""
    if value is None or not math.isfinite(value):
        return "–"
    for unit, name in _COUNTS:
        if value >= unit:
            return f"{_digits(value / unit)}{name}"
    return f"{value:,.0f}"


def share(part: float) -> str:
    """Format a fraction: "12%", "<0.1%"."""
    if 0 < part < 0.001:
        return "<0.1%"
    return f"{part:.1%}" if 0 < part < 0.0995 else f"{part:.0%}"


def times(one: float, other: float) -> str:
    """Format a ratio: "1.27 ×"."""
    return f"{_digits(one / other)} ×" if other else "–"


def ranks_text(ranks: Sequence[int], most: int = 6) -> str:
    """Format ranks: "0–3, 8, 12–15 and 20 more"."""
    runs = consecutive(sorted(ranks))
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    if len(texts) <= most:
        return ", ".join(texts)
    left = sum(map(len, runs[most:]))
    return f"{', '.join(texts[:most])} and {left} more"


def named_ranks(ranks: Sequence[int], most: int) -> str:
    """Format ranks: "rank 3", "ranks 0–7"."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks, most)}"


def _scaled(value: float, units: Sequence[tuple[float, str]], zero: str) -> str:
    if not value:
        return f"0 {zero}"
    sign = "−" if value < 0 else ""
    value = abs(value)
    # Choose the unit after rounding to three digits: 0.9996 s is "1.00 s", not "1,000 ms".
    factor, name = next(((unit, name) for unit, name in units if value >= unit * 0.9995), units[-1])
    return f"{sign}{_digits(value / factor)} {name}"


def _digits(value: float) -> str:
    # Rounding first may add a digit before the point: 9.996 is "10.0", not "10.00".
    value = float(f"{value:.3g}") if value < 999.5 else value
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 1e-9 else "0"
