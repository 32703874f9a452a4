"""Planning process that reads mini-batches from stdin and writes plans to stdout until stdin closes."""

from __future__ import annotations

import pickle
import signal
import sys
from typing import BinaryIO

from hydragraph.planner.request import PlanRequest, answer, get_ready


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Plan mini-batches until the source ends; a new request replaces the current one."""
    request: PlanRequest = pickle.load(source)
    while True:
        try:
            message = pickle.load(source)
        except EOFError:
            return
        if isinstance(message, PlanRequest):
            request = message
            continue
        lengths: tuple[int, ...] = message
        pickle.dump(answer(request, lengths), target)
        target.flush()


if __name__ == "__main__":
    # Ignore signals to the whole process group: training may need plans to finish its step.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    output = sys.stdout
    # Libraries must not write between the answers.
    sys.stdout = sys.stderr
    get_ready()  # loads lazy modules
    serve(sys.stdin.buffer, output.buffer)
