"""What it costs to lose ranks: python benchmarks/elastic.py [pause] [kills] [monitor] [moving] [nodes] [switch]

pause     8 local ranks, one of them killed: the time between two steps, and how long ranks took to meet and to move
          state, with two copies and from disk
kills     `hydragraph chaos` with 100 kills in one run of `deterministic: true`: it must survive, with the same curve
          bit for bit, and leave no process running
nodes     two machines (network namespaces; needs root), a torchrun on each: one is lost whole, and comes back; then the
          link between them is cut
monitor   seconds of a step with `elastic.monitor` and without, in turns
moving    how long training waits while a part of the state moves to other owners: between two steps and during one, in
          turns
switch    64 simulated devices, some of which slow down: the time until another plan is ready, made while training
          continues, and how long the first step with it waits
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg
from benchmarks import plans
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.engine.candidate_strategies import Planning, request_of
from hydragraph.engine.live_reshard import LiveReshard
from hydragraph.engine.step_planner import IterationPlanner
from hydragraph.planner.policy import Policy
from hydragraph.planner.request import PlanRequest
from hydragraph.spec.default_cluster import default_cluster
from hydragraph.spec.health import Health
from hydragraph.spec.record import from_record
from hydragraph.spec.training_workload import Workload
from hydragraph.train.chaos import disturbed_run
from hydragraph.train.config import TrainConfig
from hydragraph.train.step_metrics import read_metrics
from hydragraph.train.stragglers.background_replanning import Replanned, Replanner, ReplanQuestion
from hydragraph.train.stragglers.controller import Controller
from hydragraph.train.stragglers.monitor import Monitor
from tests.nodes import TwoNodes, refusal, torchrun

RANKS = 8
_JOB = "HYDRAGRAPH_BENCHMARK_JOB"  # in the environment of what a node runs for this
WARM = 6  # steps before any is counted
SPARES = 2  # of the run that is killed again and again
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "many", "lazy", "uneven", "devices", "that", "train")


def config_in(folder: Path, **changed: Any) -> TrainConfig:
    """Return the config of a small Llama on texts that are written into the folder."""
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        words = [WORDS[(number * 7 + i * (1 + number % 5)) % len(WORDS)] for i in range(60 + 11 * number)]
        (texts / f"{number:02}.txt").write_text(" ".join(words))
    return from_record(
        TrainConfig,
        {
            "model": {
                "architecture": "LlamaForCausalLM",
                "config": {
                    "hidden_size": 128,
                    "intermediate_size": 256,
                    "num_hidden_layers": 8,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                    "max_position_embeddings": 128,
                },
            },
            "data": {"paths": [str(texts)], "vocab_size": 400, "max_length": 64, "tokens_per_step": 512},
            "strategies": ["4*<tp1,pp2>"],
            "steps": 40,
            "ranks": RANKS,
            "device": "cpu",
            "check": "off",
            "output": str(folder / "run"),
            **changed,
        },
    )


def pause(table: Table) -> None:
    """Kill one of 8 ranks."""
    for name, elastic, every in (("copies 2", {"copies": 2}, 0), ("from disk", {"min_ranks": 1}, 5)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            settings = {**elastic, "rejoin": False}
            config = config_in(folder, elastic=settings, checkpoint_every=every)
            seen: dict[int, float] = {}

            def stepped(step: int, struck: int, seen: dict[int, float] = seen) -> None:
                seen.setdefault(step, time.monotonic())

            strikes = [disturbed_run.InjectedFault("kill", 17, 0.7, 0.0)]
            done = disturbed_run.run(config, strikes, stepped, until=config.steps)
            took = [event.seconds for event in done.events if event.event == "resumed"]
            times = sorted(seen.values())
            gaps = [after - before for before, after in pairwise(times)]
            usual, longest = median(gaps), max(gaps)
            whole = "yes" if done.code == 0 and len(done.metrics) == config.steps else f"no: {done.ending}"
            table.add_row(
                f"pause, {name}",
                f"{longest:.2f} s between two steps (usually {usual:.2f}), {took[0] if took else float('nan'):.2f} s of"
                f" it to meet and to move; finished: {whole}",
                "2 s" if every == 0 else "5 s",
            )


def kills(table: Table, count: int) -> None:
    """Kill ranks of one run again and again."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        elastic = {"copies": 2, "spares": SPARES}
        config = config_in(folder, ranks=4, strategies=["2*<tp1,pp2>"], elastic=elastic, checkpoint_every=20)
        config = replace(config, deterministic=True, backend="eager")
        peaceful, stormy = disturbed_run.prepared(config, folder, count)

        def stepped(step: int, struck: int) -> None:
            if step % 20 == 0:
                print(f"step {step}: {struck} of {count} kills", file=sys.stderr)

        disturbed = disturbed_run.run(stormy, disturbed_run.draw({"kill": count}, seed=7), stepped)
        last = max(m.step for m in disturbed.metrics)
        undisturbed = disturbed_run.run(peaceful, until=last).until(last)
        departed = disturbed_run.departure(disturbed, undisturbed, None)
        equal = "every bit of every loss" if departed is None else f"other losses from step {departed} on"
        table.add_row(f"{count} kills: equal to the undisturbed run", equal, "curve equal")
        for name, value in disturbed_run.rows(disturbed, undisturbed):
            table.add_row(f"{count} kills: {name}", value, "")
        said = f": {disturbed.ending}" if disturbed.code else ""
        table.add_row(f"{count} kills: exit code", f"{disturbed.code}{said}", "0")


@dataclass(frozen=True)
class Watching:
    """Seconds of one step on one rank, judging what was measured included.

    Attributes:
        on: whether ranks were watched.
        wall, cpu: of the step, and what follows it.
        judging: of these, wall clock of judging.
    """

    on: bool
    wall: float
    cpu: float
    judging: float


def turns(tokens: int, rounds: int) -> list[Watching]:
    """Train with the monitor and without, in turns of one step each, as `train` does both."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=4096,
        max_position_embeddings=tokens,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    strategy = hg.Strategy.parse("2*<tp1,pp1>", 8)
    exe = hg.compile(model, strategy, lambda named: hg.AdamW(named, lr=1e-4), device="cpu", check="off")
    generator = torch.Generator().manual_seed(1)
    lengths = [tokens // 2, tokens // 4, tokens // 8, tokens // 8] * exe.ranks
    batch = [torch.randint(0, 4096, (n,), generator=generator) for n in lengths]
    cluster = default_cluster(exe.ranks)
    controller = Controller(Monitor(Costs(datasheet(exe.program, cluster), cluster)))
    found = []
    for turn in range(WARM + 2 * rounds):
        on = exe.watched = bool(turn % 2)
        wall, cpu = time.perf_counter(), time.process_time()
        report = exe.step(batch)
        stepped = time.perf_counter()
        if on and exe.rank == 0:
            controller.stepped(report)
        now = time.perf_counter()
        found.append(Watching(on, now - wall, time.process_time() - cpu, now - stepped))
    exe.close()
    return found[WARM:]


def monitor(table: Table, tokens: int = 1000, rounds: int = 60) -> None:
    """Compare steps with the monitor and without, in turns in the same processes."""
    by_rank = hg.launch(turns, 2, tokens, rounds, timeout=timedelta(minutes=9))
    walls, cpus = {}, {}
    for on in (False, True):
        together = [each for each in zip(*by_rank, strict=True) if each[0].on == on]
        walls[on] = [each[0].wall for each in together]  # rank 0's judges
        cpus[on] = [sum(rank.cpu for rank in each) for each in together]
    wall, cpu = (median(b / a for a, b in zip(x[False], x[True], strict=True)) - 1 for x in (walls, cpus))
    judging = median(each.judging for each in by_rank[0] if each.on)
    table.add_row(
        f"monitor, 2 ranks, {tokens} tokens each, {rounds} steps with and without in turns",
        f"{wall:+.1%} of a step of {median(walls[False]):.3f} s, {cpu:+.1%} of the CPU seconds of all ranks (medians of"
        f" pairs); judging alone takes {1e3 * judging:.2f} ms, {judging / median(walls[False]):.2%} of a step",
        "1 %",
    )


@dataclass(frozen=True)
class Part:
    """Time that training waits on one rank while a part of the state moves to other owners.

    Attributes:
        beside: whether the state moves during a step (else between two).
        wall: seconds that it waits: before the step, between its instructions, at its end; and for its next step to be
            prepared.
        cpu: CPU seconds of this process, all its threads, in two steps and the time between them.
    """

    beside: bool
    wall: float
    cpu: float


def parts(tokens: int, rounds: int, layers: int) -> list[Part]:
    """Move the state of `layers` of 4 layers back and forth, between two steps and during the first in turn."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=4096,
        max_position_embeddings=tokens,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    strategy = hg.Strategy.parse("2*<tp1,pp1>", 4)
    exe = hg.compile(model, strategy, lambda named: hg.AdamW(named, lr=1e-4), device="cpu", check="off")
    generator = torch.Generator().manual_seed(1)
    batch = [torch.randint(0, 4096, (tokens,), generator=generator) for _ in range(exe.ranks)]
    homes = [hg.Home(buckets={f"layer.{n}": (1.0, share) for n in range(layers)}) for share in (1.0, 0.0)]
    waited = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*given)
            finally:
                waited[0] += time.perf_counter() - began

        return call

    for method in ("go_on", "end"):
        setattr(LiveReshard, method, timed(getattr(LiveReshard, method)))
    rehome, move = timed(exe.rehome), timed(exe.move)
    found = []
    for turn in range(2 * rounds + 2):
        beside = turn % 2 == 1
        home = homes[0] if exe.owners == homes[1] else homes[1]
        exe.world.gather(None)
        waited[0], cpu = 0.0, time.process_time()
        if beside:
            rehome(home)
        exe.step(batch)
        if not beside:
            move(exe.world, home, range(exe.ranks))
        waited[0] += exe.step(batch).preparing_s
        found.append(Part(beside, waited[0], time.process_time() - cpu))
    exe.close()
    return found[2:]


def moving(table: Table, tokens: int = 300, rounds: int = 12) -> None:
    """Compare how long training waits for a part of the state that moves during a step or between two."""
    for layers in (1, 4):
        by_rank = hg.launch(parts, 2, tokens, rounds, layers, timeout=timedelta(minutes=9))
        turns = list(zip(*by_rank, strict=True))
        # The rank that arrives last waits only for the move; the others also wait for that rank, as in any step.
        waited, cpus = (
            {way: median(of(each) for each in turns if each[0].beside == way) for way in (False, True)}
            for of in (lambda each: min(p.wall for p in each), lambda each: sum(p.cpu for p in each))
        )
        # Half of a layer of 3,211,264 weights: fp32, two moments.
        table.add_row(
            f"moving, 2 ranks, half of {layers} layer(s), {19.3 * layers:.0f} MB, {rounds} turns of each",
            f"training waits {1e3 * waited[False]:.0f} ms between two steps, {1e3 * waited[True]:.0f} ms during one;"
            f" two steps take {cpus[False]:.2f} and {cpus[True]:.2f} CPU s of both ranks (medians)",
            "gradients only",
        )


def switch(table: Table) -> None:
    """Plan 64 simulated devices again, in the processes that a run keeps for that, and switch to what was found."""
    costs = plans.costs_of("32b", plans.cluster_of(plans.node("A800", 8, 8, 8)))
    length = plans.length_of("32b")
    draw = random.Random(0)
    drawn = [tuple(min(2 * length, 16 + int(draw.lognormvariate(6.5, 1.2))) for _ in range(128)) for _ in range(8)]
    for name, batches in (("equal lengths", [(length,) * 64] * 8), ("drawn lengths", drawn)):
        for who, rates in (("one of 5.42", {3: 5.42}), ("8 spread", {8 * n: 5.42 for n in range(8)})):
            table.add_row(f"64 devices, {name}, {who}", switched(costs, batches, Health(rates)), "0.5 s together")


def switched(costs: Costs, batches: list[tuple[int, ...]], health: Health) -> str:
    """Say how long it takes until there is another plan, and what the plan gains."""
    running = hg.plan(costs, Workload(lengths=batches), method="straggler").strategies
    request = PlanRequest(tuple(map(costs.pipelines, running)), tuple(map(costs.fixed, running)))
    replanner, planner = Replanner(), IterationPlanner(request, Policy())
    try:
        planner.announce(batches[0])
        planner.plan(batches[0])
        asked = ReplanQuestion(
            costs.changed(health=health),
            tuple(batches),
            running,
            running,
            request,
            Policy(),
            at_once=True,
        )
        _answered(replanner, replace(asked, costs=costs))  # as every run does while all are well
        began, worked = time.monotonic(), _cpu_s(replanner)
        found = _answered(replanner, asked)
        took, worked = time.monotonic() - began, _cpu_s(replanner) - worked
        if found.request is None:
            raise ValueError(f"no other plan: {found.refused}")
        began = time.monotonic()
        planner.announce(batches[0])
        planner.change(found.request, found.static)
        plan = planner.plan(batches[0])
        waited = time.monotonic() - began
        began = time.monotonic()
        later = replace(asked, at_once=False, running=found.strategies, request=found.request)
        best = _answered(replanner, later)
        longer = time.monotonic() - began
        return (
            f"{took:.2f} s ({worked:.2f} CPU s) alongside training until another plan is ready ({found.before_s:.3g} ->"
            f" {found.after_s:.3g} s a step); its first step waits {waited:.3f} s"
            f"{' and takes the quick plan' if plan.late else ''}; after {longer:.1f} s more the best is known"
            f" ({best.before_s:.3g} -> {best.after_s:.3g} s)"
        )
    finally:
        planner.close()
        replanner.close()


def _cpu_s(replanner: Replanner) -> float:
    """Return the CPU seconds of the process that plans: a busy machine adds none to them."""
    assert replanner._worker is not None, "it has answered"
    return time.clock_gettime((~replanner._worker.process.pid << 3) | 2)


def _answered(replanner: Replanner, question: ReplanQuestion) -> Replanned:
    replanner.ask(question)
    while (answer := replanner.answer()) is None:
        time.sleep(0.002)
    return answer


@dataclass(frozen=True)
class Switching:
    """Seconds of steps around a switch.

    Attributes:
        before, getting_ready: medians of steps before it was asked for, and from then until it was made.
        longest: step while ranks got ready, of `count`.
        first, second: step of the new strategy.
    """

    before: float
    getting_ready: float
    longest: float
    count: int
    first: float
    second: float


def switching(ready_first: bool) -> Switching:
    """Switch to stages of two ranks, which no rank has ever run."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=4096,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    one, other, new = (hg.Strategy.parse(text, 8) for text in ("2*<tp1,pp1>", "<tp1,pp2>", "<[0,1]x8r>"))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # of what was checked once
        exe = hg.compile(model, [one, other], lambda named: hg.AdamW(named, lr=1e-4), device="cpu")
        generator = torch.Generator().manual_seed(1)
        batch = [torch.randint(0, 4096, (256,), generator=generator) for _ in range(8)]

        def step() -> float:
            began = time.perf_counter()
            name = exe.step(batch, None if asked else one).strategy
            names.append(name)
            return time.perf_counter() - began

        asked = False
        names: list[str] = []
        before = [step() for _ in range(WARM)][2:]
        asked = True
        if exe.rank == 0:
            exe.choose_from([new], request_of([new], Planning(), exe.ranks), ready_first=ready_first)
        seconds = []
        while names.count(str(new)) < 2:
            seconds.append(step())
        exe.close()
    *meanwhile, first, second = seconds
    return Switching(median(before), median(meanwhile or [0.0]), max(meanwhile or [0.0]), len(meanwhile), first, second)


def stages(table: Table) -> None:
    """Switch to stages that never ran, which are compiled in their first step, or during training before it."""
    for ready_first in (False, True) * 2:
        found = hg.launch(switching, 2, ready_first, timeout=timedelta(minutes=9))[0]
        each = f"{found.count} steps of {found.getting_ready:.2f} s until ranks are ready"
        beside = f"{each}, the longest {found.longest:.2f} s; "
        table.add_row(
            f"a switch to new stages, {'compiled beside training' if ready_first else 'compiled in their first step'}",
            f"steps of {found.before:.2f} s; {beside * ready_first}then {found.first:.2f} s and {found.second:.2f} s",
            "training never waits for it" * ready_first,
        )


def nodes(table: Table) -> None:
    """Lose one of two machines, have it back, and lose the link to it."""
    if (why := refusal()) is not None:
        table.add_row("nodes", f"skipped: {why}", "15 s")
        return
    with tempfile.TemporaryDirectory() as temporary, TwoNodes(Path(temporary) / "nodes") as two:
        folder = Path(temporary)
        config = config_in(folder, ranks=4, strategies=["2*<tp1,pp2>"], steps=400, elastic={"copies": 2})
        file = folder / "config.yaml"
        config.save(file)
        run = Path(config.output)
        started = [_node(two, number, file) for number in (0, 1)]

        def follows(step: int) -> float:
            began = time.monotonic()
            while _steps(run) < step:
                if started[0].poll() is not None or time.monotonic() - began > 240:
                    raise RuntimeError((folder / "0.log").read_text()[-3000:])
                time.sleep(0.02)
            return time.monotonic() - began

        def joined(ranks: int) -> float:
            began = time.monotonic()
            while len(json.loads((run / "ranks.json").read_text())) != ranks:
                if time.monotonic() - began > 240:
                    raise RuntimeError((folder / "0.log").read_text()[-3000:])
                time.sleep(0.05)
            return time.monotonic() - began

        follows(5)
        before = json.loads((run / "ranks.json").read_text())
        for pid, environment in two[1].processes().items():
            if _JOB in environment:
                os.kill(pid, signal.SIGKILL)
        lost = follows(_steps(run) + 2)
        same = json.loads((run / "ranks.json").read_text()) == before[:2]
        started[1] = _node(two, 1, file)
        back = joined(4)
        follows(_steps(run) + 3)
        two.down()
        cut = follows(_steps(run) + 2)
        time.sleep(1)
        alone = sum(map(_is_forked, two[1].processes()))
        two.up()
        again = joined(4)
        last = _steps(run) + 3
        follows(last)
        for pid in filter(_is_supervisor, two[0].processes()):
            os.kill(pid, signal.SIGTERM)
        codes = [process.wait(120) for process in started]
        struck = [m.loss for m in read_metrics(run / "metrics.jsonl")]
        # As many steps of the same schedule: a run of fewer would lower its learning rate sooner.
        calm = disturbed_run.run(replace(config, output=str(folder / "calm")), until=len(struck)).until(len(struck))
        undisturbed = [m.loss for m in calm.metrics]
        apart = max(abs(a - b) for a, b in zip(struck, undisturbed, strict=True))
        table.add_row("a node is killed", f"{lost:.1f} s until a step is done; processes the same: {same}", "15 s")
        table.add_row("it is back", f"{back:.1f} s until it has joined again", "it rejoins")
        table.add_row("the link is cut", f"{cut:.1f} s until a step is done; ranks left beyond it: {alone}", "0 left")
        table.add_row("the link is back", f"{again:.1f} s until that node has joined again", "it rejoins")
        table.add_row("losses", f"{apart:.1e} from an undisturbed run's, {len(struck)} steps; exit {codes}", "rounding")


def _is_supervisor(pid: int) -> bool:
    """Say whether a process is what torchrun starts on a node."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"hydragraph" in command and b"torch.distributed.run" not in command
    return False


def _is_forked(pid: int) -> bool:
    """Say whether a process is a rank: its supervisor's fork server has forked it, and it has not ended."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        commands = [Path(f"/proc/{each}/cmdline").read_bytes() for each in (pid, int(fields[1]))]
        return fields[0] not in "ZX" and all(b"multiprocessing.forkserver" in command for command in commands)
    return False


def _steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(read_metrics(file)) if file.is_file() else 0


def _node(two: TwoNodes, number: int, config: Path) -> subprocess.Popen[bytes]:
    """Start a node's torchrun, which starts one supervisor."""
    command = [*torchrun(two[number], two, 1), "-m", "hydragraph", "train", str(config), "--overwrite"]
    log = config.parent / f"{number}.log"
    given: dict[str, Any] = {_JOB: "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    return two[number].start(command, log, **given)


def main() -> None:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="pause, kills, monitor, moving, nodes, switch, stages; default: all")
    parser.add_argument("--count", type=int, default=100, help="kills")
    chosen = parser.parse_args()
    parts = chosen.parts or ["pause", "kills", "monitor", "moving", "nodes", "switch", "stages"]
    table = Table(title=f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for column in ("what", "measured", "target"):
        table.add_column(column)
    if "pause" in parts:
        pause(table)
    if "kills" in parts:
        kills(table, chosen.count)
    if "monitor" in parts:
        monitor(table)
    if "moving" in parts:
        moving(table)
    if "nodes" in parts:
        nodes(table)
    if "switch" in parts:
        switch(table)
    if "stages" in parts:
        stages(table)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
