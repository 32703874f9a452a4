"""Injection of faults from outside a run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from hydragraph.train.chaos.machines import Machines, all_stats, stat_of
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.stragglers.run_events import RunEvent, read_events

# Maximum seconds until the other ranks end a stopped rank
GIVEN_UP_S = 30.0
# Maximum wait for a fault's trigger
_MOMENT_S = 60.0
# Maximum wait for a new machine, which compiles before it joins
_JOINED_S = 300.0
_SLOW_S = 1.0
# Must be shorter than the time that other ranks wait for a stopped rank
_PAUSE_S = 3.0
_PERIOD_S = 0.1
# Fraction of time for which a slowed rank is stopped
_STOPPED = 0.6
_LEFT_S = 20.0
_LOOK_S = 0.005


@dataclass
class Victim:
    """A run that receives faults, observed through its files and /proc.

    Attributes:
        depth: 1, or 2 if torchrun adds a level of processes.
        machines: the run's machines, the launcher's first; None: only this machine.
    """

    folder: RunFolder
    launcher: subprocess.Popen[bytes]
    depth: int = 1
    machines: Machines | None = None
    pids: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.launcher.poll() is None

    @property
    def supervisor(self) -> int:
        """Process that starts the ranks: the launcher or torchrun's child."""
        pids = self._below(self.depth - 1)
        return pids[0] if pids else self.launcher.pid

    def ranks(self) -> list[int]:
        with suppress(OSError, ValueError, KeyError):
            pids = [int(place["pid"]) for place in json.loads(self.folder.ranks.read_text())]
            self.pids.update(pids)
            return [pid for pid in pids if lives(pid)]
        return []

    def children(self) -> list[int]:
        """Return the ranks' processes, newest last."""
        pids = self._below(self.depth + 1)
        self.pids.update(pids)
        if self.machines is not None:
            self.pids.update(self.machines.left())
        return pids

    def _below(self, levels: int) -> list[int]:
        above: dict[int, int] = {}
        born: dict[int, int] = {}
        # fields: state, parent, ..., [19] start time. Zombies count as parents, whose children are
        # still to be found.
        for pid, fields in all_stats():
            above[pid] = int(fields[1])
            if fields[0] not in "ZX":
                born[pid] = int(fields[19])
        level = {self.launcher.pid}
        for _ in range(levels):
            level = {pid for pid, parent in above.items() if parent in level}
        return sorted(level & born.keys(), key=lambda pid: (born[pid], pid))

    def step(self) -> int:
        with suppress(OSError, ValueError, KeyError, IndexError), self.folder.metrics.open("rb") as file:
            # Read only the end of the file, because this is called often.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return int(json.loads(file.read().splitlines()[-1])["step"])
        return 0

    def happened(self, *names: str) -> list[RunEvent]:
        with suppress(ValueError, OSError):
            return [event for event in read_events(self.folder.events) if event.event in names]
        return []

    def saving(self) -> bool:
        with suppress(OSError):
            return any(not (place / "complete.json").exists() for place in self.folder.checkpoints.iterdir())
        return False

    def until(self, what: Callable[[], object], limit_s: float = float("inf")) -> bool:
        wait(lambda: what() or not self.alive, limit_s, _LOOK_S)
        return bool(what())


def wait(done: Callable[[], object], limit_s: float, every_s: float = 0.02) -> None:
    end = time.monotonic() + limit_s
    while not done() and time.monotonic() < end:
        time.sleep(every_s)


def send(pid: int, which: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, which)


def lives(pid: int) -> bool:
    fields = stat_of(pid)
    return bool(fields) and fields[0] not in "ZX"


def ended(pid: int, limit_s: float) -> bool:
    wait(lambda: not lives(pid), limit_s)
    return not lives(pid)


def slow_down(pid: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and lives(pid):
        send(pid, signal.SIGSTOP)
        time.sleep(_PERIOD_S * _STOPPED)
        send(pid, signal.SIGCONT)
        time.sleep(_PERIOD_S * (1 - _STOPPED))


Action = Callable[[Victim, int, random.Random], None]


def _kill(run: Victim, target: int, chance: random.Random) -> None:
    """Kill a rank."""
    _end(target)


def _slow(run: Victim, target: int, chance: random.Random) -> None:
    """Slow a rank for a second."""
    slow_down(target, _SLOW_S)


def _join(run: Victim, target: int, chance: random.Random) -> None:
    """Ask a rank to leave; then tell the launcher that the rank's device is available again."""
    send(target, signal.SIGTERM)
    ended(target, _LEFT_S)
    send(run.supervisor, signal.SIGUSR1)


def _pause(run: Victim, target: int, chance: random.Random) -> None:
    """Stop a rank for 3 s; the other ranks must wait for it."""
    send(target, signal.SIGSTOP)
    time.sleep(_PAUSE_S)
    send(target, signal.SIGCONT)


def _stop(run: Victim, target: int, chance: random.Random) -> None:
    """Stop a rank permanently; the other ranks must end it within 30 s."""
    send(target, signal.SIGSTOP)
    if not ended(target, GIVEN_UP_S):
        run.problems.append(f"the other ranks did not end a stopped rank within {GIVEN_UP_S:g} s")
        send(target, signal.SIGCONT)


def _first(run: Victim, target: int, chance: random.Random) -> None:
    """Kill rank 0."""
    for pid in run.ranks()[:1]:
        _end(pid)


def _two(run: Victim, target: int, chance: random.Random) -> None:
    """Kill two ranks in the same instant."""
    other = chance.choice([pid for pid in run.ranks() if pid != target] or [target])
    _end(target, other)


def _all(run: Victim, target: int, chance: random.Random) -> None:
    """Kill all ranks in the same instant."""
    _end(*run.ranks())


def _again(run: Victim, target: int, chance: random.Random) -> None:
    """Kill a rank, and one or two other ranks during the recovery."""
    _end(target)
    for _ in range(chance.randint(1, 2)):
        time.sleep(chance.uniform(0, 1.0))
        _another(run, chance)


def _rejoin(run: Victim, target: int, chance: random.Random) -> None:
    """Kill a rank; when its replacement is about to join or has just joined, kill the replacement or another rank."""
    children_before = set(run.children())
    joined = len(run.happened("join"))
    _end(target)
    run.until(lambda: set(run.children()) - children_before, _MOMENT_S)
    # Strike while the new rank starts, or just after it joins.
    new = sorted(set(run.children()) - children_before)
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0, 3.0))
    else:
        run.until(lambda: len(run.happened("join")) > joined, _MOMENT_S)
        time.sleep(chance.uniform(0, 0.1))
    if new and chance.random() < 0.5:
        _end(new[0])
    else:
        _another(run, chance)


def _checkpoint(run: Victim, target: int, chance: random.Random) -> None:
    """Kill a rank while a checkpoint is being written."""
    run.until(run.saving, _MOMENT_S)
    time.sleep(chance.uniform(0, 0.03))
    _end_one(run, target, chance)


def _evaluate(run: Victim, target: int, chance: random.Random) -> None:
    """Kill a rank right after a step, for example during an evaluation."""
    before = run.step()
    run.until(lambda: run.step() > before, _MOMENT_S)
    _end_one(run, target, chance)


def _switch(run: Victim, target: int, chance: random.Random) -> None:
    """Slow a rank until the run switches strategies or moves state, and kill a rank during this change."""
    before = len(run.happened("switch", "migrate"))
    end = time.monotonic() + _MOMENT_S
    while len(run.happened("switch", "migrate")) == before and time.monotonic() < end and lives(target):
        slow_down(target, _PERIOD_S)
    time.sleep(chance.uniform(0, 0.5))
    _another(run, chance)


def _preempt(run: Victim, target: int, chance: random.Random) -> None:
    """End a simulated machine and delete its disk, at once or at most 30 s after a notice; then start another."""
    machines = run.machines
    if machines is None:
        run.problems.append("the run has only one machine, so no machine was preempted")
        return
    # Ending machine 0, the launcher's, would end the run.
    number = chance.randrange(1, machines.count)
    machines.preempt(number, notice=chance.random() < 0.5)
    machines.replace(number)
    if not run.until(lambda: {*run.ranks()} & {*machines.processes(number)}, _JOINED_S) and run.alive:
        run.problems.append(f"a new machine did not join within {_JOINED_S:g} s")


def _end_one(run: Victim, target: int, chance: random.Random) -> None:
    _end(target if lives(target) else chance.choice(run.ranks() or [target]))


def _another(run: Victim, chance: random.Random) -> None:
    ranks = run.ranks()
    if len(ranks) > 1:
        _end(chance.choice(ranks))


def _end(*pids: int) -> None:
    for pid in pids:
        send(pid, signal.SIGKILL)
    for pid in pids:
        ended(pid, _LEFT_S)


_STRIKES = (
    *(_kill, _slow, _join, _pause, _stop, _first, _two, _all, _again, _rejoin),
    *(_checkpoint, _evaluate, _switch, _preempt),
)
ACTIONS: Mapping[str, Action] = {strike.__name__.removeprefix("_"): strike for strike in _STRIKES}


def least_ranks(kind: str) -> int:
    return 3 if kind == "two" else 2
