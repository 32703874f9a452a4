"""Constraints of deterministic runs, whose results depend, bit by bit, only on the model and the data.

Each sequence is computed separately, and sums of gradients and losses are exact in any order (`kernels.exact_sums`). A
product that is split over ranks is summed in another order, so all stages must have the same tensor-parallel degree.
The order of library sums depends on processor and threads, so all devices must be of the same kind, and a CPU uses one
thread.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from hydragraph.cost.measured_profile import Profile
from hydragraph.errors import Unsupported
from hydragraph.kernels.exact_sums import MOST
from hydragraph.spec.pipeline import Stage
from hydragraph.spec.strategy import Strategy

_WHERE = "deterministic"


@dataclass
class Deterministic:
    """Constraints on strategies.

    Attributes:
        device: device kind of all ranks.
        degree: tensor-parallel degree of all stages; None before the first strategy.
        sequence_parallel: whether all stages use sequence parallelism.
    """

    device: str
    degree: int | None = None
    sequence_parallel: bool = False

    @staticmethod
    def begin(device: torch.device, backend: str) -> Deterministic:
        """Make this process deterministic; raise `Unsupported` if Inductor compiles graphs."""
        if backend == "inductor":
            raise Unsupported(
                "Inductor compiles a graph for the sizes of its first call, which differ between processes",
                where=_WHERE,
                remedy='pass backend="eager"',
            )
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            return Deterministic(torch.cuda.get_device_name(device))
        torch.set_num_threads(1)
        return Deterministic(f"{processor()}, {torch.backends.cpu.get_cpu_capability()}")

    def __str__(self) -> str:
        """Text that must be equal on all ranks."""
        return f"{self.device}, tensor-parallel degree {self.degree}"

    def check(self, strategies: Sequence[Strategy]) -> None:
        """Check that all stages of these and earlier strategies split products alike.

        Raises:
            Unsupported: stages are split differently, a stage streams or has sums in pieces, or a stage's devices, if
                more than two, are not in ascending order.
        """
        for strategy in strategies:
            for stage in (stage for pipeline in strategy.pipelines for stage in pipeline.stages):
                cut = stage.tp, stage.sequence_parallel and stage.tp > 1
                if self.degree is None:
                    self.degree, self.sequence_parallel = cut
                for what, remedy in self._problems(stage, cut):
                    raise Unsupported(what, where=f"{_WHERE}, strategy {strategy}", remedy=remedy)

    def _problems(self, stage: Stage, cut: tuple[int, bool]) -> Iterator[tuple[str, str]]:
        if cut != (self.degree, self.sequence_parallel):
            yield (
                f"a stage has {_cut(*cut)}, but others have {_cut(self.degree, self.sequence_parallel)}: sums over "
                "shards would not be bitwise equal",
                "give all stages of all strategies the same degree and sequence parallelism",
            )
        if stage.stream:
            yield (
                f"the stage on devices {list(stage.devices)} streams, so its gradients are rounded to fp32 after every "
                "micro-batch",
                "leave out 'stream' (w and g in strategy text), or train without 'deterministic'",
            )
        if stage.kind.sums_in_pieces:
            yield (
                f"the stage on devices {list(stage.devices)} has sums in pieces: products of fewer tokens may not be "
                "bitwise equal to whole products",
                "leave out sums_in_pieces (p in strategy text), or train without 'deterministic'",
            )
        if stage.tp > 2 and list(stage.devices) != sorted(stage.devices):
            yield (
                f"a stage lists devices {list(stage.devices)}: sums over more than two devices depend on their order, "
                "which must be ascending",
                "list a stage's devices in ascending order",
            )

    def alike(self, profile: Profile) -> Profile:
        return profile if self.degree is None else profile.of_cut(self.degree, self.sequence_parallel)

    def check_count(self, sequences: int) -> None:
        """Raise `Unsupported` unless sums over these sequences are exact."""
        # Each rank of a stage may add one part per sequence, or two for tied weights.
        most = MOST // (2 * (self.degree or 1))
        if sequences > most:
            raise Unsupported(
                f"a mini-batch has {sequences} sequences, but sums are exact for at most {most}",
                where=_WHERE,
                remedy="use smaller mini-batches, or train without 'deterministic'",
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `Unsupported` unless an optimizer rounds all elements of a shard alike."""
        # PyTorch's fused CPU kernels compute elements after the last full vector register differently.
        if any(group.get("fused") for group in optimizer.param_groups):
            raise Unsupported(
                "with fused=True, the last elements of each shard are rounded differently from the others",
                where=f"{_WHERE}, optimizer {type(optimizer).__name__}",
                remedy="omit 'fused', or use hydragraph.AdamW",
            )


def _cut(degree: int | None, sequence_parallel: bool) -> str:
    return f"tensor-parallel degree {degree}" + " with sequence parallelism" * sequence_parallel


@cache
def processor() -> str:
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
