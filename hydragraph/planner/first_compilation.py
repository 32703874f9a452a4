"""Compilation of the planner's search in other processes.

numba takes 50 CPU seconds to compile the planner. Installation fills numba's cache (`setup.py`). If the cache is empty,
other processes plan for a made-up model while this process imports PyTorch and captures the user's model:

    python -m hydragraph.planner.first_compilation stages    Metis's search over stages
    python -m hydragraph.planner.first_compilation devices   the search over devices
    python -m hydragraph.planner.first_compilation lengths   assignment of varying lengths
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hydragraph.cost import message_rounds
from hydragraph.cost.block_pieces import AUX, BlockPiece, Constants, MemoryLines, PricedDevice
from hydragraph.cost.costs import Costs
from hydragraph.cost.curves import ZERO
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.errors import StillCompiling
from hydragraph.kernels.numba_compiler import compiled_elsewhere, is_compiled
from hydragraph.planner import metis
from hydragraph.planner.assignment import schedule_search
from hydragraph.planner.assignment.assign_mini_batch import assign_pipelines
from hydragraph.planner.metis import exact_optimum
from hydragraph.planner.plan import plan
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from hydragraph.spec.health import Health
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

LENGTH = 1024
LAYERS = 6
# Invented device types, and their relative times
_FACTORS = {"fast": 1.0, "slow": 2.0}


@contextmanager
def first_compilation(varying: bool, seconds: float | None = None) -> Iterator[bool]:
    """Compile missing functions in other processes, and yield whether any is missing.

    A search that calls a missing function waits for it.

    Args:
        seconds: maximum wait, after which compilation continues in the background.

    Raises:
        StillCompiling: a function was not compiled in time.
    """
    last = {"stages": exact_optimum.best_labels, "devices": message_rounds.together}
    if varying:
        last["lengths"] = schedule_search.improve
    until = math.inf if seconds is None else time.monotonic() + seconds
    # If one fails, this process compiles the remaining functions and reports the error.
    processes = [
        subprocess.Popen([sys.executable, "-m", __name__, what], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for what, function in last.items()
        if not is_compiled(function)
    ]

    def ended() -> bool:
        over = all(process.poll() is not None for process in processes)
        if not over and time.monotonic() > until:
            processes.clear()
            raise StillCompiling(
                "the planner's search is still being compiled in the background: try again in a minute, or omit "
                "--deadline"
            )
        return over

    try:
        with compiled_elsewhere(ended):
            yield bool(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compile_stages() -> None:
    measured = {
        (name, tp, size): metis.Measurement((factor * size / tp,) * 4, 5 * factor * size / tp, (100 * size / tp,) * 4)
        for name, factor in _FACTORS.items()
        for tp in (1, 2)
        for size in (1, 2, 4)
    }
    profile = metis.Profile(measured, (4e6, 2e6, 4e6), 3.0, 0.1, hidden=512, sequence=128, vocabulary=1000)
    types = {name: metis.DeviceType(50, 40) for name in _FACTORS}
    cluster = metis.Cluster(types, tuple((name, 2) for name in types))
    for order in ("memory", "exact"):
        metis.search(profile, cluster, 4, 4, order)


def compile_devices() -> None:
    plan(_made_up(), Workload(8, LENGTH), "mixed")


def compile_lengths() -> None:
    costs = _made_up()
    pipelines = Strategy.parse("<[0]x4,[2]x2> + <[1]x4,[3]x2>", LAYERS).pipelines
    assign_pipelines([costs.pipeline(each) for each in pipelines], [LENGTH, *[LENGTH // 4] * 8])


def _made_up() -> Costs:
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
                blocks=("first", *["layer"] * LAYERS, "last"),
                pieces=pieces,
                device=PricedDevice(name, 1e9, 4),
                type=name,
                sizes=ModelSizes.rough((4000, *[1000] * LAYERS, 4000), 512, 4),
                update=(1e-5, 1e-9),
            )
        )
    nodes = tuple(Node(name, 2, wire, wire) for name in types)
    return Costs(Profile.merge(profiles), Cluster.of(types, nodes), Health({1: 1.5}))


def _piece(name: str, kind: StageKind, factor: float) -> BlockPiece:
    if name == AUX:
        return BlockPiece(Constants(0.0, 1e-9, 1e-6), ZERO)
    forward = Constants(2e-9 if name == "layer" else 0.0, 3e-6 / kind.tp, 1e-4).times(factor)
    memory_lines = MemoryLines((0.0, 512.0), (64.0, 900.0 / kind.tp), (0.0, 2000.0 / kind.tp), (0.0, 2500.0 / kind.tp))
    count = 1000 if name == "layer" else 4000
    return BlockPiece(forward, forward.times(2.0 + kind.recompute), count // kind.tp, held=memory_lines)


if __name__ == "__main__":
    parts = {"stages": compile_stages, "devices": compile_devices, "lengths": compile_lengths}
    for part in sys.argv[1:]:
        parts[part]()
