"""The fork server that ranks come from, made to leave nothing behind however its launcher ends.

multiprocessing's own does so only where its launcher ends by itself: after `kill -9`, or with the terminal, its socket
stays in /tmp, and so do the semaphores that libraries make in ranks. And it dies of a SIGTERM to the whole process
group, and with it every rank, in the midst of saving.

multiprocessing's server also dies, and with it every rank, when the system cannot fork (EAGAIN, ENOMEM). Ours goes on:
that start fails, and the ranks there are live.

The server imports this module first (`launch.PRELOAD`), and finds itself to be one by a variable of its environment.
Where its launcher can be forked, it need not be a new interpreter: `hydragraph.cluster.processes.launcher_fork`.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import signal
import socket
import threading
from collections.abc import Mapping
from multiprocessing import forkserver, reduction, util

from hydragraph.cluster.processes.compute_threads import spinning

_VARIABLE = "HYDRAGRAPH_FORK_SERVER"  # names the directory of its socket
_OUTLIVED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def ensure_running() -> None:
    """Start the server unless it runs; with modules from anywhere but the current directory.

    A `-c` interpreter looks there first. The server gets this process's path before it imports anything of the user's,
    and ranks begin with the environment of their launcher, so that none of these variables reaches them.
    """
    ours = {"PYTHONSAFEPATH": "1", _VARIABLE: util.get_temp_dir(), **spinning(os.environ)}  # type: ignore[attr-defined]
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        forkserver.ensure_running()
    finally:
        _restore(before)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def outlive_signals() -> None:
    """Make this process, which is a server, end with its launcher only."""
    for number in _OUTLIVED:
        signal.signal(number, signal.SIG_IGN)
    os.register_at_fork(after_in_child=_as_usual)


def outlive_failed_forks() -> None:
    """Make this server process continue when a fork fails; its client then reads EOF instead of a pid.

    multiprocessing's loop continues after ECONNABORTED only, and leaves the descriptors of a failed request open.
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
        os.fork, reduction.recvfds = fork, receive

    os.fork, reduction.recvfds = tolerant, recvfds
    os.register_at_fork(after_in_child=restore)


def _serve(directory: str) -> None:
    """Make this process, which is the server, end with its launcher only, and remove its socket then."""
    outlive_signals()
    outlive_failed_forks()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)  # ranks end without it: they call os._exit


def _as_usual() -> None:
    """Let a rank be ended by what ends any process, and make no semaphore where a lock among threads is enough."""
    for number in _OUTLIVED:
        signal.signal(number, signal.SIG_DFL)
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return
    tqdm.set_lock(threading.RLock())  # torch.fx makes a bar for every graph it interprets, shown or not


if _VARIABLE in os.environ:
    _serve(os.environ.pop(_VARIABLE))
