"""Terminal output of a run: a progress bar, or periodic lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

from hydragraph.log import hearing
from hydragraph.train.step_metrics import Metrics, perplexity

# Outside a terminal, print a line every _OFTEN_S seconds, later (_SETTLED_S) every _SELDOM_S.
_OFTEN_S, _SELDOM_S, _SETTLED_S = 10.0, 60.0, 600.0
# Seconds until the remaining time is estimated.
_TELLING_S = 5.0


class Screen:
    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._what = ""
        self._steps = 0
        self._began = clock()
        self._printed = clock()
        self._first: tuple[int, float] | None = None
        # Finished fraction and time at the activity's start
        self._part = (0.0, clock())
        self._hearing = ExitStack()

    def __enter__(self) -> Screen:
        self._hearing.enter_context(hearing(self.doing))
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._hearing.close()

    def doing(self, what: str, done: int = 0, of: int = 0) -> None:
        if self._steps:
            self._describe(what)
        else:
            self._show(what, done, of or None, "")

    def preparing(self, what: str, documents: int, part: float = 0.0) -> None:
        now = self._clock()
        if what != self._what:
            self._part = (part, now)
        began, since = self._part
        left = ""
        # Extrapolate the speed since the activity began.
        if began < part < 1 and now - since >= _TELLING_S:
            left = f", {duration_text((now - since) * (1 - part) / (part - began))} left"
        self._show(what, documents, None, f"documents{left}")

    def started(self, done: int, steps: int) -> None:
        self._steps = steps
        self._begin("training", steps)
        self._update(done, "")

    def stepped(self, metrics: Metrics) -> None:
        now = self._clock()
        # The first step compiles graphs, so it is not timed.
        self._first = self._first or (metrics.step, now)
        # Omit the strategy's fingerprint
        strategy = metrics.strategy.partition("@")[0]
        numbers = "  ".join(filter(None, (*_numbers(metrics), self._left(metrics.step, now), strategy)))
        self._describe("training")
        self._update(metrics.step, numbers)
        evaluated = evaluation_text(metrics)
        ending = f"  {evaluated}" if evaluated else ""
        regular = metrics.step in (1, self._steps) or self._is_time(now)
        if not self._console.is_terminal and (regular or evaluated):
            self._printed = now
            self.note(f"step {metrics.step}/{self._steps}  {numbers}{ending}")
        elif evaluated:
            self.note(f"step {metrics.step}: {evaluated}")

    def note(self, sentence: str) -> None:
        # rich would parse strategies' brackets as markup
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def _show(self, what: str, done: int, of: int | None, unit: str) -> None:
        now = self._clock()
        new = what != self._what
        if new:
            self._begin(what, of)
        self._update(done, unit)
        if not self._console.is_terminal and (new or self._is_time(now)):
            self._printed = now
            parts = f"{done:,} of {of:,}" if of else f"{done:,} {unit}" if done else ""
            self.note(what if new or not parts else f"{what}: {parts}")

    def _is_time(self, now: float) -> bool:
        return now - self._printed >= (_OFTEN_S if now - self._began < _SETTLED_S else _SELDOM_S)

    def _left(self, step: int, now: float) -> str:
        if self._first is None or step <= self._first[0] or step >= self._steps:
            return ""
        seconds_per_step = (now - self._first[1]) / (step - self._first[0])
        return f"{duration_text(seconds_per_step * (self._steps - step))} left"

    def _begin(self, what: str, total: int | None) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._what = what
        self._task = self._progress.add_task(what, total=total, numbers="")

    def _describe(self, what: str) -> None:
        if self._task is not None and what != self._what:
            self._what = what
            self._progress.update(self._task, description=what)

    def _update(self, done: int, numbers: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, numbers=numbers)


def evaluation_text(metrics: Metrics) -> str:
    """Return an evaluation's losses, such as "held out 2.1034 (perplexity 8.194)"."""
    losses = metrics.eval_losses or ({} if metrics.eval_loss is None else {"heldout": metrics.eval_loss})
    return ", ".join(
        f"{'held out' if name == 'heldout' else name} {loss:.4f}{_beside(metrics, name, loss)}"
        for name, loss in losses.items()
    )


def _beside(metrics: Metrics, name: str, loss: float) -> str:
    figures = metrics.eval_pairs.get(name)
    if figures is not None:
        return f" (accuracy {figures['accuracy']:.0%})"
    return "" if metrics.smoothed or not math.isfinite(loss) else f" (perplexity {perplexity(loss):.4g})"


def duration_text(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def _numbers(metrics: Metrics) -> tuple[str, ...]:
    used = "" if metrics.mfu is None else f"MFU {metrics.mfu:.0%}"
    memory = f"{metrics.peak_memory_bytes / 1e9:.3g} GB" if metrics.peak_memory_bytes else ""
    ordered = f"accuracy {metrics.pairs['accuracy']:.0%}" if metrics.pairs else ""
    return (f"loss {metrics.loss:.4f}", ordered, f"{metrics.tokens_per_s:,.0f} tokens/s", used, memory)
