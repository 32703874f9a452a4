"""Detection of launchers such as torchrun, and work on their ranks or on new local ranks."""

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
    from hydragraph.cluster.supervision.coordinator import RunMachines

T = TypeVar("T")


def launched() -> bool:
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def leads() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def restarts_by_torchrun() -> int | None:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else None


def torchrun_rendezvous() -> str:
    """Return the rendezvous backend of the torchrun that started this process, or ""."""
    command = Path(f"/proc/{os.getppid()}/cmdline")
    if restarts_by_torchrun() is None or not command.exists():
        return ""
    # torchrun accepts --rdzv-backend=c10d, --rdzv_backend c10d and mixtures.
    words = [word.replace("_", "-") for word in " ".join(command.read_text().split("\0")).replace("=", " ").split()]
    option = "--rdzv-backend"
    return words[words.index(option) + 1] if option in words else "static"


def first_seen(began: float) -> float:
    """Return the start time of the run in the output folder before this torchrun job, or 0.

    The first attempt stores this time in torchrun's store, which outlives the ranks. Without a shared store, a run that
    began after torchrun's process belongs to this job.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from hydragraph.cluster.processes.rendezvous_stores import client

        # compare_set with "" writes only a missing key; later attempts read the first value.
        store = client(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return float(store.compare_set("hydragraph/began", "", repr(began)))
    # torchrun's process, the parent, outlives all attempts.
    return began if began < time.time() - running_s(os.getppid()) else 0.0


def running_s(pid: int) -> float:
    """Return a process's age in seconds, rounded up by at most one second."""
    try:
        # The process's name, in parentheses, may contain spaces. Field 22, the 20th after it, is
        # the start time.
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # since boot
        return float(Path("/proc/uptime").read_text().split()[0]) - int(ticks) / os.sysconf("SC_CLK_TCK") + 1.0
    except OSError:
        # Other systems' ps prints [[days-]hours:]mm:ss
        said = subprocess.run(["ps", "-o", "etime=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
        days, _, clock = said.strip().rpartition("-")
        # 1-02:03:04 is 1 day, 2 hours, 3 minutes and 4 seconds.
        seconds = sum(int(part) * 60**i for i, part in enumerate(reversed(clock.split(":"))))
        return float(int(days or 0) * 86400 + seconds + 1)


def on_ranks(
    ranks: int,
    function: Callable[..., T],
    *args: object,
    relay: Relay | None = None,
    elastic: Elastic | None = None,
    nodes: RunMachines | None = None,
) -> T:
    """Call a function on every rank.

    Return this rank's result under a launcher; otherwise, start local ranks and return rank 0's result.

    Args:
        elastic: how ranks continue after a loss; None: a lost rank ends the run.
        nodes: machines that this machine leads, if the launcher started one process per machine instead of per rank.
    """
    if ranks == 1 or (launched() and nodes is None):
        return function(*args)
    from hydragraph.cluster.launch import launch

    return launch(function, ranks, *args, relay=relay, elastic=elastic, nodes=nodes)[0]


def quieten() -> None:
    from transformers.utils import logging as transformers_logging

    # torch.export's own code
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
    transformers_logging.disable_progress_bar()
