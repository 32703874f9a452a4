"""Screen output of a run, with and without a terminal."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from hydragraph.log import doing
from hydragraph.train.progress_line import Screen, duration_text
from hydragraph.train.step_metrics import Metrics

STRATEGY = "<[0,1]x5,[2]x3> + <tp1,pp1>"
STEP = Metrics(1, 2.0, 0.3, 1e-3, 100, 1234.0, 2.0, f"{STRATEGY}@0a1b2c", 3, (2, 1))


def show(terminal: bool, step_s: float = 2.0, steps: int = 100) -> str:
    """Show a run whose steps take so long, by a clock that stands still otherwise."""
    out = StringIO()
    now = [0.0]
    with Screen(Console(file=out, force_terminal=terminal, width=200), lambda: now[0]) as screen:
        for layer in (1, 2, 3):
            doing("capturing LlamaForCausalLM", layer, 3)
        screen.preparing("training a tokenizer", 100)
        now[0] += 11
        screen.preparing("training a tokenizer", 12000)
        screen.started(0, steps)
        for step in range(1, steps + 1):
            now[0] += step_s
            screen.stepped(replace(STEP, step=step, eval_loss=1.5 if step == 7 else None))
        screen.note("a [note]")
    doing("nobody hears this")
    return out.getvalue()


def test_a_log_gets_a_line_when_something_begins_and_then_by_time() -> None:
    lines = show(terminal=False).splitlines()
    assert lines[:3] == ["capturing LlamaForCausalLM", "training a tokenizer", "training a tokenizer: 12,000 documents"]
    assert lines[3] == f"step 1/100  loss 2.0000  1,234 tokens/s  {STRATEGY}"
    assert lines[4] == f"step 6/100  loss 2.0000  1,234 tokens/s  3 min left  {STRATEGY}"
    assert lines[5].endswith("held out 1.5000 (perplexity 4.482)")
    assert lines[-1] == "a [note]"
    # Every ten seconds of two-second steps, begun anew by an evaluation; and the last.
    assert [int(line.split()[1].split("/")[0]) for line in lines[3:-1]] == [1, 6, 7, *range(12, 100, 5), 100]


def test_a_preparation_says_how_long_the_rest_takes() -> None:
    out = StringIO()
    now = [0.0]
    with Screen(Console(file=out, force_terminal=False, width=200), lambda: now[0]) as screen:
        screen.preparing("writing", 1000, 0.5)  # an earlier session has done half
        for step in range(1, 5):
            now[0] += 30
            screen.preparing("writing", 1000 + 200 * step, 0.5 + 0.1 * step)
        screen.preparing("checking", 10, 0.0)
        now[0] += 30
        screen.preparing("checking", 20, 0.0)
    assert out.getvalue().splitlines() == [
        "writing",
        "writing: 1,200 documents, 2 min left",
        "writing: 1,400 documents, 2 min left",
        "writing: 1,600 documents, 60 s left",
        "writing: 1,800 documents, 30 s left",
        "checking",
        "checking: 20 documents",
    ]


def test_a_long_run_gets_a_line_a_minute() -> None:
    lines = show(terminal=False, step_s=20.0, steps=60).splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step")]
    assert steps == [*range(1, 30), *range(32, 60, 3), 60]


def test_a_terminal_gets_a_bar() -> None:
    shown = show(terminal=True)
    for piece in (
        "capturing LlamaForCausalLM",
        "100/100",
        "loss 2.0000",
        "1,234 tokens/s",
        STRATEGY,
        "held out 1.5000",
        "a [note]",
    ):
        assert piece in shown
    assert "0a1b2c" not in shown


def test_memory_and_the_part_of_the_peak_are_shown_where_they_are_known() -> None:
    out = StringIO()
    with Screen(Console(file=out, force_terminal=False, width=200)) as screen:
        screen.started(0, 1)
        screen.stepped(replace(STEP, peak_memory_bytes=12_345_000_000, mfu=0.413))
    assert f"1,234 tokens/s  MFU 41%  12.3 GB  {STRATEGY}" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.2, "3 s"), (89, "89 s"), (90, "2 min"), (5000, "83 min"), (12000, "3 h 20 min"), (187200, "2 d 4 h")],
)
def test_times_are_as_people_say_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
