"""Exact duration of a pipeline with unequal stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hydragraph.ir.schedules.schedule_kinds import table_of
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE


def replayed(
    rows: NDArray[np.float64],
    schedule: str = DEFAULT_SCHEDULE,
    devices: tuple[int, ...] = (),
    order: Sequence[int] | NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """Return the end time of the last action on each stage's devices; see `compiled_replay`.

    Args:
        rows: seconds of micro-batches [M, S, 5], at least one.
        devices: each stage's group of devices (`Pipeline.rows`); empty: one group per stage.
        order: micro-batches' indices in `rows`; default: ascending.
    """
    from hydragraph.cost.compiled_replay import replay, scratch_of

    stages = rows.shape[1]
    order = np.arange(len(rows)) if order is None else np.asarray(order, np.int64)
    scratch = scratch_of(stages, len(order))
    replay(table_of(schedule, devices or stages, len(order)), stages, rows, order, len(order), scratch)
    return np.asarray(scratch.clock[list(devices or range(stages))])
