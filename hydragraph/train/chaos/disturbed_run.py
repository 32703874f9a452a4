"""A training run with injected faults, compared with an undisturbed run.

The seed determines the faults and their steps, not their exact times.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from hydragraph.spec.home import Home
from hydragraph.train.chaos.fault_injection import ACTIONS, Victim, least_ranks, lives, send, wait
from hydragraph.train.chaos.machines import Machines, with_disks
from hydragraph.train.config import CheckpointConfig, ElasticConfig, PlanConfig, TrainConfig
from hydragraph.train.goodput import account
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.step_metrics import Metrics, read_metrics
from hydragraph.train.stragglers.run_events import STATE_LOST, RunEvent, read_events

MACHINES = 2
# Mean number of steps between faults
STEPS_PER_STRIKE = 5
MOST_STEPS_PER_STRIKE = 60
MOST_STEPS_PER_MACHINE = 1000
CALM_STEPS = 10
_CENSUS_S = 0.5
_END_S = 30.0
_START_S = 1800.0
# A run hangs if it completes no step for this many seconds
_QUIET_S = 180.0


@dataclass(frozen=True)
class InjectedFault:
    """Injected fault; `which` is the affected rank's index divided by the number of ranks."""

    kind: str
    step: int
    which: float
    delay_s: float


@dataclass(frozen=True)
class DisturbedRun:
    """Outcome of a run; `hung` says why a hanging run was killed, or is ""."""

    code: int
    metrics: tuple[Metrics, ...]
    events: tuple[RunEvent, ...] = ()
    struck: tuple[InjectedFault, ...] = ()
    left: tuple[int, ...] = ()
    said: str = ""
    problems: tuple[str, ...] = ()
    hung: str = ""

    @property
    def ending(self) -> str:
        how = (
            f"the process was killed by signal {-self.code}"
            if self.code < 0
            else f"the process exited with code {self.code}"
        )
        last = f"; the output ends with:\n{self.said}" if self.said else "; the output is empty"
        return (self.hung or how) + last

    @property
    def losses(self) -> dict[int, float]:
        return {m.step: m.loss for m in self.metrics}

    def until(self, step: int) -> DisturbedRun:
        return replace(self, metrics=tuple(m for m in self.metrics if m.step <= step))

    def difference(self, other: DisturbedRun) -> float:
        mine = self.losses
        theirs = other.losses
        if mine.keys() != theirs.keys() or not mine:
            return math.inf
        return max(abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in mine)


# Relative difference of losses from another order of summation
ROUNDING = 1e-5
# Largest allowed ratio to the difference of two undisturbed runs
MARGIN = 10.0


def departure(disturbed: DisturbedRun, undisturbed: DisturbedRun, control: DisturbedRun | None) -> int | None:
    """Return the first step whose loss differs by more than rounding errors explain, or None.

    Training amplifies rounding errors, so the allowed difference depends on `control`, an undisturbed run with another
    number of ranks. Without `control`, losses must be bitwise equal.
    """
    others = {} if control is None else control.losses
    mine = disturbed.losses
    # allowed: relative difference of losses; like rounding errors, it only grows.
    allowed = 0.0 if control is None else ROUNDING
    for step, loss in undisturbed.losses.items():
        allowed = max(allowed, MARGIN * abs(others.get(step, loss) - loss) / abs(loss))
        if step not in mine or not abs(mine[step] - loss) <= allowed * abs(loss):
            return step
    return None


def alone(config: TrainConfig, folder: Path) -> TrainConfig:
    output = str(folder / "alone")
    return replace(
        config,
        ranks=1,
        strategies=("<tp1,pp1>",),
        elastic=ElasticConfig(),
        plan=PlanConfig(),
        home=Home(),
        compiled=None,
        trust=False,
        output=output,
    )


def draw(counts: Mapping[str, int], seed: int) -> list[InjectedFault]:
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    chance = random.Random(seed)
    chance.shuffle(kinds)
    # at[i]: first step after which fault i is injected; random, but sorted.
    at = sorted(chance.randint(2, 2 + STEPS_PER_STRIKE * len(kinds)) for _ in kinds)
    return [
        InjectedFault(kind, step, chance.random(), chance.uniform(0, 0.3)) for kind, step in zip(kinds, at, strict=True)
    ]


def read_kinds(text: str, config: TrainConfig) -> tuple[str, ...]:
    """Parse kinds of faults, such as "two,again"; raise ValueError for invalid kinds."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in ACTIONS]:
        listed = "".join(f"\n  {kind:<11}{action.__doc__}" for kind, action in ACTIONS.items())
        raise ValueError(f"unknown fault {unknown[0]!r}: choose from{listed}")
    kinds = tuple(kind for kind in ACTIONS if kind in names)
    if "checkpoint" in kinds and not (config.checkpoint_every or config.checkpoint_per_epoch):
        raise ValueError("fault 'checkpoint' waits for a checkpoint: set checkpoint_every")
    if "switch" in kinds and (not config.replans or config.elastic.dry_run):
        raise ValueError("fault 'switch' waits for a new plan: set elastic.replan, without elastic.dry_run")
    if "preempt" in kinds and config.ranks < 2 * MACHINES:
        raise ValueError(f"'ranks' is {config.ranks}: fault 'preempt' needs {MACHINES} machines of 2 ranks each")
    least = max(map(least_ranks, kinds), default=0)
    if config.ranks < least:
        raise ValueError(f"'ranks' is {config.ranks}: set at least {least}, so that a rank survives these faults")
    return kinds


def prepared(config: TrainConfig, folder: Path, strikes: int, preempted: int = 0) -> tuple[TrainConfig, TrainConfig]:
    # The run must not end before the last fault, so `most` is generous; `run` stops it.
    most = MOST_STEPS_PER_STRIKE * strikes + MOST_STEPS_PER_MACHINE * preempted
    config = replace(config, steps=max(config.steps, most + CALM_STEPS), epochs=None)
    elastic = config.elastic
    if not elastic.survives:
        several = config.ranks > 1 and config.checkpoint.pieces is None
        elastic = replace(elastic, copies=2 if several else 1, min_ranks=1)
    peaceful = replace(elastic, copies=1, spares=0, min_ranks=None)
    home = replace(config.home, copies=1)
    undisturbed = replace(config, elastic=peaceful, home=home, output=str(folder / "undisturbed"))
    undisturbed = replace(undisturbed, checkpoint=CheckpointConfig())
    return undisturbed, replace(config, elastic=elastic, output=str(folder / "disturbed"))


def run(
    config: TrainConfig,
    strikes: Sequence[InjectedFault] = (),
    stepped: Callable[[int, int], None] = lambda step, hit: None,
    until: int | None = None,
    machines: int = 1,
) -> DisturbedRun:
    """Run training in separate processes, and inject the faults.

    Args:
        stepped: called with the last step and the number of faults.
        until: last step; None: `CALM_STEPS` steps after the last fault.
    """
    folder = RunFolder(Path(config.output))
    folder.path.mkdir(parents=True, exist_ok=True)
    file = folder.path.with_suffix(".yaml")
    said = folder.path.with_suffix(".log")
    several = Machines(machines, file, folder.path, folder.path.with_suffix(".disks"))
    (with_disks(config, several.disks) if machines > 1 else config).save(file)
    launcher = several.start()
    victim = Victim(folder, launcher, machines=several if machines > 1 else None)
    striker = _Striker(victim, list(strikes), until)
    try:
        code = striker.follow(stepped)
        launcher.kill()
        launcher.wait()
        left = _still_there(victim.pids | {*several.left()})
    finally:
        several.end()
    metrics = tuple(read_metrics(folder.metrics))
    words = said.read_text(errors="replace").strip().splitlines()[-3:]
    events = tuple(read_events(folder.events))
    problems = tuple(victim.problems)
    return DisturbedRun(code, metrics, events, tuple(striker.struck), left, "\n".join(words), problems, striker.hung)


@dataclass
class HangDetector:
    moved: float
    step: int = 0

    def look(self, step: int, now: float) -> str:
        if step != self.step:
            self.step = step
            self.moved = now
        if now - self.moved <= (_QUIET_S if self.step else _START_S):
            return ""
        if not self.step:
            return f"the run completed no step within {_START_S:g} s of its start, and was killed"
        return f"the run completed no step for {_QUIET_S:g} s after step {self.step}, and was killed"


@dataclass
class _Striker:
    victim: Victim
    coming: list[InjectedFault]
    until: int | None
    struck: list[InjectedFault] = field(default_factory=list)
    hung: str = ""

    def follow(self, stepped: Callable[[int, int], None]) -> int:
        victim, step, asked = self.victim, 0, False
        looked = time.monotonic()
        patience = HangDetector(looked)
        while (code := victim.launcher.poll()) is None:
            now = victim.step()
            if now != step:
                step = now
                stepped(step, len(self.struck))
            self.hung = patience.look(step, time.monotonic())
            if self.hung:
                return -signal.SIGALRM
            if time.monotonic() - looked > _CENSUS_S:
                looked = time.monotonic()
                victim.children()
            if self.coming and step >= self.coming[0].step and self._strike(self.coming[0]):
                self.coming.pop(0)
                if not self.coming and self.until is None:
                    self.until = victim.step() + CALM_STEPS
            if self.until is not None and step >= self.until and not asked:
                asked = True
                send(victim.supervisor, signal.SIGTERM)
            time.sleep(0.02)
        return code

    def _strike(self, strike: InjectedFault) -> bool:
        least = least_ranks(strike.kind)
        if len(self.victim.ranks()) < least:
            # No fault is possible until more ranks run
            return False
        time.sleep(strike.delay_s)
        # Ranks may have ended during the delay.
        ranks = self.victim.ranks()
        if len(ranks) < least:
            return False
        chance = random.Random(f"{strike.which} {strike.delay_s}")
        ACTIONS[strike.kind](self.victim, ranks[int(strike.which * len(ranks))], chance)
        self.struck.append(strike)
        return True


def _still_there(pids: set[int]) -> tuple[int, ...]:
    wait(lambda: not any(map(lives, pids)), _END_S)
    return tuple(sorted(filter(lives, pids)))


def rows(disturbed: DisturbedRun, undisturbed: DisturbedRun) -> Iterator[tuple[str, str]]:
    for kind in dict.fromkeys(strike.kind for strike in disturbed.struck):
        yield kind, f"{sum(strike.kind == kind for strike in disturbed.struck)} times"
    calm = account(undisturbed.metrics)
    wall_time = account(disturbed.metrics, disturbed.events, None if calm is None else calm.tokens_per_s)
    if wall_time is not None and calm is not None:
        if wall_time.pauses:
            middle = median(wall_time.pauses)
            longest = max(wall_time.pauses)
            yield "pauses", f"{len(wall_time.pauses)}: median {middle:.2f} s, longest {longest:.2f} s"
        back = sum(event.event == "resumed" and STATE_LOST in event.why for event in disturbed.events)
        yield "times that state was lost", f"{back}; {wall_time.lost_steps} steps were trained again"
        yield "moved state", f"{wall_time.moved_bytes / 1e6:,.0f} MB"
        restores = [event for event in disturbed.events if sum(event.read_bytes.values())]
        if restores:
            places = Counter[str]()
            for event in restores:
                places.update(event.read_bytes)
            sizes = ", ".join(f"{size / 1e6:,.1f} MB from {place}" for place, size in places.items())
            seconds = median(event.seconds for event in restores)
            yield "read in pieces", f"{sizes}; {len(restores)} times, median {seconds:.2f} s"
        yield "wall time", f"{wall_time.seconds:.1f} s, undisturbed {calm.seconds:.1f} s"
        stopped = f"{wall_time.paused_s:.1f} s of pauses, {wall_time.lost_s:z.1f} s of lost work"
        yield (
            "wall time by cause",
            f"{wall_time.full_s:.1f} s at full speed, {stopped}, {wall_time.slower_s:z.1f} s by slower steps",
        )
        yield (
            "goodput",
            f"{wall_time.tokens_per_s:,.0f} tokens/s, {wall_time.goodput or 0.0:.0%} of {wall_time.rate:,.0f}",
        )
    yield "steps", f"{len(disturbed.metrics)} of {len(undisturbed.metrics)}"
    yield "largest relative difference between losses", f"{disturbed.difference(undisturbed):.1e}"
    yield "processes left behind", str(len(disturbed.left))
