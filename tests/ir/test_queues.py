"""A device's queues under small hand-written programs."""

from __future__ import annotations

from hydragraph.ir.instruction import Instruction
from hydragraph.ir.rank_program import RankProgram, Role
from hydragraph.ir.value import activation, weights
from tests.ir.queues import Stuck, Transport, run_queues
from tests.ir.test_deadlock import COMMIT, forward, free, pull, receive, send


def run(transport: Transport, *instructions: list[Instruction], tp: tuple[int, ...] = ()) -> dict[int, Stuck]:
    n = len(instructions)
    return run_queues(
        [
            RankProgram(rank, n, "s", (Role(0, 0, range(1)),), tp if rank in tp else (rank,), ((0, 1),), tuple(each))
            for rank, each in enumerate(instructions)
        ],
        transport,
    )


def test_the_host_runs_ahead_of_messages_once_they_are_connected() -> None:
    programs = [receive(1), send(1)], [receive(0), send(0)]
    assert run(Transport.NCCL, *programs) == {}
    assert run(Transport.NCCL_BOUND, *programs) == {}
    assert run(Transport.NCCL_LAZY, *programs) == {0: Stuck(0, (1,)), 1: Stuck(0, (0,))}


def test_one_communicator_of_a_direction_is_one_queue() -> None:
    # Rank 0 sends to 2 then to 1; rank 1 sends to 2 only after what it receives; rank 2 expects rank 1's first.
    programs = [send(2), send(1)], [receive(0), send(2)], [receive(1), receive(0)]
    assert run(Transport.NCCL, *programs) == {}
    assert set(run(Transport.NCCL_BOUND, *programs)) == {0, 1, 2}


def test_a_message_waits_for_what_was_computed_before_the_last_send() -> None:
    computed = Instruction(forward("layer.1").op, "layer.1", 0, reads=(activation(1, 0),))
    # Rank 0 computes with what it receives, then sends; rank 1 sends only once it has received that.
    ahead = [receive(1), computed, send(1), COMMIT], [receive(0), computed, send(0), COMMIT]
    assert run(Transport.NCCL, *ahead) == {0: Stuck(1, (1,)), 1: Stuck(1, (0,))}
    assert run(Transport.NCCL, [receive(1), computed, send(1), COMMIT], [send(0), receive(0), COMMIT]) == {}


def test_tensor_parallel_ranks_meet_when_their_communicator_connects() -> None:
    one, other = forward("layer.0"), forward("layer.1")
    assert run(Transport.NCCL_LAZY, [one, other], [one, other], tp=(0, 1)) == {}
    crossed = [send(1), one], [one, receive(0)]
    assert run(Transport.NCCL, *crossed, tp=(0, 1)) == {}
    assert run(Transport.NCCL_LAZY, *crossed, tp=(0, 1)) == {0: Stuck(0, (1,)), 1: Stuck(0, (0,))}
    assert run(Transport.NCCL, [one], [other], tp=(0, 1)) == {0: Stuck(0, (1,)), 1: Stuck(0, (0,))}


def test_what_never_comes() -> None:
    use = forward("layer.0", weights("layer.0"))
    assert run(Transport.NCCL, [pull("layer.0"), use], []) == {0: Stuck(1, (1,))}
    assert run(Transport.NCCL, [send(1), free(1)], []) == {0: Stuck(1, (1,))}
    assert run(Transport.NCCL, [send(1)], []) == {0: Stuck(0, (1,))}
    assert run(Transport.NCCL, [COMMIT], []) == {0: Stuck(0, (1,))}
