"""A fork server that is a fork of its launcher, which has imported torch and its models already: there in no time.

A new interpreter, which is what multiprocessing makes, imports all that once more, for seconds. A fork can stand in for
it where the launcher has one thread (threads would be missing, with the locks that they hold) and no GPU.

Ranks find there what they find in a new interpreter: seeds, handlers of signals, logging and warnings, open files and
`__main__` are not the launcher's. Only of modules that the launcher has imported they see the state, as it is when
they are launched.
"""

from __future__ import annotations

import _warnings
import faulthandler
import gc
import importlib
import logging
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from io import FileIO, TextIOWrapper
from multiprocessing import connection, forkserver, resource_tracker, spawn, util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from hydragraph.cluster.processes.fork_server import outlive_failed_forks, outlive_signals
from hydragraph.cluster.processes.preloaded_imports import import_named
from hydragraph.private.torch_modes import untouched

_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_ENDING_S = 0.2  # in which threads that were told to end before a fork do

# The process of the server that was forked from this one; the next launch forks another, from what this one is then.
_forks: list[int] = []
# What is never dropped in a fork: objects with descriptors would close, as they go, whatever has their numbers by then.
_kept: list[object] = []


def ensure_forked(preload: Sequence[str], classes: Collection[str] = ()) -> bool:
    """Make a fork of this process the server that ranks come from, in place of an earlier fork; False if it cannot be.

    Args:
        preload: modules that ranks need, which this process imports.
        classes: of transformers, which ranks need, and the fork imports (`named_imports`).
    """
    return _can_fork() and _forked(preload, classes)


def _can_fork() -> bool:
    """Say whether a fork of this process could be the server; `_forked` also looks at its threads.

    Not where a driver of GPUs may have been asked for them, which no fork survives; not under modes of PyTorch; and not
    in place of a server that somebody else has started.
    """
    server: Any = forkserver._forkserver
    known = sys.platform == "linux" and sys.version_info < (3, 14)  # later ones authenticate, by other arguments
    alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
    free = server._forkserver_pid is None or server._forkserver_pid in _forks
    return known and alone and free and untouched() and not any(map(os.path.exists, _GPUS))


def _forked(preload: Sequence[str], classes: Collection[str]) -> bool:
    """Make a fork of this process the server; False, and no fork, where this process has threads.

    They are counted once there is a fork, since some end before one (those of OpenBLAS, which numpy starts); until then
    the fork waits.
    """
    for name in preload:
        if name != "__main__":
            with suppress(ImportError):
                importlib.import_module(name)
    server: Any = forkserver._forkserver
    resource_tracker.ensure_running()
    said = spawn.get_preparation_data("ignore")
    begin: dict[str, Any] = {name: value for name, value in said.items() if name in ("main_path", "sys_path")}
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive_r, alive_w = os.pipe()
        go_r, go_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_server(listener.fileno(), alive_r, go_r, {alive_w, go_w}, begin, classes)
        os.close(alive_r)
        os.close(go_r)
        one = _one_thread()
        if one:
            os.write(go_w, b"go")
        os.close(go_w)
    if not one:
        os.close(alive_w)
        os.waitpid(pid, 0)
        os.unlink(address)
        return False
    _end_fork(server)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_w, pid
    _forks[:] = [pid]
    return True


def _one_thread() -> bool:
    """Say whether this process has one thread, those left out that are about to end."""
    deadline = time.monotonic() + _ENDING_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _end_fork(server: Any) -> None:
    """End the server that was forked from this process before; its ranks have ended, for a launch waits for them."""
    if server._forkserver_pid is None:
        return
    with suppress(OSError):
        os.kill(server._forkserver_pid, signal.SIGKILL)  # ended otherwise it would remove its launcher's directory
        os.waitpid(server._forkserver_pid, 0)
    os.close(server._forkserver_alive_fd)
    with suppress(OSError):
        os.unlink(server._forkserver_address)


def _be_server(
    listener: int, alive: int, go: int, closed: set[int], begin: Mapping[str, Any], classes: Collection[str]
) -> NoReturn:
    """Be the server, in a fork of the launcher, and never return.

    Args:
        listener, alive: descriptors, as multiprocessing's server takes them.
        go: where a word comes from once the launcher has found that this process may live.
        closed: descriptors of the launcher's ends.
        begin: what multiprocessing's server is told of the launcher.
        classes: of transformers, to import.
    """
    directory = util.get_temp_dir()  # type: ignore[attr-defined]
    code = 1
    try:
        for number in closed:
            os.close(number)
        if not os.read(go, 2):
            os._exit(0)
        os.close(go)
        _as_new({listener, alive, resource_tracker._resource_tracker._fd})  # type: ignore[attr-defined]
        import_named(classes)
        gc.freeze()  # nothing that is here will go, and to look for garbage would copy its pages
        outlive_signals()
        outlive_failed_forks()
        forkserver._forkserver.__init__()  # type: ignore[misc]
        forkserver.main(listener, alive, ["__main__"], **begin)  # type: ignore[arg-type]
    except SystemExit:
        code = 0
    except BaseException:
        sys.__excepthook__(*sys.exc_info())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(code)


def _as_new(kept: set[int]) -> None:
    """Make this fork what a new interpreter is that has imported the same modules.

    Args:
        kept: descriptors that stay open.
    """
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    sys.settrace(None)
    sys.setprofile(None)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    faulthandler.disable()
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    _warnings.filters[:] = [entry for entry in _warnings.filters if entry[0] != "error"]  # `-W error` comes back
    importlib.reload(warnings)  # whoever was recording them
    _forget_files(kept)
    _kept.extend((sys.stdout, sys.stderr, sys.modules["__main__"]))
    sys.stdout = TextIOWrapper(FileIO(1, "w", closefd=False), line_buffering=os.isatty(1))
    sys.stderr = TextIOWrapper(FileIO(2, "w", closefd=False), errors="backslashreplace", line_buffering=True)
    sys.modules["__main__"] = ModuleType("__main__")  # the launcher's is imported anew, as a module
    random.seed()
    torch.default_generator.set_state(torch.Generator().get_state())
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _forget_files(kept: set[int]) -> None:
    """Let what the launcher has open (locks, pipes, sockets) end with it: here, their descriptors lead nowhere."""
    with open(os.devnull, "r+b", buffering=0) as nowhere:
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in {*kept, nowhere.fileno()} and Path(f"/proc/self/fd/{number}").exists():
                os.dup2(nowhere.fileno(), number)
