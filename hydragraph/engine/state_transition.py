"""What a rank has: the session that it works with, and one that its state is on its way to.

    works with   on its way       what happens
    none         none             a rank that was compiled to join others
    A            none             steps
    A            B, not whole     a move fills B, or a handover beside a step; a failure leaves B behind
    A            B, whole         B has everything: this rank takes it, or, if the last meeting failed, may have to
    B            none             steps again, in the next generation

Whether a whole B counts is agreed when ranks meet again (`runtime.standing`): they do not all learn of a failure at the
same moment, so that some may have taken it already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from hydragraph.cluster.communicators import Groups
from hydragraph.engine.live_reshard import Handover
from hydragraph.engine.session import Session
from hydragraph.engine.state_transfer import kept
from hydragraph.runtime.state_agreement import Held, Meeting, Place, Standing

_LOG = logging.getLogger(__name__)


class Holding:
    """What a rank has, and what it will have.

    Attributes:
        held: the session that it works with; None: it has joined no ranks yet.
        handover: what moves beside the next step.
        generation: how many times it has gone over to another session.
    """

    def __init__(self, start: Callable[[], Iterable[Mapping[str, Tensor]]] | None) -> None:
        """Hold nothing yet.

        Args:
            start: makes the initial weights, for a model that has none; they are asked for late, as loading and joining
                bring others.
        """
        self.held: Session | None = None
        self.handover: Handover | None = None
        self.generation = 0
        self._start = start
        self._arriving: Session | None = None
        self._whole = False
        self._ahead = 0  # the generation of what arrives
        self._called: tuple[int, ...] = ()  # this process's numbers in the meetings since then

    @property
    def session(self) -> Session:
        """What this rank works with.

        Raises:
            ValueError: nothing yet.
        """
        if self.held is None:
            raise ValueError("this executable has joined no ranks yet: call move first")
        return self.held

    @property
    def groups(self) -> list[Groups]:
        """The communicators of all that there is."""
        sessions = (self.held, self._arriving)
        return list({id(each.groups): each.groups for each in sessions if each is not None}.values())

    def begin(self) -> None:
        """Give a model that was built on the meta device its initial weights, unless some were loaded."""
        start, self._start = self._start, None
        for tensors in start() if start is not None else ():
            self.session.home.fill(tensors)

    def loaded(self) -> None:
        """Note that weights were loaded: initial ones are not asked for any more."""
        self._start = None

    def standing(self, rank: int) -> Standing | None:
        """Return what this rank has, where it meets others as `rank`; None: nothing."""
        before, self._called = self._called, (*self._called, rank)
        if self.held is None:
            return None
        self.begin()
        arrived = _held(self._arriving, self._ahead) if self._arriving and self._whole else None
        return Standing(_held(self.held, self.generation), arrived, before)

    def agree(self, meeting: Meeting, rank: int, max_grad_norm: float | None) -> bool:
        """Come to the state that all have agreed on; say whether this rank has finished a step for that."""
        if self._whole and meeting.generation == self._ahead:
            self.take()
        self._arriving, self._whole = None, False
        if self.held is None or meeting.before[rank] is None:
            return False
        behind = self.held.log.progress.updates < meeting.updates
        if behind:
            _LOG.info("finished step %d, which other ranks had finished", meeting.updates)
            self.held.update(meeting.norm, max_grad_norm)
        return behind

    def expect(self, session: Session) -> None:
        """Begin to fill a session."""
        self._arriving, self._whole, self._ahead = session, False, self.generation + 1

    def arrived(self, generation: int) -> None:
        """Note that it is whole, and which generation it is."""
        self._whole, self._ahead = True, generation

    def take(self) -> None:
        """Work with what has arrived from now on."""
        assert self._arriving is not None, "it has arrived"
        self.held = kept(self._arriving, self.held)
        self.generation = self._ahead
        self._arriving, self._whole, self._start, self._called = None, False, None, ()

    def hand_over(self, arriving: Session) -> None:
        """Let state go to another session beside the next step; all ranks call it."""
        self.handover = Handover.begin(self.session, arriving)
        self.expect(arriving)

    def go_over(self) -> None:
        """Work with the new owners from now on, if a step has brought them all."""
        if self.handover is not None and self.handover.whole:
            self.handover = None
            self.take()

    def stop_handover(self, broken: bool) -> None:
        """End what is on its way; of ranks that go on together, all have then sent and received the same.

        Args:
            broken: ranks do not go on together.
        """
        handover, self.handover = self.handover, None
        if handover is None:
            return
        self._whole = handover.whole
        if not broken:
            handover.settle()


def _held(session: Session, generation: int) -> Held:
    world = session.world
    return Held(Place(generation, world.rank, world.ranks, session.owners.home), session.log.progress)
