"""Everything at once, for real: two kinds of devices, long-tailed lengths, little memory, a slow link, and bad luck.

    sudo python benchmarks/everything.py                      # all sides, once; 25 minutes on four cores, 45 on two
    sudo python benchmarks/everything.py --sides hydragraph --quick

Two machines of two ranks each (network namespaces, joined by a link of 400 Mbit/s; needs root, iproute2 and tc) train a
small Llama on texts of very different lengths. The ranks of the second machine are of a slower kind: a process of its
own stops and continues them so that they compute half as much. The memory of a rank is limited: it is too small for the
longest sequence unless it is recomputed or divided. Then, at fixed steps:

    a rank of the fast kind takes 2.57 times as long as it did    (a straggler)
    it is killed, and its device stays away                       (a kill)
    the device comes back                                         (its return)

Three sides train the same mini-batches from the same weights, one after the other, `--rounds` times in turn:

- hydragraph: one config, `strategies: auto`, chosen for every step, `elastic: {copies: 2, replan: true}`, alone.
- static: the best plan that hydragraph finds for the healthy devices, one strategy for all steps, which knows the two
  kinds; where a rank is lost, restarted from the newest checkpoint under the best plan of three devices, and once the
  device is back, saved and restarted under the first one.
- FSDP2 (benchmarks/sharded.py): sequences divided by the speeds of the two kinds, restarted in the same way.

The two that restart are restarted by this program at the very moment of the kill, sooner than any launcher would. All
three keep checkpoints every ten steps; the kill comes while one is written, so that restarts lose ten steps, the most.
A side's total is the time from the end of its first step to the end of its last; its goodput is the tokens that count
by that time, as a part of what the same side does while all is well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

from rich.console import Console
from rich.table import Table

import hydragraph as hg
from hydragraph.cost.block_pieces import BlockPiece
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.record import from_record
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import mini_batches, open_tokens, prepare
from tests.nodes import Node, TwoNodes, shaping_refusal, torchrun

ROOT = Path(__file__).parents[1]
PER_NODE = 2
RANKS = 2 * PER_NODE
LINK_BITS_PER_S = 400e6
# Share of a core per rank; other processes use the rest. With fewer cores than ranks, all ranks slow down equally.
SHARE = {name: share * min(1.0, (os.cpu_count() or 1) / RANKS) for name, share in {"fast": 0.8, "slow": 0.4}.items()}
KINDS = ("fast", "slow")  # of the ranks of each machine
PERIOD_S = 0.02  # in which a rank computes for its share: short beside what it computes between two messages
STRAGGLER = 1  # the rank, of the fast kind, that becomes slow and is lost
RATE = 2.57
MEMORY_BYTES = {"fast": 130e6, "slow": 100e6}
LONGEST = 1024
CHECKPOINT_EVERY = 10
TAIL = 1.4  # of the Pareto distribution of lengths
SHORTEST = 48
AGREE = 1e-3  # of a loss, over all steps
HANGS_S = 180.0  # without a step
BEGINS_S = 2.0  # for processes to be seen
_JOB = "HYDRAGRAPH_BENCHMARK_JOB"  # in the environment of what a node runs for this


@dataclass(frozen=True)
class Story:
    """How many steps each part has."""

    healthy: int = 20
    straggler: int = 30
    lost: int = 30
    back: int = 20

    @property
    def parts(self) -> dict[str, range]:
        """The steps of each part; the first step, which all sides begin with, belongs to none."""
        found, at = {}, 2
        for name, steps in asdict(self).items():
            end = at + steps - (name == "healthy")
            found[name] = range(at, end)
            at = end
        return found

    @property
    def steps(self) -> int:
        """All of them."""
        return self.back_at + self.back

    @property
    def slow_at(self) -> int:
        """Last step before a rank becomes slow."""
        return self.healthy

    @property
    def kill_at(self) -> int:
        """Last step before that rank is killed."""
        return self.slow_at + self.straggler

    @property
    def back_at(self) -> int:
        """Last step before its device returns."""
        return self.kill_at + self.lost


@dataclass(frozen=True)
class Done:
    """A step that counts: its loss, its targets, and when it was written down."""

    loss: float
    tokens: int
    at: float


# Inputs that all sides share.


def write_texts(folder: Path, documents: int = 3000) -> Path:
    """Write texts of very different lengths, pieces of the standard library's sources."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in sources[:120])
    draw = random.Random(0)
    file = folder / "texts.jsonl"
    with file.open("w", encoding="utf-8") as written:
        for _ in range(documents):
            tokens = min(LONGEST + 100, int(SHORTEST * draw.paretovariate(TAIL)))
            begin = draw.randrange(len(whole) - 4 * LONGEST)
            written.write(json.dumps({"text": whole[begin : begin + 3 * tokens]}) + "\n")
    return file


def config_in(folder: Path, story: Story, **changed: Any) -> TrainConfig:
    """Return the config that all sides have in common."""
    record = {
        "model": {
            "architecture": "LlamaForCausalLM",
            "config": {
                "hidden_size": 192,
                "intermediate_size": 528,
                "num_hidden_layers": 8,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "max_position_embeddings": LONGEST,
            },
        },
        "data": {
            "paths": [str(folder / "texts.jsonl")],
            "vocab_size": 2048,
            "tokens_per_step": 4096,
            "max_length": LONGEST,
            "heldout": 0,
            "cache": str(folder / "cache"),
        },
        "strategies": [f"{RANKS}*<tp1,pp1>"],
        "schedule": {"decay": "constant", "warmup": 5},
        "steps": story.steps,
        "ranks": RANKS,
        "device": "cpu",
        "check": "off",
        "checkpoint_every": CHECKPOINT_EVERY,
        "output": str(folder / "run"),
        **changed,
    }
    return from_record(TrainConfig, record)


def slower(profile: Profile, rate: float, name: str) -> Profile:
    """Return what was measured, as a kind of device would have measured it that takes `rate` times as long."""

    def times(piece: BlockPiece) -> BlockPiece:
        return replace(piece, forward=piece.forward.times(rate), backward=piece.backward.times(rate))

    pieces = {kind: {block: times(piece) for block, piece in each.items()} for kind, each in profile.pieces.items()}
    schemes = {scheme: constants.times(rate) for scheme, constants in profile.schemes.items()}
    update = None if profile.update is None else (rate * profile.update[0], rate * profile.update[1])
    norm_s = rate * profile.norm_s
    return replace(profile, name=name, type=name, pieces=pieces, schemes=schemes, update=update, norm_s=norm_s)


def profile_in(folder: Path, config: TrainConfig) -> Path:
    """Measure one kind of device as a user would, and write the profile of both.

    Without tensor parallelism: ranks that are stopped in turn would wait for one another within every layer, as devices
    that are merely slower do not.
    """
    file = folder / "config.yaml"
    config.save(file)
    made = folder / "measured.json"
    command = [sys.executable, "-m", "hydragraph", "profile", str(file), "--schemes", "tp1pp1", "--recompute"]
    subprocess.run([*command, "--out", str(made)], check=True, stdout=subprocess.DEVNULL, env=_environment(), cwd=ROOT)
    measured = Profile.load(made)
    both = folder / "profile.json"
    Profile.merge([slower(measured, 1 / SHARE[name], name) for name in SHARE]).save(both)
    return both


def cluster_in(folder: Path) -> Path:
    """Write the cluster as it is when all is well."""
    inner = "inner: {bytes_per_s: 2.0e9, latency_s: 1.0e-4}"
    outer = f"outer: {{bytes_per_s: {LINK_BITS_PER_S / 8:.1e}, latency_s: 3.0e-4}}"
    types = [
        f"  {name}: {{flops_per_s: {SHARE[name] * 5e10:.1e}, memory_bytes: {MEMORY_BYTES[name]:.3e}, "
        "memory_bytes_per_s: 1.0e10}"
        for name in SHARE
    ]
    nodes = [f"  - {{type: {name}, devices: {PER_NODE}, {inner}, {outer}}}" for name in KINDS]
    file = folder / "cluster.yaml"
    file.write_text("\n".join(["types:", *types, "nodes:", *nodes]) + "\n")
    return file


def best_static(config: TrainConfig, profile: Path, cluster: Cluster) -> str:
    """Return the strategy that `hg.plan` finds for a cluster and the lengths of the run's own mini-batches."""
    batches = mini_batches(config, open_tokens(config, prepare(config)))
    lengths = [list(batches.skip()) for _ in range(20)]
    plan = hg.plan(Costs(Profile.load(profile), cluster), hg.Workload(lengths=lengths))
    return str(plan.strategy).partition("@")[0]


# How devices are slowed down.


class Brakes:
    """Has processes compute for shares of a core (`benchmarks/slowed.py --brake`).

    Args:
        folder: where the brake process reads which process gets which share.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._shares: dict[int, tuple[float, Path]] = {}
        self._count = 0
        script = Path(__file__).with_name("slowed.py")
        command = [sys.executable, str(script), "--brake", str(folder), "--period", str(PERIOD_S)]
        self._process = subprocess.Popen(command, env=_environment())

    def set(self, shares: Mapping[int, float]) -> None:
        """Brake these processes, by their ids, and no others."""
        for pid, (share, file) in list(self._shares.items()):
            if shares.get(pid) != share:
                file.unlink(missing_ok=True)
                del self._shares[pid]
        for pid, share in shares.items():
            if pid not in self._shares:
                self._count += 1
                file = self._folder / str(self._count)
                written = self._folder / f"of-{self._count}"
                written.write_text(f"{pid} {share}")
                written.rename(file)
                self._shares[pid] = (share, file)

    def close(self) -> None:
        """Release all processes and end the brake."""
        for file in self._folder.iterdir():
            file.unlink(missing_ok=True)
        self._folder.rmdir()
        self._process.wait()


# The sides.


class Side(Protocol):
    """A training run in progress."""

    name: str

    def steps(self) -> dict[int, Done]:
        """Return the steps that count so far."""

    def ranks(self) -> dict[int, tuple[int, int]]:
        """Return the machine and the process id, as seen from here, of every rank that trains."""

    def lost(self) -> None:
        """Do what has to be done once a rank has been killed."""

    def returned(self) -> None:
        """Do what has to be done once its device is back."""

    def over(self) -> bool:
        """Say whether it has ended."""

    def said(self) -> str:
        """Return its last words."""


class Elastic:
    """`hydragraph train` under torchrun, which is left to itself."""

    name = "hydragraph"

    def __init__(self, nodes: TwoNodes, folder: Path, config: TrainConfig) -> None:
        self._nodes, self._folder = nodes, folder
        self._run = Path(config.output)
        file = folder / "config.yaml"
        config.save(file)
        self._started = [self._start(node, file) for node in nodes]
        self._outside: dict[tuple[int, int], int] = {}

    def _start(self, node: Node, config: Path) -> subprocess.Popen[bytes]:
        command = [*torchrun(node, self._nodes, 1), "-m", "hydragraph", "train", str(config), "--overwrite"]
        return _begun(node, command, self._folder / f"{node.number}.log", {})

    def steps(self) -> dict[int, Done]:
        """Return the steps that count so far."""
        return read_steps(self._run / "metrics.jsonl")

    def ranks(self) -> dict[int, tuple[int, int]]:
        """Return the machine and the process id of every rank."""
        with suppress(OSError, ValueError):
            told = json.loads((self._run / "ranks.json").read_text())
            places = [(int(each["host"].removeprefix("node")), each["pid"]) for each in told]
            if not set(places) <= self._outside.keys():
                self._outside |= _outside(self._nodes)
            return {rank: (place[0], self._outside[place]) for rank, place in enumerate(places)}
        return {}

    def lost(self) -> None:
        """Do nothing: the run continues by itself."""

    def returned(self) -> None:
        """Tell the supervisor of the first machine, as its operator would."""
        for pid, environment in self._nodes[0].processes().items():
            if _JOB in environment and _is_supervisor(pid):  # the ranks that it has forked do not mind
                os.kill(pid, signal.SIGUSR1)

    def over(self) -> bool:
        """Say whether it has ended."""
        return all(process.poll() is not None for process in self._started)

    def said(self) -> str:
        """Return its last words."""
        return (self._folder / "0.log").read_text()[-3000:]


class Restarted:
    """Ranks that are all started anew, by this program, whenever their number changes.

    Args:
        command: of one rank, for a number of ranks.
        again: further words of the command when it resumes from a checkpoint.
    """

    def __init__(
        self, name: str, nodes: TwoNodes, folder: Path, command: Mapping[int, list[str]], again: Sequence[str]
    ) -> None:
        self.name = name
        self._nodes, self._folder, self._command, self._again = nodes, folder, command, again
        self._program = command[RANKS][:2]  # which neither its own helpers nor those that started it begin with
        self._port = 29600
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._start(RANKS, ())

    def _start(self, ranks: int, words: Sequence[str]) -> None:
        self._begun = time.monotonic()
        self._port += 1
        self._places = [0, 0, 1, 1] if ranks == RANKS else [0, 1, 1]  # the lost device is of the first machine
        for rank, number in enumerate(self._places):
            node = self._nodes[number]
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank - self._places.index(number)),
                "LOCAL_WORLD_SIZE": str(self._places.count(number)),
                "MASTER_ADDR": self._nodes[0].address,
                "MASTER_PORT": str(self._port),
            }
            command = [*self._command[ranks], *words]
            self._started[rank] = _begun(node, command, self._folder / f"{rank}.log", place)

    def steps(self) -> dict[int, Done]:
        """Return the steps that count so far."""
        return read_steps(self._folder / "run" / "metrics.jsonl")

    def ranks(self) -> dict[int, tuple[int, int]]:
        """Return the machine and the process id of every rank."""
        found = {}
        for node in self._nodes:
            for pid, environment in node.processes().items():
                if _JOB in environment and words_of(pid)[: len(self._program)] == self._program:
                    found[int(environment["RANK"])] = (node.number, pid)
        return found

    def lost(self) -> None:
        """End the others at once, and start three from the newest checkpoint."""
        for node in self._nodes:
            for pid, environment in node.processes().items():
                if _JOB in environment:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self._wait()
        self._start(RANKS - 1, self._again)

    def returned(self) -> None:
        """Have all save and end, and start four."""
        for _, pid in self.ranks().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._wait()
        self._start(RANKS, self._again)

    def _wait(self) -> None:
        """Return once all have ended; what started them is stopped where they were, and then never hears of it."""
        end = time.monotonic() + HANGS_S
        while not self.over() and time.monotonic() < end:
            time.sleep(0.02)
        for process in self._started.values():
            process.kill()
            process.wait()
        self._started.clear()

    def over(self) -> bool:
        """Say whether it has ended."""
        return time.monotonic() > self._begun + BEGINS_S and not self.ranks()

    def said(self) -> str:
        """Return its last words."""
        return (self._folder / "0.log").read_text()[-3000:]


def read_steps(file: Path) -> dict[int, Done]:
    """Return the steps that count, of those that a run has written down."""
    found: dict[int, Done] = {}
    with suppress(FileNotFoundError):
        for line in file.read_text().splitlines():
            with suppress(ValueError):  # it is being written
                told = json.loads(line)
                at = datetime.fromisoformat(told["time"]).timestamp()
                found[told["step"]] = Done(told["loss"], told["tokens"], at)
    last = max(found, default=0)
    return {step: found[step] for step in range(1, last + 1) if step in found}


def _outside(nodes: TwoNodes) -> dict[tuple[int, int], int]:
    """Return the process ids that are seen from here, by machine and the id that is seen there."""
    found = {}
    for node in nodes:
        for pid in node.processes():
            with suppress(OSError, StopIteration):
                status = Path(f"/proc/{pid}/status").read_text().splitlines()
                ids = next(line for line in status if line.startswith("NSpid:")).split()[1:]
                found[node.number, int(ids[-1])] = pid
    return found


def _is_supervisor(pid: int) -> bool:
    """Say whether a process is what torchrun starts on a machine."""
    words = words_of(pid)
    return "hydragraph" in words and "torch.distributed.run" not in words


def words_of(pid: int) -> list[str]:
    """Return the command of a process, empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return []


def _begun(node: Node, command: Sequence[str], log: Path, place: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process of this benchmark on a machine."""
    environment: dict[str, Any] = {_JOB: "1", **_threads(), **place}
    return node.start(command, log, **environment)


def _threads() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _environment() -> dict[str, str]:
    return {**os.environ, **_threads()}


# One run.


@dataclass(frozen=True)
class Ran:
    """Results of one side.

    Attributes:
        steps: those that count.
        startup_s: from its start to the end of its first step.
        events: seconds since the end of the first step, and what happened then.
    """

    steps: Mapping[int, Done]
    startup_s: float
    events: tuple[tuple[float, str], ...]

    @property
    def total_s(self) -> float:
        """From the end of the first step to the end of the last."""
        return self.steps[max(self.steps)].at - self.steps[1].at

    def seconds(self, steps: range) -> float:
        """Return what a part of the steps took, whatever happened meanwhile."""
        return self.steps[steps[-1]].at - self.steps[steps[0] - 1].at

    def usual_s(self, steps: range) -> float:
        """Return what a step of the later half of a part took."""
        later = list(steps)[len(steps) // 2 - 1 :]
        return median(self.steps[b].at - self.steps[a].at for a, b in pairwise(later))

    def tokens(self, steps: range) -> int:
        """Return the tokens of a part."""
        return sum(self.steps[step].tokens for step in steps)

    def goodput(self, well: range) -> float:
        """Return tokens by second, as a part of what they were in the later half of the steps where all was well."""
        later = range(well[len(well) // 2], well[-1] + 1)
        undisturbed = self.tokens(later) / self.seconds(later)
        whole = range(2, max(self.steps) + 1)
        return self.tokens(whole) / self.total_s / undisturbed


def run(side: Side, story: Story, brakes: Brakes, say: Any) -> Ran:
    """Let a side train through the story."""
    began = time.time()
    moved = time.monotonic()
    done, told = 0, -1
    happened: list[tuple[float, str]] = []
    left = ["straggler", "kill", "return"]
    while done < story.steps:
        steps = side.steps()
        if len(steps) != done:
            done, moved = len(steps), time.monotonic()
        if done // 10 != told:
            told = done // 10
            say(f"{side.name}: step {done} of {story.steps}")
        ranks = side.ranks()
        if left[:1] == ["straggler"] and done >= story.slow_at:
            happened.append((time.time(), left.pop(0)))
        elif left[:1] == ["kill"] and done >= story.kill_at and STRAGGLER in ranks:
            happened.append((time.time(), left.pop(0)))
            brakes.set({})
            os.kill(ranks.pop(STRAGGLER)[1], signal.SIGKILL)
            side.lost()
        elif left[:1] == ["return"] and done >= story.back_at:
            happened.append((time.time(), left.pop(0)))
            brakes.set({})
            side.returned()
        elif done:
            slow = left[:1] == ["kill"]
            brakes.set(
                {
                    pid: SHARE[KINDS[machine]] / (RATE if slow and rank == STRAGGLER else 1)
                    for rank, (machine, pid) in ranks.items()
                }
            )
        if time.monotonic() - moved > HANGS_S or (side.over() and len(side.steps()) < story.steps):
            raise RuntimeError(f"{side.name} stands still after step {done}:\n{side.said()}")
        time.sleep(0.02)
    brakes.set({})
    ended = time.monotonic()
    while not side.over():
        if time.monotonic() - ended > HANGS_S:
            raise RuntimeError(f"{side.name} does not end:\n{side.said()}")
        time.sleep(0.1)
    steps = side.steps()
    first = steps[1].at
    return Ran(steps, first - began, tuple((at - first, what) for at, what in happened))


@contextmanager
def machines(folder: Path) -> Iterator[tuple[TwoNodes, Brakes]]:
    """Make two machines, a slow link between them, and what slows their devices down."""
    with TwoNodes(folder / "nodes") as nodes:
        nodes.shape(LINK_BITS_PER_S)
        brakes = Brakes(folder / "brakes")
        try:
            yield nodes, brakes
        finally:
            brakes.close()


@dataclass(frozen=True)
class Given:
    """Measurements and plans made before the first side starts."""

    folder: Path
    story: Story
    profile: Path
    cluster: Path
    static: Mapping[int, str]  # strategies by the number of ranks

    def config(self, name: str, **changed: Any) -> TrainConfig:
        """Return the config of a side."""
        return config_in(self.folder, self.story, output=str(self.folder / name), **changed)

    def plan(self, cluster: Path) -> dict[str, Any]:
        """Return the section that chooses by the costs of a cluster."""
        return {"choose": True, "profile": str(self.profile), "cluster": str(cluster)}


def prepared(folder: Path, story: Story, say: Any) -> Given:
    """Write the data, measure the devices, and plan."""
    say("writing texts and the tokenizer, measuring a profile")
    write_texts(folder)
    config = config_in(folder, story)
    prepare(config)
    profile = profile_in(folder, config)
    cluster = cluster_in(folder)
    whole = Cluster.load(cluster)
    fewer = whole.of_ranks([rank for rank in range(RANKS) if rank != STRAGGLER])
    fewer.save(folder / "three.yaml")
    static = {n: best_static(config, profile, c) for n, c in ((RANKS, whole), (RANKS - 1, fewer))}
    for ranks, text in static.items():
        say(f"best static strategy of {ranks} ranks: {text}")
    return Given(folder, story, profile, cluster, static)


def start(name: str, given: Given, nodes: TwoNodes, round_: int) -> Side:
    """Start a side."""
    folder = given.folder / f"{name}-{round_}"
    folder.mkdir()
    if name == "hydragraph":
        elastic = {"copies": 2, "replan": True, "rejoin": False}
        config = given.config(
            f"{name}-{round_}/run", strategies=["auto"], plan=given.plan(given.cluster), elastic=elastic
        )
        return Elastic(nodes, folder, config)
    command = {}
    for ranks, text in given.static.items():
        if name == "static":
            cluster = given.cluster if ranks == RANKS else given.folder / "three.yaml"
            config = given.config(f"{name}-{round_}/run", strategies=[text], plan=given.plan(cluster), ranks=ranks)
            file = folder / f"{ranks}.yaml"
            config.save(file)
            command[ranks] = [sys.executable, "-m", "hydragraph", "train", str(file)]
        else:
            file = folder / f"{ranks}.yaml"
            given.config(f"{name}-{round_}/run").save(file)
            kinds = KINDS[0:1] * (ranks - PER_NODE) + KINDS[1:2] * PER_NODE
            speeds = ",".join(str(SHARE[kind]) for kind in kinds)
            script = [sys.executable, str(ROOT / "benchmarks/sharded.py"), str(file), "--output", str(folder / "run")]
            command[ranks] = [*script, "--until", str(given.story.steps), "--recompute", "--speeds", speeds]
    return Restarted(name, nodes, folder, command, ["--resume"] if name == "static" else [])


# Tables and pictures.


def table(story: Story, ran: Mapping[str, Sequence[Ran]]) -> Table:
    """Return a row for each side: medians over the rounds."""
    made = Table(
        title=f"{len(next(iter(ran.values())))} round(s); {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    parts = story.parts
    for heading in ("", "start-up", *(f"{part}: all / a step" for part in parts), "total", "/ hydragraph", "goodput"):
        made.add_column(heading, justify="right" if heading else "left")
    ours = median(each.total_s for each in ran["hydragraph"]) if "hydragraph" in ran else float("nan")
    for name, rounds in ran.items():
        cells = [
            f"{median(r.seconds(p) for r in rounds):.0f} / {median(r.usual_s(p) for r in rounds):.2f} s"
            for p in parts.values()
        ]
        total = median(r.total_s for r in rounds)
        goodput = median(r.goodput(parts["healthy"]) for r in rounds)
        startup = median(r.startup_s for r in rounds)
        made.add_row(name, f"{startup:.0f} s", *cells, f"{total:.0f} s", f"{total / ours:.2f}", f"{goodput:.0%}")
    return made


def differences(ran: Mapping[str, Sequence[Ran]]) -> float:
    """Return the largest relative difference of a step's loss between two sides."""
    every = [each.steps for rounds in ran.values() for each in rounds]
    losses = [[steps[step].loss for steps in every] for step in every[0]]
    return max((max(each) - min(each)) / abs(min(each)) for each in losses)


def draw(path: Path, story: Story, ran: Mapping[str, Sequence[Ran]]) -> None:
    """Draw steps over time, the first round of each side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for name, rounds in ran.items():
        one = rounds[0]
        first = one.steps[1].at
        line = axes.plot(
            [d.at - first for d in one.steps.values()], list(one.steps), label=f"{name}: {one.total_s:.0f} s"
        )
        for at, what in one.events:
            step = sum(d.at - first <= at for d in one.steps.values())
            axes.plot(
                [at], [step], marker={"straggler": "v", "kill": "X", "return": "^"}[what], color=line[0].get_color()
            )
    for step, what in (
        (story.slow_at, f"a fast rank takes {RATE} times as long"),
        (story.kill_at, "it is killed"),
        (story.back_at, "its device is back"),
    ):
        axes.axhline(step, color="0.8", linewidth=0.8, zorder=0)
        axes.annotate(
            what, (1, step), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="0.4", fontsize=9
        )
    axes.set_xlim(right=1.3 * max(rounds[0].total_s for rounds in ran.values()))  # room for what the lines say
    axes.set_xlabel("seconds after the first step")
    axes.set_ylabel("steps that count")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


SIDES = ("hydragraph", "static", "FSDP2")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few steps of each part")
    parser.add_argument("--folder", type=Path, help="keep everything there; default: a temporary one")
    parser.add_argument("--picture", type=Path, help="draw steps over time")
    chosen = parser.parse_args()
    if (why := shaping_refusal()) is not None:
        sys.exit(why)
    say = Console(stderr=True, highlight=False).print
    story = Story(8, 12, 12, 8) if chosen.quick else Story()
    ran: dict[str, list[Ran]] = {name: [] for name in chosen.sides}
    with tempfile.TemporaryDirectory(prefix="hydragraph-everything-") as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        given = prepared(folder, story, say)
        for number in range(chosen.rounds):
            for name in chosen.sides:
                with machines(folder / f"machines-{name}-{number}") as (nodes, brakes):
                    ran[name].append(run(start(name, given, nodes, number), story, brakes, say))
    Console(width=170).print(table(story, ran))
    apart = differences(ran)
    print(f"losses differ by {apart:.1e} at most, relative, over {story.steps} steps")
    if chosen.picture is not None:
        draw(chosen.picture, story, ran)
    sys.exit(apart > AGREE)


if __name__ == "__main__":
    main()
