"""Ranks of `hydragraph train` that strike themselves within its loop: python -m tests.moments_train --count 40 --seed 7

As `tests/moments.py`, with other windows: a step and its log, a save, an evaluation, recovery after a loss (which
includes taking over the run's folder, finding the mini-batch, and reporting), and the whole join of a newcomer. The
curve must equal that of the undisturbed run, bit for bit, and no process may remain.
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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hydragraph import cli
from hydragraph.commands import train
from hydragraph.spec.record import from_record
from hydragraph.train import loop, run_recovery, run_saving, step_reporting
from hydragraph.train.chaos import disturbed_run
from hydragraph.train.chaos.fault_injection import Victim, ended, lives, send
from hydragraph.train.config import CheckpointConfig, TrainConfig
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.step_metrics import read_metrics
from tests.moments import LIMIT_S, PROGRESS_S, RANKS, How, Plan, Strike, window
from tests.train.plain import settings

PLAN = "HYDRAGRAPH_TEST_PLAN"  # the plan, in the environment of a run
# Functions of the loop that are windows, and the most calls of each.
CALLS = {
    "_train_step": 20_000,
    "checkpoint": 3_000,
    "keep_pieces": 2_000,
    "_evaluate": 8_000,
    "go_on": 25_000,
    "lead": 200,
    "_find_position": 400,
    "_write_down": 300,
    "write_run_ranks": 200,
    "_join_run": 60_000,
}
OPENED = ("go_on", "lead", "_find_position", "_write_down", "write_run_ranks", "_join_run")  # by another rank's end
_genuine = train.train_rank  # what ranks run; in the launcher's process this module's own takes its place


def train_rank(*arguments: Any) -> Any:
    """Train on this rank, which strikes itself when it is its turn."""
    run_saving.matplotlib_installed = step_reporting.matplotlib_installed = lambda: False
    step_reporting.tensorboard_installed = lambda: False
    record = json.loads(os.environ[PLAN])
    strikes = tuple(Strike(**each) for each in record["strikes"])
    plan = Plan(strikes, Path(record["folder"]), opened=OPENED)
    for name in CALLS:
        callers = [module for module in (loop, run_recovery, run_saving, step_reporting) if hasattr(module, name)]
        watched = _watched(plan, name, getattr(callers[0], name))
        for module in callers:  # each has the function under a name of its own
            setattr(module, name, watched)
    return _genuine(*arguments)


def _watched(plan: Plan, name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(genuine)
    def call(*given: Any, **named: Any) -> Any:
        with _within(plan, name, given):
            return genuine(*given, **named)

    return call


def _within(plan: Plan, name: str, given: tuple[Any, ...]) -> AbstractContextManager[None]:
    if name == "_join_run":
        return window(plan, name, None, RANKS)
    world = given[0].world
    if name == "_train_step" and world.ranks == RANKS:
        plan.open(world.rank, RANKS)
    return window(plan, name, None if name == "lead" else world.rank, world.ranks)


def draw(count: int, seed: int, hows: Sequence[How], pieces: bool = False) -> tuple[Strike, ...]:
    """Draw strikes, of all windows alike; `pieces` says whether the run keeps any."""
    chance = random.Random(seed)
    windows = [name for name in CALLS if pieces or name != "keep_pieces"]
    names = [windows[number % len(windows)] for number in range(count)]
    chance.shuffle(names)
    # Calls are many where little happens: early ones are as likely as late ones, by their magnitude.
    return tuple(
        Strike(
            name,
            int(CALLS[name] ** chance.random()),
            chance.randrange(RANKS),
            chance.choice([how for how in hows if name != "_join_run" or how != "hang"] or ["kill"]),
        )
        for name in names
    )


def configured(folder: Path, copies: int, spares: int, pieces: bool = False) -> TrainConfig:
    """Return the config of a tiny run on four ranks, with checkpoints in pieces or without."""
    elastic = {"copies": copies, "spares": spares, "min_ranks": 1}
    config = settings(folder) | {"ranks": RANKS, "strategies": ["2*<tp1,pp2>"], "steps": 100_000, "check": "off"}
    config |= {
        "deterministic": True,
        "backend": "eager",
        "checkpoint_every": 5,
        "evaluate_every": 7,
        "progress_s": PROGRESS_S,
    }
    if pieces:
        config["checkpoint"] = {"pieces": {"local": str(folder / "local")}}
    return from_record(TrainConfig, config | {"elastic": elastic, "output": str(folder / "run")})


def main() -> None:
    """Strike, and print what came of it; as a launcher, `hydragraph` with ranks that strike themselves."""
    if sys.argv[1:2] == ["--launch"]:
        from tests import moments_train

        train.train_rank = moments_train.train_rank  # pyrefly: ignore[bad-assignment]
        sys.argv = ["hydragraph", *sys.argv[2:]]
        cli.app(sys.argv[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=36, help="strikes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--copies", type=int, default=2, help="owners of everything; 1: from the checkpoint")
    parser.add_argument("--pieces", action="store_true", help="with --copies 1: from pieces, if they are newer")
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--how", default=",".join(["kill"] * 8 + ["stop", "hang"]), help="to draw from")
    parser.add_argument("--keep", type=Path, help="keep everything here")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hydragraph-moments-") as temporary:
        folder = chosen.keep or Path(temporary)
        (folder / "struck").mkdir(parents=True)
        plan = Plan(draw(chosen.count, chosen.seed, chosen.how.split(","), chosen.pieces), folder / "struck")
        config = configured(folder, chosen.copies, chosen.spares, chosen.pieces)
        raise SystemExit(struck(plan, config, folder, vars(chosen)))


def struck(plan: Plan, config: TrainConfig, folder: Path, about: dict[str, Any]) -> bool:
    """Run it, and print; return whether something was not as promised."""
    load, began = os.getloadavg()[0], time.monotonic()
    config.save(folder / "config.yaml")
    record = {"strikes": [asdict(each) for each in plan.strikes], "folder": str(plan.folder)}
    command = [sys.executable, "-m", "tests.moments_train", "--launch", "train", str(folder / "config.yaml")]
    environment = {**os.environ, PLAN: json.dumps(record), "OMP_NUM_THREADS": "1"}
    with (folder / "said.log").open("wb") as said:
        launcher = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, env=environment)
    victim = Victim(RunFolder(Path(config.output)), launcher)
    problems, number, since = [], 0, time.monotonic()
    while victim.alive and plan.next()[1] is not None:
        victim.children()
        if plan.next()[0] != number:
            number, since = plan.next()[0], time.monotonic()
        if time.monotonic() - since > 2 * LIMIT_S:
            problems.append(f"strike {number} did not come: {plan.strikes[number]}")
            break
        time.sleep(0.2)
    first = victim.step()
    victim.until(lambda: victim.step() >= first + 5, LIMIT_S)
    send(launcher.pid, signal.SIGTERM)
    if not ended(launcher.pid, LIMIT_S):
        problems.append("it does not end")
        launcher.kill()
    words = (folder / "said.log").read_text(errors="replace")
    if launcher.wait():
        problems.append(f"it ended with {launcher.returncode}: {words[-600:]}")
    time.sleep(3)
    if left := [pid for pid in victim.pids if lives(pid)]:
        problems.append(f"processes {left} were left behind")
    mine = {m.step: m.loss for m in read_metrics(victim.folder.metrics)}
    last = max(mine, default=0)
    calm = replace(config, elastic=replace(config.elastic, copies=1, spares=0, min_ranks=None))
    calm = replace(calm, checkpoint=CheckpointConfig())
    losses = {m.step: m.loss for m in disturbed_run.run(replace(calm, output=str(folder / "calm")), until=last).metrics}
    far = [step for step in range(1, last + 1) if step not in mine or mine[step] != losses.get(step)]
    if far or len(mine) != last:
        problems.append(f"losses differ or are missing at {len(far)} of {last} steps, first at {far[:1]}")
    _print(plan, about, load)
    print(f"{last} steps in {time.monotonic() - began:.0f} s")
    for problem in problems:
        print(f"not as promised: {problem}")
    if not problems:
        print("every loss equals that of the undisturbed run, bit for bit")
    return bool(problems)


def _print(plan: Plan, about: dict[str, Any], load: float) -> None:
    table = Table(
        title=", ".join(f"{name} {about[name]}" for name in ("count", "seed", "copies", "spares"))
        + f", load {load:.1f}"
    )
    for heading in ("window", "strikes", "hit within", "at its end", "stopped", "hung"):
        table.add_column(heading, justify="left" if heading == "window" else "right")
    for name in CALLS:
        mine = [number for number, strike in enumerate(plan.strikes) if strike.window == name]
        hits = [json.loads(f.read_text()) for n in mine if (f := plan.folder / f"hit-{n}").exists()]
        ends = sum(hit[2] == "its end" for hit in hits)
        hows = [sum(plan.strikes[number].how == how for number in mine) for how in ("stop", "hang")]
        table.add_row(name, *map(str, (len(mine), len(hits) - ends, ends, *hows)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
