"""Compilation of the planner's search in another process.

numba compiles a search on first use, for 10 to 40 s. While a command captures a model, a process plans for a made-up
one, which fills numba's cache on disk:

    python -m hydragraph.planner.first_compilation
    python -m hydragraph.planner.first_compilation --varying    also for sequences of varying lengths
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import Self

from hydragraph.cost.block_pieces import AUX, BlockPiece, Constants, MemoryLines, PricedDevice
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.kernels.numba_compiler import is_compiled
from hydragraph.planner.assignment import schedule_search
from hydragraph.planner.metis import exact_optimum
from hydragraph.planner.plan import plan
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from hydragraph.spec.health import Health
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.training_workload import Workload

VARYING = "--varying"
LENGTH = 1024


class FirstCompilation:
    """A context manager for a process that compiles what is not compiled yet."""

    def __init__(self, varying: bool) -> None:
        last = [exact_optimum.best_labels, *([schedule_search.improve] if varying else [])]
        self._process: subprocess.Popen[bytes] | None = None
        if not all(map(is_compiled, last)):
            command = [sys.executable, "-m", __name__, *([VARYING] if varying else [])]
            # If this fails, this process compiles them and reports the error.
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(0.0)

    @property
    def ended(self) -> bool:
        """Whether everything is compiled, or the process has failed."""
        return self._process is None or self._process.poll() is not None

    def wait(self, seconds: float | None) -> None:
        """Wait for the process, and kill it after `seconds`; None: no limit."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            self._process.kill()
            self._process.wait()


def compile_searches(varying: bool) -> None:
    """Plan for a made-up model, also for varying lengths if asked."""
    costs = _made_up()
    plan(costs, Workload(8, LENGTH))
    if varying:
        plan(costs, Workload(lengths=[[LENGTH, *[LENGTH // 4] * 8]] * 2))


def _made_up() -> Costs:
    wire = Interconnect(1e10, 1e-6)
    kinds = [StageKind(tp, False, recompute) for tp in (1, 2) for recompute in (False, True)]
    types = {"fast": DeviceType(1e14, 10**9, 1e12), "slow": DeviceType(5e13, 10**9, 1e12)}
    profiles = []
    for name, factor in (("fast", 1.0), ("slow", 2.0)):
        pieces = {kind: {at: _piece(at, kind, factor) for at in (AUX, "first", "layer", "last")} for kind in kinds}
        profiles.append(
            Profile(
                name,
                {},
                {1: LENGTH},
                blocks=("first", *["layer"] * 6, "last"),
                pieces=pieces,
                device=PricedDevice(name, 1e9, 14_000, 4),
                type=name,
                sizes=ModelSizes.rough((4000, *[1000] * 6, 4000), 512, 4),
                update=(1e-5, 1e-9),
            )
        )
    nodes = tuple(Node(name, 2, wire, wire) for name in types)
    return Costs(Profile.merge(profiles), Cluster.of(types, nodes), Health({1: 1.5}))


def _piece(name: str, kind: StageKind, factor: float) -> BlockPiece:
    if name == AUX:
        return BlockPiece.apart(Constants(0.0, 1e-9, 1e-6), Constants(0.0, 0.0, 0.0))
    forward = Constants(2e-9 if name == "layer" else 0.0, 3e-6 / kind.tp, 1e-4).times(factor)
    memory_lines = MemoryLines((0.0, 512.0), (64.0, 900.0 / kind.tp), (0.0, 2000.0 / kind.tp), (0.0, 2500.0 / kind.tp))
    count = 1000 if name == "layer" else 4000
    return BlockPiece.apart(
        forward, forward.times(2.0 + kind.recompute), parameters=count // kind.tp, kept=1400.0, held=memory_lines
    )


if __name__ == "__main__":
    compile_searches(VARYING in sys.argv)
