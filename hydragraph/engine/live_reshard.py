"""Let state move to other owners beside a step, which goes on with those that it has.

A rank's state is constant from the end of one update to the next: only gradients come. So a part of it that is to live
elsewhere gets a second owner while a step computes, and what is missing at the end of the step are its gradients:

    step k    pull, forward, backward, push     | commit             | update           step k + 1
    first     the only owner of the part        | hands gradients on | drops the part
    second    weights and moments come, beside  | receives them      | updates          pulled from, pushed to

The commit is that of the step, whose totals nobody has before all ranks have given theirs, and none gives them before
it has everything: so all ranks go over to the new owners, or none does. Until then every rank works with what it had,
and a failure at any moment before leaves the new owners' part behind (`runtime.standing`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hydragraph.checkpoint.optimizer_state import Plain, merged, plain_state
from hydragraph.checkpoint.optimizer_state import restore as restore_optimizer
from hydragraph.cluster.agreement import together
from hydragraph.cluster.communicators import Role
from hydragraph.engine.session import Session
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.state_movement import Carrying, OwnedState, Route, agreed_columns

CHUNK = 16 << 20  # bytes of the whole state in a message of each rank: what an instruction may wait to be laid out

_GRADIENT = "gradient"
_WHAT = "rehome"


@dataclass(eq=False)
class Handover:
    """A part of the state on its way to other owners.

    Attributes:
        ending, arriving: the sessions of this rank before and after, in one world; what lives where it did they share.
        whole: whether the new owners have everything that an update needs.
    """

    ending: Session
    arriving: Session
    _state: OwnedState
    _route: Route
    _carrying: Carrying
    _plains: list[Plain]
    whole: bool = False

    @staticmethod
    def begin(ending: Session, arriving: Session) -> Handover:
        """Begin to move what lives elsewhere in a new session, its weights not filled; all ranks call it."""
        groups = ending.groups
        own = OwnedState.of(ending.home, ending.optimizer)
        told = together(groups, _WHAT, lambda: (own.columns, plain_state(ending.home, ending.optimizer)))
        before, after = ending.home.layouts, arriving.home.layouts
        moving = [bucket for bucket in ending.program.buckets if before[bucket.name] is not after[bucket.name]]
        names = {parameter.name for bucket in moving for parameter in bucket.parameters}
        columns = agreed_columns([found for found, _ in told])
        route = Route(moving, before, after, {name: kinds for name, kinds in columns.items() if name in names})
        state = OwnedState.empty(arriving.home, route.columns, own)
        groups.open_moving()
        streams = ending.executor.streams
        updated = streams.mark()
        with streams.beside():
            streams.wait(updated)
        carrying = Carrying(route, own, state, groups, Role.MOVE, CHUNK)
        plains = [Plain(**plain) for _, plain in told if plain is not None]
        return Handover(ending, arriving, state, route, carrying, plains)

    def go_on(self) -> None:
        """Bring on what can be without waiting; called between instructions."""
        with self.ending.executor.streams.beside():
            self._carrying.go_on()

    def settle(self) -> None:
        """Wait for what is on its way."""
        streams = self.ending.executor.streams
        with streams.beside():
            self._carrying.finish()
            landed = streams.mark()
        streams.wait(landed)

    def end(self) -> None:
        """Hand the gradients on: after it, whoever is to own a part can update it."""
        self.settle()
        old, new = self.ending.home, self.arriving.home
        learning = [bucket for bucket in self._route.buckets if bucket.learns]
        columns = {p.name: {_GRADIENT: torch.float32} for bucket in learning for p in bucket.parameters}
        route = Route(learning, old.layouts, new.layouts, columns)
        Carrying(route, _gradients(old), _gradients(new), self.ending.groups, Role.MOVE).finish()
        if self.ending.optimizer is not None and self.arriving.optimizer is not None:
            # What is the same everywhere may have changed since it began, such as the learning rate: it is this rank's.
            own = plain_state(old, self.ending.optimizer)
            assert own is not None, "it has an optimizer"
            plain = merged([Plain(**own), *self._plains])
            restore_optimizer(_WHAT, new, self.arriving.optimizer, plain, self._state.states)
        self.arriving.log.progress = self.ending.log.progress
        self.arriving.log.gathered()
        self.whole = True


def _gradients(home: HomeState) -> OwnedState:
    """Return this rank's gradients as columns."""
    learning = {name: piece for name, piece in home.pieces.items() if piece.bucket in home.gradients}
    return OwnedState(home, {name: {_GRADIENT: piece.of(home.gradients)} for name, piece in learning.items()})
