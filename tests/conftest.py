"""What every test run has: the order of the tests, their cost, and reports of workers.

The process that distributes tests over workers runs none, so it imports no PyTorch, which would take seconds before the
workers start. `tests/in_each_worker.py` is for the processes that run tests.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.spent import Spent
from tests.thorough import mark_others

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported, so before the tests are
# Tests share caches of traced programs and graphs, and of what numba compiles, separate from the user's own.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "traced")
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))

gc.disable()  # until all tests are imported

# Examples have no time limit, because tests share a machine. They are the same in each run, so that a test fails only
# because of a change. `pytest --hypothesis-profile=thorough` draws others, and more of them.
settings.register_profile("hydragraph", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("hydragraph")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spent", type=int, default=0, metavar="N", help="list the N tests and files of most CPU seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Spent(config.getoption("spent")))
    distributes = config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if not distributes:
        importlib.import_module("tests.in_each_worker").start_fork_server()


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the tests of the whole system first: they take longest, and none should be left alone at the end."""
    mark_others(items, whole=not any("::" in argument for argument in config.args))
    gc.freeze()  # else every full collection would visit all imported modules, for a second
    atexit.register(gc.unfreeze)  # the interpreter's end frees them, and nanobind would list those left
    gc.set_threshold(20_000, 20, 50)  # the default, (700, 10, 10), costs 7 % of the time of tests that trace
    gc.enable()
    items.sort(key=lambda item: item.path.parent not in (Path(__file__).parent, Path(__file__).with_name("engine")))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(report: pytest.TestReport) -> Generator[None, Any, Any]:
    """Send, of a test that passed, neither its names nor what it printed: both take longer than many a test."""
    data = yield
    if data and report.when and report.passed:
        data |= {"keywords": {}, "sections": []}
    return data
