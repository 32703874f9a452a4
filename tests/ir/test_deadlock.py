"""Deadlocks of small hand-written programs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.ir.deadlock import Deadlock, find_deadlock
from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.program_outline import Mode, Outline
from hydragraph.ir.rank_program import RankProgram, Role
from hydragraph.ir.value import Value, activation, message, weights
from hydragraph.passes.pipeline import rank_programs
from hydragraph.spec.strategy import Strategy
from tests import fuzz
from tests.ir.queues import Transport, deadlock_over
from tests.passes.test_pipeline import iterations, model, shared
from tests.thorough import thorough


def send(peer: int) -> Instruction:
    return Instruction(Op.SEND, peer=peer, reads=(activation(1, 0),), writes=(message(activation(1, 0), peer),))


def receive(peer: int) -> Instruction:
    return Instruction(Op.RECEIVE, peer=peer, writes=(activation(1, 0),))


def free(peer: int) -> Instruction:
    sent = message(activation(1, 0), peer)
    return Instruction(Op.FREE, reads=(sent,), after=(sent,))


def forward(block: str, *reads: Value) -> Instruction:
    return Instruction(Op.FORWARD, block, 0, reads=reads)


def pull(bucket: str) -> Instruction:
    return Instruction(Op.PULL, bucket)


COMMIT = Instruction(Op.COMMIT)


def run(*instructions: list[Instruction], tp: tuple[int, ...] = ()) -> Deadlock | None:
    """Find a deadlock of one program per rank; `tp` are the ranks that compute together."""
    n = len(instructions)
    return find_deadlock(
        [
            RankProgram(rank, n, "s", (Role(0, 0, range(1)),), tp if rank in tp else (rank,), ((0, 1),), tuple(each))
            for rank, each in enumerate(instructions)
        ]
    )


def test_sends_are_buffered_and_receives_wait() -> None:
    assert run([send(1), receive(1)], [send(0), receive(0)]) is None
    assert run([receive(1), send(1)], [send(0), receive(0)]) is None
    found = run([receive(1), send(1)], [receive(0), send(0)])
    assert found == Deadlock({0: 0, 1: 0}, {0: (1,), 1: (0,)})
    assert found.chain == (0, 1, 0)


def test_a_receive_from_a_rank_that_has_ended() -> None:
    found = run([send(1)], [receive(0), receive(0)])
    assert found == Deadlock({1: 1}, {1: (0,)})
    assert found.chain == (1, 0)


def test_whoever_frees_a_message_waits_until_it_is_received() -> None:
    assert run([send(1), free(1), receive(1)], [receive(0), send(0)]) is None
    found = run([send(1), free(1), receive(1)], [send(0), free(0), receive(0)])
    assert found == Deadlock({0: 1, 1: 1}, {0: (1,), 1: (0,)})


def test_tensor_parallel_ranks_compute_together() -> None:
    one, other = forward("layer.0"), forward("layer.1")
    assert run([one, other], [one, other], tp=(0, 1)) is None
    assert run([one, other], [other, one], tp=(0, 1)) == Deadlock({0: 0, 1: 0}, {0: (1,), 1: (0,)})
    assert run([one, other], [other, one]) is None


def test_a_pull_needs_every_rank_before_its_weights_are_read() -> None:
    use = forward("layer.0", weights("layer.0"))
    assert run([pull("layer.0"), use], [pull("layer.0")]) is None
    found = run([pull("layer.0"), use, send(1)], [receive(0), pull("layer.0")])
    assert found == Deadlock({0: 1, 1: 0}, {0: (1,), 1: (0,)})


def test_the_commit_needs_all_ranks() -> None:
    assert run([COMMIT], [COMMIT], [COMMIT]) is None
    found = run([COMMIT], [COMMIT], [])
    assert found is not None
    assert found.waits == {0: (2,), 1: (2,)}


# Of 1,115 and 845 drawn strategies with shared stages, 2 and 1 deadlock with one communicator per direction.
BOUND = [
    ("<[3]x2,[4,0]x2s> + <[5]x2s,[4,0]x2s> + <[3]x2,[2]x2> + <[5]x2s,[2]x2>", (5, 6, 0, 3), 6),
    ("<[7]x2,[1]x1sr,[2,0]x1s> + <[7]x2,[3]x1r,[2,0]x1s> + <[7]x2,[5,4]x1,[2,0]x1s>", (6, 5, 4), 8),
]


@pytest.mark.parametrize(("strategy", "counts", "ranks"), BOUND)
def test_one_communicator_per_direction_may_deadlock_where_one_per_pair_does_not(
    strategy: str, counts: tuple[int, ...], ranks: int
) -> None:
    programs = rank_programs(model(4), Strategy.parse(strategy, 4), counts, ranks=ranks)
    deadlocks = {transport: deadlock_over(programs, transport) for transport in Transport}
    assert [transport for transport, deadlock in deadlocks.items() if deadlock] == [Transport.NCCL_BOUND]
    bound = deadlocks[Transport.NCCL_BOUND]
    assert bound is not None
    assert all(bound.waits.values())


def test_a_computation_waits_for_its_message_over_nccl_and_over_gloo() -> None:
    """The second computation after a receive reads what arrives; the sender sends it only after the commit."""
    value, sent = activation(1, 0), message(activation(1, 0), 1)
    late = Instruction(Op.SEND, peer=1, reads=(value,), writes=(sent,))
    rows = [
        (forward("layer.0"), COMMIT, late),
        (receive(0), forward("aux"), forward("layer.1", value), COMMIT),
    ]
    programs = [RankProgram(r, 2, "s", (Role(0, 0, range(1)),), (r,), ((0, 1),), row) for r, row in enumerate(rows)]
    assert all(deadlock_over(programs, transport) for transport in Transport)


@thorough
@settings(max_examples=25)
@given(st.one_of(iterations(), shared()), st.randoms(use_true_random=False))
def test_what_ends_over_gloo_ends_over_nccl_with_a_communicator_per_pair(
    iteration: tuple[Outline, Strategy, list[int], Mode, int], random: Random
) -> None:
    """Also with moved instructions, except for messages without a counterpart, which only gloo tolerates."""
    outline, strategy, counts, mode, ranks = iteration
    programs = list(rank_programs(outline, strategy, counts, mode, ranks=ranks))
    assert not any(deadlock_over(programs, transport) for transport in (Transport.NCCL, Transport.NCCL_LAZY))
    at = random.randrange(ranks)
    body = list(programs[at].instructions)
    if body:
        taken = body.pop(random.randrange(len(body)))
        body.insert(random.randint(0, len(body)), taken)
    programs[at] = replace(programs[at], instructions=tuple(body))
    if find_deadlock(programs) is None:
        assert deadlock_over(programs, Transport.NCCL) is None


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "of_shared"), [(4, 1.0), (6, 1.0), (8, 1.0), (6, 0.0)])
def test_thousands_of_drawn_programs(ranks: int, of_shared: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "RANKS", ranks)
    ended = dict.fromkeys(Transport, 0)
    drawn = 0
    for seed in range(2000):
        draw = Random(seed)
        text = (fuzz._shared if draw.random() < of_shared else fuzz._strategy)(draw, 4)
        strategy = Strategy.parse(text, 4)
        counts = tuple(draw.randint(0, 6) for _ in strategy.pipelines)
        if sum(counts):
            programs = rank_programs(model(4), strategy, counts, ranks=ranks)
            drawn += 1
            for transport in Transport:
                ended[transport] += deadlock_over(programs, transport) is None
    assert drawn > 1500
    assert ended[Transport.GLOO] == ended[Transport.NCCL] == ended[Transport.NCCL_LAZY] == drawn
    assert ended[Transport.NCCL_BOUND] > 0.99 * drawn
