"""Emulation of one stage's ranks as threads of this process: sharded graphs run without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.cluster.collectives import head_loss, head_token_losses
from hydragraph.passes.differentiate import Variant

_END = "the end"


class Meeting:
    """Rendezvous of a stage's `size` threads; every call exchanges the values of all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._calls: list[tuple[str, tuple[int, ...]]] = [("", ())] * size
        self._values: list[Any] = [None] * size

    def exchange(self, index: int, call: str, value: Any = None) -> list[Any]:
        """Return the values of all ranks, in rank order.

        Raises:
            RuntimeError: ranks are in different calls, or pass values of different shapes.
        """
        # Two barriers: after the first all ranks have written; after the second all have read and may write again.
        self._calls[index] = call, tuple(getattr(value, "shape", ()))
        self._values[index] = value
        self._barrier.wait()
        calls = list(self._calls)
        values = list(self._values)
        self._barrier.wait()
        if len(set(calls)) > 1:
            said = "; ".join(f"rank {i}: {name} {list(shape)}" for i, (name, shape) in enumerate(calls))
            raise RuntimeError(f"ranks of a stage do not meet: {said}")
        return values

    def leave(self) -> None:
        """Release the ranks that wait for a failed rank."""
        self._barrier.abort()


class EmulatedCollectives:
    """Thread-based version of the `hydragraph.cluster.collectives.Collectives` interface for compiled graphs.

    Attributes:
        calls: names of the calls made, in order.
    """

    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting = meeting
        self.index = index
        self.size = meeting.size
        self.calls: list[str] = []

    def _all(self, call: str, x: Tensor) -> list[Tensor]:
        self.calls.append(call)
        return self._meeting.exchange(self.index, call, x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the stage."""
        return _sum(self._all("all_reduce", x))

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The elementwise maximum over the stage."""
        return torch.stack(self._all("all_reduce_max", x)).amax(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The concatenation along `dim` of the stage's parts."""
        return torch.cat(self._all("all_gather", x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum over the stage."""
        return self.split(_sum(self._all("reduce_scatter", x)), dim)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim`; no exchange."""
        if x.shape[dim] % self.size:
            raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not divide by {self.size} ranks: pad it")
        return x.chunk(self.size, dim)[self.index].clone(memory_format=torch.contiguous_format)

    head_loss = head_loss
    head_token_losses = head_token_losses


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def generate_code(variants: Iterable[Variant]) -> None:
    """Generate the Python code of graphs that several threads are about to run.

    PyTorch generates it on the first call (`private.tracing.code_when_called`), and two first calls of one graph at a
    time disturb each other.
    """
    for variant in variants:
        for graph in (variant.forward, variant.backward):
            if isinstance(graph, fx.GraphModule):
                _ = graph.code  # the property generates it


def run_ranks(size: int, function: Callable[[EmulatedCollectives], Any]) -> list[Any]:
    """Call a function once per rank, in threads; return the results in rank order.

    Raises:
        Exception: the error of the first rank that failed on its own.
    """
    meeting = Meeting(size)
    results = [None] * size
    errors: list[Exception] = []

    def work(index: int) -> None:
        try:
            results[index] = function(EmulatedCollectives(meeting, index))
            meeting.exchange(index, _END)
        except Exception as error:
            errors.append(error)
            meeting.leave()

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A failing rank breaks the barrier, which makes the others fail as well; their errors carry no information.
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
