"""A run on the terminal: a progress bar where there is one, else a line now and then."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from hydragraph.train.metrics import Metrics, perplexity

_LINES = 20  # about so many lines for a whole run where there is no terminal


class Screen:
    """Shows a run on a console; a context manager.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._what = ""
        self._steps = 0

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def preparing(self, what: str, documents: int) -> None:
        """Show how many documents are done."""
        if what != self._what:
            self._begin(what, None)
            if not self._console.is_terminal:
                self._console.print(what)
        self._update(documents, "documents")

    def started(self, done: int, steps: int) -> None:
        """Show that training begins."""
        self._steps = steps
        self._begin("training", steps)
        self._update(done, "")

    def stepped(self, metrics: Metrics) -> None:
        """Show a step's numbers."""
        numbers = f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s  {metrics.strategy}"
        self._update(metrics.step, numbers)
        evaluated = evaluation_text(metrics)
        ending = f"  {evaluated}" if evaluated else ""
        regular = metrics.step in (1, self._steps) or metrics.step % max(self._steps // _LINES, 1) == 0
        if not self._console.is_terminal and (regular or evaluated):
            self._print(f"step {metrics.step}/{self._steps}  {numbers}{ending}")
        elif evaluated:
            self._print(f"step {metrics.step}: {evaluated}")

    def note(self, sentence: str) -> None:
        """Show a sentence."""
        self._print(sentence)

    def _begin(self, what: str, total: int | None) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._what = what
        self._task = self._progress.add_task(what, total=total, numbers="")

    def _update(self, done: int, numbers: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, numbers=numbers)

    def _print(self, text: str) -> None:
        # Strategies hold square brackets, which rich would take for its markup.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def evaluation_text(metrics: Metrics) -> str:
    """Return the losses of a step's evaluation, set by set, such as "held out 2.1034 (perplexity 8.194)"; "": none."""
    losses = metrics.eval_losses or ({} if metrics.eval_loss is None else {"heldout": metrics.eval_loss})
    named = {("held out" if name == "heldout" else name): loss for name, loss in losses.items()}
    return ", ".join(f"{name} {loss:.4f} (perplexity {perplexity(loss):.4g})" for name, loss in named.items())
