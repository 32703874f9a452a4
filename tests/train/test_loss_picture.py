"""The loss curve's picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.train import loss_picture
from hydragraph.train.loss_picture import _draw_events, _draw_steps, smoothed, write_picture
from hydragraph.train.step_metrics import Metrics
from hydragraph.train.stragglers.run_events import RunEvent

STEP = Metrics(1, 2.5, 0.3, 1e-3, 100, 50.0, 2.0, "<[0,1]x5,[2]x3>@0a", 3, (2, 1))


@pytest.mark.parametrize("steps", [1, 30])
def test_writes_a_png_and_nothing_else(tmp_path: Path, steps: int) -> None:
    pytest.importorskip("matplotlib")
    names = ("<tp1,pp2>@11", "<[0,1]x5,[2]x3>@0a")
    history = [
        replace(STEP, step=i, loss=5 / i, strategy=names[i % 2], eval_loss=4.0 if i % 9 == 0 else None)
        for i in range(1, steps + 1)
    ]
    write_picture(history, tmp_path / "loss.png")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
    image = pytest.importorskip("matplotlib.image").imread(tmp_path / "loss.png")
    assert image.shape[0] > 300
    assert image.std() > 0.01, "something is drawn"


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"eval_losses": {"first": 4.0, "heldout": 3.0}}, ("loss (nats per token)", "held out")),
        ({"pairs": {"margin": 0.1}, "eval_losses": {"first": 4.0}}, ("loss (per pair)", "first")),
    ],
)
def test_labels_name_the_unit_and_the_data(
    changes: dict[str, Any], labels: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr(loss_picture, "save_figure", lambda figure, path: figures.append(figure))
    write_picture([replace(STEP, eval_loss=4.0, **changes)], tmp_path / "loss.png")
    (axes,) = figures[0].axes
    assert (axes.get_ylabel(), axes.get_legend().get_texts()[-1].get_text()) == labels


def test_what_happened_to_ranks_is_marked(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    history = [replace(STEP, step=i) for i in range(1, 30)]
    events = [
        RunEvent(9, "straggler", (1,), 0.0, ""),
        RunEvent(11, "switch", (1,), 0.0, ""),
        RunEvent(20, "recovered", (1,), 0.0, ""),
        RunEvent(22, "fault", (1,), 0.0, ""),
        RunEvent(25, "join", (1,), 0.0, ""),
    ]
    dry = [replace(event, done=False) for event in events]
    pictures = []
    for name, marked in (("plain", []), ("dry", dry), ("marked", events)):
        write_picture(history, tmp_path / f"{name}.png", marked)
        pictures.append(image.imread(tmp_path / f"{name}.png"))
    assert (pictures[0] == pictures[1]).all(), "dry runs have no mark"
    assert pictures[2].shape[0] > pictures[0].shape[0], "there are rows for what happened"


def test_each_kind_of_event_has_a_row_with_its_name() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes, below = Figure().subplots(2)
    lost = [RunEvent(4, "fault", (1,), 0.0, ""), RunEvent(9, "fault", (0,), 0.0, "")]
    pauses = [RunEvent(4, "resumed", (0,), 0.5, "")]
    _draw_events(axes, below, [*lost, RunEvent(6, "join", (1,), 0.0, "")], ["fault", "join"], pauses)
    assert [label.get_text() for label in below.get_yticklabels()] == ["rank lost", "rank joined", "pause"]
    assert [list(line.get_xdata()) for line in below.get_lines()] == [[4, 9], [6]]
    assert [text.get_text() for text in below.texts] == [" 0.5 s"]
    assert len(axes.get_lines()) == 3


def test_smoothing_a_constant_changes_nothing() -> None:
    assert smoothed([3.0] * 9) == pytest.approx([3.0] * 9)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.9]))
def test_smoothed_values_are_weighted_means_of_neighbours(values: list[float], weight: float) -> None:
    count = len(values)
    for at, found in enumerate(smoothed(values, weight)):
        near = [
            i for i in range(count) if i <= 2 * at and (i == at or weight ** (abs(i - at) - 1) * (weight > 0) > 1e-3)
        ]
        weights = [weight ** abs(i - at) for i in near]
        mean = sum(w * values[i] for w, i in zip(weights, near, strict=True)) / sum(weights)
        assert found == pytest.approx(mean, abs=1e-6)


def test_a_steep_beginning_is_where_the_line_begins() -> None:
    falling = [10.0 - i for i in range(8)]
    assert smoothed(falling)[:4] == pytest.approx(falling[:4])


def test_a_strategy_is_called_by_its_text_unless_two_have_the_same() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    names = ("<tp1,pp2>@11", "<tp2,pp1>@22", "<tp2,pp1>@33")
    _draw_steps(axes, [replace(STEP, step=i, strategy=name) for i, name in enumerate(names, start=1)])
    assert axes.get_legend_handles_labels()[1] == ["<tp1,pp2>", "<tp2,pp1>@22", "<tp2,pp1>@33", "smoothed"]
