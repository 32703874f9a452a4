"""Background compilation and checks of new strategies' graphs during training.

One rank of each machine starts a low-priority process. Ranks read results once every machine has one. If a process dies
or exceeds LIMIT_S seconds, ranks compile a strategy when they first run it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hydragraph.cluster.module_process import start_module
from hydragraph.cluster.once_per_node import OfferedFile
from hydragraph.cluster.processes.shared_preparation import read_value, write_value
from hydragraph.frontend.check.stage_check import StageCheck
from hydragraph.passes.variants import Variants
from hydragraph.spec.strategy import Strategy

LIMIT_S = 600.0

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PreparedStrategies:
    """Compiled graphs and check results for the ranks of a machine.

    Attributes:
        refused: reason why the strategies cannot run, or "".
    """

    variants: Variants | None
    passed: Mapping[str, str]
    refused: str = ""


class BackgroundCompile:
    def __init__(self, variants: Variants, check: StageCheck | None, strategies: Sequence[Strategy]) -> None:
        self._asked = (variants, check, tuple(strategies))
        self._folder = tempfile.TemporaryDirectory(prefix="hydragraph-", ignore_cleanup_errors=True)  # mode 0700
        self._process: subprocess.Popen[bytes] | None = None
        self.offer: OfferedFile | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._make, name="hydragraph-beforehand", daemon=True)
        self._thread.start()

    @property
    def settled(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.kill()
        self._thread.join()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.cleanup()

    def _make(self) -> None:
        began = time.monotonic()
        try:
            folder = Path(self._folder.name)
            write_value(folder / "asked", self._asked)
            self._process = _started(folder)
            # `close` may have run before `_process` was set, and could not kill it.
            if self._closed:
                self._process.kill()
            status = self._process.wait(LIMIT_S)
            if status:
                raise RuntimeError(f"the preparing process ended with status {status}")
            self.offer = OfferedFile.of(folder / "made")
            _LOG.info("prepared new strategies in %.1f s alongside training", time.monotonic() - began)
        except (OSError, ValueError, RuntimeError, subprocess.TimeoutExpired) as error:
            if self._process is not None:
                self._process.kill()
            if not self._closed:
                _LOG.warning(
                    "new strategies cannot be prepared during training, so ranks prepare them at their first use: %s",
                    error,
                )


@dataclass(frozen=True, eq=False)
class StrategyPreparation:
    """One rank's part in the preparation of strategies; it starts the process if `makes`."""

    variants: Variants
    check: StageCheck | None
    makes: bool

    def begin(self, strategies: Sequence[Strategy]) -> BackgroundCompile | None:
        if not self.makes or not self.variants.portable or not self.variants.lacks(strategies):
            return None
        return BackgroundCompile(self.variants, self.check, strategies)

    def take(self, offer: OfferedFile) -> str:
        try:
            prepared = offer.read()
        except (OSError, ValueError, RuntimeError) as error:
            _LOG.warning("graphs of new strategies cannot be read, so this rank compiles them: %s", error)
            return ""
        assert isinstance(prepared, PreparedStrategies), "a preparing process writes only `PreparedStrategies`"
        if prepared.variants is not None:
            self.variants.adopt(prepared.variants)
        if self.check is not None:
            self.check.passed.update(prepared.passed)
        return prepared.refused


def _started(folder: Path) -> subprocess.Popen[bytes]:
    return start_module(
        "hydragraph.engine.background_compile",
        str(folder),
        environment={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        # The process must be able to import the model's code
        paths=sys.path,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def made(variants: Variants, check: StageCheck | None, strategies: Sequence[Strategy]) -> PreparedStrategies:
    try:
        variants.compile(strategies)
        if check is not None:
            for strategy in strategies:
                check.check(strategy)
    except ValueError as error:
        return PreparedStrategies(None, {}, str(error))
    return PreparedStrategies(variants, {} if check is None else check.passed)


def end_with_stdin() -> None:
    # Reading `sys.stdin` in a thread would make the interpreter's exit fail
    os.read(0, 1)
    os._exit(1)


def main(folder: Path) -> None:
    write_value(folder / "made", made(*read_value(folder / "asked")))


if __name__ == "__main__":
    # Pickled classes must not belong to __main__
    from hydragraph.engine import background_compile

    os.nice(10)
    torch.set_num_threads(1)
    threading.Thread(target=background_compile.end_with_stdin, daemon=True).start()
    background_compile.main(Path(sys.argv[1]))
