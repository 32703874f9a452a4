"""Emulation of a stage's ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.cluster.collectives import StartsAtOnce, head_loss, head_token_losses
from hydragraph.passes.differentiate import Variant

_END = "the end"


class StageBarrier(threading.Barrier):
    """Barrier that lets threads exchange values."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._given: list[tuple[str, Any]] = [("", None)] * size

    def exchange(self, index: int, call: str, value: Any = None) -> list[Any]:
        """Return all ranks' values, in order; raise RuntimeError if calls or shapes differ."""
        self._given[index] = call, value
        self.wait()
        contributions = list(self._given)
        self.wait()
        calls = [(name, tuple(getattr(rank_value, "shape", ()))) for name, rank_value in contributions]
        if len(set(calls)) > 1:
            said = "; ".join(f"rank {i}: {name} {list(shape)}" for i, (name, shape) in enumerate(calls))
            raise RuntimeError(f"the ranks of a stage make different calls: {said}")
        return [rank_value for _, rank_value in contributions]


class EmulatedCollectives(StartsAtOnce):
    """Thread-based `hydragraph.cluster.collectives.Collectives`."""

    def __init__(self, barrier: StageBarrier, index: int) -> None:
        self._barrier = barrier
        self.index = index
        self.size = barrier.parties

    def _all(self, call: str, x: Tensor) -> list[Tensor]:
        return self._barrier.exchange(self.index, call, x)

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all("all_reduce", x)).sum(0)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return torch.stack(self._all("all_reduce_max", x)).amax(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._all("all_gather", x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.split(torch.stack(self._all("reduce_scatter", x)).sum(0), dim)

    def split(self, x: Tensor, dim: int) -> Tensor:
        if x.shape[dim] % self.size:
            raise ValueError(f"dimension {dim} of {tuple(x.shape)} is not divisible by {self.size} ranks: pad it")
        return x.chunk(self.size, dim)[self.index].clone(memory_format=torch.contiguous_format)

    head_loss = head_loss
    head_token_losses = head_token_losses


def generate_code(variants: Iterable[Variant]) -> None:
    """Generate the graphs' code before threads run it; generation is not thread-safe."""
    for variant in variants:
        for graph in (variant.forward, variant.backward):
            if isinstance(graph, fx.GraphModule):
                _ = graph.code


def run_ranks(size: int, function: Callable[[EmulatedCollectives], Any]) -> list[Any]:
    """Call a function in one thread per rank; return results or raise the first error."""
    barrier = StageBarrier(size)

    def work(index: int) -> Any:
        try:
            result = function(EmulatedCollectives(barrier, index))
            # A rank that ends during another's collective is an error, not a hang.
            barrier.exchange(index, _END)
        except Exception:
            barrier.abort()
            raise
        return result

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, index) for index in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        # The other ranks only report a broken barrier.
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]
