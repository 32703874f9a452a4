"""The faults that tests inject, and the promised outcome of each.

A fault strikes a run of `hydragraph train`, from outside or from inside a rank (`tests/struck.py`), at a moment of the
run. `Outcome` lists the four possible results; in every case all processes end in time and clean up,
and a run that can be resumed continues with the same bits. `tests/chaos.py` draws from `FAULTS`,
`tests/test_two_nodes.py` from `LINK_FAULTS`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.nodes import TwoNodes

END_S = 10.0  # within which every process has ended or raised
GRACE_S = 30.0  # within which a run that was asked to stop has saved and ended


def patience() -> float:
    """Return by what a machine that has more to do than it has cores for stretches all times."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)


class Moment(Enum):
    """Activity of a run when a fault strikes."""

    STARTING = "starting"  # from the ranks' first instruction on: they join, and read the data
    COMPILING = "compiling"
    STEPPING = "stepping"
    SAVING = "saving"
    EVALUATING = "evaluating"
    CLOSING = "closing"  # the model is gathered and exported, and communicators are dropped


class Outcome(Enum):
    """What must follow."""

    GOES_ON = "goes on"  # as if undisturbed: the same curve, exit code 0
    FAILS = "fails"  # all processes end within END_S, and the message has the cause
    STOPS = "stops"  # the step is finished and saved; exit code 0, 130 or 143 within GRACE_S
    ENDS = "ends"  # all processes end within END_S, without a message


@dataclass(frozen=True)
class Target:
    """Target of a fault.

    Attributes:
        launcher: process id of `hydragraph train`.
        rank: process id of one rank.
        ranks: of all ranks.
        folder: of the run.
    """

    launcher: int
    rank: int
    ranks: Sequence[int]
    folder: Path


Undo = Callable[[], None]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: for tables and test ids.
        outcome: what must follow.
        strike: does it from outside, and returns how to undo what outlasts the run; None: it happens inside a rank.
        act: the name of what happens inside (`tests.struck.ACTS`).
        cause: regular expression for the message of a run that fails; {rank} stands for the rank that was struck.
        moments: when it may strike.
        heals: whether a restarted run would succeed, so that --max-restarts must bring it to its end.
        kills_launcher: it needs a launcher with a fork server of its own, which dies with it.
        mounts: it needs the right to mount file systems.
    """

    name: str
    outcome: Outcome
    strike: Callable[[Target], Undo] | None = None
    act: str = ""
    cause: str = ""
    moments: tuple[Moment, ...] = tuple(Moment)
    heals: bool = False
    kills_launcher: bool = False
    mounts: bool = False


# Signals.


def _send(which: signal.Signals) -> Callable[[Target], Undo]:
    def strike(target: Target) -> Undo:
        _kill(target.rank, which)
        return _nothing

    return strike


def _tell_launcher(*which: signal.Signals) -> Callable[[Target], Undo]:
    def strike(target: Target) -> Undo:
        for i, each in enumerate(which):
            time.sleep(0.1 * (i > 0))  # a person is not quicker, and two of a kind at once are one
            _kill(target.launcher, each)
        return _nothing

    return strike


def _pause(seconds: float, everybody: bool) -> Callable[[Target], Undo]:
    def strike(target: Target) -> Undo:
        paused = [target.launcher, *target.ranks] if everybody else [target.rank]
        for pid in paused:
            _kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in paused:
            _kill(pid, signal.SIGCONT)
        return _nothing

    return strike


def _kill(pid: int, which: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, which)


# Disks. The run's folder is in a file system of its own (`small_disk`).

_DISK_BYTES = 64 << 20


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Make a folder a file system of its own, which can be filled; needs the right to mount."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _fill(target: Target) -> Undo:
    filler = target.folder.parent / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    return lambda: filler.unlink(missing_ok=True)


def _read_only(target: Target) -> Undo:
    target.folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", target.folder, target.folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", target.folder], check=True)
    return lambda: subprocess.run(["umount", "--lazy", target.folder], check=True) and None  # pyrefly: ignore[bad-return]


def _vanish(target: Target) -> Undo:
    aside = target.folder.with_name("aside")
    with suppress(FileNotFoundError):  # it may not have been made yet
        target.folder.rename(aside)

    def undo() -> None:
        if aside.exists():
            shutil.rmtree(target.folder, ignore_errors=True)
            aside.rename(target.folder)

    return undo


# Writes that can still follow a disk fault: the last checkpoint is written at the end, so a fault there is too late.
_BEFORE_THE_END = (Moment.STARTING, Moment.COMPILING, Moment.STEPPING, Moment.EVALUATING)
# A folder vanishes only where there is one.
_UNDER_WAY = (Moment.STEPPING, Moment.EVALUATING)

FAULTS: tuple[Fault, ...] = (
    Fault("killed", Outcome.FAILS, _send(signal.SIGKILL), cause=r"rank {rank}( on \S+)? failed.*SIGKILL", heals=True),
    Fault("stopped", Outcome.FAILS, _send(signal.SIGSTOP), cause=r"rank {rank}( on \S+)? failed", heals=True),
    Fault("raises", Outcome.FAILS, act="raises", cause=r"Struck: by a test", heals=True),
    Fault("exits", Outcome.FAILS, act="exits", cause=r"rank {rank}( on \S+)? failed.*exited with code 3", heals=True),
    Fault(
        "interrupted",
        Outcome.FAILS,
        act="interrupted",
        cause=r"rank {rank}( on \S+)? failed.*KeyboardInterrupt",
        heals=True,
    ),
    Fault("paused for 3 s", Outcome.GOES_ON, _pause(3, everybody=False)),
    Fault("all paused for 12 s", Outcome.GOES_ON, _pause(12, everybody=True)),
    Fault("computes for 12 s", Outcome.GOES_ON, act="computes"),
    Fault("full disk", Outcome.FAILS, _fill, cause=r"No space left on device", moments=_BEFORE_THE_END, mounts=True),
    Fault("read-only", Outcome.FAILS, _read_only, cause=r"Read-only file system", moments=_UNDER_WAY, mounts=True),
    Fault("vanished", Outcome.FAILS, _vanish, cause=r"(?i)no such file|vanished|gone|not there", moments=_UNDER_WAY),
    Fault("SIGTERM", Outcome.STOPS, _tell_launcher(signal.SIGTERM)),
    Fault("Ctrl-C", Outcome.STOPS, _tell_launcher(signal.SIGINT)),
    Fault("Ctrl-C twice", Outcome.ENDS, _tell_launcher(signal.SIGINT, signal.SIGINT)),
    Fault("launcher killed", Outcome.ENDS, _tell_launcher(signal.SIGKILL), kills_launcher=True),
    Fault("launcher hung up", Outcome.ENDS, _tell_launcher(signal.SIGHUP), kills_launcher=True),
)


# Links between two nodes.


@dataclass(frozen=True)
class LinkFault:
    """A fault of two nodes with a rank or more each.

    Attributes:
        name: for tables and test ids.
        outcome: of the ranks that are left.
        strike: does it, and returns the processes that it ended, which cannot report.
        spares: the nodes whose ranks survive and report; torchrun ends the ranks next to a killed one.
        cause: regular expression for what each of them says.
    """

    name: str
    outcome: Outcome
    strike: Callable[[TwoNodes], set[int]]
    spares: tuple[int, ...] = (0, 1)
    cause: str = r"rank \d( on \S+)? failed"


def _cut(seconds: float) -> Callable[[TwoNodes], set[int]]:
    def strike(nodes: TwoNodes) -> set[int]:
        nodes.down()
        threading.Timer(seconds, nodes.up).start()
        return set()

    return strike


def _pull(nodes: TwoNodes) -> set[int]:
    nodes.down()
    return set()


def _last_rank_of(number: int, which: signal.Signals) -> Callable[[TwoNodes], set[int]]:
    def strike(nodes: TwoNodes) -> set[int]:
        _, pid = max(nodes[number].ranks().items())
        _kill(pid, which)
        return {pid}

    return strike


def _kill_node(number: int) -> Callable[[TwoNodes], set[int]]:
    def strike(nodes: TwoNodes) -> set[int]:
        struck = set(nodes[number].processes())
        for pid in struck:
            _kill(pid, signal.SIGKILL)
        return struck

    return strike


LINK_BACK = LinkFault("link down for 3 s", Outcome.GOES_ON, _cut(3))
RANK_KILLED = LinkFault(
    "rank killed", Outcome.FAILS, _last_rank_of(1, signal.SIGKILL), spares=(0,), cause=r"rank [13]( on \S+)? failed"
)

LINK_FAULTS: tuple[LinkFault, ...] = (
    LINK_BACK,
    LinkFault("link down for 15 s", Outcome.FAILS, _cut(15)),
    LinkFault("link lost", Outcome.FAILS, _pull),
    RANK_KILLED,
    LinkFault("rank stopped", Outcome.FAILS, _last_rank_of(1, signal.SIGSTOP)),
    LinkFault("rank of the store's host stopped", Outcome.FAILS, _last_rank_of(0, signal.SIGSTOP)),
    LinkFault("store's host killed", Outcome.FAILS, _kill_node(0), spares=(1,)),
    LinkFault("other host killed", Outcome.FAILS, _kill_node(1), spares=(0,)),
)
