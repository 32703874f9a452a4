"""Sequence of the passes that turn an outline, a strategy and micro-batch counts into rank programs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import get_args

from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import RankProgram, Role
from hydragraph.ir.shared_programs import Body, Peers, SharedPrograms, numbered
from hydragraph.passes.offload import offload
from hydragraph.passes.order import order
from hydragraph.passes.overlap import overlap
from hydragraph.passes.place import Placement, place
from hydragraph.passes.retain import retain
from hydragraph.passes.stream import decides, stream
from hydragraph.spec.strategy import Strategy

Pass = Callable[[Placement, Mode, RankProgram], RankProgram]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("order", order),
    ("stream", stream),
    ("overlap", overlap),
    ("offload", offload),
    ("retain", retain),
)


def rank_programs(
    outline: Outline, strategy: Strategy, micro_batches: Sequence[int], mode: Mode = "train", *, ranks: int
) -> tuple[RankProgram, ...]:
    """Build the programs of all ranks, including idle ones, for one iteration.

    Raises:
        ValueError: the arguments are inconsistent.
    """
    return tuple(shared_programs(outline, strategy, micro_batches, mode, ranks=ranks))


def shared_programs(
    outline: Outline, strategy: Strategy, micro_batches: Sequence[int], mode: Mode = "train", *, ranks: int
) -> SharedPrograms:
    """Build the programs of all ranks, with shared instructions (`ir.shared_programs`)."""
    placement = _placed(outline, strategy, micro_batches, mode, ranks)
    name = str(strategy)
    return SharedPrograms.gather(_each_rank(placement, name, mode, ranks))


def _each_rank(placement: Placement, name: str, mode: Mode, ranks: int) -> Iterator[tuple[RankProgram, Body, Peers]]:
    # key of `_decides` -> instructions and, for each peer number in them, its index in
    # `neighbours`. Most ranks differ only in peers.
    body_and_places: dict[Hashable, tuple[Body, tuple[int, ...]]] = {}
    for rank in range(ranks):
        decides, neighbours = _decides(placement, mode, rank)
        if decides not in body_and_places:
            program = placed_program(placement, name, mode, rank, ranks)
            body, peers = numbered(program.instructions)
            body_and_places[decides] = (body, tuple(map(neighbours.index, peers)))
        body, places = body_and_places[decides]
        yield _header(placement, name, rank, ranks), body, tuple(neighbours[place] for place in places)


def _decides(placement: Placement, mode: Mode, rank: int) -> tuple[Hashable, Peers]:
    """Return a key that determines a rank's instructions except their peers, and the rank's peers."""
    stage = placement.stage_of.get(rank)
    if stage is None:
        return None, ()
    index = stage.ranks.index(rank)
    degree = len(stage.ranks)
    number: dict[int, int] = {}
    roles = []
    beats = placement.beats(stage)
    for role in stage.roles:
        # As in `order`: one sender and every degree-th receiver per neighboring stage.
        ways = [
            (peers[index % len(peers)] if peers else None, peers[index::degree])
            for peers in (role.previous, role.following)
        ]
        named = [
            tuple(None if peer is None else number.setdefault(peer, len(number)) for peer in (sender, *receivers))
            for sender, receivers in ways
        ]
        ends = (bool(role.previous), bool(role.following))
        roles.append((role.micro_batches, ends, tuple(named), beats[role]))
    return (stage.blocks, stage.offload, tuple(roles), decides(placement, mode, stage)), tuple(number)


def rank_program(
    outline: Outline, strategy: Strategy, micro_batches: Sequence[int], rank: int, mode: Mode = "train", *, ranks: int
) -> RankProgram:
    """Build one rank's program, faster than `rank_programs`."""
    *_, (_, program) = after_each_pass(outline, strategy, micro_batches, rank, mode, ranks=ranks)
    return program


def after_each_pass(
    outline: Outline, strategy: Strategy, micro_batches: Sequence[int], rank: int, mode: Mode = "train", *, ranks: int
) -> Iterator[tuple[str, RankProgram]]:
    if not 0 <= rank < ranks:
        raise ValueError(f"'rank' is {rank}: the world has ranks 0 to {ranks - 1}")
    placement = _placed(outline, strategy, micro_batches, mode, ranks)
    yield from _passes(placement, str(strategy), mode, rank, ranks)


def _placed(outline: Outline, strategy: Strategy, micro_batches: Sequence[int], mode: Mode, ranks: int) -> Placement:
    if mode not in get_args(Mode):
        raise ValueError(f"'mode' is {mode!r}: use {' or '.join(map(repr, get_args(Mode)))}")
    strategy.check(outline.layers, ranks)
    return place(outline, strategy, micro_batches)


def placed_program(placement: Placement, strategy: str, mode: Mode, rank: int, ranks: int) -> RankProgram:
    *_, (_, program) = _passes(placement, strategy, mode, rank, ranks)
    return program


def _passes(
    placement: Placement, strategy: str, mode: Mode, rank: int, ranks: int
) -> Iterator[tuple[str, RankProgram]]:
    program = _header(placement, strategy, rank, ranks)
    for name, run in PASSES:
        program = run(placement, mode, program)
        yield name, program


def _header(placement: Placement, strategy: str, rank: int, ranks: int) -> RankProgram:
    stage = placement.stage_of.get(rank)
    if stage is None:
        return RankProgram(rank, ranks, strategy, (), (), (), ())
    roles = tuple(Role(role.pipeline, role.stage, role.micro_batches) for role in stage.roles)
    return RankProgram(rank, ranks, strategy, roles, stage.ranks, stage.layers, ())
