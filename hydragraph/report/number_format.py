"""Number formats with three digits and a suitable unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

_SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_COUNTS = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k"))


def seconds(value: float | None) -> str:
    """Format a time, such as "12.3 ms"; "–" if it is unknown or infinite."""
    if value is None or not math.isfinite(value):
        return "–"
    return _scaled(value, _SECONDS, "s")


def size(value: float) -> str:
    """Format bytes, such as "1.35 GB"."""
    return _scaled(value, _BYTES, "B")


def rate(value: float | None) -> str:
    """Format a count, such as "3.46 M" or "8,210"."""
    if value is None or not math.isfinite(value):
        return "–"
    for unit, name in _COUNTS:
        if value >= unit:
            return f"{_digits(value / unit)}{name}"
    return f"{value:,.0f}"


def share(part: float) -> str:
    """Format a fraction, such as "12%", "0.4%" or "<0.1%"."""
    if 0 < part < 0.001:
        return "<0.1%"
    return f"{part:.1%}" if 0 < part < 0.0995 else f"{part:.0%}"


def times(one: float, other: float) -> str:
    """Format a ratio, such as "1.27 ×"."""
    return f"{_digits(one / other)} ×" if other else "–"


def ranks_text(ranks: Sequence[int], most: int = 6) -> str:
    """Format ranks: "0–3, 8, 12–15 and 20 more"."""
    runs = []
    for _, group in groupby(enumerate(sorted(ranks)), lambda item: item[1] - item[0]):
        run = [rank for _, rank in group]
        runs.append((run[0], run[-1]))
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in runs]
    if len(texts) <= most:
        return ", ".join(texts)
    left = sum(b - a + 1 for a, b in runs[most:])
    return f"{', '.join(texts[:most])} and {left} more"


def counts_text(counts: Sequence[int]) -> str:
    """Format micro-batches by pipeline: "4, 2", "8 × 16"."""
    groups = ((count, len(list(group))) for count, group in groupby(counts))
    parts = (f"{times} × {count}" if times > 2 else ", ".join([str(count)] * times) for count, times in groups)
    return ", ".join(parts)


def _scaled(value: float, units: Sequence[tuple[float, str]], zero: str) -> str:
    if not value:
        return f"0 {zero}"
    sign = "−" if value < 0 else ""
    value = abs(value)
    factor, name = next(((unit, name) for unit, name in units if value >= unit * 0.9995), units[-1])
    return f"{sign}{_digits(value / factor)} {name}"


def _digits(value: float) -> str:
    value = float(f"{value:.3g}") if value < 999.5 else value
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 1e-9 else "0"
