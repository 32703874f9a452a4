"""Simulated machines: processes that start ranks, each with its own session and disk."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydragraph.train.config import TrainConfig

# Like spot instances
NOTICE_S = 30.0
_END_S = 20.0


@dataclass
class Machines:
    count: int
    config: Path
    log: Path
    disks: Path
    supervisors: list[subprocess.Popen[bytes]] = field(default_factory=list)
    sessions: set[int] = field(default_factory=set)
    _port: int = field(default_factory=lambda: _free_port())

    def start(self) -> subprocess.Popen[bytes]:
        self.supervisors = [self._started(number) for number in range(self.count)]
        return self.supervisors[0]

    def preempt(self, number: int, notice: bool) -> None:
        """End a machine and delete its disk; after a notice, ranks have `NOTICE_S` seconds to leave."""
        supervisor = self.supervisors[number]
        if notice:
            supervisor.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                supervisor.wait(NOTICE_S)
        self._kill(supervisor)
        shutil.rmtree(self.disks / str(number), ignore_errors=True)

    def replace(self, number: int) -> None:
        self.supervisors[number] = self._started(number)

    def processes(self, number: int) -> list[int]:
        return _in_sessions({self.supervisors[number].pid})

    def end(self) -> None:
        for supervisor in self.supervisors:
            self._kill(supervisor)

    def left(self) -> list[int]:
        return _in_sessions(self.sessions)

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        place: dict[str, str] = {}
        if self.count > 1:
            place = {name: str(number) for name in ("RANK", "GROUP_RANK")} | {"WORLD_SIZE": str(self.count)}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
        command = [sys.executable, "-m", "hydragraph", "train", str(self.config), "--overwrite"]
        with self.log.with_suffix(f".{number}.log" if number else ".log").open("ab" if number else "wb") as out:
            started = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **place},
                start_new_session=True,
            )
        self.sessions.add(started.pid)
        return started

    def _kill(self, supervisor: subprocess.Popen[bytes]) -> None:
        # Ranks outlive a killed supervisor: kill the session until it is empty.
        end = time.monotonic() + _END_S
        while (there := _in_sessions({supervisor.pid})) and time.monotonic() < end:
            for pid in there:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            supervisor.poll()
            time.sleep(0.02)
        supervisor.wait()


def with_disks(config: TrainConfig, disks: Path) -> TrainConfig:
    pieces = config.checkpoint.pieces
    if pieces is None or pieces.local is None:
        return config
    local = str(disks / "$GROUP_RANK")
    return replace(config, checkpoint=replace(config.checkpoint, pieces=replace(pieces, local=local)))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; [] if the process does not exist."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def all_stats() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := stat_of(int(entry.name))):
            yield int(entry.name), fields


def _in_sessions(sessions: set[int]) -> list[int]:
    return [pid for pid, fields in all_stats() if fields[0] not in "ZX" and int(fields[3]) in sessions]
