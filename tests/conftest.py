"""What every test run has: no time limits per example, the same examples everywhere, and quiet libraries."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported, so before the tests are
# Tests share caches of traced programs and graphs, and of what numba compiles, separate from the user's own.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "traced")
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))

import functools
import gc
import multiprocessing
import signal
import threading
from multiprocessing import forkserver
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from typer import main, testing

from hydragraph.cluster import launch
from hydragraph.frontend.check import check_once
from tests.spent import Spent
from tests.thorough import mark_others

gc.disable()  # until all tests are imported

check_once.AUTO = (
    "off"  # these tests compare by themselves; those of the check ask for it. tests/warm.py does so for ranks
)

# A shell's background job ignores these, and so would all that the tests start; some of them send these signals.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)

# Examples have no time limit, because tests share a machine. They are the same in each run, so that a test fails only
# because of a change. `pytest --hypothesis-profile=thorough` draws others, and more of them.
settings.register_profile("hydragraph", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("hydragraph")
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
    "hydragraph.planner.plan",
    "transformers.models.gpt2.modeling_gpt2",
    "tests.warm",
]
multiprocessing.get_context("forkserver").set_forkserver_preload([*launch.PRELOAD, *_SHARED])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spent", type=int, default=0, metavar="N", help="list the N tests and files of most CPU seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Spent(config.getoption("spent")))
    distributes = config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if not distributes:  # otherwise each worker starts its own server
        forkserver.ensure_running()


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the tests of the whole system first: they take longest, and none should be left alone at the end."""
    mark_others(items, whole=not any("::" in argument for argument in config.args))
    gc.freeze()  # else every full collection would visit all imported modules, for a second
    gc.enable()
    items.sort(key=lambda item: item.path.parent not in (Path(__file__).parent, Path(__file__).with_name("engine")))


def pytest_unconfigure() -> None:
    gc.unfreeze()  # the interpreter's end frees them, and nanobind would list those left
