"""This process: one rank among those of a launcher, or the one that starts them; and what it keeps to itself."""

from __future__ import annotations

import os
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hydragraph.cluster.processes.stop_requests import Relay
from hydragraph.spec.elastic import Elastic

if TYPE_CHECKING:
    from hydragraph.cluster.supervision.coordinator import Nodes

T = TypeVar("T")


def launched() -> bool:
    """Say whether torchrun, or a launcher like it, has started this process as one of several."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def leads() -> bool:
    """Say whether this process is the one that writes and prints results."""
    return int(os.environ.get("RANK", "0")) == 0


def may_be_restarted() -> bool:
    """Say whether torchrun started this process, perhaps anew."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarted() -> int:
    """Return how many times this machine's torchrun has started its ranks anew because one of them failed.

    Where ranks of another machine failed, it starts its own anew too, and does not count that.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def first_seen(began: float) -> float:
    """Return when the run in a folder had begun that the first attempt of this torchrun job found there.

    torchrun's store outlives its ranks: the first attempt writes there what it found, and later ones read that. Clocks
    are not compared, because they may be set while a run is under way. Without a shared store the age of torchrun's
    process has to tell: what began before it did is another job's.

    Args:
        began: `RunFolder.began` now.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from hydragraph.cluster.processes.rendezvous_stores import client

        store = client(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return float(store.compare_set("hydragraph/began", "", repr(began)))
    return began if began < time.time() - running_s(os.getppid()) else 0.0


def running_s(pid: int) -> float:
    """Return how many seconds a process has been running, or up to one more."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # since the machine was started
        return float(Path("/proc/uptime").read_text().split()[0]) - int(ticks) / os.sysconf("SC_CLK_TCK") + 1.0
    except OSError:  # no Linux; `ps` tells whole seconds, as [[days-]hours:]mm:ss
        said = subprocess.run(["ps", "-o", "etime=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
        days, _, clock = said.strip().rpartition("-")
        seconds = sum(int(part) * 60**i for i, part in enumerate(reversed(clock.split(":"))))
        return float(int(days or 0) * 86400 + seconds + 1)


def on_ranks(
    ranks: int,
    function: Callable[..., T],
    *args: object,
    relay: Relay | None = None,
    elastic: Elastic | None = None,
    nodes: Nodes | None = None,
) -> T:
    """Run a function on the ranks that a launcher has started, or on new local ones; return this or rank 0's result.

    Args:
        relay: told of the new ranks' processes.
        elastic: go on when ranks are lost; None: the loss of one ends all.
        nodes: a launcher has started not the ranks, but this process on each of these machines; this is the first.
    """
    if ranks == 1 or (launched() and nodes is None):
        return function(*args)
    from hydragraph.cluster.launch import launch

    return launch(function, ranks, *args, relay=relay, elastic=elastic, nodes=nodes)[0]


def quieten() -> None:
    """Keep what torch and transformers say to their own developers, and their progress bars, off the terminal."""
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)  # torch.export's own code
    transformers_logging.disable_progress_bar()
