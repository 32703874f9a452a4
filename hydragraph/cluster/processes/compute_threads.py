"""The threads that a rank computes with: how many, and how long they wait for each other by spinning.

PyTorch's threads (GNU OpenMP) meet after every operator, and who is first spins for some milliseconds before it sleeps.
As soon as anything else wants one of their cores, a browser or another rank's helper, all spin for the one that is not
scheduled: with 4 threads on 4 cores, of which others kept about 2 busy, plain PyTorch trained a model of 10 million
parameters with 59 tokens a second, and with 1,145 where threads spin a thousand times only. On an idle machine that
costs a tenth to a quarter of the speed, the more the smaller the operators are; so it is done where others are busy
when a run starts. OpenMP reads its variables once, when PyTorch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# About as long as between two operators; GNU OpenMP's own default is 300,000.
_SPINS = "1000"
# Cores that others have kept busy over the last minute, from which on threads spin briefly.
_BUSY = 0.5


def spinning(environment: Mapping[str, str], busy: float | None = None) -> dict[str, str]:
    """Return what an environment lacks for threads not to stall on a busy machine.

    Args:
        environment: of the process that will load PyTorch; nothing is added where it says how threads wait.
        busy: cores that were busy over the last minute; None: what this machine says.
    """
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        return {}
    if busy is None:
        busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {"GOMP_SPINCOUNT": _SPINS} if busy >= _BUSY else {}


def threads_of(ranks: int) -> int:
    """Return how many threads each of this machine's ranks computes with.

    So many as OMP_NUM_THREADS says, as everywhere in PyTorch; without it all share the machine's cores.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # of a list: nested levels come behind
    if asked.isdecimal() and int(asked):
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)
