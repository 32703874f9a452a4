"""Names of the pipeline schedules, which `ir/schedules` builds."""

from __future__ import annotations

SCHEDULES = ("1f1b", "gpipe", "zb-h1")
# Texts of strategies omit this default
DEFAULT_SCHEDULE = SCHEDULES[0]


def planned_schedules(backend: str) -> tuple[str, ...]:
    """Return the schedules that the planner tries. Inductor cannot split backward graphs, as zb-h1 requires."""
    return ("1f1b",) if backend == "inductor" else ("1f1b", "zb-h1")
