"""Move of state to new owners during a step.

Between two updates, only gradients change. New owners therefore get weights and moments while a step computes, get the
gradients at its commit, and then update. A rank commits only after receiving everything, so either all ranks switch
owners or none does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hydragraph.checkpoint.optimizer_state import UnshardedState, merged, plain_state
from hydragraph.checkpoint.optimizer_state import restore as restore_optimizer
from hydragraph.cluster.agreement import together
from hydragraph.cluster.communicators import Channel
from hydragraph.engine.session import Session
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.state_movement import OwnedState, Route, StateTransfer, agreed_columns

# Bytes packed at a time; few, because instructions wait
CHUNK = 16 << 20

_GRADIENT = "gradient"
_WHAT = "rehome"


@dataclass(eq=False)
class LiveReshard:
    """State in transit to other owners.

    Attributes:
        whole: whether the new owners can update.
    """

    ending: Session
    arriving: Session
    _state: OwnedState
    _route: Route
    _carrying: StateTransfer
    _plains: list[UnshardedState]
    whole: bool = False

    @staticmethod
    def begin(ending: Session, arriving: Session) -> LiveReshard:
        """Start moving state to `arriving`, which has other owners and no state; all ranks call this."""
        groups = ending.groups
        own = OwnedState.of(ending.home, ending.optimizer)
        reports = together(groups, _WHAT, lambda: (own.columns, plain_state(ending.home, ending.optimizer)))
        before, after = ending.home.layouts, arriving.home.layouts
        # Buckets with unchanged owners keep their tensors (`HomeState.allocate`).
        moving = [bucket for bucket in ending.program.buckets if before[bucket.name] is not after[bucket.name]]
        names = {parameter.name for bucket in moving for parameter in bucket.parameters}
        columns = agreed_columns([rank_columns for rank_columns, _ in reports])
        route = Route(moving, before, after, {name: kinds for name, kinds in columns.items() if name in names})
        state = OwnedState.empty(arriving.home, route.columns, own)
        groups.open_moving()
        # The copies run alongside the step, but must see the previous update's weights.
        streams = ending.executor.streams
        updated = streams.mark()
        with streams.beside():
            streams.wait(updated)
        carrying = StateTransfer(route, own, state, groups, Channel.MOVE, CHUNK)
        plains = [UnshardedState(**plain) for _, plain in reports if plain is not None]
        return LiveReshard(ending, arriving, state, route, carrying, plains)

    def go_on(self) -> None:
        """Advance the transfer between instructions, without waiting."""
        with self.ending.executor.streams.beside():
            self._carrying.go_on()

    def settle(self) -> None:
        streams = self.ending.executor.streams
        with streams.beside():
            self._carrying.finish()
            landed = streams.mark()
        streams.wait(landed)

    def end(self) -> None:
        """Send gradients and the optimizer's settings to the new owners."""
        # Weights and moments come first: the gradients use the same channel.
        self.settle()
        old, new = self.ending.home, self.arriving.home
        learning = [bucket for bucket in self._route.buckets if bucket.learns]
        # Gradients move like a column of state, but only for trained buckets.
        columns = {p.name: {_GRADIENT: torch.float32} for bucket in learning for p in bucket.parameters}
        route = Route(learning, old.layouts, new.layouts, columns)
        StateTransfer(route, _gradients(old), _gradients(new), self.ending.groups, Channel.MOVE).finish()
        if self.ending.optimizer is not None and self.arriving.optimizer is not None:
            # The learning rate, for example, may have changed meanwhile.
            own = plain_state(old, self.ending.optimizer)
            assert own is not None, "plain_state returns None only without an optimizer"
            plain = merged([UnshardedState(**own), *self._plains])
            restore_optimizer(_WHAT, new, self.arriving.optimizer, plain, self._state.states)
        # Now the new owners can update without messages.
        self.arriving.log.progress = self.ending.log.progress
        self.arriving.log.gathered()
        self.whole = True


def _gradients(home: HomeState) -> OwnedState:
    learning = {name: piece for name, piece in home.pieces.items() if piece.bucket in home.gradients}
    return OwnedState(home, {name: {_GRADIENT: piece.of(home.gradients)} for name, piece in learning.items()})
