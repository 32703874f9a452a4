"""Processes that run this package's modules."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

PACKAGE = str(Path(__file__).parents[2])
GONE = (EOFError, OSError, pickle.UnpicklingError)


def start_module(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    paths: Sequence[str] = (),
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start `python -m module`; its import path includes `paths` but not the current directory."""
    environment = os.environ if environment is None else environment
    every = [PACKAGE, *filter(None, [os.environ.get("PYTHONPATH")]), *filter(None, paths)]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        env={**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(every))},
        **options,
    )


class Worker:
    """A process whose module calls `serve`."""

    def __init__(self, module: str) -> None:
        self.process = start_module(module, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, question: object) -> Any:
        stdin = cast(IO[bytes], self.process.stdin)
        pickle.dump(question, stdin)
        stdin.flush()
        return pickle.load(cast(IO[bytes], self.process.stdout))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                cast(IO[bytes], pipe).close()


def serve(prepare: Callable[[], Callable[[Any], object]]) -> None:
    """Answer a `Worker`'s questions with the function that `prepare` returns, until stdin closes."""
    # Signals reach the whole process group, but a step may need an answer.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    output = sys.stdout.buffer
    # Libraries' output must not mix with the answers.
    sys.stdout = sys.stderr
    answer = prepare()
    while True:
        try:
            question = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            pickle.dump(answer(question), output)
            output.flush()
        except BrokenPipeError:
            # The asking process has ended
            os._exit(1)  # without flushing again
