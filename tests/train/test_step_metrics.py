"""Metrics as JSON lines and TensorBoard events, and where a resumed run continues them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.train import step_metrics
from hydragraph.train.step_metrics import Metrics, MetricsLog, read_metrics
from hydragraph.train.stragglers.run_events import RunEvent
from tests.train.conftest import AWAIT_LATER_NAME

STEP = Metrics(1, 2.5, 0.3, 1e-3, 100, 50.0, 2.0, "<tp1,pp1>@0a", 3, (2, 1))


def write(path: Path, steps: range, after: int, events: Path | None = None) -> list[Metrics]:
    with MetricsLog(path, events, after) as log:
        for step in steps:
            log.write(replace(STEP, step=step, loss=1 / step, eval_loss=math.pi if step % 2 else None))
        return log.history


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    history = write(tmp_path / "m", range(1, 6), 0)
    assert read_metrics(tmp_path / "m") == history
    assert [m.step for m in history] == [1, 2, 3, 4, 5]


def test_the_explanation_of_a_plan_is_kept(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m", None, 0) as log:
        assert not log.written
        log.write(replace(STEP, plan=("devices: 2", "plan: one pipeline")))
        assert log.written
    assert read_metrics(tmp_path / "m")[0].plan == ("devices: 2", "plan: one pipeline")


def test_a_comparison_under_its_earlier_name_is_read(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m", None, 0) as log:
        log.write(replace(STEP, comparison="expected 1 s"))
    (tmp_path / "m").write_text((tmp_path / "m").read_text().replace("comparison", "beside"))
    assert read_metrics(tmp_path / "m")[0].comparison == "expected 1 s"


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    losses = {"a": math.nan, "b": 1.0}
    with MetricsLog(tmp_path / "m", None, 0) as log:
        log.write(replace(STEP, eval_loss=math.nan, eval_losses=losses))
    assert "NaN" not in (tmp_path / "m").read_text()
    (read,) = read_metrics(tmp_path / "m")
    assert str((read.eval_loss, read.eval_losses)) == str((math.nan, losses))
    assert str(read.perplexities) == str({"a": math.nan, "b": math.e})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_every_bit(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("metrics") / "m"
    with MetricsLog(path, None, 0) as log:
        log.write(replace(STEP, loss=value))
    assert read_metrics(path)[0].loss.hex() == value.hex()


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", range(1, 9), 0)
    write(tmp_path / "m", range(1, 6), 0)
    with (tmp_path / "m").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while it wrote
    assert len(read_metrics(tmp_path / "m")) == 5
    write(tmp_path / "m", range(4, 9), 3)
    assert read_metrics(tmp_path / "m") == whole
    assert (tmp_path / "m").read_bytes() == (tmp_path / "whole").read_bytes()


def test_names_a_line_that_is_no_metrics(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="m:1: not a line of metrics"):
        read_metrics(tmp_path / "m")


def test_tensorboard_shows_each_step_once_after_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    numbers = iter(range(9, 100))  # of event files: of two begun in one second, "10" would be read before "9"
    monkeypatch.setattr(writer._global_uid, "get", lambda: next(numbers))
    monkeypatch.setattr(step_metrics, "_await_later_name", AWAIT_LATER_NAME)
    write(tmp_path / "m", range(1, 6), 0, tmp_path / "events")
    write(tmp_path / "m", range(4, 8), 3, tmp_path / "events")
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    losses = [(e.step, e.value) for e in events.Scalars("loss")]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6, 7]
    assert [value for _, value in losses] == pytest.approx([1 / step for step, _ in losses])
    assert [e.step for e in events.Scalars("eval_loss")] == [1, 3, 5, 7]


def test_tensorboard_shows_what_happened_to_ranks(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsLog(tmp_path / "m", tmp_path / "events", after=0) as log:
        log.mark(RunEvent(2, "straggler", (2,), 0.0, "rank 2 is slow", {2: 2.5}))
        log.mark(RunEvent(3, "fault", (1,), 0.0, "rank 1 failed"))
        log.mark(RunEvent(3, "resumed", (0, 1), 0.5, "2 ranks continue", lost_steps=4, moved_bytes=1000))
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    texts = {tag.removesuffix("/text_summary"): events.Tensors(tag) for tag in events.Tags()["tensors"]}
    assert texts.keys() == {"ranks/slow rank", "ranks/rank lost", "ranks/resumed"}
    assert [(e.step, e.tensor_proto.string_val[0]) for e in texts["ranks/rank lost"]] == [(3, b"rank 1 failed")]
    numbers = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert numbers == {
        "ranks/rate_of_2": [(2, 2.5)],
        "ranks/count": [(3, 2)],
        "ranks/pause_s": [(3, 0.5)],
        "ranks/lost_steps": [(3, 4)],
        "ranks/moved_bytes": [(3, 1000)],
    }


def test_what_ended_a_run_is_told_though_its_events_cannot_be_closed(tmp_path: Path) -> None:
    class Gone:
        def close(self) -> None:
            raise FileNotFoundError("events")

    def end_by(error: type[Exception] | None) -> None:
        with MetricsLog(tmp_path / "metrics.jsonl", None, after=0) as log:
            log._tensorboard = Gone()
            if error is not None:
                raise error("first")

    with pytest.raises(ArithmeticError, match="first"):
        end_by(ArithmeticError)
    with pytest.raises(FileNotFoundError, match="events"):
        end_by(None)
