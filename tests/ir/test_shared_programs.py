"""Programs that ranks share: no information is lost, and programs that differ in more than peers are not shared."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.shared_programs import SharedPrograms
from hydragraph.ir.verify import verify
from hydragraph.passes.pipeline import rank_program, rank_programs, shared_programs
from hydragraph.spec.strategy import Strategy
from tests.passes.test_pipeline import iterations, model, shared
from tests.thorough import thorough


@thorough
@settings(max_examples=60)
@given(st.one_of(iterations(), shared()))
def test_every_rank_gets_the_program_that_it_would_get_alone(
    iteration: tuple[Outline, Strategy, list[int], Mode, int],
) -> None:
    outline, strategy, counts, mode, ranks = iteration
    programs = shared_programs(outline, strategy, counts, mode, ranks=ranks)
    alone = [rank_program(outline, strategy, counts, rank, mode, ranks=ranks) for rank in range(ranks)]
    assert list(programs) == alone
    found = SharedPrograms.of(alone)  # by what they are, not by how they were made
    assert list(found) == alone
    assert (found.bodies, found.kinds, found.peers) == (programs.bodies, programs.kinds, programs.peers)
    assert programs.instructions == sum(len(each.instructions) for each in alone)


def test_equal_pipelines_have_one_kind_per_stage() -> None:
    strategy = Strategy.parse("16*<tp8,pp4> + 8*<tp4,pp4>", 8)
    programs = shared_programs(model(8), strategy, [4] * 24, ranks=640)
    assert len(programs.bodies) == 8  # four stages of each of the two degrees
    assert programs.of_kind(0) == tuple(r for p in range(16) for r in range(32 * p, 32 * p + 8))
    assert programs.peers[0] == (8,)
    assert programs.peers[9] == (1, 17)
    verify(programs, model(8))


def test_who_sends_to_two_ranks_runs_another_program_than_who_sends_to_one() -> None:
    programs = shared_programs(model(2), Strategy.parse("<[0,1]x1,[2,3,4]x1>", 2), [2], ranks=6)
    assert programs.peers == ((2, 4), (3,), (0,), (1,), (0,), ())
    # Rank 4's gradients go nowhere: rank 0 has rank 2's. Rank 5 is idle.
    assert programs.kinds == (0, 1, 2, 2, 3, 4)


def test_one_broken_rank_is_a_kind_of_its_own() -> None:
    whole = rank_programs(model(2), Strategy.parse("2*<tp2,pp1>", 2), [1, 1], ranks=4)
    broken = (*whole[:3], dataclasses.replace(whole[3], instructions=whole[3].instructions[:-1]))
    assert SharedPrograms.of(whole).kinds == (0, 0, 0, 0)
    assert SharedPrograms.of(broken).kinds == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="rank 3"):
        verify(broken, model(2))
