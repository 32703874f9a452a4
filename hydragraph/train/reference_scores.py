"""Scores of answers for DPO: log-probabilities before training."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hydragraph.data.atomic_write import whole_file
from hydragraph.data.mini_batches import MiniBatches, Mixture
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cluster.launch import World
    from hydragraph.cluster.processes.stop_requests import Requests
    from hydragraph.engine.executable import Executable
    from hydragraph.train.watcher import Watcher

Scores = Mapping[str, npt.NDArray[np.float32]]
_EVERY_S = 60.0


class ReferenceScores:
    """Scores of every answer that a run reads.

    Args:
        model: result of `model_identity`; None: read any model's scores.

    Attributes:
        of: scores of each stream's chunks (answers), fp32 [chunks]; NaN: unknown.
    """

    def __init__(
        self, path: Path, train: Mixture, evaluation: Mapping[str, Iterable[MiniBatches]], model: str | None
    ) -> None:
        self._path = path
        self._model = model
        self._train = train
        self._evaluation = {
            evaluation_name(name, i): stream for name, streams in evaluation.items() for i, stream in enumerate(streams)
        }
        self._streams = {train_name(i): member for i, member in enumerate(train.members)} | self._evaluation
        self.of: Scores = {name: np.full(len(s.chunks), np.nan, np.float32) for name, s in self._streams.items()}

    def read(self) -> None:
        if not self._path.is_file():
            return
        with np.load(self._path) as stored:
            if self._model is not None and ("model" not in stored or str(stored["model"]) != self._model):
                return
            for name, stream in self._streams.items():
                if name in stored and str(stored[f"{name} of"]) == stream.identity:
                    self.of[name][:] = stored[name]

    def missing(self, config: TrainConfig) -> list[list[tuple[str, int]]]:
        """Read stored scores; return unscored answers as (stream, chunk), by mini-batch."""
        self.read()
        missing = []
        # seen[stream][chunk]: whether the answer has a score, or is in an earlier mini-batch's
        # list.
        seen = {name: ~np.isnan(scores) for name, scores in self.of.items()}
        for drawn in chain(self._drawn(config.steps), self._evaluated(config.evaluate_batches)):
            new = [(name, chunk) for name, chunk in dict.fromkeys(drawn) if not seen[name][chunk]]
            for name, chunk in new:
                seen[name][chunk] = True
            if new:
                missing.append(new)
        return missing

    def complete(
        self,
        missing: list[list[tuple[str, int]]],
        executor: Executable,
        world: World,
        stopping: Requests,
        watcher: Watcher | None,
    ) -> int:
        """Score answers with current weights; return 0 or a stop signal. All ranks must call this."""
        count = sum(map(len, missing))
        done = 0
        written = time.monotonic()
        for answers in missing:
            # Scoring is collective, so all ranks must agree to stop.
            if stop := max(world.gather(stopping.signal)):
                self._write(world)
                return stop
            sequences = [self._streams[name].read(chunk, with_score=False) for name, chunk in answers]
            for (name, chunk), score in zip(answers, executor.score(sequences).tolist(), strict=True):
                self.of[name][chunk] = score
            done += len(answers)
            if watcher is not None:
                watcher.preparing("scoring answers under the model before training", done, done / count)
            if time.monotonic() - written > _EVERY_S:
                self._write(world)
                written = time.monotonic()
        self._write(world)
        # No rank trains before the file is complete
        world.gather(None)
        return 0

    def _drawn(self, steps: int) -> Iterator[list[tuple[str, int]]]:
        for _ in range(steps):
            self._train.skip()
            yield [(train_name(member), chunk) for member, chunk in self._train.drawn]

    def _evaluated(self, batches: int) -> Iterator[list[tuple[str, int]]]:
        for name, stream in self._evaluation.items():
            for chunks in islice(stream.single_pass_chunks(), batches):
                yield [(name, chunk) for chunk in chunks]

    def _write(self, world: World) -> None:
        if world.rank:
            return
        identities = {f"{name} of": np.array(stream.identity) for name, stream in self._streams.items()}
        with whole_file(self._path) as file:
            np.savez(file, allow_pickle=False, **self.of, **identities, model=np.array(self._model))


def model_identity(config: TrainConfig) -> str:
    """Describe a model by settings, dtype, and its files' sizes and modification times."""
    model = config.model
    if model.directory is None:
        return json.dumps([model.architecture, model.config, config.dtype, config.seed], default=str)
    folder = Path(model.directory).absolute()
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return json.dumps([model.architecture, model.config, config.dtype, str(folder), files], default=str)


def train_name(member: int) -> str:
    return f"train-{member}"


def evaluation_name(name: str, member: int) -> str:
    return f"{name}-{member}-evaluated"
