"""What a run shows, with and without a terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from hydragraph.train.metrics import Metrics
from hydragraph.train.screen import Screen

STRATEGY = "<[0,1]x5,[2]x3> + <tp1,pp1>@0a1b2c"


def show(terminal: bool) -> str:
    out = StringIO()
    with Screen(Console(file=out, force_terminal=terminal, width=200)) as screen:
        screen.preparing("training a tokenizer", 100)
        screen.started(0, 100)
        for step in range(1, 101):
            held = 1.5 if step == 7 else None
            screen.stepped(Metrics(step, 2.0, 0.3, 1e-3, 100, 1234.0, 2.0, STRATEGY, 3, (2, 1), held))
        screen.note("a [note]")
    return out.getvalue()


def test_a_log_gets_a_line_now_and_then() -> None:
    lines = show(terminal=False).splitlines()
    assert lines[0] == "training a tokenizer"
    assert lines[1] == f"step 1/100  loss 2.0000  1,234 tokens/s  {STRATEGY}"
    assert lines[-1] == "a [note]"
    assert [line.split()[1] for line in lines[1:-1]] == [f"{i}/100" for i in (1, 5, 7, *range(10, 101, 5))]
    assert lines[3].endswith("held out 1.5000 (perplexity 4.482)")


def test_a_terminal_gets_a_bar() -> None:
    shown = show(terminal=True)
    for piece in ("100/100", "loss 2.0000", "1,234 tokens/s", STRATEGY, "held out 1.5000", "a [note]"):
        assert piece in shown
