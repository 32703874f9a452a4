"""Transfer of a model's state from the ranks that have it to the owners of a new session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydragraph.checkpoint import save_and_load
from hydragraph.checkpoint.extra_entry import encoded
from hydragraph.checkpoint.optimizer_state import Plain, merged, plain_state
from hydragraph.checkpoint.optimizer_state import restore as restore_optimizer
from hydragraph.checkpoint.piece_recovery import recover
from hydragraph.checkpoint.state_pieces import Pieces
from hydragraph.cluster.agreement import together
from hydragraph.engine.session import Session
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.kernels.adamw import AdamW
from hydragraph.runtime.state_agreement import Meeting
from hydragraph.runtime.state_movement import OwnedState, Route, agreed_columns, carry, named

_WHAT = "move"

Restore = str | Path | Pieces  # checkpoint of `Executable.save`, or pieces of `Executable.keep`


@dataclass(frozen=True)
class Moved:
    """Result of a move.

    Attributes:
        step: last step that the state includes, identical on all ranks; training continues with the next.
        finished: whether that step had raised on this rank and was finished by the move: step your learning-rate
            scheduler once more here.
        restored: step of the checkpoint that was read because the remaining ranks did not have the whole state; None:
            no checkpoint was read.
        extra: the `extra` of that checkpoint.
        received: bytes received from other ranks.
        seconds: duration on this rank, including the creation of communicators.
    """

    step: int
    finished: bool
    restored: int | None
    extra: Mapping[str, Any]
    received: int
    seconds: float


@dataclass(frozen=True)
class Brought:
    """Result of filling a session.

    Attributes:
        restored: whether a checkpoint was read.
        received: bytes received from other ranks.
        extra: the caller's data from that checkpoint.
    """

    restored: bool
    received: int
    extra: Mapping[str, Any]


def keep(session: Session, pieces: Pieces, extra: Mapping[str, Any]) -> None:
    """Keep this rank's state in pieces; all ranks call it."""
    groups = session.groups
    own = OwnedState.of(session.home, session.optimizer)
    told = together(groups, "keep", lambda: (own.columns, plain_state(session.home, session.optimizer)))
    columns = agreed_columns([found for found, _ in told])
    plains = [Plain(**plain) for _, plain in told if plain is not None]
    common = {
        "columns": named(columns),
        "steps": session.log.progress.updates,
        "optimizer": vars(merged(plains)) if plains else None,
        "extra": dict(extra),
    }
    step, buckets = session.log.progress.updates, session.program.buckets
    together(groups, "keep", lambda: pieces.put(step, own, buckets, columns, encoded("extra", common)))


def bring(session: Session, old: Session | None, meeting: Meeting, restore: Restore | None) -> Brought:
    """Fill a new session's state; all ranks call it. The old state is not changed.

    Args:
        session: new session, with weights not filled.
        old: this rank's old session; None: it holds no valid state.
        meeting: which rank has which state.
        restore: what to read if a part of the state is lost; None: raise instead.

    Raises:
        ValueError: on all ranks: a part of the state is lost, and no checkpoint is given.
    """
    groups = session.groups
    rank = session.world.rank
    own = OwnedState.of(old.home, old.optimizer) if old is not None and meeting.before[rank] is not None else None

    def told() -> tuple[dict[str, object], dict[str, object] | None, str]:
        if own is None or old is None:
            return {}, None, session.world.node
        return dict(own.columns), plain_state(old.home, old.optimizer), session.world.node

    columns, plains, hosts = zip(*together(groups, _WHAT, told), strict=True)
    nodes = [hosts.index(host) for host in hosts]
    there = HomeLayouts(meeting.home, meeting.ranks).by_name(session.program.buckets)
    source = {name: layout.renamed(meeting.before, nodes) for name, layout in there.items()}
    stays = {
        b.name for b in session.program.buckets if own and own.home.layouts[b.name] is session.home.layouts[b.name]
    }
    moving = [bucket for bucket in session.program.buckets if bucket.name not in stays]
    names = {parameter.name for bucket in moving for parameter in bucket.parameters}
    kinds = {name: kinds for name, kinds in agreed_columns(columns).items() if name in names}
    route = Route(moving, source, session.home.layouts, kinds)
    if route.lost:
        return _read(session, route, restore, meeting.leader is None)
    arriving = OwnedState.empty(session.home, route.columns, own)
    received = carry(route, own, arriving, groups)
    if session.optimizer is not None:
        assert meeting.leader is not None, "nothing is lost, so somebody has it"
        parts = [plains[meeting.leader], *(plain for plain in plains if plain is not None)]
        plain = merged([Plain(**part) for part in parts])
        optimizer = session.optimizer
        together(groups, _WHAT, lambda: restore_optimizer(_WHAT, session.home, optimizer, plain, arriving.states))
    return Brought(False, received, {})


def _read(session: Session, route: Route, restore: Restore | None, nobody: bool) -> Brought:
    """Read the whole state: survivors are ahead of a checkpoint, and all parts of a state must be of one step.

    Args:
        session, restore: as for `bring`.
        route: transfers, with lost parts.
        nobody: whether no rank has any of the state.
    """
    session.agree("what to restore from", "pieces" if isinstance(restore, Pieces) else str(restore))
    if restore is None and nobody:
        raise ValueError(
            "move: all ranks that had the state are lost, and nothing was saved: start again, or give a checkpoint as "
            "restore"
        )
    if restore is None:
        name, intervals = next(iter(route.lost.items()))
        size = next(bucket.size for bucket in route.buckets if bucket.name == name)
        gone = sum(hi - lo for lo, hi in intervals)
        lo, hi = intervals[0]
        raise ValueError(
            f"move: no rank that is left has elements [{lo}, {hi}) of bucket {name} ({gone / size:.0%} of it; "
            f"{len(route.lost)} of {len(route.buckets)} buckets lack something): keep copies=2 in the home, or give a "
            "checkpoint as restore"
        )
    if isinstance(restore, Pieces):
        return _recover(session, restore)
    saved = save_and_load.load(restore, session.home, session.optimizer, session.groups)
    session.log.restored(int(saved["steps"]))
    return Brought(True, 0, saved["user"])


def _recover(session: Session, pieces: Pieces) -> Brought:
    found = recover(pieces, session.program.buckets, session.home, session.groups)
    optimizer = session.optimizer
    if optimizer is not None:
        plain = Plain(**found.common["optimizer"])
        states = found.state.states
        what = f"checkpoint pieces of step {found.step}"
        together(session.groups, _WHAT, lambda: restore_optimizer(what, session.home, optimizer, plain, states))
    session.log.restored(int(found.common["steps"]))
    return Brought(True, found.received, found.common["extra"])


def kept(session: Session, old: Session | None) -> Session:
    """Return a session that keeps the process's existing optimizer object, because schedulers refer to it."""
    if old is None or old.optimizer is None or session.optimizer is None:
        return session
    optimizer, new = old.optimizer, session.optimizer
    optimizer.param_groups = new.param_groups
    optimizer.state = new.state
    if isinstance(optimizer, AdamW) and isinstance(new, AdamW):
        optimizer.copy_to(new.copies)
    return replace(session, optimizer=optimizer)
