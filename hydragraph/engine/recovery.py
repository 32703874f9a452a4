"""Going on with the ranks that are left, and with those that have come: what a training loop calls where a step raises.

    while exe.steps < 100:
        try:
            report = exe.step(batches[exe.steps])
        except (hg.RankFailure, hg.Stopped) as failure:
            hg.survive(exe, failure)

The ranks meet again in the same processes (`runtime.meeting`), the state moves to where it lives among them
(`Executable.move`), a strategy is chosen that fits them, and the step that was under way is repeated or finished.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hydragraph.cluster.launch import World, join
from hydragraph.cluster.rendezvous.member import CALLED, Dismissed, Member, here
from hydragraph.cluster.rendezvous.protocol import Generation
from hydragraph.cluster.rendezvous.store_registers import Peer
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.engine.candidate_strategies import at_once_among, candidates_among, strategy_for
from hydragraph.engine.executable import Executable
from hydragraph.engine.strategy_history import Past
from hydragraph.errors import RankFailure, Stopped, TooFewRanks, Unsupported
from hydragraph.planner.refit import refit
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True)
class Survived:
    """How ranks went on; equal on all but for `received` and `seconds`.

    Attributes:
        generation: which set of ranks this is, counted from 1.
        step: the last one that the state has had; training goes on with the next.
        lost, left: ranks that failed, and that were asked to end, in their numbers before.
        joined: ranks that came, in their numbers now.
        peers: the processes, by rank.
        strategies: what steps choose from now on.
        restored: the step of the checkpoint that was read; None: no state was lost.
        received: bytes of state that came from other ranks to this one.
        seconds: from this rank's failure to the state's arrival.
        why: what happened, in words.
        ending: why these ranks are only to save and end; "": they go on.
    """

    generation: int
    step: int
    lost: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    peers: tuple[Peer, ...]
    strategies: tuple[Strategy, ...]
    restored: int | None
    received: int
    seconds: float
    why: str
    ending: str = ""


def survive(exe: Executable, failure: BaseException | None = None, restore: str | Path | None = None) -> Survived:
    """Meet the ranks that are left and those that have come, and bring the state to them; all of them call it.

    After it `exe` is as it was before, on other ranks: `exe.world`, `exe.strategies`, `exe.steps` are theirs.

    Args:
        exe: of this rank; of a newcomer, one that was compiled with `joining=True`.
        failure: what a call of `exe` has raised: a `RankFailure`, or the `Stopped` that calls ranks together.
        restore: a checkpoint that all go back to where a part of the state is lost.

    Raises:
        TooFewRanks: on all ranks, which have the state and can save it: fewer are left than may go on.
        RankFailure, Stopped: the failure itself, where ranks were not started to survive it.
        ValueError: a part of the state is lost, and `restore` is not given.
    """
    survived = meet_again(exe, failure, lambda: None if restore is None else Path(restore))
    if survived.ending:
        raise TooFewRanks(f"{survived.ending}: {survived.why}")
    return survived


def meet_again(
    exe: Executable,
    failure: BaseException | None,
    newest: Callable[[], Path | None],
    soon: bool = False,
    rates: Mapping[int, float] | None = None,
) -> Survived:
    """Do what `survive` does, but return also where too few ranks are left.

    Args:
        exe, failure: as of `survive`.
        newest: returns the checkpoint to go back to where state is lost; the first rank's answer counts that has one.
        soon: where a strategy is planned, take a good one that is found at once: a better one is looked for beside
            training, by who calls this.
        rates: of slow members, on the rank that watches them; a plan at once goes by them.
    """
    member = here()
    if member is None or (isinstance(failure, Stopped) and failure.reason < CALLED):
        raise failure or ValueError("survive: give launch elastic=hg.Elastic(), and call this where a step raises")
    began = time.monotonic()
    reasons: list[str] = []
    before = member.generation.members
    left: list[int] = []
    received = 0
    past = exe.past.ended(exe.recent, len(before))
    while True:
        if isinstance(failure, RankFailure):
            reasons.append(str(failure).partition("; restart all ranks")[0])
        exe.leave()
        member.progress_s = exe.progress_s
        generation = member.meet(failure)
        try:
            survived = _move(exe, member, generation, newest, past if soon else None, rates or {})
        except RankFailure as again:
            failure = again
            continue
        member.holds = generation.number
        received += survived.received
        if not generation.leaving:
            break
        if member.number in generation.leaving:
            member.leave()
            raise Dismissed("handed over its state, as it was asked to end")
        left += generation.leaving
        reasons += [f"rank {generation.members.index(m)} was asked to end" for m in generation.leaving]
        failure = None  # the others meet once more, without those that have handed over their state
    exe.stopping = 0
    exe.past = replace(past, seats=tuple(peer.seat for peer in survived.peers))
    now = generation.members
    joined = tuple(rank for rank, m in enumerate(now) if m not in before)
    came = "ranks came" if joined else "ranks were called together"
    lost = tuple(rank for rank, m in enumerate(before) if m not in now and m not in left)
    if len(joined) == len(now) and generation.lost:  # nobody is here who could tell
        lost, came = tuple(range(len(generation.lost))), "all ranks were lost"
    return replace(
        survived,
        lost=lost,
        left=tuple(rank for rank, m in enumerate(before) if m in left),
        joined=joined,
        received=received,
        seconds=time.monotonic() - began,
        why="; ".join(dict.fromkeys(reasons)) or came,
        ending=generation.ending,
    )


def _move(
    exe: Executable,
    member: Member,
    generation: Generation,
    newest: Callable[[], Path | None],
    past: Past | None,
    rates: Mapping[int, float],
) -> Survived:
    """Bring the state to a generation's ranks.

    Args:
        past: what ran before, by which a strategy is found at once; None: the best is looked for.
        rates: of members, as far as this one knows them; they count where a strategy is found at once.
    """
    world = join(exe.device)
    world.watch.progress_s = exe.progress_s
    peers = member.peers
    going = [generation.members.index(m) for m in generation.leaving]
    home = home_for(exe.wanted_home, [peer.seat for peer in peers], going)
    profile = costs_for(exe.given_profile, [peer.seat for peer in peers], home)
    with world.calling("meet"):
        if past is not None and isinstance(profile, Costs):
            told = next((each for each in world.gather(rates) if each), {})
            slow = {rank: told[m] for rank, m in enumerate(generation.members) if math.isfinite(told.get(m, math.inf))}
            profile = profile.changed(health=Health(slow))
        strategies = strategies_for(exe, world, home, profile, past, [peer.seat for peer in peers])
        restore = next((each for each in world.gather(newest()) if each is not None), None)
    moved = exe.move(world, home, generation.before, restore, strategies, profile)
    came = moved.received
    return Survived(generation.number, moved.step, (), (), (), peers, exe.strategies, moved.restored, came, 0.0, "")


def strategies_for(
    exe: Executable,
    world: World,
    home: Home,
    profile: Profile | Costs | None,
    past: Past | None = None,
    seats: Sequence[int] = (),
) -> tuple[Strategy, ...]:
    """Return what a world's ranks choose from: what was given, as far as it fits, else what is planned or is like it.

    Args:
        exe: of this rank.
        world, home: of the ranks there are now.
        profile: by which these choose.
        past, seats: what this rank knows of earlier ranks, and the seats of these: by them, what is planned is found
            at once, where it is; None: the best is looked for.
    """
    given, lengths = exe.given, exe.planning.lengths

    def planned() -> tuple[Strategy, ...]:
        if past is not None and isinstance(profile, Costs) and lengths:
            eras = next((each for each in world.gather(past.eras) if each), ())  # a newcomer has seen nothing
            ran = replace(past, eras=eras).among(seats)
            if (found := at_once_among(world, exe.program, profile, lengths, home, ran)) is not None:
                return (found,)
        return candidates_among(world, "auto", exe.program, world.ranks, profile, lengths, home)

    if isinstance(given, str) and given == "auto":
        return planned()
    several = [given] if isinstance(given, Strategy | str) else given
    known = [strategy_for(each, exe.program) for each in several]

    def fits(strategy: Strategy) -> bool:
        try:
            exe.check(strategy, world.ranks)
        except (ValueError, Unsupported):
            return False
        return True

    if isinstance(profile, Costs) and lengths and not any(map(fits, known)):
        with suppress(Unsupported):  # by the costs nothing fits; what is like the first one may all the same
            known = [strategy for strategy in planned() if fits(strategy)] or known
    return refit(known, world.ranks, exe.program.layers, fits)


def costs_for(given: Profile | Costs | None, seats: Sequence[int], home: Home) -> Profile | Costs | None:
    """Return what strategies cost among ranks that sit in these seats, each on its seat's device.

    Args:
        given: for all seats.
        seats: by rank; where one is none of the cluster's, devices are taken to be alike.
        home: who owns the state among them.
    """
    if not isinstance(given, Costs):
        return given
    if any(seat >= given.ranks for seat in seats):
        return given.profile
    return given.of_ranks(seats, home)


def home_for(wanted: Home, seats: Sequence[int], leaving: Sequence[int] = ()) -> Home:
    """Return who owns the state among ranks that sit in these seats, as a home for all seats says.

    Args:
        wanted: shares by seat; ranks in other seats get what the others have on average.
        seats: by rank.
        leaving: ranks that are to own nothing any more.
    """
    copies = wanted.copies if len(seats) - len(leaving) >= wanted.copies else 1
    if not leaving and wanted.shares is None and not wanted.buckets:
        return Home(copies=copies, rule=wanted.rule)
    each = {name: _shares(shares, seats, leaving) for name, shares in wanted.buckets.items()}
    return Home(_shares(wanted.shares, seats, leaving), copies, each, rule=wanted.rule)


def _shares(wanted: Sequence[float] | None, seats: Sequence[int], leaving: Sequence[int]) -> tuple[float, ...]:
    given = [1.0] * (max(seats) + 1) if wanted is None else list(wanted)
    mean = sum(given) / len(given)
    shares = [given[seat] if seat < len(given) else mean for seat in seats]
    kept = tuple(0.0 if rank in leaving else share for rank, share in enumerate(shares))
    equal = tuple(0.0 if rank in leaving else 1.0 for rank in range(len(seats)))
    return kept if sum(kept) > 0 else equal
