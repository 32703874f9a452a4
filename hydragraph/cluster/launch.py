"""Starts ranks as local processes, and joins the process group that a launcher prepared.

Only this module reads the launcher's environment.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store  # type: ignore[attr-defined]

from hydragraph.cluster.adopted import backend_of, check_moves, gpu_name, object_group
from hydragraph.cluster.failure.newest_watch import watch_of
from hydragraph.cluster.failure.rank_watch import Watch
from hydragraph.cluster.processes import fork_server
from hydragraph.cluster.processes.cuda_environment import set_cuda_environment
from hydragraph.cluster.processes.launched_ranks import GUARD, Context, run_crew
from hydragraph.cluster.processes.launcher_fork import ensure_forked
from hydragraph.cluster.processes.pickling import nothing_else_imported, sent
from hydragraph.cluster.processes.preloaded_imports import classes_named_in
from hydragraph.cluster.processes.rank_process import HOST
from hydragraph.cluster.processes.rendezvous_stores import client, hosted
from hydragraph.cluster.processes.shared_preparation import SharedFile, left_of, prepare_for_ranks
from hydragraph.cluster.processes.stop_requests import Relay
from hydragraph.cluster.processes.torchrun_round import generation
from hydragraph.cluster.rendezvous.member import meet
from hydragraph.cluster.supervision.coordinator import Nodes
from hydragraph.spec.elastic import Elastic

T = TypeVar("T")

_MOST = 1024  # processes of one host, each of which takes about 0.3 GB
_ARRIVAL = timedelta(minutes=30)  # of all ranks of all machines

# How processes start. Importing torch takes seconds, forking a process that has imported it 10 ms; but where system
# libraries have threads of their own (macOS), no process may be forked, and each imports for itself.
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"

# What ranks import.
PRELOAD = [
    "hydragraph.cluster.processes.fork_server",
    "tqdm",
    "torch.distributed",
    "hydragraph.cluster.launch",
    "hydragraph.engine.api",
    "__main__",
]


@dataclass(frozen=True)
class World:
    """This process's place among the ranks.

    Attributes:
        rank, ranks: which of how many; 0 of 1 without any process group.
        local_rank: which of the ranks of this host.
        device: what this process computes on.
        backend: "nccl" where every rank has a GPU of its own, else "gloo".
        watch: over the ranks, from here until this process ends.
        node: where it runs: ranks of the same one may be lost together.
        objects: the group in which objects travel; None: the default one.
    """

    rank: int
    ranks: int
    local_rank: int
    device: torch.device
    backend: str
    watch: Watch = field(default_factory=lambda: Watch(None, 0, 1), compare=False, repr=False)
    node: str = ""
    objects: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank; small picklable objects.

        Raises:
            RankFailure: within a call that the watch knows of, where another rank failed.
        """
        values: list[T] = [value] * self.ranks
        if self.ranks > 1:
            gather = lambda: dist.all_gather_object(values, value, self.objects)  # noqa: E731
            self.watch.call(gather)
        return values

    def calling(self, what: str) -> AbstractContextManager[None]:
        """Let this rank make a call that all make inside; see `Watch.calling`."""
        return self.watch.calling(what)


def join(device: torch.device | str | None = None) -> World:
    """Joins the ranks: the process group there is, or the one that the launcher's environment describes, or none.

    Args:
        device: what to compute on; a GPU without an index means this rank's. None: a GPU where there is one.

    Raises:
        ValueError: hydragraph does not compute on the device, this machine has none, or the process group there is
            moves nothing.
        RankFailure: another rank failed meanwhile.
    """
    device, local_rank = _of_this_rank(device)
    name = gpu_name(device)
    launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    if not dist.is_initialized() and launched:
        # Objects (hashes, host names) travel as CPU tensors, also where weights do not.
        kind = "gloo" if name is None else "cpu:gloo,cuda:nccl"
        rank = int(os.environ["RANK"])
        ranks = int(os.environ["WORLD_SIZE"])
        meet(kind, _store_of_launcher(rank, ranks), rank, ranks)
    if not dist.is_initialized():
        return World(0, 1, 0, device, backend_of([name]))
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    check_moves(group)
    watch = watch_of(group, group.get_group_store, rank, ranks)
    node = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"  # torchrun may start two on one host
    world = World(rank, ranks, local_rank, device, "gloo", watch, node)
    with watch.calling("join"):
        world = replace(world, objects=watch.call(lambda: object_group(group)))
        return replace(world, backend=backend_of(world.gather(name)))


def apart(device: torch.device | str | None = None) -> World:
    """Return a world of this process alone, on the device that it would have among the ranks of its host.

    Args, Raises: as of `join`.
    """
    device, local_rank = _of_this_rank(device)
    return World(0, 1, local_rank, device, backend_of([gpu_name(device)]))


def _of_this_rank(asked: torch.device | str | None) -> tuple[torch.device, int]:
    """Return what this process computes on, and which of the ranks of its host it is."""
    if str(asked) != "cpu" and torch.backends.cuda.is_built():
        set_cuda_environment(os.environ)  # before anything starts CUDA
    device = _device(asked)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", local_rank % gpus if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device, local_rank


def _device(asked: torch.device | str | None) -> torch.device:
    """Return what a user asked to compute on."""
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:  # PyTorch lists every device it has ever had
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(asked)!r}: use cpu, or cuda for this rank's GPU")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(asked)!r}: PyTorch {torch.__version__} finds no GPU here: use cpu")
    return device


def _store_of_launcher(rank: int, ranks: int) -> Store:
    """Return the store that the launcher's environment names: torchrun's agent keeps it, elsewhere rank 0 does.

    torchrun's outlives its ranks, so each attempt has keys of its own: gloo would meet the addresses of the dead.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not shared:
        store = hosted(address, port)
    else:
        store = client(address, port)
    joining = dist.PrefixStore("hydragraph/generations", store)  # type: ignore[attr-defined]
    name = generation(joining, rank, ranks, _ARRIVAL) if shared else "first"
    return dist.PrefixStore(f"hydragraph/{name}", store)  # type: ignore[attr-defined, no-any-return]


def launch(
    function: Callable[..., T],
    ranks: int,
    *args: object,
    timeout: timedelta | None = None,
    prepare: Callable[[], object] | None = None,
    relay: Relay | None = None,
    elastic: Elastic | None = None,
    nodes: Nodes | None = None,
) -> list[T]:
    """Runs `function(*args)` on ranks that are processes of this host, joined over gloo on the CPU.

    The function learns its rank from `torch.distributed`. It, its arguments and its result are pickled, tensors by
    value; so are closures and what is defined in a notebook. A script calls this under `if __name__ == "__main__":`,
    since ranks import it. No rank's process ends before all are done or one has failed, and none outlives the call.

    Args:
        function: what each rank runs.
        ranks: how many processes to start.
        timeout: for the whole run; None: no limit.
        prepare: called once, in a process of its own. What it returns comes before the function's
            arguments, so that a model is captured and compiled once and not on every rank: `prepare` returns the
            model, its program and what `precompile` gave, and ranks call `compile` with that program. It travels as
            one file that each rank maps: weights are in memory once, until a rank changes its own.
        relay: told of the ranks' processes while they run, so that a signal to this one can be passed on.
        elastic: go on when ranks are lost, and let others take their places: the function calls `hydragraph.survive`
            where a step raises. None: the loss of a rank ends all.
        nodes: with `elastic`: this machine, the first, among several, on which `follow` is called; `ranks` counts those
            of all.

    Returns:
        What each rank returned, by rank; with `elastic`, of the ranks that there were at the end.

    Raises:
        ValueError: the function, an argument or what `prepare` returned cannot be pickled, or `ranks` is not positive.
        RuntimeError: a rank that imports a script was about to start ranks itself.
        RankFailure: a rank died; it names the instruction where a step was running.
        TimeoutError: the run took too long.
        Any other error: what the rank that failed first raised, with its traceback as a note.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(f"launch: a rank imports this script, which would start ranks itself; {GUARD}")
    if not callable(function):
        raise ValueError(f"launch: the function is {function!r}: give one, as in launch(train, {ranks})")
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"launch: ranks={ranks}: give a positive number of ranks")
    if ranks > _MOST:
        raise ValueError(
            f"launch: ranks={ranks} are so many processes of this host, which nothing would be left of: give at most "
            f"{_MOST}, or start them on several machines with torchrun"
        )
    work = _pickled(function, args)
    context = starting(function, prepare)
    server = hosted(HOST if nodes is None else nodes.address, 0)  # it has a thread
    run = run_crew if elastic is None else partial(_run_members, elastic, nodes)
    if prepare is None:
        return [pickle.loads(value) for value in run(context, ranks, server.port, work, timeout, None, relay)]
    began = time.monotonic()
    with tempfile.TemporaryFile() as file:
        shared = SharedFile(file.fileno())
        prepare_for_ranks(context, _pickled(prepare, ()), shared, timeout)
        outcomes = run(context, ranks, server.port, work, left_of(timeout, began), shared, relay)
        return [pickle.loads(value) for value in outcomes]


def follow(nodes: Nodes, say: Callable[[str], None]) -> None:
    """Start and watch ranks on this machine for a `launch` on another, until that is over.

    Args:
        nodes: this machine among all; not the first.
        say: prints a sentence.

    Raises:
        RuntimeError: the work has failed.
        ConnectionError: the first machine is heard no more.
    """
    from hydragraph.cluster.supervision.node_agent import Deputy

    Deputy(starting(), nodes, say).run()


def starting(*functions: Callable[..., object] | None) -> Context:
    """Return how processes are started, ready to: before this process has threads.

    Args:
        functions: that these will call.
    """
    context: Context = multiprocessing.get_context(START_METHOD)  # type: ignore[assignment]
    if START_METHOD == "forkserver":
        with nothing_else_imported():
            if not ensure_forked(PRELOAD, classes_named_in(*filter(None, functions))):
                context.set_forkserver_preload([*PRELOAD, *_models()])
                fork_server.ensure_running()
    return context


def _run_members(elastic: Elastic, nodes: Nodes | None, *args: Any) -> list[bytes]:
    from hydragraph.cluster.supervision.supervisor import run_members

    return run_members(elastic, nodes, *args)


def _models() -> list[str]:
    """Return the modules of models that this process has imported, so that ranks need not, each for itself.

    Libraries' own alone: importing what a user wrote may compute, and nothing is forked that has.
    """
    parts = ("configuration_", "modeling_")
    return sorted(
        name for name in sys.modules if name.startswith("transformers.models.") and any(p in name for p in parts)
    )


def _pickled(function: Callable[..., object], args: Sequence[object]) -> bytes:
    try:
        return sent((function, args))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"launch: `{name}`, what it closes over or its arguments cannot be sent to another process ({error}): "
            "open files, locks and devices in the function, and pass data"
        ) from error
