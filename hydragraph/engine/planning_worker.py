"""Planning process: `python -m hydragraph.engine.planning_worker` reads mini-batches from stdin and writes choices to
stdout.

It is started by its module name, so the training script is never imported again, guarded by `__main__` or not. It ends
when its stdin closes.
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
        if isinstance(message, PlanRequest):  # the request has changed
            request = message
            continue
        lengths: tuple[int, ...] = message
        pickle.dump(answer(request, lengths), target)
        target.flush()


if __name__ == "__main__":
    # These signals reach the whole process group, and training may first finish a step; this process ends with stdin.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    output = sys.stdout
    # Output of libraries must not mix with the answers.
    sys.stdout = sys.stderr
    get_ready()  # load lazy modules now: otherwise a changed request could load them while a step waits
    serve(sys.stdin.buffer, output.buffer)
