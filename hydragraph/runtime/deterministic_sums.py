"""What a run keeps the same, and refuses, so that its bits depend on the model and the data alone.

a sequence is computed alone          its activations and gradients are functions of it and of the weights
gradients and losses are added exactly  no order, grouping or owner changes a sum (`kernels.exact`)
one tensor-parallel degree            a product that is cut in two is another sum than a whole one
one thread on a CPU, one kind of device  libraries choose how to add by both
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from hydragraph.cost.measured_profile import Profile
from hydragraph.errors import Unsupported
from hydragraph.kernels.exact_sums import MOST
from hydragraph.spec.strategy import Strategy

_WHERE = "deterministic"


@dataclass
class Deterministic:
    """What stays the same in one process.

    Attributes:
        device: the kind of device, which must be the same on all ranks.
        degree, sequence_parallel: of all stages of all strategies; None: none was seen yet.
    """

    device: str
    degree: int | None = None
    sequence_parallel: bool = False

    @staticmethod
    def begin(device: torch.device, backend: str) -> Deterministic:
        """Let this process compute in one way from now on: with one thread on a CPU, by PyTorch's rules on a GPU.

        Raises:
            Unsupported: graphs are compiled by Inductor.
        """
        if backend == "inductor":
            raise Unsupported(
                "Inductor compiles a graph for the sizes that it sees first, and another process sees others first",
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
        """What ranks compare."""
        return f"{self.device}, tensor-parallel degree {self.degree}"

    def check(self, strategies: Sequence[Strategy]) -> None:
        """Check that all stages are cut alike, now and in all strategies to come.

        Raises:
            Unsupported: two differ, or a stage of more than two names its devices in another order than ascending.
        """
        for strategy in strategies:
            for stage in (stage for pipeline in strategy.pipelines for stage in pipeline.stages):
                cut = stage.tp, stage.sequence_parallel and stage.tp > 1
                if self.degree is None:
                    self.degree, self.sequence_parallel = cut
                if cut != (self.degree, self.sequence_parallel):
                    raise Unsupported(
                        f"a stage of {_cut(*cut)} where others have {_cut(self.degree, self.sequence_parallel)}: sums "
                        "over shards would have other bits",
                        where=f"{_WHERE}, strategy {strategy}",
                        remedy="give all stages of all strategies the same degree and sequence parallelism",
                    )
                if stage.tp > 2 and list(stage.devices) != sorted(stage.devices):
                    raise Unsupported(
                        f"a stage on devices {list(stage.devices)}: sums over more than two go by their numbers",
                        where=f"{_WHERE}, strategy {strategy}",
                        remedy="name a stage's devices in ascending order",
                    )

    def alike(self, profile: Profile) -> Profile:
        """Return what was measured of stages that are cut as those that were seen; all of it, where none were."""
        return profile if self.degree is None else profile.of_cut(self.degree, self.sequence_parallel)

    def check_count(self, sequences: int) -> None:
        """Check that so many sequences are added up exactly.

        Raises:
            Unsupported: there are too many.
        """
        # Under tensor parallelism a rank of each place may add its part, and a tied weight gets two.
        most = MOST // (2 * (self.degree or 1))
        if sequences > most:
            raise Unsupported(
                f"a mini-batch of {sequences} sequences, and sums are exact for {most}",
                where=_WHERE,
                remedy="use smaller mini-batches, or train without deterministic",
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer rounds elements alike wherever shards end.

        Raises:
            Unsupported: it does not.
        """
        # PyTorch's fused kernels on a CPU compute what is left over after whole vectors by another formula.
        if any(group.get("fused") for group in optimizer.param_groups):
            raise Unsupported(
                "with fused=True the last elements of each shard are rounded otherwise than others",
                where=f"{_WHERE}, optimizer {type(optimizer).__name__}",
                remedy="leave fused out, or use hydragraph.AdamW",
            )


def _cut(degree: int, sequence_parallel: bool) -> str:
    return f"tensor-parallel degree {degree}" + " with sequence parallelism" * sequence_parallel


@cache
def processor() -> str:
    """Return what this machine's processor is called."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
