"""Compilation of the planner's search in two other processes.

numba compiles a search on first use, for 10 to 40 s. While a command imports PyTorch and captures a model, processes
plan for a made-up one, which fills numba's cache:

    python -m hydragraph.planner.first_compilation stages    Metis's search over stages; needs no PyTorch
    python -m hydragraph.planner.first_compilation devices   everything else
    python -m hydragraph.planner.first_compilation varying   the same, and sequences of varying lengths
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hydragraph.cost import message_rounds
from hydragraph.kernels.numba_compiler import compiled_elsewhere, is_compiled
from hydragraph.planner import metis
from hydragraph.planner.assignment import schedule_search
from hydragraph.planner.metis import exact_optimum
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from hydragraph.spec.health import Health
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.training_workload import Workload

if TYPE_CHECKING:
    from hydragraph.cost.block_pieces import BlockPiece
    from hydragraph.cost.costs import Costs

LENGTH = 1024
_FACTORS = {"fast": 1.0, "slow": 2.0}  # made-up types of devices, and their relative seconds


@contextmanager
def first_compilation(varying: bool, seconds: float | None = None) -> Iterator[bool]:
    """Compile what is not compiled yet in other processes; a search waits for each function when it calls it.

    Yields whether there is anything to compile.

    Args:
        seconds: limit of waiting; then this process compiles by itself.
    """
    last = {
        "stages": exact_optimum.best_labels,
        "varying" if varying else "devices": schedule_search.improve if varying else message_rounds.together,
    }
    until = math.inf if seconds is None else time.monotonic() + seconds
    # If one fails, this process compiles the rest and reports the error.
    processes = [
        subprocess.Popen([sys.executable, "-m", __name__, what], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for what, function in last.items()
        if not is_compiled(function)
    ]

    def ended() -> bool:
        return time.monotonic() > until or all(process.poll() is not None for process in processes)

    try:
        with compiled_elsewhere(ended):
            yield bool(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compile_stages() -> None:
    """Search for the stages of a made-up model."""
    measured = {
        (name, tp, size): metis.Measurement((factor * size / tp,) * 4, 5 * factor * size / tp, (100 * size / tp,) * 4)
        for name, factor in _FACTORS.items()
        for tp in (1, 2)
        for size in (1, 2, 4)
    }
    profile = metis.Profile(measured, (4e6, 2e6, 4e6), 3.0, 0.1, hidden=512, sequence=128, vocabulary=1000)
    types = {name: metis.DeviceType(50, 40) for name in _FACTORS}
    metis.search(profile, metis.Cluster(types, tuple((name, 2) for name in types)), 4, 4, "exact")


def compile_devices(varying: bool) -> None:
    """Plan for a made-up model without a search over stages."""
    from hydragraph.planner.plan import plan  # imports torch

    costs = _made_up()
    workloads = [Workload(8, LENGTH), Workload(lengths=[[LENGTH, *[LENGTH // 4] * 8]] * 2)]
    for workload in workloads[: 1 + varying]:
        plan(costs, workload, "mixed")


def _made_up() -> Costs:
    from hydragraph.cost.block_pieces import AUX, PricedDevice
    from hydragraph.cost.costs import Costs
    from hydragraph.cost.measured_profile import Profile
    from hydragraph.cost.model_sizes import ModelSizes

    wire = Interconnect(1e10, 1e-6)
    kinds = [StageKind(tp, False, recompute) for tp in (1, 2) for recompute in (False, True)]
    types = {"fast": DeviceType(1e14, 10**9, 1e12), "slow": DeviceType(5e13, 10**9, 1e12)}
    profiles = []
    for name, factor in _FACTORS.items():
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
    from hydragraph.cost.block_pieces import AUX, BlockPiece, Constants, MemoryLines

    if name == AUX:
        return BlockPiece.apart(Constants(0.0, 1e-9, 1e-6), Constants(0.0, 0.0, 0.0))
    forward = Constants(2e-9 if name == "layer" else 0.0, 3e-6 / kind.tp, 1e-4).times(factor)
    memory_lines = MemoryLines((0.0, 512.0), (64.0, 900.0 / kind.tp), (0.0, 2000.0 / kind.tp), (0.0, 2500.0 / kind.tp))
    count = 1000 if name == "layer" else 4000
    return BlockPiece.apart(
        forward, forward.times(2.0 + kind.recompute), parameters=count // kind.tp, kept=1400.0, held=memory_lines
    )


if __name__ == "__main__":
    if sys.argv[1] == "stages":
        compile_stages()
    else:
        compile_devices(varying=sys.argv[1] == "varying")
