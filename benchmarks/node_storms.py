"""Odd ways to disturb a run of two machines: sudo python benchmarks/node_storms.py [NAME ...] [--list]

Two machines of two ranks each (network namespaces; needs root and iproute2), a torchrun on each that starts one
supervisor, `deterministic: true`. Each storm is a run of its own, disturbed in its own way. It must continue with the
losses of the undisturbed run, bit for bit, run every step once, and leave no process running.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

from rich.console import Console
from rich.table import Table

from benchmarks.elastic import config_in
from benchmarks.storms import Stormed
from hydragraph.train.chaos import disturbed_run
from hydragraph.train.chaos.fault_injection import send
from hydragraph.train.chaos.machines import stat_of
from hydragraph.train.config import TrainConfig
from hydragraph.train.step_metrics import read_metrics
from tests.nodes import TwoNodes, refusal, torchrun

RANKS = 4
LIMIT_S = 240.0  # for something that must happen
CALM = 4  # steps after the last disturbance
LONG_S = 20.0
_JOB = "HYDRAGRAPH_BENCHMARK_JOB"  # in the environment of what a node runs for this


class TooLateError(Exception):
    """Something that must happen did not."""


@dataclass
class Machines(Stormed):
    """A run on two machines.

    Args:
        nodes: the machines.
        config: of the run.
        started: torchrun of each.
    """

    nodes: TwoNodes | None = None
    config: Path = Path()
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def two(self) -> TwoNodes:
        """The machines."""
        assert self.nodes is not None
        return self.nodes

    def start(self, number: int, *words: str, restarts: int = 0) -> subprocess.Popen[bytes]:
        """Start a machine's torchrun."""
        command = [*torchrun(self.two[number], self.two, 1, restarts=restarts), "-m", "hydragraph", "train"]
        return self._begun(number, [*command, str(self.config), "--max-restarts", str(restarts), *words])

    def start_alone(self, number: int, *words: str) -> subprocess.Popen[bytes]:
        """Start a machine's supervisor without torchrun, where and as that would."""
        where = {"MASTER_ADDR": self.two[0].address, "MASTER_PORT": "29511"}
        command = [sys.executable, "-m", "hydragraph", "train", str(self.config), *words]
        return self._begun(number, command, RANK=str(number), WORLD_SIZE="2", **where)

    def _begun(self, number: int, command: list[str], **place: str) -> subprocess.Popen[bytes]:
        given: dict[str, Any] = {
            _JOB: "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            **place,
        }
        return self.two[number].start(command, self.config.parent / f"{number}.log", **given)

    def again(self, number: int) -> None:
        """Start it once more, when what was there has ended."""
        self.must(lambda: self.started[number].poll() is not None, f"the end of machine {number}")
        self.started[number] = self.start(number)

    def places(self) -> list[tuple[int, int]]:
        """Return the machine and the process, as seen from here, of every rank that lives."""
        outside = {}
        for node in self.two:
            for pid in node.processes():
                with suppress(OSError, StopIteration):
                    status = Path(f"/proc/{pid}/status").read_text().splitlines()
                    ids = next(line for line in status if line.startswith("NSpid:")).split()[1:]
                    state = next(line for line in status if line.startswith("State:")).split()[1]
                    if state not in "ZX":
                        outside[node.number, int(ids[-1])] = pid
        with suppress(OSError, ValueError, KeyError):
            told = json.loads(self.folder.ranks.read_text())
            seen = [(int(each["host"].removeprefix("node")), int(each["pid"])) for each in told]
            return [(node, outside[node, pid]) for node, pid in seen if (node, pid) in outside]
        return []

    def ranks(self) -> list[int]:
        """Return the processes of the ranks there are that have not ended, by rank, as seen from here."""
        return [pid for _, pid in self.places()]

    def everything(self, number: int) -> list[int]:
        """Return all processes of the run on a machine."""
        return [pid for pid, environment in self.two[number].processes().items() if _JOB in environment]

    def supervisor(self, number: int) -> int:
        """Return the process that torchrun has started on a machine; ranks are forked from it, and look like it."""
        alike = set()
        for pid in self.everything(number):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"hydragraph" in words and words[0] != b"nsenter" and b"torch.distributed.run" not in words:
                    alike.add(pid)
        for pid in alike:
            fields = stat_of(pid)
            if fields and int(fields[1]) not in alike:
                return pid
        raise TooLateError(f"machine {number} has no supervisor")

    def must(self, what: Callable[[], object], words: str) -> None:
        """Wait for something that must happen."""
        end = time.monotonic() + LIMIT_S
        while not what():
            if time.monotonic() > end:
                raise TooLateError(f"{words} did not come within {LIMIT_S:g} s, after step {self.step()}")
            time.sleep(0.02)

    def goes_on(self, steps: int = 2) -> None:
        """Wait for steps."""
        first = self.step()
        self.must(lambda: self.step() >= first + steps, f"step {first + steps}")

    def whole(self) -> None:
        """Wait until all ranks have joined, and train."""
        self.must(lambda: len(self.ranks()) == RANKS, f"{RANKS} ranks")
        self.goes_on()


Storm = Callable[[Machines], None]


def first_rank(run: Machines) -> None:
    """Kill rank 0, alone."""
    run.kill(0)
    run.goes_on()
    run.whole()


def first_rank_moves(run: Machines) -> None:
    """Kill rank 0 until it is on the second machine, and there once more."""
    for machine in (0, 0, 1):
        assert run.places()[0][0] == machine
        run.kill(0)
        run.goes_on()
        run.whole()


def node_lost(run: Machines) -> None:
    """Kill all of the second machine, and start it again."""
    _kill_all(run, 1)
    run.goes_on()
    run.again(1)
    run.whole()


def node_lost_as_it_rejoins(run: Machines) -> None:
    """Kill all of the second machine again in the moment in which its ranks have joined."""
    _kill_all(run, 1)
    run.goes_on()
    run.again(1)
    run.must(lambda: len(run.ranks()) > 2, "a rank of the second machine")
    _kill_all(run, 1)
    run.goes_on()
    run.again(1)
    run.whole()


def cut_3_s(run: Machines) -> None:
    """Cut the link for 3 s."""
    _cut(run, 3)
    run.whole()


def cut_20_s(run: Machines) -> None:
    """Cut the link for 20 s."""
    _cut(run, LONG_S)
    run.goes_on()
    run.whole()


def cut_again_and_again(run: Machines) -> None:
    """Cut the link for 8 s, about as long as it is waited for, three times."""
    for _ in range(3):
        _cut(run, 8)
        time.sleep(2)
    run.whole()


def cut_with_a_rank(run: Machines) -> None:
    """Cut the link, and kill a rank of the first machine while the others notice: its other copies are beyond it."""
    run.two.down()
    time.sleep(3)
    run.kill(1)
    time.sleep(LONG_S)
    run.two.up()
    run.whole()


def one_of_each(run: Machines) -> None:
    """Kill a rank on each machine in the same instant."""
    run.kill(1, 3)
    run.goes_on()
    run.whole()


def rank_stopped(run: Machines) -> None:
    """Stop a rank of the second machine for 20 s, then let it continue."""
    _freeze(run, run.ranks()[3:4])
    run.whole()


def node_frozen(run: Machines) -> None:
    """Stop all of the second machine for 20 s, like a host that is migrated, then let it continue."""
    _freeze(run, run.everything(1))
    run.whole()


def writer_frozen(run: Machines) -> None:
    """Place rank 0, which writes, on the second machine; stop that machine for 20 s, then let it continue."""
    for _ in range(2):
        run.kill(0)
        run.goes_on()
        run.whole()
    assert run.places()[0][0] == 1
    _freeze(run, run.everything(1))
    run.whole()


def deputy_stopped(run: Machines) -> None:
    """Stop the supervisor of the second machine for 20 s, but not its ranks."""
    _freeze(run, [run.supervisor(1)])
    run.whole()


def leader_stopped(run: Machines) -> None:
    """Stop the supervisor of the first machine for 20 s, but not its ranks."""
    _freeze(run, [run.supervisor(0)])
    run.whole()


def deputy_killed(run: Machines) -> None:
    """Kill the supervisor of the second machine, and start it again."""
    send(run.supervisor(1), signal.SIGKILL)
    run.goes_on()
    run.again(1)
    run.whole()


def leader_killed(run: Machines) -> None:
    """Kill the supervisor of the first machine, and start another, with --resume: the second has waited for it."""
    ranks = run.ranks()
    send(run.supervisor(0), signal.SIGKILL)
    run.must(lambda: not set(ranks) & set(run.ranks()), "the end of all ranks")
    run.must(lambda: run.started[0].poll() is not None, "the end of its torchrun")
    run.started[0] = run.start_alone(0, "--resume")
    run.whole()


def described(pid: int) -> str:
    """Say what a process is, and what it does."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-60:]
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        threads = [(task / "wchan").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return f"{pid} of {fields[1]} ({fields[0]}; {', '.join(threads)}) {words}"
    return f"{pid} has ended"


def leader_restarted(run: Machines) -> None:
    """Kill the supervisor of the first machine, where torchrun and hydragraph have --max-restarts 1."""
    ranks = run.ranks()
    send(run.supervisor(0), signal.SIGKILL)
    run.must(lambda: not set(ranks) & set(run.ranks()), "the end of all ranks")
    run.whole()


STORMS: tuple[Storm, ...] = (
    first_rank,
    first_rank_moves,
    node_lost,
    node_lost_as_it_rejoins,
    cut_3_s,
    cut_20_s,
    cut_again_and_again,
    cut_with_a_rank,
    one_of_each,
    rank_stopped,
    node_frozen,
    writer_frozen,
    deputy_stopped,
    leader_stopped,
    deputy_killed,
    leader_killed,
    leader_restarted,
)
RESTARTS = {"leader_restarted": 1}  # that torchrun is given


def _kill_all(run: Machines, number: int) -> None:
    for pid in run.everything(number):
        send(pid, signal.SIGKILL)


def _cut(run: Machines, seconds: float) -> None:
    run.two.down()
    time.sleep(seconds)
    run.two.up()


def _freeze(run: Machines, pids: list[int]) -> None:
    for pid in pids:
        send(pid, signal.SIGSTOP)
    time.sleep(LONG_S)
    for _ in range(2):  # nsenter stops itself once it has seen its child stopped
        for pid in pids:
            send(pid, signal.SIGCONT)
        time.sleep(0.5)


def weathered(storm: Storm, folder: Path, steps: int) -> tuple[TrainConfig, list[str], Mapping[int, float]]:
    """Train through a storm; return the config, what was not as promised, and the losses."""
    config = config_in(
        folder, ranks=RANKS, strategies=["2*<tp1,pp2>"], elastic={"copies": 2}, steps=steps, checkpoint_every=20
    )
    config = replace(config, deterministic=True, backend="eager")
    file = folder / "config.yaml"
    config.save(file)
    problems: list[str] = []
    with TwoNodes(folder / "nodes") as two:
        run = Machines(disturbed_run.RunFolder(Path(config.output)), None, nodes=two, config=file)
        run.started = [run.start(number, "--overwrite", restarts=RESTARTS.get(storm.__name__, 0)) for number in (0, 1)]
        run.launcher = run.started[0]
        try:
            run.must(lambda: run.step() >= CALM, "the first steps")
            storm(run)
            run.goes_on(CALM)
            send(run.supervisor(0), signal.SIGTERM)
            codes = [process.wait(LIMIT_S) for process in run.started]
            if any(codes):
                problems.append(f"it ended with {codes}")
        except (TooLateError, AssertionError, subprocess.TimeoutExpired) as error:
            problems.append(f"{type(error).__name__}: {str(error)[-80:]}: " + (folder / "0.log").read_text()[-300:])
            problems += [f"machine {n}: {described(pid)}" for n in (0, 1) for pid in run.everything(n)]
        end = time.monotonic() + 20
        while (left := [*run.everything(0), *run.everything(1)]) and not problems and time.monotonic() < end:
            time.sleep(0.1)
        if left and not problems:
            problems.append(f"processes {left} were left behind")
    found = read_metrics(run.folder.metrics)
    if [m.step for m in found] != list(range(1, len(found) + 1)):
        problems.append(f"{len(found)} steps are written down, the last is {found[-1].step}")
    return config, problems, {m.step: m.loss for m in found}


def main() -> None:
    """Run the storms that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of storms; default: all")
    parser.add_argument("--list", action="store_true", help="name them, and what they do")
    parser.add_argument("--keep", type=Path, help="keep the folders of all runs here")
    chosen = parser.parse_args()
    if chosen.list:
        for storm in STORMS:
            print(f"{storm.__name__:28} {storm.__doc__}")
        return
    if (why := refusal()) is not None:
        sys.exit(why)
    storms = [storm for storm in STORMS if not chosen.names or storm.__name__ in chosen.names]
    table = Table(
        title=f"{len(storms)} storms over two machines, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    for column in ("storm", "came to", "steps", "seconds"):
        table.add_column(column)
    with tempfile.TemporaryDirectory(prefix="hydragraph-storms-") as temporary:
        kept = chosen.keep or Path(temporary)
        found = {}
        for storm in storms:
            (kept / storm.__name__).mkdir(parents=True)
            began = time.monotonic()
            config, problems, losses = weathered(storm, kept / storm.__name__, 4000)
            found[storm.__name__] = (problems, losses, time.monotonic() - began)
            print(f"{storm.__name__}: {'; '.join(problems) or 'goes on'}", file=sys.stderr, flush=True)
        last = max((max(losses, default=1) for _, losses, _ in found.values()), default=1)
        peaceful = replace(config, elastic=replace(config.elastic, copies=1), output=str(kept / "calm"))
        calm = {m.step: m.loss for m in disturbed_run.run(peaceful, until=last).metrics}
    bad = 0
    for name, (problems, losses, seconds) in found.items():
        problems += _others(losses, calm)
        bad += bool(problems)
        came = "NOT AS PROMISED: " + "; ".join(problems) if problems else "every bit of every loss"
        table.add_row(name, came, str(max(losses, default=0)), f"{seconds:.0f}")
    Console(width=140).print(table)
    raise SystemExit(bool(bad))


def _others(losses: Mapping[int, float], calm: Mapping[int, float]) -> Iterator[str]:
    """Yield the steps whose losses differ from those of the undisturbed run."""
    if far := [step for step, loss in losses.items() if calm.get(step) != loss]:
        yield f"losses differ at {len(far)} steps, first at {far[0]}"


if __name__ == "__main__":
    main()
