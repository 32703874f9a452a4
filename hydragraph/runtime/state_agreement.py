"""Agreement of ranks that meet on one state of the whole model.

Ranks that meet again are at most one update apart, as every step ends with all:

    a rank was lost            state of the others                           recovery
    before the commit          no rank has updated                           drop the gradients, repeat the step
    while some detect it       some have updated, the others have all        the others update as well, with the norm
                               gradients at home                             the commit has shared: no message is needed
    in its own update          the others have updated                       none

A process whose own update was interrupted counts as a newcomer. In a move, each rank replaces its old state once all
have the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydragraph.spec.home import Home


@dataclass(frozen=True)
class StatePlace:
    """Which part of the whole training state a rank holds.

    Attributes:
        generation: number of earlier moves.
        home: the owners, with nodes if it has copies.
    """

    generation: int
    rank: int
    ranks: int
    home: Home


@dataclass(frozen=True)
class StateProgress:
    """Progress of a rank's state.

    Attributes:
        norm: norm of the gradients of the last update, before clipping.
        gathered: whether all gradients of the next update are at home.
    """

    updates: int = 0
    norm: float = 0.0
    gathered: bool = False
    torn: bool = False


@dataclass
class ProgressLog:
    """A rank's progress; each change is one assignment."""

    progress: StateProgress = StateProgress()

    def begin(self) -> None:
        """Record that gradients are computed again."""
        self.progress = replace(self.progress, gathered=False)

    def gathered(self) -> None:
        """Record that all gradients are at home."""
        self.progress = replace(self.progress, gathered=True)

    def updating(self) -> None:
        """Record that an update begins."""
        self.progress = replace(self.progress, torn=True)

    def updated(self, norm: float) -> None:
        """Record that the update has ended."""
        self.progress = StateProgress(self.progress.updates + 1, norm)

    def restored(self, updates: int) -> None:
        """Record that state with this number of updates was loaded."""
        self.progress = StateProgress(updates)


@dataclass(frozen=True)
class HeldState:
    """One state of a rank."""

    place: StatePlace
    progress: StateProgress


@dataclass(frozen=True)
class Standing:
    """State of one rank when ranks meet.

    Attributes:
        arrived: a move's complete state that it has not switched to yet.
        called: its rank numbers since `held`, in worlds whose ranks did not complete a move.
    """

    held: HeldState
    arrived: HeldState | None = None
    called: tuple[int, ...] = ()

    def of(self, generation: int) -> HeldState | None:
        """Return its state of a generation; None if it has none, or an interrupted update has damaged it."""
        states = (self.held, self.arrived)
        return next((s for s in states if s and s.place.generation == generation and not s.progress.torn), None)


@dataclass(frozen=True)
class AgreedState:
    """Agreement of ranks that meet.

    Attributes:
        generation: generation of the agreed state; -1: no rank has any state.
        before: each new rank's number in that state; None: the rank has no valid state.
        updates: after all ranks have finished their step.
        leader: the first rank without an unfinished step, whose hyperparameters count.
    """

    generation: int
    ranks: int
    home: Home
    before: tuple[int | None, ...]
    updates: int
    norm: float
    leader: int | None


def meet(standings: Sequence[Standing | None], before: Sequence[int | None]) -> AgreedState:
    """Agree on the state of the model, by a pure function of the same arguments on all ranks.

    Args:
        standings: standing of each new rank; None: the rank never had any state.
        before: each new rank's number in the world before; None: a newcomer.

    Raises:
        ValueError: `before` does not fit the ranks, or gives a rank another's number.
    """
    if len(before) != len(standings):
        raise ValueError(f"move: before names {len(before)} ranks, the world has {len(standings)}: one number for each")
    old_ranks = [old for old in before if old is not None]
    if len(set(old_ranks)) != len(old_ranks):
        raise ValueError(f"move: before is {list(before)}: two ranks cannot both have been rank {_twice(old_ranks)}")
    for new, (old, standing) in enumerate(zip(before, standings, strict=True)):
        if old is None:
            continue
        if standing is None:
            raise ValueError(f"move: before says that rank {new} was rank {old}, but it is new: give None for it")
        numbers = {standing.held.place.rank, *standing.called}
        if old not in numbers:
            raise ValueError(
                f"move: before says that rank {new} was rank {old}, but it was {sorted(numbers)}: give its last number"
            )
    alive = {new: standing for new, standing in enumerate(standings) if standing and before[new] is not None}
    # A rank switches only after all ranks have received their state.
    newest = max((standing.held.place.generation for standing in alive.values()), default=-1)
    states = {new: state for new, standing in alive.items() if (state := standing.of(newest))}
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
