"""Real runs of `hydragraph train`, struck by faults at random instants: python -m tests.chaos --count 100 --seed 7

A case is a function of its seed: a tiny run on two or three ranks, a fault (`tests/faults.py`), the moment and the
rank that it strikes. Afterwards every process must have ended in time and named the true cause, no process or file may
remain, and the resumed run must have the curve and the weights of an undisturbed run, bit for bit. The program prints a
table by kind of fault, and the seed of each failed case: `--count 1 --seed n` runs it again.

Runs share one fork server with everything imported, but for those whose launcher is killed. All of it happens in a
mount namespace of its own, where that is permitted, so that /dev/shm and the disks that fill up are nobody else's.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hydragraph import cli
from hydragraph.cluster import launch
from hydragraph.cluster.processes import fork_server
from hydragraph.commands import train
from tests import struck
from tests.commands.tiny import computed
from tests.faults import END_S, FAULTS, GRACE_S, Fault, Moment, Outcome, Target, patience, small_disk
from tests.train.plain import settings

STEPS = 24
STRATEGIES = {2: ["<[0]x1,[1]x1>", "<[0,1]x2>"], 3: ["<[0,1]x1,[2]x1>", "<[0]x2> + <[1]x1,[2]x1>"]}
LIMIT_S = 120.0  # for an undisturbed run; after that it counts as hung
ALONE = "HYDRAGRAPH_TEST_ALONE"  # set where this runs in a mount namespace of its own
TIMES = {"checkpoint_every": 6, "evaluate_every": 8}
# How often a moment comes in a run, and about how many seconds it lasts.
OCCURRENCES = {
    Moment.STARTING: (1, 1.0),
    Moment.COMPILING: (1, 2.0),
    Moment.STEPPING: (STEPS, 0.05),
    Moment.SAVING: (STEPS // 6, 0.05),
    Moment.EVALUATING: (STEPS // 8, 0.05),
    Moment.CLOSING: (1, 0.2),
}


@dataclass(frozen=True)
class Case:
    """A run and its fault.

    Attributes:
        seed: what it is a function of.
        fault: what happens.
        order: when, and to which rank; its notice is a file's name.
        ranks: of the run.
        asynchronous: whether it saves in the background.
        restarts: how many times it may begin again by itself.
    """

    seed: int
    fault: Fault
    order: struck.Order
    ranks: int
    asynchronous: bool
    restarts: int

    def __str__(self) -> str:
        how = f"{self.ranks} ranks{', saving beside' * self.asynchronous}{', restarted' * bool(self.restarts)}"
        when = f"{self.order.moment} {self.order.occurrence} + {self.order.delay_s:.3f} s"
        return f"seed {self.seed}: {self.fault.name}, {when}, rank {self.order.rank} of {how}"


def draw_case(seed: int, mounts: bool = True) -> Case:
    """Draw a case; consecutive seeds take the kinds of faults in turn.

    Args:
        seed: what it depends on.
        mounts: whether faults that need the right to mount are among them.
    """
    draw = random.Random(seed)
    kinds = [fault for fault in FAULTS if mounts or not fault.mounts]
    fault = kinds[seed % len(kinds)]
    ranks, moment = draw.choice([2, 2, 3]), draw.choice(fault.moments)
    most, seconds = OCCURRENCES[moment]
    if fault.outcome is Outcome.FAILS and not fault.heals:
        most = max(1, most - 1)  # so that something is left to be written
    act = fault.act
    order = struck.Order(
        draw.randrange(ranks), moment.value, draw.randint(1, most), draw.uniform(0, seconds), act, "notice"
    )
    return Case(seed, fault, order, ranks, draw.random() < 0.5, int(fault.heals and draw.random() < 0.25))


@dataclass(frozen=True)
class Result:
    """Result of a case.

    Attributes:
        case: which.
        struck: whether the fault came before the run's end.
        seconds: from the fault until the run ended, or said that it failed; None if the run continued, or ended before
            the fault.
        resumed: whether curve and weights were those of an undisturbed run in the end.
        problems: what was not as promised.
    """

    case: Case
    struck: bool
    seconds: float | None
    resumed: bool
    problems: tuple[str, ...]


@dataclass
class Run:
    """One call of `hydragraph train`, and how it ended."""

    code: int
    said: str
    struck: bool = False
    seconds: float = 0.0  # from the fault until it ended, or said that it failed
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Made:
    """What training came to: the metrics that are computed, and a hash of the final model."""

    curve: tuple[Any, ...]
    weights: str

    @staticmethod
    def of(folder: Path) -> Made:
        """Read it from a run's folder."""
        metrics = folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
        # A full disk cuts the line that was being written; a resumed run writes it again.
        lines = [line for line in lines if line.endswith("\n")]
        files = sorted((folder / "model").glob("*.safetensors"))
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        return Made(tuple(json.dumps(computed(json.loads(line)), sort_keys=True) for line in lines), digest)

    def differs_from(self, other: Made) -> str:
        """Say how this is not the same; "" where it is."""
        if self.curve != other.curve:
            first = next((i for i, (a, b) in enumerate(zip(self.curve, other.curve, strict=False)) if a != b), None)
            where = f"step {first + 1}" if first is not None else f"{len(self.curve)} steps for {len(other.curve)}"
            return f"another curve ({where})"
        return "" if self.weights == other.weights else "other weights"


class Laboratory:
    """Runs cases in a folder.

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what loses its parent becomes our child, to be seen
        shared = ["transformers.models.llama.modeling_llama", "hydragraph.train.loop", "hydragraph.train.progress_line"]
        multiprocessing.get_context("forkserver").set_forkserver_preload([*launch.PRELOAD, *shared, "tests.struck"])
        terminal = os.dup(2)
        with (folder / "ranks").open("ab") as file:
            os.dup2(file.fileno(), 2)  # where the ranks of all runs say something
            fork_server.ensure_running()
        os.dup2(terminal, 2)
        os.close(terminal)
        self._ours = {os.getpid(), *_children(os.getpid())}  # the fork server and multiprocessing's tracker
        self._wanted: dict[int, Made] = {}

    @cached_property
    def can_mount(self) -> bool:
        """Say whether disks can be made here."""
        return ALONE in os.environ

    def undisturbed(self, ranks: int) -> Made:
        """Return the curve and weights of an undisturbed run."""
        if ranks not in self._wanted:
            folder = self._folder / f"undisturbed-{ranks}"
            config = self._configured(folder, ranks, asynchronous=False)
            run = self._run(["train", str(config)], folder)
            assert run.code == 0, run.said
            assert not run.left, run.left
            self._wanted[ranks] = Made.of(_output(folder))
            assert len(self._wanted[ranks].curve) == STEPS
        return self._wanted[ranks]

    def examine(self, case: Case) -> Result:
        """Run a case, and then what is left to do of its run."""
        wanted, folder = self.undisturbed(case.ranks), self._folder / f"case-{case.seed}"
        config, arguments = self._configured(folder, case.ranks, case.asynchronous), ["--max-restarts", "1"]
        with small_disk(folder / "disk") if case.fault.mounts else nullcontext():
            struck_run = self._run(["train", str(config), *(arguments * case.restarts)], folder, case)
            problems = [*struck_run.left, *_judged(case, struck_run)]
            difference = Made.of(_output(folder)).differs_from(wanted)
            if difference and case.fault.outcome is Outcome.GOES_ON:
                problems.append(f"it continued with another result: {difference}")
            if difference:
                again = self._run(["train", str(config), *_continuing(_output(folder))], folder)
                problems += [f"resumed: {each}" for each in again.left]
                if again.code:
                    problems.append(f"it could not be resumed: {again.said[-300:]}")
                difference = Made.of(_output(folder)).differs_from(wanted)
                if difference and not again.code:
                    problems.append(f"resumed to {difference}")
            leftover = [p.name for p in _output(folder).glob("checkpoints/*") if not re.fullmatch(r"step-\d+", p.name)]
            if leftover:
                problems.append(f"left in checkpoints: {', '.join(leftover)}")
        if not problems:
            shutil.rmtree(folder)
        seconds = None if case.fault.outcome is Outcome.GOES_ON or case.restarts else struck_run.seconds
        return Result(case, struck_run.struck, seconds if struck_run.struck else None, not difference, tuple(problems))

    def _configured(self, folder: Path, ranks: int, asynchronous: bool) -> Path:
        """Write the config of a tiny run; all read one corpus and keep one cache of it."""
        folder.mkdir()
        config = settings(self._folder)
        config["model"]["config"]["hidden_size"] = 64
        config["data"]["cache"] = str(self._folder / "cache")
        config |= {"ranks": ranks, "strategies": STRATEGIES[ranks], "steps": STEPS, "check": "off", **TIMES}
        config |= {"checkpoint": {"asynchronous": asynchronous}, "output": str(_output(folder))}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        return folder / "config.yaml"

    def _run(self, arguments: Sequence[str], folder: Path, case: Case | None = None) -> Run:
        """Call hydragraph in a process of its own, have it struck, and wait for the last of its processes."""
        notice, temporary, said = folder / "notice", folder / "tmp", folder / "said"
        temporary.mkdir(exist_ok=True)
        said.unlink(missing_ok=True)
        environment = {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        if case is not None:
            environment[struck.ORDER] = replace(case.order, notice=str(notice)).text()
        shared_memory = set(os.listdir("/dev/shm"))
        launcher = _forked(arguments, environment, said, case is not None and case.fault.kills_launcher)
        began, struck_at, told_s, undo, code = time.monotonic(), None, 0.0, None, None
        limit = (GRACE_S if case is not None and case.fault.outcome is Outcome.STOPS else END_S) * patience()
        allowed = float("inf") if case is None or case.fault.outcome is Outcome.GOES_ON or case.restarts else limit
        late: list[str] = []
        tells = case is not None and case.fault.outcome is Outcome.FAILS
        while code is None or self._running():
            ended, status = _reaped(launcher)
            code = status if ended else code
            if case is not None and struck_at is None and notice.exists():
                struck_at = time.monotonic()
                if case.fault.strike is not None:
                    target = Target(launcher, int(notice.read_text()), self._ranks(launcher), _output(folder))
                    undo = case.fault.strike(target)
            now = time.monotonic()
            if (
                struck_at is not None
                and not told_s
                and (code is not None or (tells and b"hydragraph: " in said.read_bytes()))
            ):
                told_s = now - struck_at
            if now - began > LIMIT_S * patience() or (struck_at is not None and now - struck_at > 2 * allowed):
                late = [f"still running: {_described(pid)}" for pid in sorted(self._running())]
                self._end_all()
                code = code if code is not None else -signal.SIGKILL
                break
            time.sleep(0.003 if struck_at is None else 0.02)
        if undo is not None:
            undo()
        if told_s > allowed and not late:
            late = [f"it took {told_s:.1f} s to end or say so"]
        left = [f"left in /dev/shm: {name}" for name in set(os.listdir("/dev/shm")) - shared_memory]
        left += [f"left in the directory for temporary files: {path.name}" for path in temporary.iterdir()]
        shutil.rmtree(temporary)
        return Run(code, said.read_text(errors="replace"), struck_at is not None, told_s, [*late, *left])

    def _running(self) -> set[int]:
        """Return the processes of a run: all that descend from this one, but for those that stay."""
        found: set[int] = set()
        parents = _parents()
        for pid in parents:
            line = [pid]
            while line[-1] in parents:
                line.append(parents[line[-1]])
            if os.getpid() in line and pid not in self._ours:
                found.add(pid)
        return found

    def _ranks(self, launcher: int) -> list[int]:
        """Return the ranks' processes: children of a fork server, the shared one or the launcher's."""
        servers = [*self._ours - {os.getpid()}, *_children(launcher)]
        return [rank for server in servers for rank in _children(server)]

    def _end_all(self) -> None:
        while left := self._running():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _reaped(0)
            time.sleep(0.02)


def _output(folder: Path) -> Path:
    return folder / "disk" / "run"


def _judged(case: Case, run: Run) -> list[str]:
    """Say what a run did not do that was promised of it."""
    fault, last = case.fault, run.said.strip().splitlines()[-1:]
    problems = []
    if "Traceback (most recent call last)" in run.said:
        problems.append(f"it printed a traceback: {last}")
    if not run.struck:
        return [*problems, *([] if run.code == 0 else [f"it was not struck, and ended with {run.code}: {last}"])]
    if fault.outcome is Outcome.GOES_ON or case.restarts:
        if run.code != 0:
            problems.append(f"it did not continue: exit code {run.code}: {last}")
    elif fault.outcome is Outcome.FAILS:
        if run.code == 0:
            problems.append("it ended with exit code 0")
        elif not re.search(fault.cause.format(rank=case.order.rank), run.said):
            problems.append(f"no true cause: {last}")
    elif fault.outcome is Outcome.STOPS and run.code not in (0, 130, 143):
        problems.append(f"it did not stop by itself: exit code {run.code}: {last}")
    return problems


def _continuing(output: Path) -> list[str]:
    """Return how the run of a folder is called again: resumed where it can be, else from the start."""
    whole = any((path / "complete.json").is_file() for path in output.glob("checkpoints/step-*"))
    return ["--resume"] if whole else ["--overwrite"]


def _forked(arguments: Sequence[str], environment: Mapping[str, str], said: Path, alone: bool) -> int:
    """Call hydragraph's command line in a child that has imported it already; return its process id.

    Args:
        arguments: of the command line.
        environment: beside this process's.
        said: the file for what it prints.
        alone: it starts a fork server of its own, and does not use one that outlives it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
            opened = os.open("/dev/null" if descriptor == 0 else said, mode | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(opened, descriptor)
        os.environ.update(environment)
        tempfile.tempdir = None
        # As multiprocessing does in its own children: what the parent has registered is not ours to end.
        util._finalizer_registry.clear()
        atexit._clear()
        atexit.register(util._exit_function)
        util._tempdir = None
        multiprocessing.current_process()._config.pop("tempdir", None)
        server: Any = forkserver._forkserver
        tracker: Any = resource_tracker._resource_tracker
        tracker._fd = tracker._pid = None  # one of its own, which clears up after it
        if alone:
            os.close(server._forkserver_alive_fd)
            server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None
        else:
            # It is our parent's, so that we cannot ask how it is.
            server.ensure_running = forkserver.ensure_running = lambda: None
        train.train_rank = struck.train_rank  # pyrefly: ignore[bad-assignment]
        sys.argv = ["hydragraph", *arguments]
        try:
            cli.app(arguments)
        except SystemExit as ending:
            code = int(ending.code or 0)
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reaped(pid: int) -> tuple[bool, int]:
    """Take leave of all children that have ended, and say whether a certain one has, and how."""
    found = (False, 0)
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if ended == 0:
            return found
        if ended == pid:
            found = True, os.waitstatus_to_exitcode(status)


def _parents() -> dict[int, int]:
    """Return every process's parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _children(pid: int) -> list[int]:
    return [child for child, parent in _parents().items() if parent == pid]


def _described(pid: int) -> str:
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        return f"{name} ({pid}, {rest.split()[0]})"
    except OSError:
        return str(pid)


def shown(results: Sequence[Result]) -> Table:
    """Return the table by kind of fault."""
    table = Table(title="faults at random instants", title_justify="left")
    for heading in ("fault", "must", "runs", "struck", "while", "worst s to end", "resumed equal", "as promised"):
        table.add_column(heading, justify="left" if heading in ("fault", "must", "while") else "right")
    by_kind: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_kind[result.case.fault.name].append(result)
    for fault in FAULTS:
        if found := by_kind[fault.name]:
            seconds = [result.seconds for result in found if result.seconds is not None]
            moments = sorted({result.case.order.moment for result in found})
            table.add_row(
                fault.name,
                fault.outcome.value,
                str(len(found)),
                str(sum(result.struck for result in found)),
                ", ".join(moments),
                f"{max(seconds):.1f}" if seconds else "-",
                f"{sum(result.resumed for result in found)}/{len(found)}",
                f"{sum(not result.problems for result in found)}/{len(found)}",
            )
    return table


def _alone() -> None:
    """Go on in a mount namespace of our own, where that is permitted."""
    if ALONE in os.environ or shutil.which("unshare") is None:
        return
    inside = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    isolated = ["unshare", "--mount", "sh", "-c", inside, "sh"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        print("faults of disks are left out: mounting is not permitted here", file=sys.stderr)
        return
    command = [sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
    os.execvpe("unshare", [*isolated, *command], {**os.environ, ALONE: "1"})


def main() -> None:
    """Run cases, print the table and what was not as promised."""
    _alone()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--fault", help="of this kind only, such as 'killed'")
    parser.add_argument("--keep", type=Path, help="a directory where the folders of failed cases stay")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hydragraph-chaos-") as temporary:
        folder = Path(temporary) if chosen.keep is None else chosen.keep
        folder.mkdir(parents=True, exist_ok=True)
        laboratory = Laboratory(folder)
        cases: list[Case] = []
        seed = chosen.seed
        while len(cases) < chosen.count:
            case = draw_case(seed, laboratory.can_mount)
            cases += [case] if chosen.fault in (None, case.fault.name) else []
            seed += 1
        results, began = [], time.monotonic()
        for case in track(cases, "cases", console=Console(stderr=True)):
            if time.monotonic() - began > 60 * chosen.minutes:
                break
            results.append(laboratory.examine(case))
            for problem in results[-1].problems:
                print(f"{case}: {problem}", flush=True)
        laboratory._end_all()
    Console(width=140).print(shown(results))
    wrong = [result for result in results if result.problems]
    print(f"{len(wrong)} of {len(results)} cases were not as promised")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
