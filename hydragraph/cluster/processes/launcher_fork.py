"""Fork server forked from the launcher, which has already imported torch and models.

The launcher must not use a GPU and must have only one thread: a fork copies only the calling thread, so locks that
other threads hold stay locked. Ranks start like a new interpreter, except for imported modules.
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
from multiprocessing import connection, forkserver, resource_tracker, spawn
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from hydragraph.cluster.processes.fork_server import outlive_failed_forks, outlive_signals, own_folder
from hydragraph.cluster.processes.preloaded_imports import import_named
from hydragraph.private.torch_modes import untouched

_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
# Time for threads to end before a fork
_ENDING_S = 0.2

# The forked server's process id; the next launch forks a new server.
_forks: list[int] = []
# Objects kept alive after a fork: destroying them would close reused descriptors.
_kept: list[object] = []


def ensure_forked(preload: Sequence[str], classes: Collection[str] = ()) -> bool:
    return _can_fork() and _forked(preload, classes)


def _can_fork() -> bool:
    server: Any = forkserver._forkserver
    # Later Python versions' servers authenticate clients and take other arguments.
    supported = sys.platform == "linux" and sys.version_info < (3, 14)
    alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
    free = server._forkserver_pid is None or server._forkserver_pid in _forks
    return supported and alone and free and untouched() and not any(map(os.path.exists, _GPUS))


def _forked(preload: Sequence[str], classes: Collection[str]) -> bool:
    """Fork this process; return False if it has several threads.

    Threads are counted afterwards, because some (OpenBLAS's) end just before a fork.
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
    address = connection.arbitrary_address("AF_UNIX")  # pyrefly: ignore[missing-attribute]  # not in typeshed
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        # alive: the server ends when the launcher closes its end; go: consent to serve
        alive_r, alive_w = os.pipe()
        go_r, go_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_server(listener.fileno(), alive_r, go_r, {alive_w, go_w}, begin, classes)
        os.close(alive_r)
        os.close(go_r)
        # The fork has copied other threads' locks, so the child waits for `go`, or ends with
        # the pipe.
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
    # multiprocessing now believes that it started this server.
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_w
    server._forkserver_pid = pid
    _forks[:] = [pid]
    return True


def _one_thread() -> bool:
    deadline = time.monotonic() + _ENDING_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _end_fork(server: Any) -> None:
    if server._forkserver_pid is None:
        return
    with suppress(OSError):
        # A normal exit would remove the launcher's directory
        os.kill(server._forkserver_pid, signal.SIGKILL)
        os.waitpid(server._forkserver_pid, 0)
    os.close(server._forkserver_alive_fd)
    with suppress(OSError):
        os.unlink(server._forkserver_address)


def _be_server(
    listener: int, alive: int, go: int, closed: set[int], begin: Mapping[str, Any], classes: Collection[str]
) -> NoReturn:
    directory = own_folder()
    code = 1
    try:
        for number in closed:
            os.close(number)
        if not os.read(go, 2):
            os._exit(0)
        os.close(go)
        # pyrefly: ignore[missing-attribute]  # not in typeshed
        _as_new({listener, alive, resource_tracker._resource_tracker._fd})
        import_named(classes)
        # Garbage collection would copy memory pages
        gc.freeze()
        outlive_signals()
        outlive_failed_forks()
        forkserver._forkserver.__init__()
        forkserver.main(listener, alive, ["__main__"], **begin)
    except SystemExit:
        code = 0
    except BaseException as error:
        sys.__excepthook__(type(error), error, error.__traceback__)
    finally:
        if directory:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(code)


def _as_new(kept: set[int]) -> None:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    sys.settrace(None)
    sys.setprofile(None)
    sys.excepthook = sys.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    faulthandler.disable()
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    # Reloading restores `-W error`.
    _warnings.filters[:] = [entry for entry in _warnings.filters if entry[0] != "error"]
    # Ends any recording of warnings
    importlib.reload(warnings)
    _forget_files(kept)
    _kept.extend((sys.stdout, sys.stderr, sys.modules["__main__"]))
    sys.stdout = TextIOWrapper(FileIO(1, "w", closefd=False), line_buffering=os.isatty(1))
    sys.stderr = TextIOWrapper(FileIO(2, "w", closefd=False), errors="backslashreplace", line_buffering=True)
    # The script is imported again, as a module
    sys.modules["__main__"] = ModuleType("__main__")
    random.seed()
    torch.default_generator.set_state(torch.Generator().get_state())
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _forget_files(kept: set[int]) -> None:
    """Redirect inherited files to /dev/null, because they would outlive the launcher."""
    with open(os.devnull, "r+b", buffering=0) as nowhere:
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in {*kept, nowhere.fileno()} and Path(f"/proc/self/fd/{number}").exists():
                os.dup2(nowhere.fileno(), number)
