"""Odd ways to disturb a run, one after another: python benchmarks/storms.py [NAME ...] [--list]

Each is a small run of three ranks with two copies of the state, disturbed in its own way. It must finish with the
losses of the undisturbed run, up to rounding, or stop with a clear message, and leave no process running. `hydragraph
chaos` draws such faults at random; these are the cases that chance rarely meets.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

from rich.console import Console
from rich.table import Table

from benchmarks.elastic import config_in
from hydragraph.train.chaos.fault_injection import Victim, lives, send
from hydragraph.train.chaos.machines import stat_of
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.step_metrics import read_metrics

STEPS = 30
RANKS = 3
LIMIT_S = 300.0  # for one run; a storm that takes longer counts as hanging
SMALL = {"strategies": ["<tp1,pp2> + <tp1,pp1>"], "ranks": RANKS, "steps": STEPS}
STAYS = 1e-3  # of a loss: what other groupings of sums come to in so few steps


class Stormed(Victim):
    """A run that storms disturb."""

    @property
    def server(self) -> int | None:
        """The process that ranks are forked from."""
        children = self.children()
        return int(stat_of(children[-1])[1]) if children else None

    def at(self, step: int) -> None:
        self.until(lambda: self.step() >= step)

    def kill(self, *which: int, signal_: signal.Signals = signal.SIGKILL) -> None:
        pids = self.ranks()
        for rank in which:
            if rank < len(pids):
                send(pids[rank], signal_)


Storm = Callable[[Stormed], None]


def first_step(run: Stormed) -> None:
    """Kill a rank as soon as the run lists its ranks, before any step is done."""
    run.until(run.ranks)
    run.kill(1)


def getting_ready(run: Stormed) -> None:
    """Kill a process before there are ranks: while all get ready."""
    run.until(lambda: len(run.children()) >= RANKS)
    send(run.children()[1], signal.SIGKILL)


def last_step(run: Stormed) -> None:
    """Kill a rank after the last step but one."""
    run.at(STEPS - 1)
    run.kill(2)


def behind_the_end(run: Stormed) -> None:
    """Kill the leader when the last step is done, while the model is written."""
    run.at(STEPS)
    run.kill(0)


def two_at_once(run: Stormed) -> None:
    """Kill two of three in the same instant: a part of the state is lost."""
    run.at(8)
    run.kill(0, 1)


def all_but_the_leader_in_turn(run: Stormed) -> None:
    """Kill the highest rank, and the next 0.1 s later."""
    run.at(8)
    run.kill(2)
    time.sleep(0.1)
    run.kill(1)


def all_at_once(run: Stormed) -> None:
    """Kill all ranks, so that only the checkpoint is left."""
    run.at(8)
    run.kill(0, 1, 2)


def replacement_at_once(run: Stormed) -> None:
    """Kill every replacement as soon as it is born, three times."""
    run.at(5)
    run.kill(1)
    known = set(run.children())
    for _ in range(3):
        run.until(lambda: set(run.children()) - known)
        for pid in set(run.children()) - known:
            known.add(pid)
            send(pid, signal.SIGKILL)


def replacement_as_it_joins(run: Stormed) -> None:
    """Kill another rank at the moment when the replacement joins."""
    run.at(5)
    run.kill(1)
    run.until(lambda: run.happened("join"))
    run.kill(2)


def while_they_meet(run: Stormed) -> None:
    """Kill a rank, and a second 0.3 s later, while the others meet."""
    run.at(8)
    run.kill(0)
    time.sleep(0.3)
    run.kill(1)


def evaluation(run: Stormed) -> None:
    """Kill a rank just after a step that evaluates."""
    run.at(9)
    run.until(lambda: run.step() >= 9)
    time.sleep(0.15)
    run.kill(1)


def checkpoint(run: Stormed) -> None:
    """Kill the leader while a checkpoint is written."""
    run.at(9)
    run.until(run.saving)
    run.kill(0)


def checkpoint_follower(run: Stormed) -> None:
    """Kill another rank while a checkpoint is written."""
    run.at(9)
    run.until(run.saving)
    run.kill(2)


def while_slow(run: Stormed) -> None:
    """Slow a rank, and kill it then."""
    run.at(5)
    pids = run.ranks()
    for _ in range(15):
        send(pids[1], signal.SIGSTOP)
        time.sleep(0.06)
        send(pids[1], signal.SIGCONT)
        time.sleep(0.04)
    send(pids[1], signal.SIGSTOP)
    send(pids[1], signal.SIGKILL)


def another_while_slow(run: Stormed) -> None:
    """Stop one rank, kill another, then let the first continue."""
    run.at(5)
    run.kill(0, signal_=signal.SIGSTOP)
    pids = run.ranks()
    run.kill(1)
    time.sleep(1.0)
    send(pids[0], signal.SIGCONT)


def stopped_20_s(run: Stormed) -> None:
    """Stop a rank for 20 s, longer than others wait for it, then let it continue."""
    run.at(8)
    pids = run.ranks()
    send(pids[1], signal.SIGSTOP)
    time.sleep(20)
    send(pids[1], signal.SIGCONT)


def stopped_3_s(run: Stormed) -> None:
    """Stop a rank for 3 s: slow is not dead."""
    run.at(8)
    pids = run.ranks()
    send(pids[2], signal.SIGSTOP)
    time.sleep(3)
    send(pids[2], signal.SIGCONT)


def all_stopped(run: Stormed) -> None:
    """Stop all ranks for 8 s: the whole machine slept."""
    run.at(8)
    run.kill(0, 1, 2, signal_=signal.SIGSTOP)
    pids = run.ranks()
    time.sleep(8)
    for pid in pids:
        send(pid, signal.SIGCONT)


def sigterm_storm(run: Stormed) -> None:
    """Ask one rank ten times to leave."""
    run.at(8)
    for _ in range(10):
        run.kill(1, signal_=signal.SIGTERM)
        time.sleep(0.02)


def sigterm_to_all(run: Stormed) -> None:
    """Ask all ranks to leave at once: the whole machine is taken away."""
    run.at(8)
    run.kill(0, 1, 2, signal_=signal.SIGTERM)


def sigterm_then_kill(run: Stormed) -> None:
    """Ask a rank to leave, and kill it while it hands over."""
    run.at(8)
    run.kill(1, signal_=signal.SIGTERM)
    time.sleep(0.2)
    run.kill(1)


def sigterm_one_kill_another(run: Stormed) -> None:
    """Ask one rank to leave while another is killed."""
    run.at(8)
    run.kill(0, signal_=signal.SIGTERM)
    run.kill(2)


def back_again_and_again(run: Stormed) -> None:
    """Ask a rank to leave and tell twenty times that its device is back."""
    run.at(6)
    run.kill(2, signal_=signal.SIGTERM)
    for _ in range(20):
        send(run.supervisor, signal.SIGUSR1)
        time.sleep(0.05)


def stop_while_they_meet(run: Stormed) -> None:
    """Kill a rank, and stop the whole run while the others meet."""
    run.at(8)
    run.kill(1)
    time.sleep(0.3)
    send(run.supervisor, signal.SIGTERM)


def hang_up(run: Stormed) -> None:
    """Send signals to a rank that should not disturb it (SIGWINCH, SIGURG, SIGCHLD), and one that ends it (SIGSEGV)."""
    run.at(8)
    for which in (signal.SIGWINCH, signal.SIGURG, signal.SIGCHLD):
        run.kill(1, signal_=which)
    time.sleep(0.3)
    run.kill(1, signal_=signal.SIGSEGV)


def launcher_killed(run: Stormed) -> None:
    """Kill the launcher: its ranks must end. Under torchrun that is the supervisor."""
    run.at(8)
    run.ranks()
    run.children()
    send(run.supervisor, signal.SIGKILL)


def starter_killed(run: Stormed) -> None:
    """Kill what has started the run, such as torchrun: everything must end."""
    run.at(8)
    run.ranks()
    run.pids.update([run.supervisor, *run.children()])
    send(run.launcher.pid, signal.SIGKILL)


def server_killed(run: Stormed) -> None:
    """Kill the process that ranks are forked from: they end with it, and others come from another."""
    run.at(8)
    server = run.server
    assert server is not None
    send(server, signal.SIGKILL)


def server_stopped(run: Stormed) -> None:
    """Stop the process that ranks are forked from, kill a rank, and let the process continue 20 s later."""
    run.at(8)
    server = run.server
    assert server is not None
    send(server, signal.SIGSTOP)
    run.kill(1)
    time.sleep(20)
    send(server, signal.SIGCONT)


def server_stopped_for_good(run: Stormed) -> None:
    """Stop the process that ranks are forked from for good, and kill a rank: all end, and others come from another."""
    run.at(8)
    server = run.server
    assert server is not None
    send(server, signal.SIGSTOP)
    run.kill(1)


def two_stopped(run: Stormed) -> None:
    """Stop two of three ranks and never resume them: a part of the state is lost with them."""
    run.at(8)
    run.kill(0, 2, signal_=signal.SIGSTOP)


def newcomer_stopped(run: Stormed) -> None:
    """Kill a rank, and stop the process that replaces it without ever resuming it."""
    run.at(5)
    known = set(run.children())
    run.kill(1)
    run.until(lambda: set(run.children()) - known)
    time.sleep(0.5)
    for pid in set(run.children()) - known:
        send(pid, signal.SIGSTOP)


def launcher_stopped(run: Stormed) -> None:
    """Stop the launcher for 20 s, and kill a rank meanwhile: the ranks wait for it and then continue."""
    run.at(8)
    launcher = run.supervisor
    send(launcher, signal.SIGSTOP)
    time.sleep(5)
    run.kill(1)
    time.sleep(15)
    send(launcher, signal.SIGCONT)


# All other storms must continue; these must end with this exit code and these words on the screen.
ENDS: Mapping[str, tuple[int, str]] = {
    "sigterm_to_all": (0, "stopped after step"),
    "stop_while_they_meet": (0, "stopped after step"),
    "launcher_killed": (-9, ""),
    "starter_killed": (-9, ""),
}
UNDER_TORCHRUN = {**ENDS, "launcher_killed": (1, "")}
STORMS: tuple[Storm, ...] = (
    first_step,
    getting_ready,
    last_step,
    behind_the_end,
    two_at_once,
    all_but_the_leader_in_turn,
    all_at_once,
    replacement_at_once,
    replacement_as_it_joins,
    while_they_meet,
    evaluation,
    checkpoint,
    checkpoint_follower,
    while_slow,
    another_while_slow,
    stopped_20_s,
    stopped_3_s,
    all_stopped,
    sigterm_storm,
    sigterm_to_all,
    sigterm_then_kill,
    sigterm_one_kill_another,
    back_again_and_again,
    stop_while_they_meet,
    hang_up,
    launcher_killed,
    starter_killed,
    launcher_stopped,
    server_killed,
    server_stopped,
    server_stopped_for_good,
    two_stopped,
    newcomer_stopped,
)


def free_port() -> str:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return str(listening.getsockname()[1])


def losses(folder: RunFolder) -> dict[int, float]:
    """Return the loss of each step."""
    return {m.step: m.loss for m in read_metrics(folder.metrics)}


def ran(folder: Path, storm: Storm | None, under: str = "") -> tuple[Stormed, int | None, str]:
    """Train, disturbed or not; return the run, its exit code (None: it hung) and what it said.

    Args:
        folder: of the run and its config.
        storm: the disturbance; None leaves the run undisturbed.
        under: "torchrun": that starts it, with one process on this machine, which starts the ranks.
    """
    settings: dict[str, Any] = {**SMALL, "evaluate_every": 10, "checkpoint_every": 10, "elastic": {"copies": 2}}
    config = config_in(folder, output=str(folder / "run"), **settings)
    file = folder / "config.yaml"
    config.save(file)
    said = folder / "said.log"
    with said.open("wb") as out:
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "1",
            "--nproc-per-node",
            "1",
            "--master-port",
            free_port(),
        ]
        command = [sys.executable, *(torchrun if under else []), "-m", "hydragraph", "train", str(file), "--overwrite"]
        launcher = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    run = Stormed(RunFolder(folder / "run"), launcher, depth=2 if under else 1)
    if storm is not None:
        threading.Thread(target=storm, args=(run,), daemon=True).start()
    end = time.monotonic() + LIMIT_S
    while run.alive and time.monotonic() < end:
        run.ranks()
        time.sleep(0.1)
    code = launcher.poll()
    launcher.kill()
    launcher.wait()
    return run, code, said.read_text(errors="replace")


def wrong(name: str, run: Victim, code: int | None, said: str, calm: Mapping[int, float]) -> Iterator[str]:
    """Yield what is not as it should be."""
    wanted, words = (UNDER_TORCHRUN if run.depth > 1 else ENDS).get(name, (0, ""))
    if code is None:
        yield f"it hung after step {run.step()}"
        return
    if code != wanted:
        yield f"it ended with {code}: {' '.join(said.split())[-300:]}"
    elif words not in " ".join(said.split()):
        yield f"it did not say {words!r}: {' '.join(said.split())[-300:]}"
    mine = losses(run.folder)
    if name not in ENDS and mine.keys() != calm.keys():
        yield f"it has steps {min(mine, default=0)} to {max(mine, default=0)}"
    far = {step: loss for step, loss in mine.items() if abs(loss - calm[step]) > STAYS * abs(calm[step])}
    if far:
        yield f"losses differ at {len(far)} steps, first at {min(far)}"
    end = time.monotonic() + 20
    while (left := [pid for pid in run.pids if lives(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    if left:
        yield f"processes {left} were left behind"


def main() -> None:
    """Run the storms that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of storms; default: all")
    parser.add_argument("--under", choices=["torchrun"], default="", help="what starts the run; default: nothing else")
    parser.add_argument("--list", action="store_true", help="name them, and what they do")
    chosen = parser.parse_args()
    if chosen.list:
        for storm in STORMS:
            print(f"{storm.__name__:28} {storm.__doc__}")
        return
    storms = [storm for storm in STORMS if not chosen.names or storm.__name__ in chosen.names]
    table = Table(title=f"{len(storms)} storms, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for column in ("storm", "came to", "seconds"):
        table.add_column(column)
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        calm = losses(ran(Path(temporary) / "calm", None)[0].folder)
        for storm in storms:
            began = time.monotonic()
            run, code, said = ran(Path(temporary) / storm.__name__, storm, chosen.under)
            found = list(wrong(storm.__name__, run, code, said, calm))
            bad += bool(found)
            ended = "goes on" if storm.__name__ not in ENDS else "ends with a sentence"
            came = "NOT AS PROMISED: " + "; ".join(found) if found else ended
            table.add_row(storm.__name__, came, f"{time.monotonic() - began:.0f}")
            print(f"{storm.__name__}: {came}", file=sys.stderr, flush=True)
    Console(width=140).print(table)
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
