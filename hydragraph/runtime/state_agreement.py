"""Agreement of a new world's ranks on one state of the whole model.

Every step ends with a commit of all ranks, so remaining ranks are at most one update apart:

    a rank was lost            state of other ranks                          recovery
    before the commit          no rank has updated                           drop the gradients, repeat the step
    after the commit           some ranks have updated, and all owners       remaining ranks update without messages,
                               have all gradients                            with the norm from the commit
    in its own update          other ranks have updated                      no recovery is needed

A process whose update was interrupted counts as a newcomer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydragraph.spec.home import Home


@dataclass(frozen=True)
class StatePlace:
    """The part of the training state that a rank stores.

    Attributes:
        generation: number of earlier moves.
        home: owners of the state; `nodes` is set for two copies.
    """

    generation: int
    rank: int
    ranks: int
    home: Home


@dataclass(frozen=True)
class StateProgress:
    """A rank's progress.

    Attributes:
        norm: gradient norm of the last update, before clipping.
        gathered: whether owners have all gradients of the next update.
    """

    updates: int = 0
    norm: float = 0.0
    gathered: bool = False
    torn: bool = False


@dataclass
class ProgressLog:
    """A rank's progress, changed by single assignments, which an interruption cannot split."""

    progress: StateProgress = StateProgress()

    def begin(self) -> None:
        """Record that new gradients are being computed."""
        self.progress = replace(self.progress, gathered=False)

    def gathered(self) -> None:
        self.progress = replace(self.progress, gathered=True)

    def updating(self) -> None:
        self.progress = replace(self.progress, torn=True)

    def updated(self, norm: float) -> None:
        self.progress = StateProgress(self.progress.updates + 1, norm)

    def restored(self, updates: int) -> None:
        self.progress = StateProgress(updates)


@dataclass(frozen=True)
class HeldState:
    place: StatePlace
    progress: StateProgress


@dataclass(frozen=True)
class RankStates:
    """One rank's states when ranks form a new world.

    Attributes:
        arrived: complete state that a move brought, but the rank does not use yet.
        called: this rank's numbers, since it got `held`, in worlds whose moves failed.
    """

    held: HeldState
    arrived: HeldState | None = None
    called: tuple[int, ...] = ()

    def of(self, generation: int) -> HeldState | None:
        """Return the state of a generation, or None if missing or torn by an interrupted update."""
        states = (self.held, self.arrived)
        return next((s for s in states if s and s.place.generation == generation and not s.progress.torn), None)


@dataclass(frozen=True)
class AgreedState:
    """State on which the ranks of a new world agree.

    Attributes:
        generation: generation, or -1 if no rank has any state.
        before: each rank's number in the agreed state, or None without valid state.
        updates: number of updates after all ranks finish their step.
        leader: first rank that finished its step, whose hyperparameters are used.
    """

    generation: int
    ranks: int
    home: Home
    before: tuple[int | None, ...]
    updates: int
    norm: float
    leader: int | None


def meet(standings: Sequence[RankStates | None], before: Sequence[int | None]) -> AgreedState:
    """Agree on the model's state. The function is pure, and its arguments are equal on all ranks.

    Args:
        standings: each rank's states, or None without any.
        before: each rank's previous number, or None for a newcomer.

    Raises:
        ValueError: `before` does not match the ranks.
    """
    if len(before) != len(standings):
        raise ValueError(
            f"move: `before` has {len(before)} numbers for {len(standings)} ranks: give one number per rank"
        )
    # Check `before` against the ranks' earlier numbers.
    old_ranks = [old for old in before if old is not None]
    if len(set(old_ranks)) != len(old_ranks):
        raise ValueError(f"move: `before` is {list(before)}: two ranks cannot both have been rank {_twice(old_ranks)}")
    for new, (old, standing) in enumerate(zip(before, standings, strict=True)):
        if old is None:
            continue
        if standing is None:
            raise ValueError(f"move: `before` says that rank {new} was rank {old}, but rank {new} is new: give None")
        numbers = {standing.held.place.rank, *standing.called}
        if old not in numbers:
            raise ValueError(
                f"move: `before` says that rank {new} was rank {old}, but its numbers were {sorted(numbers)}: "
                "give the last number"
            )
    alive = {new: standing for new, standing in enumerate(standings) if standing and before[new] is not None}
    # A rank switches to new state only after all ranks have it.
    newest = max((standing.held.place.generation for standing in alive.values()), default=-1)
    states = {new: state for new, standing in alive.items() if (state := standing.of(newest))}
    # done: ranks with all updates. last: ranks without the last update, but with all its
    # gradients to finish it. All others count as new.
    updates = max((state.progress.updates for state in states.values()), default=0)
    done = {new: state for new, state in states.items() if state.progress.updates == updates}
    last = {new: s for new, s in states.items() if s.progress.updates == updates - 1 and s.progress.gathered}
    if not done:
        return AgreedState(-1, len(before), Home(), (None,) * len(before), 0, 0.0, None)
    leader = min(done)
    place = done[leader].place
    owners = {new: state.place.rank for new, state in (done | last).items()}
    numbered = tuple(owners.get(new) for new in range(len(before)))
    return AgreedState(newest, place.ranks, place.home, numbered, updates, done[leader].progress.norm, leader)


def _twice(numbers: Sequence[int]) -> int:
    return next(n for n in numbers if list(numbers).count(n) > 1)
