"""Tensor-parallel ranks as threads of one process, so that sharded graphs can be checked without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hydragraph.runtime.collectives import head_loss


class _Group:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size


class SimulatedCollectives:
    """What the runtime's collectives offer, between threads."""

    def __init__(self, group: _Group, index: int, size: int) -> None:
        self.group, self.index, self.size = group, index, size
        self.calls: list[str] = []

    def _all(self, name: str, x: Tensor) -> list[Tensor]:
        self.calls.append(name)
        self.group.values[self.index] = x
        self.group.barrier.wait(20)
        found = list(self.group.values)
        self.group.barrier.wait(20)
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all("all_reduce", x)).sum(0)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return torch.stack(self._all("all_reduce_max", x)).amax(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._all("all_gather", x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return torch.stack(self._all("reduce_scatter", x)).sum(0).chunk(self.size, dim)[self.index]

    def split(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.size, dim)[self.index]

    head_loss = head_loss


def run_ranks(size: int, function: Callable[[SimulatedCollectives], Any]) -> list[Any]:
    """Call `function` once per rank, in threads; return the results in rank order."""
    group, results, errors = _Group(size), [None] * size, []

    def work(index: int) -> None:
        try:
            results[index] = function(SimulatedCollectives(group, index, size))
        except Exception as error:
            group.barrier.abort()
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
