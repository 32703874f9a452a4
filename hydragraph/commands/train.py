"""`hydragraph train`: train a model, and continue after rank failures."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from hydragraph.cluster.processes.stop_requests import Interrupted, Overdue, Relay, Requests, Stopping
from hydragraph.commands.config_or_data import config_of
from hydragraph.commands.launch_process import (
    first_seen,
    launched,
    leads,
    on_ranks,
    quieten,
    restarts_by_torchrun,
    torchrun_rendezvous,
)
from hydragraph.commands.options import CommonOptions, argument, check_strategies, flag, option, set_option, verb
from hydragraph.errors import RankFailure, TooFewRanks
from hydragraph.spec.elastic import Elastic
from hydragraph.train.available_devices import RanksIfEqual, own_gpus
from hydragraph.train.config import TrainConfig

# Maximum restarts of an elastic run after losing all ranks, or one before the first step
_ALL_LOST = 3

if TYPE_CHECKING:
    from hydragraph.cluster.supervision.coordinator import RunMachines
    from hydragraph.train.run_folder import Begin
    from hydragraph.train.train_state import RunOutcome


@dataclass(frozen=True, kw_only=True)
class TrainOptions(CommonOptions):
    paths: list[Path] = argument(
        "The run's YAML file, such as examples/demo.yaml; or files and folders of data, and a Hugging Face "
        "directory: train then writes a config for them, as hydragraph init does.",
        metavar="CONFIG | DATA... [MODEL]",
        show_default=False,
    )
    to: Path = option("The file to which the config for DATA and MODEL is written.", default=Path("hydragraph.yaml"))
    resume: bool = flag("Continue from the last complete checkpoint.")
    resume_from: str | None = option(
        "Continue from this checkpoint of the run; later checkpoints are set aside.", metavar="step-N"
    )
    auto_resume: bool = flag(
        "Continue from the last complete checkpoint, or begin the run if none exists; for jobs that a "
        "scheduler restarts."
    )
    overwrite: bool = flag("Replace the run in the output folder.")
    compiled: Path | None = option(
        "Start without tracing, from this folder that hydragraph compile wrote for the config."
    )
    trust: bool = flag("Also load Inductor's code from --compiled; it runs with your permissions.")
    trace: bool = flag("Write a file for Perfetto with the times of every rank's instructions in the first steps.")
    max_restarts: int = option(
        "Number of times to continue from the last checkpoint after a rank fails; give torchrun the same number.",
        default=0,
        min=0,
    )
    store: str | None = option(
        "Members of an etcd cluster through which several machines elect a leader, so that the run survives "
        "the loss of any machine (docs/elastic.md).",
        metavar="etcd://A,B,C",
    )
    overrides: list[str] | None = set_option()

    def load(self) -> TrainConfig:
        config = config_of(self.paths, self.to, self.overrides or ())
        if self.compiled is not None:
            config = replace(config, compiled=str(self.compiled))
        return replace(config, trust=True) if self.trust else config

    def __post_init__(self) -> None:
        resume = self.begin == "resume"
        if (resume or self.auto_resume) and self.overwrite:
            raise ValueError("--resume continues a run and --overwrite replaces it: give one of them")
        if resume and self.auto_resume:
            raise ValueError("--auto-resume also begins a run, and --resume requires a checkpoint: give one of them")

    @property
    def begin(self) -> Begin:
        if self.resume or self.resume_from:
            return "resume"
        return "auto" if self.auto_resume else "overwrite" if self.overwrite else "new"

    @property
    def step(self) -> int | None:
        return None if self.resume_from is None else read_step(self.resume_from, "--resume-from")


@verb
def train_command(options: TrainOptions) -> None:
    """Train a model, and write metrics, checkpoints, a picture and the final model to the run folder.

    Example: hydragraph train chats.jsonl models/Qwen2.5-0.5B writes hydragraph.yaml, plans for your devices and trains;
    hydragraph train hydragraph.yaml trains with this file after you have changed it.
    """
    if options.store is not None and launched():
        os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    # Find all errors before any process starts.
    config = surviving(options.load(), options.store)
    if not (launched() or config.automatic):
        check_strategies(config.strategies, config.model, config.ranks)
    nodes = _nodes(config, options.store)
    if nodes is None and launched() and os.environ.get("LOCAL_WORLD_SIZE") == "1" and config.automatic:
        _print_idle(own_gpus(config.device))
    # Without an election, machine 0 leads; others only start and watch ranks.
    if nodes is not None and nodes.number and nodes.election is None:
        from hydragraph.cluster.launch import follow

        follow(nodes, _print)
        return
    # A relay forwards stop requests to this process's ranks.
    relay = None if (launched() and nodes is None) or config.ranks == 1 else Relay()
    overdue = partial(_overdue, config)
    stopping = Stopping(config.grace_s, relay=relay, overdue=overdue)
    if config.elastic.survives and launched() and nodes is None and leads():
        _print(
            "elastic: the launcher ends all ranks when one is lost: to survive a loss, let the launcher start one "
            "process per machine (--nproc-per-node 1)"
        )

    def train(nodes: RunMachines | None) -> RunOutcome:
        with stopping:
            return _train(options, config, stopping, relay, nodes)

    try:
        # Train here, or on all machines while this one leads.
        elected = nodes is not None and nodes.election is not None
        outcome = _train_when_elected(nodes, train) if nodes is not None and elected else train(nodes)
    except Interrupted as request:
        _print("stopped before training started or resumed: the run's folder is unchanged")
        raise typer.Exit(_code(request.signal)) from None
    except Overdue:
        _print(f"hydragraph: {overdue()}")
        raise typer.Exit(1) from None
    if outcome is None:
        return
    if outcome.stopped:
        if elected or leads():
            _print_stop(outcome, config)
        raise typer.Exit(_code(stopping.signal or outcome.stopped))
    if outcome.history:
        _print_events(outcome)
        first, last = outcome.history[0], outcome.history[-1]
        where = f"all results are in {outcome.folder.path}"
        _print(f"loss {first.loss:.4f} -> {last.loss:.4f} in {last.step} steps; {where}")


def _print_idle(gpus: int) -> None:
    if gpus > 1:
        _print(
            f"this machine has {gpus} GPUs, but 1 rank: set elastic.min_ranks to 1 and omit 'ranks', or start "
            f"{gpus} processes per machine"
        )


def surviving(config: TrainConfig, store: str | None = None) -> TrainConfig:
    """Default `elastic.min_ranks` to 1 if this process starts ranks that can survive the loss of others."""
    keys = config.elastic
    if keys.survives or keys.min_ranks is not None or config.ranks == 1:
        return config
    # Under a launcher, start ranks only if it starts one process per machine.
    starts = config.measures
    if launched():
        alone = os.environ.get("LOCAL_WORLD_SIZE", "1" if store else "") == "1"
        more = config.ranks > int(os.environ["WORLD_SIZE"])
        starts = alone and (config.measures or more) and (store is not None or "MASTER_ADDR" in os.environ)
    return replace(config, elastic=replace(keys, min_ranks=1)) if starts else config


def read_step(text: str, option: str) -> int:
    number = text.removeprefix("step-")
    if not number.isdecimal():
        raise ValueError(f"{option} {text!r}: name a checkpoint by its step, such as step-40")
    return int(number)


def _code(number: int) -> int:
    return 128 + signal.SIGINT if number == signal.SIGINT else 0


def _train_when_elected(nodes: RunMachines, train: Callable[[RunMachines], RunOutcome]) -> RunOutcome | None:
    from hydragraph.cluster.launch import follow
    from hydragraph.cluster.supervision.election import LeadershipLost

    assert nodes.election is not None
    # `follow` returns when this machine is elected, or None at the run's end.
    while (leading := follow(nodes, _print)) is not None:
        _print(f"machine {nodes.number} leads (term {nodes.election.standing.lease.term})")
        try:
            outcome = train(leading)
        except LeadershipLost as error:
            _print(f"hydragraph: this machine ends its ranks and follows the next leader: {error}")
            nodes.election.resign()
        except BaseException as error:
            nodes.election.end(f"{type(error).__name__}: {error}")
            raise
        else:
            nodes.election.end()
            return outcome
    return None


def _train(
    options: TrainOptions, config: TrainConfig, stopping: Stopping, relay: Relay | None, nodes: RunMachines | None
) -> RunOutcome:
    from hydragraph.train.run_folder import RunFolder

    folder = RunFolder(Path(config.output))
    before = folder.began if nodes is None or nodes.election is None else nodes.election.before
    begin = options.begin
    step = options.step
    restarts = options.max_restarts
    if nodes is not None and nodes.handed is not None:
        # Remedy if no rank is left
        begin, step = folder.again(begin, before, step)
    elif restarts and (earlier := restarts_by_torchrun()) is not None and earlier <= restarts:
        before = first_seen(before)
        begin, step = folder.again(begin, before, step)
    elif relay is not None or not launched():
        folder.check(config, begin, step)
        folder.refuse_shared()
    lost = _ALL_LOST if config.elastic.survives else 0
    while True:
        try:
            if relay is None:
                return train_rank(config, begin, step, options.trace, stopping)
            where = "this machine" if nodes is None or nodes.count == 1 else f"{nodes.count} machines"
            if nodes is None or nodes.handed is None:
                ranks = "the" if isinstance(config.ranks, RanksIfEqual) else config.ranks
                _print(f"starting {ranks} ranks on {where}: each rank first imports PyTorch and transformers")
            again = (Exception,) if restarts else (RankFailure,) if lost else ()
            restartable_nodes = replace(nodes, again=again) if nodes is not None else None
            work = (config.ranks, train_rank, config, begin, step, options.trace)
            return on_ranks(*work, relay=relay, elastic=_elastic(config), nodes=restartable_nodes)
        except (ValueError, OSError, ImportError, FloatingPointError):
            # A restart would fail too, or another machine leads
            raise
        except Exception as error:
            if stopping.signal and isinstance(error, RankFailure) and "SIGTERM" in error.error:
                # The failed rank could not handle the signal yet
                raise Interrupted(stopping.signal) from None
            nodes = None if nodes is None else replace(nodes, handed=None)
            left = max(restarts, lost) if isinstance(error, RankFailure) else restarts
            if left == 0 or relay is None or stopping.signal or isinstance(error, TooFewRanks):
                raise
            restarts = max(0, restarts - 1)
            lost = max(0, lost - 1)
            begin, step = folder.again(begin, before, step)
            last = folder.last()
            where = "the start" if last is None else str(last.path)
            print(f"hydragraph: {error}; continuing from {where}", file=sys.stderr)


def _nodes(config: TrainConfig, store: str | None) -> RunMachines | None:
    several = config.elastic.survives and launched() and config.ranks > 1
    if not several and store is None:
        return None
    from hydragraph.cluster.supervision.coordinator import nodes_of

    nodes = nodes_of(os.environ, elected=store is not None) if several else None
    if nodes is None:
        if store is None:
            return None
        raise ValueError(
            f"--store {store} is for several machines: set 'elastic: {{copies: 2}}', and start one process per machine "
            "with torchrun (--nproc-per-node 1), or with RANK and WORLD_SIZE set"
        )
    if config.ranks < nodes.count:
        raise ValueError(
            f"'ranks' is {config.ranks}, but there are {nodes.count} machines: set at least one rank per machine"
        )
    nodes = replace(nodes, devices=max(own_gpus(config.device), 1), fills=isinstance(config.ranks, RanksIfEqual))
    return nodes if store is None else _electing(config, nodes, store)


def _electing(config: TrainConfig, nodes: RunMachines, store: str) -> RunMachines:
    from hydragraph.cluster.interface import own_address
    from hydragraph.cluster.supervision.election import Election
    from hydragraph.cluster.supervision.etcd_register import register_of
    from hydragraph.train.run_folder import RunFolder

    if (backend := torchrun_rendezvous()) not in ("", "static"):
        raise ValueError(
            f"--store {store}: torchrun --rdzv-backend {backend} ends the run on all machines when one is lost: use "
            "the static rendezvous (--node-rank, --master-addr and --master-port)"
        )
    register = register_of(store, str(Path(config.output).resolve()), nodes.number)
    address = own_address(host for host, _ in register.endpoints)
    # Read this before any leader begins a run
    before = RunFolder(Path(config.output)).began
    return replace(nodes, address=address, election=Election(register, nodes.number, before))


def _elastic(config: TrainConfig) -> Elastic | None:
    keys = config.elastic
    if not keys.survives:
        return None
    return Elastic(keys.min_ranks or 1, keys.spares, keys.rejoin, config.grace_s, config.progress_s)


def train_rank(
    config: TrainConfig, begin: Begin, step: int | None, trace: bool, stopping: Requests | None = None
) -> RunOutcome:
    """Train on this rank; without `stopping`, the launching process forwards stop requests."""
    from hydragraph.cluster.rendezvous.member import LauncherRequests, elastic, here
    from hydragraph.engine import api
    from hydragraph.train.loop import train
    from hydragraph.train.progress_line import Screen

    if stopping is None and elastic():
        stopping = LauncherRequests()
    if stopping is None:
        with Stopping(config.grace_s, led=True) as stopping:
            return train_rank(config, begin, step, trace, stopping)
    if (member := here()) is not None and isinstance(config.ranks, RanksIfEqual):
        config = replace(config, ranks=member.ranks)
    quieten()
    with Screen(Console(stderr=True)) as screen:
        return train(config, begin, api.compile, screen, trace, step, stopping)


def _overdue(config: TrainConfig) -> str:
    from hydragraph.train.run_folder import RunFolder

    stays = RunFolder(Path(config.output)).how_to_go_on
    return f"a step and a save took longer than grace_s ({config.grace_s:g}), so the run ended without saving; {stays}"


def _print_stop(outcome: RunOutcome, config: TrainConfig) -> None:
    last = outcome.folder.last()
    if last is None:
        _print("stopped before the first step: no checkpoint was needed")
    else:
        of = f" of {config.steps}" if config.epochs is None else ""
        _print(f"stopped after step {last.step}{of}, saved in {last.path}: continue with --resume")


def _print_events(outcome: RunOutcome) -> None:
    from hydragraph.commands.text_table import new_table
    from hydragraph.train.goodput import account
    from hydragraph.train.stragglers.run_events import read_events

    every = read_events(outcome.folder.events)
    events = [event for event in every if event.event != "saved"]
    if all(event.event == "resumed" and not event.lost_steps for event in events):
        return
    headings = ("step", "event", "ranks", "why")
    table = new_table("Lost, slow and new ranks", headings, left=headings)
    for event in events:
        table.add_row(str(event.step), event.title, " ".join(map(str, event.ranks)), Text(event.why))
    console = Console(stderr=True)
    console.print(table)
    wall_time = account(outcome.history, every)
    if wall_time is None:
        return
    part = "" if wall_time.goodput is None else f" ({wall_time.goodput:.0%} of the undisturbed {wall_time.rate:,.0f})"
    _print(
        f"goodput: {wall_time.tokens_per_s:,.0f} tokens/s over {wall_time.seconds:,.1f} s{part}: "
        f"{wall_time.paused_s:.3g} s of pauses, {wall_time.lost_s:z.1f} s of lost work, "
        f"{wall_time.slower_s:z.1f} s of slower steps; "
        f"all events are in {outcome.folder.events}"
    )


def _print(sentence: str) -> None:
    Console(stderr=True).print(sentence, markup=False, highlight=False, soft_wrap=True)
