"""A rank's current session, and the arriving session that receives the state.

current      arriving         meaning
none         none             a rank compiled to join others
A            none             train with A
A            B, incomplete    a move or a handover fills B; a failure discards B
A            B, complete      switch to B; after a failure, ranks agree on A or B
B            none             train with B
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from hydragraph.cluster.communicators import Groups
from hydragraph.engine.live_reshard import LiveReshard
from hydragraph.engine.session import Session
from hydragraph.engine.state_transfer import kept
from hydragraph.runtime.state_agreement import AgreedState, HeldState, RankStates, StatePlace

_LOG = logging.getLogger(__name__)


class StateTransition:
    def __init__(self, start: Callable[[], Iterable[Mapping[str, Tensor]]] | None) -> None:
        """Begin without a session; `start` provides the initial weights unless weights are loaded."""
        self.held: Session | None = None
        self.reshard: LiveReshard | None = None
        self.generation = 0
        self._start = start
        self._arriving: Session | None = None
        self._whole = False
        self._ahead = 0
        # This process's rank numbers since the last switch
        self._called: tuple[int, ...] = ()

    @property
    def session(self) -> Session:
        """Current session; raises ValueError if there is none."""
        if self.held is None:
            raise ValueError("this executable has not joined the other ranks yet: call move first")
        return self.held

    @property
    def groups(self) -> list[Groups]:
        sessions = (self.held, self._arriving)
        return list({id(session.groups): session.groups for session in sessions if session is not None}.values())

    def begin(self) -> None:
        """Give a meta-device model initial weights, unless weights were loaded."""
        for tensors in self._start() if self._start is not None else ():
            self.session.home.fill(tensors)
        self._start = None

    def loaded(self) -> None:
        self._start = None

    def standing(self, rank: int) -> RankStates | None:
        """Return this process's states as rank `rank`; None without a session."""
        # If this attempt fails, the next may name this process by its number in
        # this attempt.
        before, self._called = self._called, (*self._called, rank)
        if self.held is None:
            return None
        self.begin()
        arrived = _held(self._arriving, self._ahead) if self._arriving and self._whole else None
        return RankStates(_held(self.held, self.generation), arrived, before)

    def agree(self, meeting: AgreedState, rank: int) -> bool:
        """Switch to the agreed state; return whether this rank finished the last step."""
        # An interrupted move may have completed on some ranks. The others then switch too if it is the
        # agreed state; otherwise they discard it.
        if self._whole and meeting.generation == self._ahead:
            self.take()
        self._arriving = None
        self._whole = False
        if self.held is None or meeting.before[rank] is None:
            return False
        # All owners had their gradients before any rank could update, so
        # no communication is needed.
        behind = self.held.log.progress.updates < meeting.updates
        if behind:
            _LOG.info("finished step %d, which other ranks had finished", meeting.updates)
            self.held.update(meeting.norm)
        return behind

    def expect(self, session: Session) -> None:
        self._arriving = session
        self._whole = False
        self._ahead = self.generation + 1

    def arrived(self, generation: int) -> None:
        self._whole = True
        self._ahead = generation

    def take(self) -> None:
        assert self._arriving is not None, "only an arriving session can be taken"
        # Schedulers refer to the optimizer object, so it survives the switch.
        self.held = kept(self._arriving, self.held)
        self.generation = self._ahead
        self._arriving = None
        self._whole = False
        self._start = None
        self._called = ()

    def hand_over(self, arriving: Session) -> None:
        """Start moving state to a session during the next step; all ranks call this."""
        self.reshard = LiveReshard.begin(self.session, arriving)
        self.expect(arriving)

    def go_over(self) -> None:
        if self.reshard is not None and self.reshard.whole:
            self.reshard = None
            self.take()

    def stop_handover(self, broken: bool) -> None:
        """Stop a handover; wait for transfers unless communication is broken."""
        reshard, self.reshard = self.reshard, None
        if reshard is None:
            return
        # After a complete handover, other ranks may have switched, so offer
        # the new state (`standing`).
        self._whole = reshard.whole
        if not broken:
            reshard.settle()


def _held(session: Session, generation: int) -> HeldState:
    world = session.world
    return HeldState(StatePlace(generation, world.rank, world.ranks, session.owners.home), session.log.progress)
