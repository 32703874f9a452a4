"""What strategies need that were never run, made beside training: their graphs, and the check of these.

    rank 0 tells which strategies are coming    one rank of each machine has a process make what they need, which gives
                                                way to training; steps go on as before
    it is there on every machine                all ranks read it, and choose from the new strategies in the next step

So the first step of a new strategy is as quick as its second. What is found to be wrong is not switched to. A process
that dies, or takes longer than LIMIT_S, costs nothing but that: ranks make what they need when they run it, as ever.
"""

from __future__ import annotations

import hashlib
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

from hydragraph.cluster.once_per_node import Offer
from hydragraph.cluster.processes.shared_preparation import SharedFile
from hydragraph.frontend.check.stage_check import StageCheck
from hydragraph.passes.variants import Variants
from hydragraph.spec.strategy import Strategy

LIMIT_S = 600.0

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Made:
    """What a process has made for the ranks of its machine.

    Attributes:
        variants: the graphs of all their stages, and those that were there.
        passed: what need not be checked again (`StageCheck.passed`).
        refused: why the strategies cannot be run; "" where they can.
    """

    variants: Variants | None
    passed: Mapping[str, str]
    refused: str = ""


@dataclass(frozen=True, eq=False)
class _Asked:
    variants: Variants
    check: StageCheck | None
    strategies: Sequence[Strategy]


class Beforehand:
    """A process that makes what some strategies need.

    Args:
        variants: of the model; what they have is not made again.
        check: of what is made, where this run checks it.
        strategies: that are coming.
    """

    def __init__(self, variants: Variants, check: StageCheck | None, strategies: Sequence[Strategy]) -> None:
        self._asked = _Asked(variants, check, tuple(strategies))
        self._folder = tempfile.TemporaryDirectory(prefix="hydragraph-", ignore_cleanup_errors=True)  # of mode 0700
        self._process: subprocess.Popen[bytes] | None = None
        self._offer: Offer | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._make, name="hydragraph-beforehand", daemon=True)
        self._thread.start()

    @property
    def settled(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    @property
    def offer(self) -> Offer | None:
        """Where a `Made` lies, once it has ended; None: it could not make it."""
        return self._offer if self.settled else None

    def close(self) -> None:
        """End it, and drop what it has made."""
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
            with (folder / "asked").open("w+b") as file:
                SharedFile(file.fileno()).write(self._asked)
            self._process = _started(folder)
            if self._closed:
                self._process.kill()
            status = self._process.wait(LIMIT_S)
            if status:
                raise RuntimeError(f"its process ended with status {status}")
            with (folder / "made").open("rb") as file:
                self._offer = Offer(file.name, hashlib.file_digest(file, "sha256").hexdigest())
            _LOG.info("made what is coming in %.1f s beside training", time.monotonic() - began)
        except (OSError, ValueError, RuntimeError, subprocess.TimeoutExpired) as error:
            if self._process is not None:
                self._process.kill()
            if not self._closed:
                _LOG.warning("what is coming cannot be made beside training, so ranks make it then: %s", error)


class Readying:
    """How a rank gets ready for strategies that it has never run.

    Args:
        variants: that it runs.
        check: of them; None: on another rank of its machine, or nowhere.
        makes: whether it is this rank that has things made for its machine.
    """

    def __init__(self, variants: Variants, check: StageCheck | None, makes: bool) -> None:
        self._variants = variants
        self._check = check
        self._makes = makes

    def begin(self, strategies: Sequence[Strategy]) -> Beforehand | None:
        """Begin to make what strategies need; None: there is nothing to make, or not here."""
        if not self._makes or not self._variants.portable or not self._variants.lacks(strategies):
            return None
        return Beforehand(self._variants, self._check, strategies)

    def take(self, offer: Offer) -> str:
        """Take what was made; return why the strategies cannot be run, or ""."""
        try:
            found = offer.read()
        except (OSError, ValueError, RuntimeError) as error:
            _LOG.warning("what was made for coming strategies cannot be read, so this rank makes it: %s", error)
            return ""
        assert isinstance(found, Made), "a process has made it"
        if found.variants is not None:
            self._variants.adopt(found.variants)
        if self._check is not None:
            self._check.passed.update(found.passed)
        return found.refused


def _started(folder: Path) -> subprocess.Popen[bytes]:
    # The process must import this very package, installed or not; a model's own code is where the run found it.
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")]), *filter(None, sys.path)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "hydragraph.engine.background_compile", str(folder)],
        stdin=subprocess.PIPE,  # closed when this process ends, however it does: then the other one ends, too
        stdout=subprocess.DEVNULL,
        env={**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
    )


def made(asked: _Asked) -> Made:
    """Make what was asked for."""
    try:
        asked.variants.compile(asked.strategies)
        if asked.check is not None:
            for strategy in asked.strategies:
                asked.check.check(strategy)
    except ValueError as error:  # `Unsupported` too: what a rank would be refused in its step
        return Made(None, {}, str(error))
    return Made(asked.variants, {} if asked.check is None else asked.check.passed)


def end_with_stdin() -> None:
    """End this process when the one that has started it is gone: nobody waits for what it makes."""
    os.read(0, 1)  # not `sys.stdin`, whose lock, held here, would end the interpreter with an error
    os._exit(1)


def main(folder: Path) -> None:
    """Make what the file "asked" of a folder says, and leave it there as "made"."""
    with (folder / "asked").open("rb") as file:
        asked = SharedFile(file.fileno()).read()
    with (folder / "made").open("w+b") as file:
        SharedFile(file.fileno()).write(made(asked))


if __name__ == "__main__":
    from hydragraph.engine import background_compile  # what it writes is of that module's classes, not of __main__'s

    os.nice(10)
    torch.set_num_threads(1)
    threading.Thread(target=background_compile.end_with_stdin, daemon=True).start()
    background_compile.main(Path(sys.argv[1]))
