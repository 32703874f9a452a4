"""End of a pipeline, compared with the closed form for equal stages and with relaxation over all dependencies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.compiled_replay import PARTS
from hydragraph.cost.schedule_replay import replayed

Rows = list[list[float]]


def relaxed(early: Rows, forward: Rows, backward: Rows, ahead: Rows, back: Rows, schedule: str) -> float:
    """Return the longest path, step by step: every operation waits for the one before it on its stage, and its own."""
    stages, count = len(forward), len(forward[0])
    orders = []
    for s in range(stages):
        warm = count if schedule == "gpipe" else min(stages - 1 - s, count)
        order = [("f", m) for m in range(warm)]
        for m in range(count - warm):
            order += [("f", warm + m), ("b", m)]
        order += [("b", m) for m in range(count - warm, count)]
        if schedule == "zb-h1" and s:
            order = [each for kind, m in order for each in ([("b", m), ("w", m)] if kind == "b" else [(kind, m)])]
        orders.append(order)
    ends = {(s, kind, m): 0.0 for s in range(stages) for kind, m in orders[s]}
    for _ in range(len(ends)):  # the longest path has no more operations than there are
        for s, order in enumerate(orders):
            before = 0.0
            for kind, m in order:
                if kind == "f":
                    came = ends[s - 1, "f", m] + ahead[s - 1][m] if s else 0.0
                    before = max(before + early[s][m], came) + forward[s][m]
                elif kind == "b":
                    came = ends[s + 1, "b", m] + back[s][m] if s < stages - 1 else 0.0
                    before = max(before, came) + backward[s][m] / (1 + ((s, "w", m) in ends))
                else:
                    before += backward[s][m] / 2
                ends[s, kind, m] = before
    return max(ends.values())


def end(parts: tuple[Rows, ...], schedule: str) -> float:
    """Return the latest end; `parts` are early, forward, backward, ahead and back, by stage and micro-batch."""
    stages, count = len(parts[0]), len(parts[0][0])
    rows = np.zeros((count, stages, PARTS))
    for part, by_stage in enumerate(parts):
        rows[:, : len(by_stage), part] = np.array(by_stage).reshape(-1, count).T
    return float(replayed(rows, schedule).max())


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Rows, Rows, Rows, Rows, Rows]:
    stages, count = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rows = lambda n: draw(  # noqa: E731
        st.lists(st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count), min_size=n, max_size=n)
    )
    return rows(stages), rows(stages), rows(stages), rows(stages - 1), rows(stages - 1)


@given(pipelines(), st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
def test_it_ends_where_the_longest_path_does(rows: tuple[Rows, Rows, Rows, Rows, Rows], schedule: str) -> None:
    assert end(rows, schedule) == relaxed(*rows, schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), [(1, 3), (3, 2), (4, 8)])
def test_equal_stages_take_the_papers_form(stages: int, count: int, schedule: str) -> None:
    """(PP - 1 + V) times forward and backward (Hydraulis, 6.1), where messages take no time."""
    none, edges = [[0.0] * count for _ in range(stages)], [[0.0] * count for _ in range(stages - 1)]
    forward, backward = [[1.0] * count for _ in range(stages)], [[2.0] * count for _ in range(stages)]
    assert end((none, forward, backward, edges, edges), schedule) == (stages - 1 + count) * 3.0


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 1), (4, 8)])
def test_halved_backwards_of_equal_stages_idle_for_a_forward_and_an_input_gradient(stages: int, count: int) -> None:
    none, edges = [[0.0] * count for _ in range(stages)], [[0.0] * count for _ in range(stages - 1)]
    forward, backward = [[1.0] * count for _ in range(stages)], [[2.0] * count for _ in range(stages)]
    assert end((none, forward, backward, edges, edges), "zb-h1") == 3.0 * count + (stages - 1) * 2.0
