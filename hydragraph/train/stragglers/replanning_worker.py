"""The replanning process: `python -m hydragraph.train.stragglers.replanning_worker` answers questions from stdin on
stdout.

It runs at a lower priority than training, and ends when its input does.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import BinaryIO

from hydragraph.cost.costs import Costs
from hydragraph.train.stragglers.background_replanning import Replanned, ReplanQuestion, costs_of, replan


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer questions until the source ends."""
    costs: Costs | None = None
    while True:
        try:
            question: ReplanQuestion = pickle.load(source)
        except EOFError:
            return
        try:
            costs = costs_of(question, costs)
            answer = replan(question, costs)
        except Exception as error:  # training continues unchanged and reports the error
            answer = Replanned(refused=f"{type(error).__name__}: {error}")
        pickle.dump(answer, target)
        target.flush()


if __name__ == "__main__":
    # These signals reach the whole process group, and training may finish a step first; this process ends with stdin.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    output = sys.stdout
    # Output of libraries must not mix with the answers.
    sys.stdout = sys.stderr
    serve(sys.stdin.buffer, output.buffer)
