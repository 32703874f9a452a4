"""Protocol for objects that show a run's progress."""

from __future__ import annotations

from typing import Protocol

from hydragraph.train.step_metrics import Metrics


class Watcher(Protocol):
    """Display of a run's progress, on rank 0."""

    def preparing(self, what: str, documents: int, part: float) -> None:
        """Report the number and fraction of finished documents (0: unknown)."""

    def started(self, done: int, steps: int) -> None:
        """Report that training starts after `done` of `steps` steps."""

    def stepped(self, metrics: Metrics) -> None: ...

    def note(self, sentence: str) -> None:
        """Show a sentence to the user."""
