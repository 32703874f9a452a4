"""Lines on stderr that show a command's activity."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

Say = Callable[[str], str]
REPEAT_S = 10.0


@contextmanager
def progress(first: str) -> Iterator[Say]:
    """Show an activity repeatedly; yield a function that replaces it and returns the previous one."""
    console = Console(stderr=True)
    began = time.monotonic()
    activities = [first]
    ended = threading.Event()

    def show(line: str) -> None:
        if not console.is_terminal:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def say(activity: str) -> str:
        before = activities[-1]
        if activity not in activities:
            show(activity)
        activities.append(activity)
        status.update(escape(activity))
        return before

    def repeat() -> None:
        while not ended.wait(REPEAT_S):
            show(f"{activities[-1]} ({time.monotonic() - began:.0f} s)")

    show(first)
    repeating = threading.Thread(target=repeat, daemon=True)
    with console.status(escape(first)) as status:
        repeating.start()
        try:
            yield say
        finally:
            ended.set()
            repeating.join()
