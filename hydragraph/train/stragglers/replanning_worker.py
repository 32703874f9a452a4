"""The planning process, which reads questions from stdin and writes answers to stdout."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import BinaryIO

from hydragraph.cost.costs import Costs
from hydragraph.train.stragglers.background_replanning import Replanned, ReplanQuestion, costs_of, replan


def serve(source: BinaryIO, target: BinaryIO) -> None:
    costs: Costs | None = None
    while True:
        try:
            question: ReplanQuestion = pickle.load(source)
        except EOFError:
            return
        try:
            costs = costs_of(question, costs)
            answer = replan(question, costs)
        except Exception as error:  # training continues, and reports this error
            answer = Replanned(refused=f"{type(error).__name__}: {error}")
        pickle.dump(answer, target)
        target.flush()


if __name__ == "__main__":
    # Signals reach the whole process group, but training may need this process to finish a step.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    output = sys.stdout
    # Output of libraries must not mix with the answers.
    sys.stdout = sys.stderr
    serve(sys.stdin.buffer, output.buffer)
