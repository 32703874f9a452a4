"""A rank of `hydragraph train` that kills itself at a step, for tests whose launcher is their own process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

from hydragraph.commands.train import train_rank
from hydragraph.engine.executable import Executable
from hydragraph.train.config import TrainConfig

MARK = "killed"  # file beside the run's folder, a list of its processes


def killed_once(rank: int, steps: int, config: TrainConfig, *arguments: Any) -> Any:
    """Train as `train_rank` does, but kill this rank the first time that it has taken `steps` steps."""
    step, run = Executable.step, Path(config.output)
    mark = run.with_name(MARK)

    def stepping(exe: Executable, *given: Any) -> Any:
        if exe.rank == rank and exe.steps == steps and not mark.exists():
            mark.write_bytes((run / "ranks.json").read_bytes())
            os.kill(os.getpid(), signal.SIGKILL)
        return step(exe, *given)

    with mock.patch.object(Executable, "step", stepping):
        return train_rank(config, *arguments)
