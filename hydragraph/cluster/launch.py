"""Functions that start local ranks, or join another launcher's."""

from __future__ import annotations

import errno
import logging
import math
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
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hydragraph.cluster.adopted import backend_of, check_moves, gpu_name, object_group
from hydragraph.cluster.failure.newest_watch import watch_of
from hydragraph.cluster.failure.rank_watch import RankWatch
from hydragraph.cluster.processes import fork_server
from hydragraph.cluster.processes.cuda_environment import set_cuda_environment
from hydragraph.cluster.processes.launched_ranks import GUARD, Context, Job, run_crew
from hydragraph.cluster.processes.launcher_environment import check_environment
from hydragraph.cluster.processes.launcher_fork import ensure_forked
from hydragraph.cluster.processes.pickling import nothing_else_imported, sent
from hydragraph.cluster.processes.preloaded_imports import classes_named_in
from hydragraph.cluster.processes.rank_process import HOST
from hydragraph.cluster.processes.rendezvous_stores import client, hosted, resolved
from hydragraph.cluster.processes.shared_preparation import SharedFile, left_of, prepare_for_ranks
from hydragraph.cluster.processes.stop_requests import Relay
from hydragraph.cluster.processes.torchrun_round import generation
from hydragraph.cluster.rendezvous.member import here, meet
from hydragraph.cluster.supervision.coordinator import RunMachines
from hydragraph.cluster.supervision.node_agent import NodeAgent
from hydragraph.cluster.supervision.supervisor import run_members
from hydragraph.cluster.unreachable import TOLD_S, first_host, no_store
from hydragraph.spec.argument_types import check_types
from hydragraph.spec.elastic import Elastic

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

# Maximum processes per host; each needs about 0.3 GB
_MOST = 1024
_ASK_S = 5.0
_REACHED_S = 300.0
_ARRIVAL_POLL_S = 0.01
_HERE = "hydragraph/here"
_ARRIVAL = timedelta(minutes=30)

# A fork takes 10 ms, an import of torch seconds; on macOS, forks are unsafe
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"

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
    """This process's rank and device, and its access to the other ranks.

    Attributes:
        backend: "nccl" if every rank has its own GPU, else "gloo".
        node: name of the node, whose ranks may be lost together.
        objects: process group for objects, or None for the default group.
    """

    rank: int
    ranks: int
    local_rank: int
    device: torch.device
    backend: str
    watch: RankWatch = field(default_factory=lambda: RankWatch(None, 0, 1), compare=False, repr=False)
    node: str = ""
    objects: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    def gather(self, value: T) -> list[T]:
        values: list[T] = [value] * self.ranks
        if self.ranks > 1:
            gather = lambda: dist.all_gather_object(values, value, self.objects)  # noqa: E731
            self.watch.call(gather)
        return values

    def calling(self, what: str) -> AbstractContextManager[None]:
        return self.watch.calling(what)


def join(device: torch.device | str | None = None) -> World:
    """Join the default process group or the launcher's ranks; without either, run as a single rank.

    Args:
        device: `cuda` without an index means this rank's GPU; None means a GPU if available.
    """
    check_environment(os.environ)
    device, local_rank = _of_this_rank(device)
    name = gpu_name(device)
    launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    # A single process without MASTER_ADDR meets no other ranks.
    if launched and os.environ["WORLD_SIZE"] == "1" and "MASTER_ADDR" not in os.environ:
        launched = False
    if not dist.is_initialized() and launched:
        # Objects are sent as CPU tensors.
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
    # Two nodes may share a host
    node = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
    world = World(rank, ranks, local_rank, device, "gloo", watch, node)
    # The backend is known only after ranks have exchanged GPU names, under the watch.
    with watch.calling("join"):
        world = replace(world, objects=watch.call(lambda: object_group(group)))
        return replace(world, backend=backend_of(world.gather(name)))


def apart(device: torch.device | str | None = None) -> World:
    device, local_rank = _of_this_rank(device)
    return World(0, 1, local_rank, device, backend_of([gpu_name(device)]))


def _of_this_rank(asked: torch.device | str | None) -> tuple[torch.device, int]:
    if str(asked) != "cpu" and torch.backends.cuda.is_built():
        # Must happen before CUDA starts
        set_cuda_environment(os.environ)
    device = _device(asked)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        member = here()
        own = (local_rank if member is None else member.gpu) % gpus
        device = torch.device("cuda", own if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device, local_rank


def _device(asked: torch.device | str | None) -> torch.device:
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        # PyTorch's message lists every device type
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(asked)!r}: use 'cpu', or 'cuda' for this rank's GPU")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(asked)!r}: PyTorch {torch.__version__} finds no GPU here: use cpu")
    return device


def _store_of_launcher(rank: int, ranks: int) -> Store:
    """Return the launcher's store, with new keys for each restart under torchrun."""
    for name, what in (("MASTER_ADDR", "the address of rank 0's machine"), ("MASTER_PORT", "a free port there")):
        if name not in os.environ:
            raise ValueError(f"{name} is not set: set it to {what}, on every rank")
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not shared:
        if not resolved(address):
            raise ValueError(
                f"MASTER_ADDR is {address!r}, which this machine cannot resolve: set an address of this machine"
            )
        try:
            store = hosted(address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ValueError(
                f"port {port} is in use on this machine, perhaps by another job: set MASTER_PORT to a free port"
            ) from None
        _wait_for_ranks(store, ranks, f"{address}:{port}")
    else:
        _reach(address, port, rank)
        store = client(address, port)
        # Rank 0 logs missing ranks (`_wait_for_ranks`).
        store.set(f"{_HERE}/{rank}", "")
    # torchrun's store may have keys of an earlier attempt, so ranks agree on a new prefix. Rank 0's
    # own store starts empty.
    joining = dist.PrefixStore("hydragraph/generations", store)
    name = generation(joining, rank, ranks, _ARRIVAL) if shared else "first"
    return dist.PrefixStore(f"hydragraph/{name}", store)


def _wait_for_ranks(store: Store, ranks: int, where: str) -> None:
    began = time.monotonic()
    told = False
    missing = list(range(1, ranks))
    while missing := [rank for rank in missing if not store.check([f"{_HERE}/{rank}"])]:
        if time.monotonic() - began > _REACHED_S:
            return
        if not told and time.monotonic() - began > TOLD_S:
            told = True
            _LOG.warning(
                "rank 0 waits at %s for %d of %d ranks, including rank %d", where, len(missing), ranks, missing[0]
            )
        time.sleep(_ARRIVAL_POLL_S)


def _reach(address: str, port: int, rank: int) -> None:
    began = time.monotonic()
    told = False
    while True:
        try:
            return socket.create_connection((address, port), timeout=_ASK_S).close()
        except OSError as error:
            if time.monotonic() - began > _REACHED_S:
                raise ConnectionError(no_store(error, address, port, rank)) from None
            if not told and time.monotonic() - began > TOLD_S:
                told = True
                _LOG.warning("rank %d waits for %s", rank, first_host(error, address, port))
        time.sleep(0.5)


def launch(
    function: Callable[..., T],
    ranks: int,
    *args: object,
    timeout: timedelta | None = None,
    prepare: Callable[[], object] | None = None,
    relay: Relay | None = None,
    elastic: Elastic | None = None,
    nodes: RunMachines | None = None,
) -> list[T]:
    """Run `function(*args)` on `ranks` processes of this host, connected by gloo on the CPU.

    The function gets its rank from `torch.distributed`. The function, its arguments and its result are pickled; tensors
    are copied, and closures are supported. In a script, call `launch` under `if __name__ == "__main__":`, because ranks
    import the script. All processes have ended when the call returns.

    Args:
        timeout: time limit of the whole run, or None.
        prepare: function called once, in a separate process. Its result, such as a tuple (model, program, result of
            `precompile`), becomes the first argument of `function`. Ranks map it from one file, so weights share memory
            until a rank changes them.
        relay: forwards stop requests to the ranks' processes.
        elastic: settings for lost ranks; `function` must call `hydragraph.survive` when a step raises an error.
        nodes: machines of an elastic run that this machine leads; call `follow` on the others. `ranks` counts all
            machines' ranks.

    Returns:
        The ranks' results, by rank; with `elastic`, only those of ranks that remain at the end.

    Raises:
        ValueError: a value cannot be pickled, or `ranks` is not positive.
        RankFailure: a rank died.
        TimeoutError: the run exceeded `timeout`.
        Any other error: that of the rank that failed first, with its traceback as a note.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(f"launch: a rank imported this script, which called launch again; {GUARD}")
    check_types("launch: ", {"elastic": elastic, "nodes": nodes}, launch)
    if not callable(function):
        raise ValueError(f"launch: {function!r} is not a function: give one, as in launch(train, {ranks})")
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"launch: ranks={ranks}: give a positive number of ranks")
    if ranks > _MOST:
        raise ValueError(
            f"launch: ranks={ranks} would exhaust this machine: use at most {_MOST}, or start ranks on several "
            "machines with torchrun"
        )
    if elastic is not None and ranks + elastic.spares > _MOST:
        raise ValueError(f"launch: {ranks} ranks and {elastic.spares} spares: use at most {_MOST} processes")
    if not isinstance(timeout, timedelta | None):
        raise ValueError(f"launch: timeout={timeout!r}: give a datetime.timedelta, as in timedelta(seconds=60)")
    work = _pickled(function, args)
    context = starting(function, prepare)
    # Starts a thread, so it must come after `starting`.
    server = hosted(HOST if nodes is None else nodes.address, 0)
    run = run_crew if elastic is None else partial(run_members, elastic, nodes)
    timeout_s = math.inf if timeout is None else timeout.total_seconds()
    job = Job(context, ranks, server.port, work, timeout_s, relay or Relay())
    if prepare is None:
        return [pickle.loads(value) for value in run(job)]
    began = time.monotonic()
    with tempfile.TemporaryFile() as file:
        shared = SharedFile(file.fileno())
        prepare_for_ranks(context, _pickled(prepare, ()), shared, timeout_s)
        job = replace(job, timeout_s=left_of(timeout_s, began), prepared=shared)
        return [pickle.loads(value) for value in run(job)]


def follow(nodes: RunMachines, say: Callable[[str], None]) -> RunMachines | None:
    """Start and watch this machine's ranks for another machine's `launch`.

    Returns:
        None if the run ended; on an elected leader, the `nodes` of a `launch` that continues the run.
    """
    context = starting()
    if nodes.election is not None:
        # Import in the fork server now: an elected leader must not wait for it.
        first = context.Process(target=int)
        first.start()
        first.join()
    handed = NodeAgent(context, nodes, say).run()
    if handed is None or nodes.election is None:
        return None
    # Without a previous leader, the run begins here, without inherited members.
    lease = nodes.election.standing.lease
    return replace(nodes, handed=None if lease.prior is None else handed)


def starting(*functions: Callable[..., object] | None) -> Context:
    """Return the multiprocessing context for ranks; call it before this process has threads."""
    context: Context = multiprocessing.get_context(START_METHOD)
    if START_METHOD == "forkserver":
        with nothing_else_imported():
            if not ensure_forked(PRELOAD, classes_named_in(*filter(None, functions))):
                context.set_forkserver_preload([*PRELOAD, *_models()])
                fork_server.ensure_running()
    return context


def _models() -> list[str]:
    parts = ("configuration_", "modeling_")
    names = [name for name in sys.modules if name.startswith("transformers.models.")]
    return sorted(name for name in names if any(part in name for part in parts))


def _pickled(function: Callable[..., object], args: Sequence[object]) -> bytes:
    try:
        return sent((function, args))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"launch: `{name}`, its closure or its arguments cannot be sent to another process ({error}): "
            "create files, locks and devices inside the function, and pass only data"
        ) from error
