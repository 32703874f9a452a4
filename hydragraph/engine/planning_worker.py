"""A process that plans: `python -m hydragraph.engine.planning_worker` reads mini-batches from stdin, writes choices to
stdout.

It is started by its module's name, so a training script is never imported again, guarded by `__main__` or not. It ends
when its input does.
"""

from __future__ import annotations

import pickle
import signal
import sys
from typing import BinaryIO

from hydragraph.planner.request import PlanRequest, answer, get_ready


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer until the source ends."""
    request: PlanRequest = pickle.load(source)
    while True:
        try:
            message = pickle.load(source)
        except EOFError:
            return
        if isinstance(message, PlanRequest):  # it has changed
            request = message
            continue
        lengths: tuple[int, ...] = message
        pickle.dump(answer(request, lengths), target)
        target.flush()


if __name__ == "__main__":
    # These are sent to the whole process group, and training may finish a step first; this one ends with stdin.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    output = sys.stdout
    # What a library prints must not come between the answers.
    sys.stdout = sys.stderr
    get_ready()  # else a change of the request may need what was never loaded, and a step would wait for that
    serve(sys.stdin.buffer, output.buffer)
