"""A pytest plugin that measures the CPU seconds of each test, its ranks and subprocesses included (`make slowest`).

CPU seconds depend much less on other work on the machine than the wall-clock seconds of `--durations`.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

PROPERTY = "cpu_s"  # of a test's report: workers send it, and --junitxml writes it
_TICKS = os.sysconf("SC_CLK_TCK")
_BEGAN = pytest.StashKey[float]()


def cpu_s() -> float:
    """Return the CPU seconds of this process, of ended subprocesses, and of the fork server with its ended ranks."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + _fork_server_s()


def _fork_server_s() -> float:
    server = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009 - typeshed does not know it
    try:
        stat = Path(f"/proc/{server}/stat").read_text()
    except OSError:  # none runs, or this is not Linux
        return 0.0
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / _TICKS


class Spent:
    """Measures every test, its fixtures included, and prints the sums at the end of the run.

    Args:
        shown: how many tests and files to list; 0: the total only.
    """

    def __init__(self, shown: int) -> None:
        self.shown = shown

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_BEGAN] = cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        if call.when == "teardown":
            item.user_properties.append((PROPERTY, cpu_s() - item.stash[_BEGAN]))
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        tests: Counter[str] = Counter()
        for reports in terminalreporter.stats.values():
            for report in reports:
                tests.update({report.nodeid: dict(getattr(report, "user_properties", ())).get(PROPERTY, 0.0)})
        files: Counter[str] = Counter()
        for test, seconds in tests.items():
            files.update({test.partition("::")[0]: seconds})
        for name, seconds in [*files.most_common(self.shown), *tests.most_common(self.shown)]:
            terminalreporter.write_line(f"{seconds:8.1f} CPU s  {name}")
        terminalreporter.write_line(f"{tests.total():8.1f} CPU s  in all tests")
