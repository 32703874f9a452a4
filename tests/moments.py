"""Ranks that kill or stop themselves at every moment: python -m tests.moments --count 100 --seed 7 [--copies 1]

A strike happens at a call of one of hydragraph's functions, or a call made by them, counted from the beginning of a
window of training: a step, the start of a move of state during a step, a save, recovery after a loss, making room for a
newcomer, or joining as one. The rank that makes this call really kills or stops itself. Another process takes its
place, and the next strike follows, until all have hit. Then every loss of any process must equal that of the run
without strikes, bit for bit, and no process may remain.

How many calls a window has is counted in a first run, whose strikes come when their windows end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.cluster.rendezvous.member import comes_late, here
from hydragraph.runtime.state_movement import carry
from tests.models import llama, sequences
from tests.ready import Ready

RANKS = 4
TEXTS = ("2*<tp1,pp2>", "3*<tp1,pp1>", "2*<tp1,pp1>", "<tp1,pp1>")
PROGRESS_S = 8.0  # a rank without progress for this long hangs
LIMIT_S = 60.0  # for a strike and what follows from it
SAVES = 4  # steps between two
NEVER = 1 << 60  # calls: a strike comes when its window ends

How = Literal["kill", "stop", "hang"]
Window = Literal["step", "move", "save", "recover", "room", "join"]
WINDOWS: tuple[Window, ...] = get_args(Window)
AFTER_A_LOSS = ("recover", "room", "join")  # opened by another rank's end


@dataclass(frozen=True)
class Strike:
    """Fault that a rank applies to itself.

    Attributes:
        window: what it is doing then.
        call: which one, from 1, of those that are made within it; if it has fewer, its end.
        rank: of the ranks there are then, modulo their number; a newcomer is whoever comes.
        how: it is killed, it is stopped, or it lives and hangs.
        at: only calls of functions of this name count; "": all do.
        also: the rank across does the same, at the same call: some part has only these owners, among all ranks.
    """

    window: str
    call: int
    rank: int
    how: How = "kill"
    at: str = ""
    also: bool = False


@dataclass(frozen=True)
class Plan:
    """Faults of one training run.

    Attributes:
        strikes: in turn.
        folder: where ranks write what they have seen, and what has hit.
        copies: how many owners everything has.
        steps: that it has at least; a few follow the last strike.
        opened: windows that only another rank's end opens.
    """

    strikes: tuple[Strike, ...]
    folder: Path
    copies: int = 2
    steps: int = 0
    opened: tuple[str, ...] = AFTER_A_LOSS

    def open(self, rank: int, ranks: int) -> None:
        """End this rank, if that is what the next strike waits for: not the one that strikes itself then."""
        number, strike = self.next()
        waits = strike is not None and strike.window in self.opened and rank == (strike.rank + 1) % ranks
        if waits and self.claim(f"opened-{number}", ""):
            os.kill(os.getpid(), signal.SIGKILL)

    def next(self) -> tuple[int, Strike | None]:
        """Return the first strike that has not hit."""
        for number, strike in enumerate(self.strikes):
            if not (self.folder / f"hit-{number}").exists():
                return number, strike
        return len(self.strikes), None

    def last(self, step: int) -> int:
        """Return the last step, as it stands after one: a few follow the last strike."""
        if self.next()[1] is not None:
            return NEVER
        self.claim("last", str(max(step + 3, self.steps)))
        return int((self.folder / "last").read_text() or NEVER)

    def claim(self, name: str, text: str) -> bool:
        """Write a file that only one process can write."""
        try:
            file = os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(file, text.encode())
        os.close(file)
        return True


@contextmanager
def window(plan: Plan, which: str, rank: int | None, ranks: int) -> Iterator[None]:
    """Strike this process inside, if it is its turn."""
    number, strike = plan.next()
    mine = strike is not None and strike.window == which and rank in (None, *_struck(strike, ranks))
    if which not in plan.opened:
        mine = mine and ranks > 2  # two are left, at least
        mine = mine and (ranks == RANKS or not strike.also)  # of three, one may own everything
    elif mine:
        mine = (plan.folder / f"opened-{number}").exists()
    if strike is None or not mine:
        yield
        return
    seen = 0
    claims = ("hit", "also") if strike.also else ("hit",)

    def hit(where: str) -> None:
        sys.setprofile(None)
        if any(plan.claim(f"{each}-{number}", json.dumps([which, seen, where])) for each in claims):
            if strike.how != "hang":
                os.kill(os.getpid(), signal.SIGSTOP if strike.how == "stop" else signal.SIGKILL)
            while True:  # a stop takes effect a little later
                time.sleep(60)

    def called(frame: FrameType, event: str, what: Any) -> None:
        nonlocal seen
        counts = frame.f_code.co_name == strike.at and event == "call" if strike.at else event in ("call", "c_call")
        if counts and frame.f_globals.get("__name__", "").startswith("hydragraph."):
            seen += 1
            if seen == strike.call:
                hit(f"{frame.f_globals['__name__']}:{frame.f_lineno} {frame.f_code.co_name}")

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)
        hit("its end")


def _struck(strike: Strike, ranks: int) -> tuple[int, ...]:
    # Neighbours own no part alone in most homes of `home_of`; ranks across do in all.
    return tuple((strike.rank + more * (ranks // 2)) % ranks for more in range(1 + strike.also))


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an optimizer with state per element."""
    return torch.optim.AdamW(named, lr=1e-2)


def batch(step: int) -> list[Tensor]:
    """Return a step's mini-batch."""
    return sequences([20, 7, 33, 1, 12, 5], seed=step)


def home_of(step: int, ranks: int, copies: int) -> hg.Home:
    """Return who is to own the state at a step: others than at the one before."""
    return hg.Home([1.0 + (3 * rank + step) % 4 for rank in range(ranks)], copies=min(copies, ranks))


def train(prepared: Ready, plan: Plan) -> int:
    """Train, apply this rank's strikes, continue; return the number of steps done."""
    comes = comes_late()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydragraph.engine.state_transfer.carry", partial(carry, chunk=16_384))  # many messages
        patch.setattr("hydragraph.engine.live_reshard.CHUNK", 16_384)
        with window(plan, "join", None, 1) if comes else nullcontext():
            exe = prepared.executable(
                list(TEXTS), adamw, home=hg.Home(copies=plan.copies), deterministic=True, progress_s=PROGRESS_S
            )
        promised: dict[int, list[Tensor]] = {}  # by how many steps there are before it
        while True:
            try:
                if not one_more(plan, exe, promised):
                    break
            except (hg.RankFailure, hg.Stopped) as failure:
                promised.clear()
                opened: Window = "room" if isinstance(failure, hg.Stopped) else "recover"
                with window(plan, opened, exe.rank, exe.ranks):
                    survived = hg.survive(exe, failure, restore=plan.folder / "saved")
                if survived.restored is not None:
                    plan.claim(f"restored-{survived.generation}", "")
    exe.close()
    return exe.steps


def one_more(plan: Plan, exe: hg.Executable, promised: dict[int, list[Tensor]]) -> bool:
    """Train one step more, with all that is between two, and wait for newcomers; False where it was the last.

    Every second step is promised, without any other call before it.
    """
    saved, told = plan.folder / "saved", plan.folder / f"told-{os.getpid()}"
    with exe.world.calling("train"):
        if exe.steps >= exe.world.gather(plan.last(exe.steps))[0]:
            return False
        if exe.ranks == RANKS:
            plan.open(exe.rank, exe.ranks)
        at = exe.steps
        given = promised.pop(at, None)
        if given is None:
            if not saved.exists() or at % SAVES == 0:
                with window(plan, "save", exe.rank, exe.ranks):
                    exe.save(saved)
            with window(plan, "move", exe.rank, exe.ranks):
                exe.rehome(home_of(at, exe.ranks, plan.copies))
            given = batch(at)
        if at % 2 == 0:
            exe.promise(promised.setdefault(at + 1, batch(at + 1)))
        with window(plan, "step", exe.rank, exe.ranks):
            report = exe.step(given)
        with told.open("a") as file:
            file.write(f"{report.step} {report.loss.hex()}\n")
        wait_for_all(plan, exe)
    return True


def wait_for_all(plan: Plan, exe: hg.Executable) -> None:
    """Wait until there are as many ranks as at first, before the next strike."""
    member = here()
    while member is not None and exe.ranks < RANKS and not exe.world.gather(plan.next()[1] is None)[0]:
        if any(exe.world.gather(member.called)):
            raise hg.Stopped(1000)
        time.sleep(0.02)


def drawn(
    count: int, seed: int, calls: Mapping[Window, int], windows: Sequence[Window], hows: Sequence[How]
) -> list[Strike]:
    """Draw strikes, of all windows alike.

    Args:
        count, seed: how many; what they depend on.
        calls: that a window has.
        windows, hows: to draw from.
    """
    chance = random.Random(seed)
    kinds = [windows[number % len(windows)] for number in range(count)]
    chance.shuffle(kinds)
    ended = [how for how in hows if how != "hang"] or ["kill"]  # a hung newcomer is not awaited
    return [
        Strike(
            each,
            chance.randint(1, calls[each]),
            chance.randrange(RANKS),
            chance.choice(ended if each == "join" else hows),
        )
        for each in kinds
    ]


@dataclass(frozen=True)
class Came:
    """Result of a training run.

    Attributes:
        losses: by step, all that any process has seen of it.
        hits: by strike, its window, the call that it came at, and where that was.
        error: what it ended with; "": it came to its end.
        seconds: that it took.
    """

    losses: Mapping[int, set[str]]
    hits: Mapping[int, tuple[str, int, str]]
    error: str
    seconds: float


def run(prepared: Ready, plan: Plan) -> Came:
    """Train in processes of their own."""
    limit = timedelta(seconds=LIMIT_S * (2 + len(plan.strikes)))
    began, error = time.monotonic(), ""
    try:
        hg.launch(train, RANKS, prepared, plan, timeout=limit, elastic=hg.Elastic(progress_s=PROGRESS_S))
    except (RuntimeError, ValueError, TimeoutError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    losses: dict[int, set[str]] = {}
    for file in plan.folder.glob("told-*"):
        for line in file.read_text().splitlines():
            step, loss = line.split()
            losses.setdefault(int(step), set()).add(loss)
    hits = {int(file.name[4:]): tuple(json.loads(file.read_text())) for file in plan.folder.glob("hit-*")}
    return Came(losses, hits, error, time.monotonic() - began)


def ready() -> Ready:
    """Return what is trained."""
    return Ready.of(llama(layers=2), list(TEXTS))


def wrong(plan: Plan, came: Came, calm: Came) -> list[str]:
    """Say what is not as promised."""
    problems = [came.error] if came.error else []
    missing = [number for number in range(len(plan.strikes)) if number not in came.hits]
    if missing:
        problems.append(f"strikes {missing} never hit: {plan.strikes[missing[0]]}")
    steps = max(came.losses, default=0)
    if sorted(came.losses) != list(range(1, steps + 1)):
        problems.append(f"steps are missing of {steps}")
    problems += [f"the losses of step {step} differ: {came.losses[step]}" for step in came.losses
                 if step in calm.losses and came.losses[step] != calm.losses[step]]  # fmt: skip
    return problems


def counted(prepared: Ready, folder: Path, windows: Sequence[Window]) -> dict[Window, int]:
    """Return how many calls each window has, by strikes that come when they end."""
    folder.mkdir()
    came = run(prepared, Plan(tuple(Strike(each, NEVER, 1) for each in windows), folder))
    if came.error or len(came.hits) < len(windows):
        raise RuntimeError(f"strikes at the ends of windows: {came.error}; {came.hits}")
    return {each: came.hits[number][1] for number, each in enumerate(windows)}


def main() -> None:
    """Strike, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="strikes")
    parser.add_argument("--seed", type=int, default=0, help="of the windows, the calls and the ranks")
    parser.add_argument("--copies", type=int, default=2, help="owners of everything; 1: from the checkpoint")
    parser.add_argument("--windows", default=",".join(WINDOWS), help="to draw from")
    parser.add_argument("--keep", type=Path, help="keep what ranks have written here")
    parser.add_argument("--how", default=",".join(["kill"] * 8 + ["stop", "hang"]), help="to draw from")
    chosen = parser.parse_args()
    windows: list[Window] = [each for each in WINDOWS if each in chosen.windows.split(",")]
    prepared = ready()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="hydragraph-moments-") as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        calls = counted(prepared, folder / "counted", windows)
        (folder / "struck").mkdir()
        strikes = drawn(chosen.count, chosen.seed, calls, windows, chosen.how.split(","))
        plan = Plan(tuple(strikes), folder / "struck", chosen.copies)
        came = run(prepared, plan)
        (folder / "calm").mkdir()
        calm = run(prepared, Plan((), folder / "calm", chosen.copies, max(came.losses, default=0)))
    table = Table(title=f"{chosen.count} strikes, seed {chosen.seed}, copies {chosen.copies}, load {load:.1f}")
    for heading in ("window", "calls", "strikes", "hit within", "at its end", "stopped", "hung"):
        table.add_column(heading, justify="left" if heading == "window" else "right")
    for each in windows:
        mine = [number for number, strike in enumerate(strikes) if strike.window == each]
        ends = sum(came.hits[number][2] == "its end" for number in mine if number in came.hits)
        within = sum(number in came.hits for number in mine) - ends
        hows = [sum(strikes[number].how == how for number in mine) for how in ("stop", "hang")]
        table.add_row(each, str(calls[each]), *map(str, (len(mine), within, ends, *hows)))
    Console(width=120).print(table)
    print(f"{max(came.losses, default=0)} steps in {came.seconds:.0f} s")
    problems = wrong(plan, came, calm)
    for problem in problems:
        print(f"not as promised: {problem}")
    if not problems:
        print("every loss is, bit for bit, that of the run without strikes")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
