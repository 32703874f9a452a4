"""Result of `prepare`, computed once in a separate process and passed to all ranks as one file.

A process that has run autograd has threads, so it cannot be forked.
"""

from __future__ import annotations

import gc
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import torch

from hydragraph.cluster.processes.launched_ranks import Context, StoppedProcesses, dismiss, start, wait_for_outcomes
from hydragraph.cluster.processes.rank_process import Died, Outcome, Raised, Returned, error_of


@dataclass(frozen=True)
class SharedFile:
    """An unnamed file, open here and in processes that receive the `SharedFile`."""

    descriptor: int

    def __reduce__(self) -> tuple[Callable[[Any], SharedFile], tuple[Any]]:
        return _received, (reduction.DupFd(self.descriptor),)

    def write(self, value: object) -> None:
        """Write a value; functions and classes without a module are pickled by value."""
        with os.fdopen(os.dup(self.descriptor), "wb") as file:
            try:
                self._write(value, file)
            except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"launch: the result of `prepare` cannot be sent to ranks ({error}): "
                    "return only models, programs, results of `precompile` and data, and no open files"
                ) from error

    @staticmethod
    def _write(value: object, file: BinaryIO) -> None:
        try:
            torch.save(value, file, pickle_protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError):
            file.seek(0)
            file.truncate()
            torch.save(value, file, pickle_module=cloudpickle, pickle_protocol=pickle.HIGHEST_PROTOCOL)

    def read(self) -> Any:
        """Return the value, with tensors memory-mapped copy-on-write."""
        return torch.load(f"/dev/fd/{self.descriptor}", mmap=True, weights_only=False)


def write_value(path: Path, value: object) -> None:
    with path.open("w+b") as file:
        SharedFile(file.fileno()).write(value)


def read_value(path: Path) -> Any:
    with path.open("rb") as file:
        return SharedFile(file.fileno()).read()


def _received(descriptor: Any) -> SharedFile:
    return SharedFile(descriptor.detach())


def prepare_for_ranks(context: Context, prepare: bytes, file: SharedFile, timeout_s: float) -> None:
    member = start(context, 0, _prepare, prepare, file)
    try:
        deadline = time.monotonic() + timeout_s
        stops = StoppedProcesses()
        while not list(wait_for_outcomes([member], stops, min(0.5, deadline - time.monotonic()), others_run=True)):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"launch: `prepare` had not returned after {timeout_s:g} s")
        if isinstance(member.outcome, Died):
            raise RuntimeError(f"launch: the process that runs `prepare` failed: {member.outcome.how}")
        if isinstance(member.outcome, Raised):
            raise error_of(member.outcome)
    finally:
        dismiss([member])


def _prepare(prepare: bytes, file: SharedFile) -> Outcome:
    function, _ = pickle.loads(prepare)
    gc.freeze()
    file.write(function())
    return Returned(b"")


def left_of(timeout_s: float, began: float) -> float:
    left_s = timeout_s - (time.monotonic() - began)
    if left_s <= 0:
        raise TimeoutError(
            f"launch: `prepare` used up the timeout of {timeout_s:g} s, so no time was left for the ranks"
        )
    return left_s
