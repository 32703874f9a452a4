"""Continuation of a run after ranks are lost, leave or join."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydragraph.cluster.rendezvous.member import here
from hydragraph.cost.costs import Costs
from hydragraph.data.atomic_write import write_whole
from hydragraph.engine.recovery import Checkpoints, Survived, meet_again
from hydragraph.spec.health import Health
from hydragraph.train.callbacks import Callbacks
from hydragraph.train.config import TrainConfig
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.run_saving import checkpoint, forget_unsaved, saves_after, set_hyperparameters
from hydragraph.train.step_metrics import read_metrics
from hydragraph.train.step_reporting import log_step, open_log, peak_of, tell
from hydragraph.train.straggler_file import read_slow
from hydragraph.train.straggler_setup import controller_of, follows
from hydragraph.train.stragglers.controller import Controller
from hydragraph.train.stragglers.lateness import Lateness
from hydragraph.train.stragglers.run_events import STATE_LOST, RunEvent
from hydragraph.train.train_state import Run, TrainState, ahead_of

# Maximum wait for a lost rank to release the folder, in seconds
TAKEOVER_S = 5.0
# The same if disconnected machines have ended their ranks
_FENCED_S = 1.0


def go_on(run: Run, state: TrainState, failure: BaseException | None, owned: ExitStack) -> tuple[Run, str]:
    """Return the run of remaining and joining ranks, and why it must end ("" if it continues)."""
    config, folder, executor = run.config, run.folder, run.executor
    watching = run.controller
    # before: number of ranks before this recovery, or before an earlier interrupted one.
    before = len(state.untold[-1][0].peers) if state.untold else run.world.ranks

    def newest() -> Path | None:
        last = folder.last_whole()
        return None if last is None else last.path

    def set_aside(damaged: Path) -> bool:
        return any(folder.replace_damaged(each) for each in folder.all() if each.path == damaged)

    # Meet the other ranks; restore lost ranks' state from copies or a checkpoint.
    rates = _known_rates(run, state) if _soon(config) else None
    met = run.joined or (lambda: run)
    survived = meet_again(executor, failure, Checkpoints(newest, lambda: met().pieces, set_aside), rates)
    run = met()
    forget_unsaved(run)
    world = executor.world
    # last: the last trained step; steps after the restored one are lost.
    turns = () if config.plan.choose else survived.strategies
    last, idle_s = state.done, 0.0
    # All earlier ranks are lost
    if last < 0 and world.rank == 0:
        before, (last, idle_s) = len(survived.lost), _written(folder)
    lost_to = None if survived.restored is None else last
    run = replace(run, world=world, strategies=turns, controller=None, watcher=None)
    # From here on, another rank may fail: `untold` keeps this recovery for the next report.
    state.untold.append((survived, before))
    with world.calling("continue"):
        if survived.restored is not None:
            set_hyperparameters(executor, run.settings)
        run = replace(run, peak_flops_per_s=peak_of(config, world))
        trace_anew(run)
        if world.rank == 0:
            run = lead(run, state, survived, owned, watching)
        elif watching is not None:
            watching.close()
        # All ranks continue after the same step and position in the data.
        state.done = survived.step
        state.began = folder.began
        _find_position(run, state)
        _write_down(run, state)
        write_run_ranks(run)
        moved = sum(world.gather(survived.received))
        read: Counter[str] = Counter()
        for bytes_read in world.gather(survived.read):
            read.update(bytes_read)
        # The gathers above succeeded on all ranks: report these recoveries once.
        meetings = state.untold
        state.untold = []
        took = max(world.gather(paused(meetings, world.rank)))
        if run.watcher is not None:
            for event in (*changes_of(meetings), resumed(meetings, world.ranks, lost_to, moved, took or idle_s, read)):
                tell(run, event)
        if not survived.ending and _unsaved(run, state):
            checkpoint(run, state)
    return run, survived.ending


def trace_anew(run: Run) -> None:
    if any(run.world.gather(run.executor.spans is not None)):
        run.executor.spans = []
        run.traced.clear()


def _known_rates(run: Run, state: TrainState) -> dict[int, float]:
    if run.controller is not None:
        health = run.controller.health
        return {run.watched[rank]: health.rate(rank) for rank in health}
    if not run.config.watches:
        return {}
    slow = read_slow(run.folder, state.began)
    late = Lateness(
        learned={member: straggler.learned for member, straggler in slow.items() if straggler.learned is not None}
    )
    health = late.planned(Health({member: straggler.rate for member, straggler in slow.items() if straggler.rate > 1}))
    return {member: health.rate(member) for member in health}


def _soon(config: TrainConfig) -> bool:
    return config.replans and not config.elastic.dry_run


def lead(run: Run, state: TrainState, survived: Survived, owned: ExitStack, watching: Controller | None) -> Run:
    """Make this rank the leading rank; `watching` is its previous controller."""
    log = run.log
    if not state.owns:
        member = here()
        patience_s = _FENCED_S if member is not None and member.fenced else TAKEOVER_S
        owned.enter_context(run.folder.taken_over(patience_s, state.began))
        state.owns = True
    if log is None:
        if state.callbacks is None:
            state.callbacks = Callbacks.load(run.config.callbacks)
            owned.enter_context(state.callbacks.started(run.config))
        run = replace(run, callbacks=state.callbacks)
    # An interrupted recovery may have closed the log.
    if log is None or log.closed or survived.restored is not None:
        if log is not None:
            log.__exit__(None, None, None)
        log = owned.enter_context(open_log(run.folder, survived.step, state.watcher))
        state.watcher.started(survived.step, run.config.steps)
    run = replace(run, log=log, watcher=state.watcher)
    if run.config.watches or follows(run.config, run.executor):
        hurried = _soon(run.config) and isinstance(run.executor.profile, Costs)
        members = tuple(peer.member for peer in survived.peers)
        # numbers: old rank -> new rank, of remaining ranks. slow: new rank -> its slowdown.
        numbers = {before: members.index(m) for before, m in enumerate(run.watched) if m in members}
        written = read_slow(run.folder, run.folder.began) if watching is None else {}
        slow = {members.index(m): straggler for m, straggler in written.items() if m in members}
        controller = controller_of(run.config, run.world, run.executor, watching, numbers, hurried, slow)
        owned.callback(controller.close)
        run = replace(run, controller=controller, watched=members)
    return run


def _find_position(run: Run, state: TrainState) -> None:
    # Ranks that trained this step know the position; joining ranks do not.
    positions = run.world.gather(state.positions.get(state.done))
    position = next((rank_position for rank_position in positions if rank_position is not None), None)
    if position is None:
        state.batches = state.anew()
        # If none remains, draw the finished steps' mini-batches again.
        for _ in range(state.done):
            next(state.batches)
        position = dict(state.batches.state_dict())
    state.batches.load_state_dict(dict(position))
    state.positions = {step: at for step, at in state.positions.items() if step < state.done}
    state.positions[state.done] = position
    state.coming = ahead_of(run, state.batches)


def _write_down(run: Run, state: TrainState) -> None:
    # A leading rank may be lost between the update and the log.
    missing = run.log is not None and (run.log.history[-1].step if run.log.history else 0) < state.done
    mine = state.last if state.last is not None and state.last[0] == state.done else None
    gathered = run.world.gather((missing, mine))
    last = next((step_report for _, step_report in gathered if step_report is not None), None)
    if gathered[0][0] and last is not None:
        # The report uses old rank numbers, unknown to the new controller.
        log_step(replace(run, controller=None), *last)


def _unsaved(run: Run, state: TrainState) -> bool:
    """Return whether the last step's checkpoint is due but missing; all ranks must call this."""
    last = run.folder.last() if run.world.rank == 0 else None
    there = run.world.gather(-1 if last is None else last.step)[0]
    state.saved = max(there, 0)
    state.kept = there >= 0
    due = saves_after(run, state.done)
    return there < state.done and state.done > 0 and due


def write_run_ranks(run: Run) -> None:
    """Write each rank's process, host and device to `ranks.json`; all ranks must call this."""
    world = run.world
    place = {"rank": world.rank, "pid": os.getpid(), "host": socket.gethostname(), "device": str(world.device)}
    places = world.gather(place)
    if run.log is not None:
        write_whole(run.folder.ranks, json.dumps(places) + "\n")


def changes_of(told: Sequence[tuple[Survived, int]]) -> Iterator[RunEvent]:
    for survived, before in told:
        step = survived.step
        now = len(survived.peers)
        if survived.lost:
            yield RunEvent(step, "fault", survived.lost, 0.0, survived.why)
        if survived.left:
            yield RunEvent(
                step, "leave", survived.left, 0.0, f"these ranks handed over their state before ending: {survived.why}"
            )
        if survived.joined:
            yield RunEvent(step, "join", survived.joined, 0.0, f"the run had {before} ranks and now has {now}")


def paused(told: Sequence[tuple[Survived, int]], rank: int) -> float:
    return sum(survived.seconds for survived, _ in told if rank not in survived.joined)


def _written(folder: RunFolder) -> tuple[int, float]:
    with suppress(FileNotFoundError):
        done = [metrics.step for metrics in read_metrics(folder.metrics)[-1:]]
        return done[0] if done else 0, max(0.0, time.time() - folder.metrics.stat().st_mtime)
    return 0, 0.0


def resumed(
    told: Sequence[tuple[Survived, int]],
    ranks: int,
    undone: int | None,
    moved: int,
    seconds: float,
    read: Mapping[str, int],
) -> RunEvent:
    """Return the "resumed" event; `undone` is the last step trained before ranks returned to a checkpoint."""
    survived, _ = told[-1]
    step = survived.step
    strategies = " or ".join(map(str, survived.strategies))
    state = f"all state was kept, and {moved / 1e6:.3g} MB moved"
    lost = 0
    if survived.restored is not None:
        lost = 0 if undone is None else max(0, undone - survived.restored)
        redone = "" if undone is None else f", {lost} steps earlier"
        places = ", ".join(f"{size / 1e6:.3g} MB from {place}" for place, size in read.items() if size)
        source = f" (read in pieces: {places})" if places else ""
        state = f"{STATE_LOST}, so all ranks returned to the checkpoint after step {survived.restored}{redone}{source}"
    why = f"{ranks} ranks continue after step {step} with {strategies}; {state}"
    numbers: dict[str, Any] = {"lost_steps": lost, "moved_bytes": moved, "read_bytes": dict(read)}
    return RunEvent(step, "resumed", tuple(range(ranks)), seconds, why, **numbers)
