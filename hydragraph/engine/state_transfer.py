"""Transfer of a model's state to a new session's owners."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from hydragraph.checkpoint import save_and_load
from hydragraph.checkpoint.extra_entry import encoded
from hydragraph.checkpoint.optimizer_state import UnshardedState, kind_of, merged, plain_state
from hydragraph.checkpoint.optimizer_state import restore as restore_optimizer
from hydragraph.checkpoint.piece_recovery import Recovery, RecoveryResult
from hydragraph.checkpoint.piece_sources import StorageTier
from hydragraph.checkpoint.state_pieces import Pieces, StoredCheckpoint
from hydragraph.cluster.agreement import together
from hydragraph.engine.session import Session
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.kernels.adamw import AdamW
from hydragraph.runtime.state_agreement import AgreedState
from hydragraph.runtime.state_movement import CHUNK, OwnedState, Route, agreed_columns, carry, named

_WHAT = "move"

# A directory of `Executable.save`, pieces of `Executable.keep`, or both; the newer checkpoint is read
Restore = str | Path | Pieces | tuple[Pieces, str | Path]


@dataclass(frozen=True)
class Moved:
    """A move's result.

    Attributes:
        step: last step in the state, equal on all ranks.
        finished: whether the move finished the step that raised an error on this rank; if so, step your learning-rate
            scheduler once more.
        restored: step of the checkpoint read, or None if no state was lost.
        read: bytes read from pieces, as in `recovery.Survived`.
    """

    step: int
    finished: bool
    restored: int | None
    extra: Mapping[str, Any]
    received: int
    seconds: float
    read: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedSession:
    """Result of loading state into a session.

    Attributes:
        restored: whether `extra` comes from a checkpoint.
        buffers: persistent buffers, from a checkpoint or, if a rank joins, from another rank.
    """

    restored: bool
    received: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    read: Mapping[str, int] = field(default_factory=dict)


def keep(session: Session, pieces: Pieces, extra: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> tuple[str, ...]:
    groups = session.groups
    step = session.log.progress.updates
    buckets = session.program.buckets
    own = OwnedState.of(session.home, session.optimizer)
    errors = [f"rank {session.world.rank}: {error}" for error in pieces.errors()]

    def mine() -> tuple[Any, ...]:
        encoded("extra", dict(extra))
        plain = plain_state(session.home, session.optimizer)
        return own.columns, plain, pieces.busy, pieces.written, pieces.last, pieces.new_series(), errors

    # All ranks report which places are busy, and what they hold, to decide
    # alike.
    reports = zip(*together(groups, "keep", mine), strict=True)
    all_columns, all_plains, busy, written, all_last, new_series, all_errors = reports
    columns = agreed_columns(all_columns)
    plains = [UnshardedState(**plain) for plain in all_plains if plain is not None]
    # If the last stored step is not earlier, training went back. Its pieces get a new series, apart
    # from the abandoned ones.
    last = max((kept for kept in all_last if kept is not None), default=None)
    series = new_series[0] if last is None or last.step >= step else last.series
    # whole: place -> last checkpoint that every rank wrote there; older ones may be deleted
    whole = {tier: kept for tier, kept in written[0].items() if all(other.get(tier) == kept for other in written)}
    common = {
        "columns": named(columns),
        "steps": step,
        "optimizer": vars(merged(plains)) if plains else None,
        "extra": dict(extra),
        save_and_load.BUFFERS: dict(buffers),
        save_and_load.MODEL: (save_and_load.shapes_of(session.home), kind_of(session.optimizer)),
    }
    # Copied, because training changes the originals
    entry = partial(encoded, "extra", deepcopy(common))
    busy_anywhere = frozenset[StorageTier]().union(*busy)
    pieces.put(
        StoredCheckpoint(step, series),
        own,
        buckets,
        columns,
        entry,
        busy_anywhere,
        whole,
        tidies=session.world.rank == 0,
    )
    return tuple(itertools.chain(*all_errors))


def bring(
    session: Session, old: Session | None, meeting: AgreedState, restore: Restore | None, buffers: Mapping[str, Tensor]
) -> LoadedSession:
    """Fill a new session's state without changing the old state; all ranks call this.

    Args:
        old: this rank's old session; None without state.
        buffers: persistent buffers.

    Raises:
        ValueError: state is lost, and no checkpoint is given; raised on all ranks.
    """
    groups = session.groups
    rank = session.world.rank
    # First, tell all ranks what survivors hold and, if ranks join, the leader's buffers.
    own = OwnedState.of(old.home, old.optimizer) if old is not None and meeting.before[rank] is not None else None

    tells = None in meeting.before and rank == meeting.leader

    def told() -> tuple[dict[str, object], dict[str, object] | None, str, Mapping[str, Tensor]]:
        own_buffers = buffers if tells else {}
        if own is None or old is None:
            return {}, None, session.world.node, own_buffers
        return dict(own.columns), plain_state(old.home, old.optimizer), session.world.node, own_buffers

    columns, plains, hosts, told_buffers = zip(*together(groups, _WHAT, told), strict=True)
    # Second, find the agreed state's owners, numbered as in the new world; lost ranks' elements have
    # no row in `source`.
    nodes = [hosts.index(host) for host in hosts]
    there = HomeLayouts(meeting.home, meeting.ranks).by_name(session.program.buckets)
    source = {name: layout.renamed(meeting.before, nodes) for name, layout in there.items()}
    before = own.home.layouts if own is not None else {}
    # moving: buckets whose owners change; the others keep their tensors
    moving = [b for b in session.program.buckets if before.get(b.name) is not session.home.layouts[b.name]]
    names = {parameter.name for bucket in moving for parameter in bucket.parameters}
    kinds = {name: kinds for name, kinds in agreed_columns(columns).items() if name in names}
    route = Route(moving, source, session.home.layouts, kinds)
    # Third, move the state, or read all of it from a checkpoint if some is lost: parts of different
    # steps must not mix.
    if route.lost:
        return _read(session, route, restore, meeting.leader is None, buffers)
    arriving = OwnedState.empty(session.home, route.columns, own)
    received = carry(route, own, arriving, groups)
    if session.optimizer is not None:
        assert meeting.leader is not None, "the state is complete, so at least one rank has finished its step"
        # The leader's part comes first: `merged` takes the first part's
        # hyperparameters.
        parts = [plains[meeting.leader], *(plain for plain in plains if plain is not None)]
        plain = merged([UnshardedState(**part) for part in parts])
        optimizer = session.optimizer
        together(groups, _WHAT, lambda: restore_optimizer(_WHAT, session.home, optimizer, plain, arriving.states))
    return LoadedSession(False, received, buffers=told_buffers[meeting.leader or 0])


def _read(
    session: Session, route: Route, restore: Restore | None, nobody: bool, buffers: Mapping[str, Tensor]
) -> LoadedSession:
    """Read the complete state from a checkpoint, ignoring newer surviving parts."""
    if restore is None and nobody:
        raise ValueError(
            "move: all ranks that had the state are lost, and no checkpoint is given: start again, or give a "
            "checkpoint with restore="
        )
    if restore is None:
        name, intervals = next(iter(route.lost.items()))
        size = next(bucket.size for bucket in route.buckets if bucket.name == name)
        gone = sum(hi - lo for lo, hi in intervals)
        lo, hi = intervals[0]
        raise ValueError(
            f"move: no remaining rank has elements [{lo}, {hi}) of bucket {name} ({gone / size:.0%} of it is lost; "
            f"{len(route.lost)} of {len(route.buckets)} buckets are incomplete): use copies=2 in the home, or give a "
            "checkpoint with restore="
        )
    return read(session, restore, buffers)


def read(session: Session, restore: Restore, buffers: Mapping[str, Tensor]) -> LoadedSession:
    """Read the complete state from a checkpoint; all ranks call this.

    Raises:
        Damaged, ValueError: as for `save_and_load.load`, or no pieces are complete; raised on all ranks.
    """
    pieces, path = parts(restore)
    groups = session.groups
    groups.same_everywhere("checkpoint to restore from", f"{pieces is not None} {path}")
    if pieces is not None:
        # Pieces older than the directory's checkpoint are not worth reading.
        least = None
        if path is not None:
            least = groups.gather(_steps_of(path) if session.world.rank == 0 else 0)[0]
        kind = kind_of(session.optimizer)
        recovery = Recovery(pieces, session.program.buckets, session.home, groups, CHUNK, least, buffers, kind)
        recovered = recovery.run()
        # Later checkpoints do not continue these pieces' series
        pieces.last = None
        if recovered is not None:
            return _taken(session, recovered)
    assert path is not None, "a recovery returns None only if a path is given"
    saved = save_and_load.load(path, session.home, session.optimizer, groups, buffers)
    session.log.restored(int(saved["steps"]))
    return LoadedSession(True, 0, saved["user"], saved.get(save_and_load.BUFFERS, {}))


def _steps_of(path: Path) -> int:
    try:
        return int(save_and_load.read_extra(path)["steps"])
    except Exception:
        # Torch raises many kinds of errors for damaged files
        return -1


def parts(restore: Restore) -> tuple[Pieces | None, Path | None]:
    """Return the pieces and directory to read; raise TypeError for other types."""
    if isinstance(restore, Pieces):
        return restore, None
    if isinstance(restore, tuple) and [isinstance(source, Pieces) for source in restore] == [True, False]:
        return restore[0], parts(restore[1])[1]
    if isinstance(restore, (str, os.PathLike)):
        return None, Path(restore)
    raise TypeError(f"{restore!r} is not a checkpoint: give a directory, hg.Pieces, or the pair (pieces, directory)")


def _taken(session: Session, found: RecoveryResult) -> LoadedSession:
    optimizer = session.optimizer
    if optimizer is not None:
        plain = UnshardedState(**found.common["optimizer"])
        states = found.state.states
        what = f"checkpoint pieces of step {found.kept.step}"
        together(session.groups, _WHAT, lambda: restore_optimizer(what, session.home, optimizer, plain, states))
    session.log.restored(int(found.common["steps"]))
    sizes = {tier.name.lower(): size for tier, size in found.read.items()}
    buffers = found.common[save_and_load.BUFFERS]
    return LoadedSession(True, found.received, found.common["extra"], buffers, sizes)


def kept(session: Session, old: Session | None) -> Session:
    """Return the new session with the old optimizer object, which schedulers reference."""
    if old is None or old.optimizer is None or session.optimizer is None:
        return session
    optimizer, new = old.optimizer, session.optimizer
    optimizer.param_groups = new.param_groups
    optimizer.state = new.state
    if isinstance(optimizer, AdamW) and isinstance(new, AdamW):
        optimizer.copy_to(new.copies)
    return replace(session, optimizer=optimizer)
