"""What ranks have when they meet to move their state, and how they agree on one state of the whole model.

A rank may be lost at any instruction, so those that meet again need not have come equally far. They can be one update
apart, and no more, because every step ends with all ranks:

    a rank was lost            who is where                                  what is done
    before the commit          nobody has updated                            gradients are dropped, the step is repeated
    while some learned of it   some have updated, the others have all        the others update, too: nothing is sent, as
                               gradients at home: all arrived before any     the commit told those that have updated the
                               rank took part in the commit                  norm by which all clip
    in its own update          it is lost; the others have updated           nothing

A process whose own update was cut off (an error in the optimizer, an interrupt) has weights that are neither: it counts
as a newcomer. Moves end like steps: state arrives beside the old one, all ranks meet once, then each takes what arrived
in the old one's place, alone. Who missed that last meeting has everything too, and takes it when ranks meet again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydragraph.spec.home import Home


@dataclass(frozen=True)
class Place:
    """Where a rank's state is in the whole: its number among how many, under which home.

    Attributes:
        generation: how many moves there were before; newer state is newer.
        rank, ranks: this rank's number then, of how many.
        home: who owned what, with nodes where it has copies.
    """

    generation: int
    rank: int
    ranks: int
    home: Home


@dataclass(frozen=True)
class Progress:
    """How far a rank's state is.

    Attributes:
        updates: that its weights and optimizer have had.
        norm: of the gradients of the last of them, before clipping.
        gathered: whether the gradients of the next are all at home.
        torn: whether an update has begun and not ended.
    """

    updates: int = 0
    norm: float = 0.0
    gathered: bool = False
    torn: bool = False


@dataclass
class ProgressLog:
    """A rank's progress, as its executor and its updates write it down; each change is one assignment."""

    progress: Progress = Progress()

    def begin(self) -> None:
        """Note that gradients are about to be computed anew."""
        self.progress = replace(self.progress, gathered=False)

    def gathered(self) -> None:
        """Note that all gradients are at home."""
        self.progress = replace(self.progress, gathered=True)

    def updating(self) -> None:
        """Note that an update begins."""
        self.progress = replace(self.progress, torn=True)

    def updated(self, norm: float) -> None:
        """Note that it has ended."""
        self.progress = Progress(self.progress.updates + 1, norm)

    def restored(self, updates: int) -> None:
        """Note that state was read which has had so many updates."""
        self.progress = Progress(updates)


@dataclass(frozen=True)
class Held:
    """One state that a rank has: where it is in the whole, and how far."""

    place: Place
    progress: Progress


@dataclass(frozen=True)
class Standing:
    """What one rank has when ranks meet.

    Attributes:
        held: the state that it works with.
        arrived: the state that a move has brought it whole, which it has not taken yet.
        called: the numbers that it has had since `held`, in worlds whose ranks could not move to the end.
    """

    held: Held
    arrived: Held | None = None
    called: tuple[int, ...] = ()

    def of(self, generation: int) -> Held | None:
        """Return its state of a generation; None: it has none, or one that a broken update has left between two."""
        states = (self.held, self.arrived)
        return next((s for s in states if s and s.place.generation == generation and not s.progress.torn), None)


@dataclass(frozen=True)
class Meeting:
    """What ranks agree on when they meet.

    Attributes:
        generation, ranks, home: of the state that all work with now; a generation of -1: nobody has any.
        before: by new rank, its number in that state; None: it has none that counts.
        updates: that the state has had, once those have finished their step who had not.
        norm: by which they clip.
        leader: the rank whose hyperparameters count: the first that needs not finish anything; None: nobody.
    """

    generation: int
    ranks: int
    home: Home
    before: tuple[int | None, ...]
    updates: int
    norm: float
    leader: int | None


def meet(standings: Sequence[Standing | None], before: Sequence[int | None]) -> Meeting:
    """Agree on the state of the model; a pure function, so that all ranks come to the same.

    Args:
        standings: by new rank; None: of a process that never had any state.
        before: by new rank, the number that it had in the world before; None: it is a newcomer, whatever it has.

    Raises:
        ValueError: `before` does not fit the ranks, or names one that is another.
    """
    if len(before) != len(standings):
        raise ValueError(f"move: before names {len(before)} ranks, the world has {len(standings)}: one number for each")
    known = [old for old in before if old is not None]
    if len(set(known)) != len(known):
        raise ValueError(f"move: before is {list(before)}: two ranks cannot both have been rank {_twice(known)}")
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
    # Whoever has taken what a move brought did so after all had received theirs.
    newest = max((standing.held.place.generation for standing in alive.values()), default=-1)
    states = {new: state for new, standing in alive.items() if (state := standing.of(newest))}
    updates = max((state.progress.updates for state in states.values()), default=0)
    done = {new: state for new, state in states.items() if state.progress.updates == updates}
    last = {new: s for new, s in states.items() if s.progress.updates == updates - 1 and s.progress.gathered}
    if not done:
        return Meeting(-1, len(before), Home(), (None,) * len(before), 0, 0.0, None)
    leader = min(done)
    place = done[leader].place
    owners = {new: state.place.rank for new, state in (done | last).items()}
    numbered = tuple(owners.get(new) for new in range(len(before)))
    return Meeting(newest, place.ranks, place.home, numbered, updates, done[leader].progress.norm, leader)


def _twice(numbers: Sequence[int]) -> int:
    return next(n for n in numbers if list(numbers).count(n) > 1)
