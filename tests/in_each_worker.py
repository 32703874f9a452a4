"""What each process that runs tests has: the same examples everywhere, quiet libraries, and a fork server of ranks."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver
from unittest import mock

from _pytest.assertion.rewrite import AssertionRewritingHook
from hypothesis.internal.conjecture import providers
from typer import main, testing

from hydragraph.cluster import launch
from hydragraph.cluster.processes import launcher_fork
from hydragraph.frontend.check import check_once

check_once.AUTO = (
    "off"  # these tests compare by themselves; those of the check ask for it. tests/warm.py does so for ranks
)

# A shell's background job ignores these, and so would all that the tests start; some of them send these signals.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)

# Hypothesis also draws the constants of the modules of ours that are imported by then: an edit elsewhere, or another
# distribution of the tests over workers, would draw other examples.
mock.patch.object(providers, "is_local_module_file", create=True, return_value=False).start()

# typer would build all commands anew in each test of the command line, for a tenth of a second.
mock.patch.object(testing, "_get_command", functools.cache(main.get_command), create=True).start()

# Ranks are forked from a process that has imported this: imports of tests do not cost time again in each rank.
_SHARED = [
    "pytest",
    "hypothesis",
    "peft",
    "hydragraph.commands.train",
    "hydragraph.planner.plan",
    "transformers.models.gpt2.modeling_gpt2",
    "tests.warm",
]


def start_fork_server() -> None:
    """Start the process that ranks are forked from: a fork of this one, where hydragraph forks launchers.

    pytest-xdist has a thread here. It waits for orders now and holds no lock, so the fork does not miss it.
    """
    if not _may_fork():
        multiprocessing.get_context("forkserver").set_forkserver_preload([*launch.PRELOAD, *_SHARED])
        forkserver.ensure_running()
        return
    for name in _SHARED:
        importlib.import_module(name)
    finders = [*sys.meta_path]
    # Ranks import the tests' modules as they are, not rewritten by pytest.
    sys.meta_path[:] = [finder for finder in finders if not isinstance(finder, AssertionRewritingHook)]
    with mock.patch.object(launcher_fork, "_one_thread", return_value=True):
        assert launcher_fork._forked(launch.PRELOAD, ())
    sys.meta_path[:] = finders
    launcher_fork._forks.clear()  # else each launch would fork another


def _may_fork() -> bool:
    supported = sys.platform == "linux" and sys.version_info < (3, 14)
    return supported and not any(map(os.path.exists, launcher_fork._GPUS))
