"""Fork server of ranks, which cleans up even if its launcher is killed.

multiprocessing's own server would leave its socket and semaphores behind. A SIGTERM to the process group, or a failed
fork, would end it and every rank, even during a save.

The server imports this module first (`launch.PRELOAD`), which calls `_serve` because `_VARIABLE` is set.
"""

from __future__ import annotations

import atexit
import errno
import multiprocessing
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver, reduction, util

from hydragraph.cluster.processes.compute_threads import spinning

_VARIABLE = "HYDRAGRAPH_FORK_SERVER"
_OUTLIVED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def ensure_running() -> None:
    """Start the server if needed; its import path excludes the current directory."""
    ours = {"PYTHONSAFEPATH": "1", _VARIABLE: own_folder(), **spinning(os.environ)}
    with environment(ours):
        forkserver.ensure_running()


def own_folder() -> str:
    folder: str = util.get_temp_dir()
    return folder if multiprocessing.parent_process() is None else ""


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def outlive_signals() -> None:
    """Make this server end only with its launcher."""
    for number in _OUTLIVED:
        signal.signal(number, signal.SIG_IGN)
    os.register_at_fork(after_in_child=_as_usual)


def outlive_failed_forks() -> None:
    """Make this server continue when a fork fails; the process that asked for the fork reads EOF instead of a pid.

    multiprocessing's server does so only after ECONNABORTED, and leaves descriptors open.
    """
    fork, receive = os.fork, reduction.recvfds
    received: list[int] = []

    def recvfds(sock: socket.socket, size: int) -> list[int]:
        received[:] = receive(sock, size)
        return list(received)

    def tolerant() -> int:
        try:
            return fork()
        except OSError as error:
            for descriptor in received:
                os.close(descriptor)
            raise OSError(errno.ECONNABORTED, f"a rank could not be forked: {error}") from error

    def restore() -> None:
        os.fork = fork
        reduction.recvfds = receive

    os.fork = tolerant
    reduction.recvfds = recvfds
    os.register_at_fork(after_in_child=restore)


def _serve(directory: str) -> None:
    outlive_signals()
    outlive_failed_forks()
    if directory:
        # Ranks skip this, because they call os._exit.
        atexit.register(shutil.rmtree, directory, ignore_errors=True)


def _as_usual() -> None:
    for number in _OUTLIVED:
        signal.signal(number, signal.SIG_DFL)
    try:
        from tqdm import tqdm
    except ImportError:
        return
    # torch.fx creates a progress bar for every graph
    tqdm.set_lock(threading.RLock())


if _VARIABLE in os.environ:
    _serve(os.environ.pop(_VARIABLE))
