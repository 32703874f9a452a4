"""Recovery from a failed step, with surviving and new ranks.

    while exe.steps < 100:
        try:
            report = exe.step(batches[exe.steps])
        except (hg.RankFailure, hg.Stopped) as failure:
            hg.survive(exe, failure)

`survive` reconnects the ranks in the same processes, moves the state and chooses a strategy. Either `survive` finishes
the interrupted step, or the loop repeats it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from hydragraph.checkpoint.manifest import Damaged
from hydragraph.checkpoint.state_pieces import Pieces
from hydragraph.cluster.launch import World, join
from hydragraph.cluster.rendezvous.member import CALLED, MemberDismissed, here
from hydragraph.cluster.rendezvous.protocol import Generation
from hydragraph.cluster.rendezvous.store_registers import MemberDescription
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.engine.candidate_strategies import at_once_among, candidates_among, strategy_for
from hydragraph.engine.executable import Executable
from hydragraph.engine.state_transfer import Moved, Restore, parts
from hydragraph.engine.strategy_history import StrategyHistory
from hydragraph.errors import RankFailure, Stopped, TooFewRanks, Unsupported
from hydragraph.planner.refit import refit
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

_LOG = logging.getLogger(__name__)

_FREE_S = 1.0


@dataclass(frozen=True)
class Survived:
    """Result of a recovery; equal on all ranks except `received`, `seconds`, `read` and `finished`.

    Attributes:
        generation: number of this set of ranks, counted from 1.
        step: last step that the state includes.
        lost: previous numbers of ranks that failed.
        left: previous numbers of ranks that were asked to end.
        joined: current numbers of new ranks.
        restored: step of the checkpoint read, or None if no state was lost.
        received: bytes of state received from other ranks.
        seconds: seconds until this rank has its state.
        why: the failure's description.
        ending: reason why ranks may only save and end, or "".
        read: bytes read from pieces, by storage ("memory", "disk" or "store").
        finished: whether `survive` finished the step that raised an error on this rank.
    """

    generation: int
    step: int
    lost: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    peers: tuple[MemberDescription, ...]
    strategies: tuple[Strategy, ...]
    restored: int | None
    received: int
    seconds: float
    why: str
    ending: str = ""
    read: Mapping[str, int] = field(default_factory=dict)
    finished: bool = False


@dataclass(frozen=True)
class Checkpoints:
    """Functions that find a checkpoint after reconnection if state is lost.

    Attributes:
        newest: returns a checkpoint; all ranks use the first that is not None.
        pieces: returns this rank's pieces, which are read if newer than the checkpoint.
        set_aside: renames a damaged checkpoint; returns whether an earlier one exists.
    """

    newest: Callable[[], Path | None]
    pieces: Callable[[], Pieces | None] = lambda: None
    set_aside: Callable[[Path], bool] | None = None


class _SetAside(Exception):  # noqa: N818
    """Raised on all ranks after renaming a damaged checkpoint."""


def survive(exe: Executable, failure: BaseException | None = None, restore: Restore | None = None) -> Survived:
    """Connect surviving and new ranks, and distribute the state; all of them must call this.

    This updates `exe.world`, `exe.strategies` and `exe.steps`. Set the learning rate from `exe.steps`, which a restored
    checkpoint lowers.

    Args:
        exe: this rank's only executable; a new rank compiles it with `joining=True`.
        restore: checkpoint as for `Executable.load`, read by all ranks if state is lost.

    Raises:
        TooFewRanks: too few ranks are left; raised on all ranks, which can still save.
        RankFailure, Stopped: `failure` itself, if the ranks were not launched for recovery.
        ValueError: state is lost, and `restore` is not given.
    """
    pieces, path = (None, None) if restore is None else parts(restore)
    survived = meet_again(exe, failure, Checkpoints(lambda: path, lambda: pieces))
    if survived.ending:
        raise TooFewRanks(f"{survived.ending}: {survived.why}")
    return survived


def meet_again(
    exe: Executable, failure: BaseException | None, saved: Checkpoints, rates: Mapping[int, float] | None = None
) -> Survived:
    """Recover as `survive` does, but return instead of raising TooFewRanks.

    Args:
        rates: slowdowns by member number on the rank that monitors speeds; ranks then use the first good strategy.
            None: search for the best strategy.
    """
    member = here()
    if member is None or (isinstance(failure, Stopped) and failure.reason < CALLED):
        raise failure or ValueError(
            "survive: ranks cannot recover; pass elastic=hg.Elastic() to launch, and call survive after a step raises"
        )
    if exe.joined not in (0, member.holds):
        raise ValueError(
            "survive: the ranks have already recovered with another executable; train only one with hg.Elastic()"
        )
    began = time.monotonic()
    reasons: list[str] = []
    before = member.generation.members
    left: list[int] = []
    received = 0
    finished = False
    read: Counter[str] = Counter()
    past = exe.past.ended(exe.recent, len(before))
    # Each round forms a generation, until all ranks have the state; a rank lost during the move
    # starts another.
    while True:
        if isinstance(failure, RankFailure):
            reasons.append(str(failure).partition("; restart all ranks")[0])
        # Close communicators with lost ranks before the next generation connects.
        exe.leave()
        _free_frames(failure)
        member.progress_s = exe.progress_s
        generation = member.meet(failure)
        try:
            peers = member.peers
            moved = _move(exe, generation, peers, saved, past, rates)
        except RankFailure as again:
            failure = again
            continue
        except _SetAside:
            failure = None
            continue
        member.holds = exe.joined = generation.number
        received += moved.received
        finished |= moved.finished
        read.update(moved.read)
        # Leaving ranks have handed over their state, but belong to this generation. They end, and
        # the others meet once more.
        if not generation.leaving:
            break
        if member.number in generation.leaving:
            member.leave()
            raise MemberDismissed("this rank handed over its state because it was asked to end")
        left += generation.leaving
        reasons += [f"rank {generation.members.index(m)} was asked to end" for m in generation.leaving]
        failure = None
    exe.stopping = 0
    exe.past = replace(past, seats=tuple(peer.seat for peer in peers))
    now = generation.members
    joined = tuple(rank for rank, m in enumerate(now) if m not in before)
    came = "ranks joined" if joined else "ranks were asked to reconnect"
    # lost, left: numbers in the previous generation; joined: in the current one
    lost = tuple(rank for rank, m in enumerate(before) if m not in now and m not in left)
    # No survivor remembers the earlier generation: count its ranks from 0.
    if len(joined) == len(now) and generation.lost:
        lost = tuple(range(len(generation.lost)))
        came = "all ranks were lost"
    return Survived(
        generation=generation.number,
        step=moved.step,
        lost=lost,
        left=tuple(rank for rank, m in enumerate(before) if m in left),
        joined=joined,
        peers=peers,
        strategies=exe.strategies,
        restored=moved.restored,
        received=received,
        seconds=time.monotonic() - began,
        why="; ".join(dict.fromkeys(reasons)) or came,
        ending=generation.ending,
        read=read,
        finished=finished,
    )


def _move(
    exe: Executable,
    generation: Generation,
    peers: Sequence[MemberDescription],
    saved: Checkpoints,
    past: StrategyHistory,
    rates: Mapping[int, float] | None,
) -> Moved:
    world = join(exe.device)
    world.watch.progress_s = exe.progress_s
    seats = [peer.seat for peer in peers]
    going = [generation.members.index(m) for m in generation.leaving]
    home = home_for(exe.wanted_home, seats, going)
    with world.calling("survive"):
        # First measure unknown devices, which makes earlier measurements'
        # slowdowns obsolete.
        fresh = exe.given == "auto" and _measured(exe, world, generation, seats)
        profile = costs_for(exe.given_profile, seats, home, exe.measured_seats)
        if rates is not None and isinstance(profile, Costs) and not fresh:
            member_rates: Mapping[int, float] = next(
                (rank_rates for rank_rates in world.gather(rates) if rank_rates), {}
            )
            finite = {m: rate for m, rate in member_rates.items() if math.isfinite(rate)}
            slow = {rank: finite[m] for rank, m in enumerate(generation.members) if m in finite}
            profile = profile.changed(health=Health(slow))
        # Then choose strategies, and a checkpoint in case state is lost. New ranks may not know it,
        # so all use the first one found.
        strategies = strategies_for(exe, world, home, profile, None if rates is None else past, seats)
        pieces = saved.pieces()
        sources = world.gather((saved.newest(), pieces is not None))
        path = next((checkpoint for checkpoint, _ in sources if checkpoint is not None), None)
        # Reads are collective, so a rank without pieces also takes part.
        if pieces is None and any(has_pieces for _, has_pieces in sources):
            pieces = Pieces()
    restore: Restore | None = path
    if pieces is not None:
        restore = pieces if path is None else (pieces, path)
    try:
        return exe.move(world, home, generation.before, restore, strategies, profile)
    except ValueError as error:
        # All ranks have raised this error. If any found damage, rank 0 renames the directory.
        if path is None or saved.set_aside is None or not any(world.gather(isinstance(error, Damaged))):
            raise
        if not world.gather(world.rank == 0 and saved.set_aside(path))[0]:
            raise
        _LOG.warning("a DAMAGED checkpoint was renamed: %s; trying an earlier one", error)
        raise _SetAside from error


def _free_frames(failure: BaseException | None) -> None:
    def free() -> None:
        errors = [failure]
        # The list grows during the loop, which visits causes and contexts once.
        for error in errors:
            if error is not None:
                traceback.clear_frames(error.__traceback__)
                errors += [e for e in (error.__cause__, error.__context__) if not any(e is known for known in errors)]

    # A gloo group's destructor may block.
    thread = threading.Thread(target=free, name="hydragraph-free", daemon=True)
    thread.start()
    thread.join(_FREE_S)


def _measured(exe: Executable, world: World, generation: Generation, seats: Sequence[int]) -> bool:
    measured = next(filter(None, world.gather(exe.measured)), None)
    exe.adopt(measured)
    if measured is None and exe.given_profile is None:
        exe.measure(world, seats)
        return True
    newcomers = [rank for rank, before in enumerate(generation.before) if before is None]
    return measured is not None and bool(newcomers) and exe.measure_newcomers(world, seats, newcomers)


def seats_of_fewer(world: World) -> Sequence[int]:
    """Return each rank's seat (initial rank) if fewer ranks started than requested, else ()."""
    member = here()
    return () if member is None or world.ranks >= member.ranks else [peer.seat for peer in member.peers]


def begin_with_fewer(exe: Executable, model: nn.Module, world: World, seats: Sequence[int]) -> None:
    """Distribute the weights if fewer ranks started than requested; all ranks must call this."""
    home = home_for(exe.wanted_home, seats)
    profile = costs_for(exe.given_profile, seats, home)
    if exe.given == "auto" and exe.planning.strategies:
        exe.measured_seats = seats
        profile, strategies = exe.given_profile, exe.planning.strategies
    else:
        strategies = strategies_for(exe, world, home, profile)
    exe.begin(model, world, home, strategies, profile)


def strategies_for(
    exe: Executable,
    world: World,
    home: Home,
    profile: Profile | Costs | None,
    past: StrategyHistory | None = None,
    seats: Sequence[int] = (),
) -> tuple[Strategy, ...]:
    """Return the given strategies that fit; if none fits, return planned or adapted ones."""
    choices = exe.given
    lengths = exe.planning.lengths

    def planned() -> tuple[Strategy, ...]:
        if past is not None and isinstance(profile, Costs) and lengths:
            periods = next((history for history in world.gather(past.periods) if history), ())
            ran = replace(past, periods=periods).among(seats)
            if (immediate_strategy := at_once_among(world, exe.program, profile, lengths, ran)) is not None:
                return (immediate_strategy,)
        how = (exe.program, world.ranks, replace(exe.planning, profile=profile), home, (), exe.may_stream)
        return candidates_among(world, "auto", *how)

    if isinstance(choices, str) and choices == "auto":
        return planned()
    several = [choices] if isinstance(choices, Strategy | str) else choices
    strategies = [strategy_for(choice, exe.program) for choice in several]

    # Keep given strategies that fit; otherwise, plan for the devices, or adapt the
    # given ones (`refit`).
    def fits(strategy: Strategy) -> bool:
        try:
            exe.check(strategy, world.ranks)
        except ValueError:
            return False
        return True

    if isinstance(profile, Costs) and lengths and not any(map(fits, strategies)):
        with suppress(Unsupported):
            strategies = [strategy for strategy in planned() if fits(strategy)] or strategies
    return refit(strategies, world.ranks, exe.program.layers, fits)


def costs_for(
    given: Profile | Costs | None, seats: Sequence[int], home: Home, priced: Sequence[int] | None = None
) -> Profile | Costs | None:
    """Return costs on the ranks' devices.

    Args:
        seats: each rank's seat (initial rank). If one is not in the cluster, devices are assumed identical.
        priced: seats in `given`; default: 0, 1, ...
    """
    if not isinstance(given, Costs):
        return given
    places = list(priced or range(given.ranks))
    if not {*seats} <= {*places}:
        return given.profile
    # ranks in seats (0, 2) of costs for seats (0, 1, 2): devices 0 and 2 become ranks 0 and 1
    return given.of_ranks([places.index(seat) for seat in seats], home)


def home_for(wanted: Home, seats: Sequence[int], leaving: Sequence[int] = ()) -> Home:
    """Derive the home of ranks in `seats` (initial ranks).

    Args:
        wanted: home by seat; a seat without a share gets the average.
        leaving: ranks that must not own state.
    """
    # Without enough ranks, keep one copy; without enough nodes, copies may share a node.
    copies = wanted.copies if len(seats) - len(leaving) >= wanted.copies else 1
    nodes = None
    if wanted.nodes is not None and max(seats) < len(wanted.nodes):
        nodes = [wanted.nodes[seat] for seat in seats]
        if len({node for rank, node in enumerate(nodes) if rank not in leaving}) < copies:
            nodes = None
    if not leaving and wanted.shares is None and not wanted.buckets:
        return Home(copies=copies, nodes=nodes, rule=wanted.rule)
    bucket_shares = {name: _shares(shares, seats, leaving) for name, shares in wanted.buckets.items()}
    return Home(_shares(wanted.shares, seats, leaving), copies, bucket_shares, nodes, rule=wanted.rule)


def _shares(wanted: Sequence[float] | None, seats: Sequence[int], leaving: Sequence[int]) -> tuple[float, ...]:
    seat_shares = [1.0] * (max(seats) + 1) if wanted is None else list(wanted)
    mean = sum(seat_shares) / len(seat_shares)
    # wanted (3, 1, 2), seats [0, 2, 5], rank 1 leaves: shares 3, 2, 2 (mean), kept = (3, 0, 2)
    shares = [seat_shares[seat] if seat < len(seat_shares) else mean for seat in seats]
    kept = tuple(0.0 if rank in leaving else share for rank, share in enumerate(shares))
    equal = tuple(0.0 if rank in leaving else 1.0 for rank in range(len(seats)))
    return kept if sum(kept) > 0 else equal
