# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return, bad-argument-type]
import pytest

from hydragraph.ir.instruction import Op, Stream
from hydragraph.ir.instruction_text import instruction_text
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.rank_program import RankProgram
from hydragraph.passes.order import order
from hydragraph.passes.overlap import overlap
from hydragraph.passes.place import place
from hydragraph.spec.strategy import Strategy

BLOCKS = ("embed", "layer.0", "layer.1", "layer.2", "head")
MODEL = Outline(BLOCKS, (("word", ("embed", "head")), *((block, (block,)) for block in BLOCKS[1:])))


def overlapped(text, counts, rank, mode="train", schedule="1f1b"):
    placement = place(MODEL, Strategy(Strategy.parse(text, 3).pipelines, schedule), counts)
    blank = RankProgram(rank, rank + 1, text, (), (), (), ())
    return overlap(placement, mode, order(placement, mode, blank)).instructions


def compact(instructions):
    """Return forwards, backwards and transfers as words: F0 is micro-batch 0's through all the stage's blocks."""
    words = []
    for each in instructions:
        if each.op in (Op.FORWARD, Op.BACKWARD):
            word = f"{each.op.name[0]}{each.micro_batch}"
        elif each.op in (Op.SEND, Op.RECEIVE):
            word = f"{each.op.value}:{(*each.reads, *each.writes)[0]}"
        else:
            continue
        if word not in words[-1:]:
            words.append(word)
    return " ".join(words)


def test_forward_receives_are_posted_before_the_backward_that_precedes_them():
    assert compact(overlapped("<tp1,pp2>", [3], 1)) == (
        "receive:h1.0 F0 receive:h1.1 B0 send:d1.0 F1 receive:h1.2 B1 send:d1.1 F2 B2 send:d1.2"
    )
    assert compact(overlapped("<tp1,pp3>", [3], 1)) == (
        "receive:h1.0 F0 send:h2.0 receive:h1.1 F1 send:h2.1 "
        "receive:d2.0 receive:h1.2 B0 send:d1.0 F2 send:h2.2 receive:d2.1 B1 send:d1.1 receive:d2.2 B2 send:d1.2"
    )


def test_gpipe_receives_stay_where_they_are():
    assert compact(overlapped("<tp1,pp2>", [2], 1, schedule="gpipe")) == (
        "receive:h1.0 F0 receive:h1.1 F1 B0 send:d1.0 B1 send:d1.1"
    )


@pytest.mark.parametrize("rank", range(5))
def test_all_ranks_pull_first_and_push_in_reverse(rank):
    run = overlapped("<tp2,pp1> + <tp1,pp2>", [1, 2], rank)
    order = ["word", "layer.0", "layer.1", "layer.2", "head"]
    assert [i.target for i in run[:5] if i.op is Op.PULL] == order
    assert [i.target for i in run if i.op is Op.PUSH] == order[::-1]
    assert [i.op for i in run[-2:]] == [Op.COMMIT, Op.UPDATE]


@pytest.mark.parametrize("rank", range(4))
def test_own_gradients_leave_when_complete_and_behind_a_waiting_send(rank):
    run = overlapped("<tp2,pp1> + <tp1,pp2>", [1, 2], rank)
    tied_late = {"word"} if rank == 3 else set()  # complete early, but its turn in the one order of pushes is last
    for push in (i for i in run if i.reads and i.op is Op.PUSH and i.target not in tied_late):
        last = max(n for n, i in enumerate(run) if i.op is Op.BACKWARD and push.reads[0] in i.writes)
        between = run[last + 1 : run.index(push)]
        assert all(i.stream in (Stream.P2P, Stream.PUSH) for i in between)
        assert [i.stream for i in between] == sorted((i.stream for i in between), key=[Stream.P2P, Stream.PUSH].index)


def test_tied_gradient_of_the_last_stage_waits_for_its_turn():
    run = overlapped("<tp1,pp2>", [2], 1)
    assert [(i.target, i.reads) for i in run if i.op is Op.PUSH][-2:] == [("layer.0", ()), ("word", ("G.word",))]


def test_pushes_of_others_wait_for_the_last_forward_only():
    run = overlapped("<tp1,pp2>", [3], 0)
    last = max(n for n, i in enumerate(run) if i.op is Op.FORWARD)
    others = [n for n, i in enumerate(run) if i.op is Op.PUSH and not i.reads]
    assert others
    assert [i.op for i in run[last + 1 : others[0]]] == [Op.SEND, Op.RECEIVE]


def test_idle_rank_takes_part_in_every_exchange():
    assert [instruction_text(i).partition(" after ")[0].rstrip() for i in overlapped("<tp1,pp1>", [1], 7)][4:7] == [
        "pull     link W.head home -> others",
        "push     link G.head others -> home",
        "push     link G.layer.2 others -> home",
    ]


def test_commit_ends_losses_and_gradients():
    *_, commit, _ = overlapped("<tp1,pp2>", [2], 1)
    assert set(commit.reads) == {"loss.0", "loss.1", "G.word", "G.layer.1", "G.layer.2", "G.head"}
    assert overlapped("<tp1,pp2>", [2], 1, "evaluate")[-1].reads == ("loss.0", "loss.1")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("mode", ["train", "evaluate"])
@pytest.mark.parametrize("rank", range(6))
def test_every_message_is_freed_once_behind_its_send_and_before_the_commit(rank, mode, schedule):
    run = overlapped("<[0,1]x1,[2]x1,[3,4,5]x1>", [5], rank, mode, schedule)
    sent = [value for i in run if i.op is Op.SEND for value in i.writes]
    freed = [value for i in run if i.op is Op.FREE for value in i.reads]
    assert sorted(sent) == sorted(freed) == sorted(set(sent))
    for i in (i for i in run if i.op is Op.FREE):
        assert i.after == i.reads
        assert all(run.index(i) > n for n, other in enumerate(run) if set(other.writes) & set(i.reads))
    ends = [i.op for i in run if i.op in (Op.FREE, Op.COMMIT)]
    assert ends[-1] is Op.COMMIT


def test_messages_are_freed_when_the_peer_has_them():
    def word(instruction):
        return f"{instruction.op.value}:{(*instruction.reads, *instruction.writes)[0]}"

    first = [word(i) for i in overlapped("<tp1,pp2>", [4], 0) if i.op in (Op.FREE, Op.RECEIVE)]
    assert first == [
        f"{op}:h1.{m}>1" if op == "free" else f"{op}:d1.{m}" for m in range(4) for op in ("receive", "free")
    ]
    second = [word(i) for i in overlapped("<tp1,pp2>", [4], 1) if i.op in (Op.FREE, Op.SEND)]
    assert second == ["send:d1.0", "send:d1.1", "free:d1.0>0", "send:d1.2", "free:d1.1>0", "send:d1.3", "free:d1.2>0"]


def test_evaluation_neither_pushes_nor_updates():
    ops = {i.op for i in overlapped("<tp1,pp2>", [2], 0, "evaluate")}
    assert ops == {Op.PULL, Op.FORWARD, Op.SEND, Op.FREE, Op.COMMIT}


def test_waits_are_for_other_streams_only():
    run = overlapped("<tp1,pp2>", [1], 1)
    waits = {(i.op, i.target): i.after for i in run}
    assert waits[Op.FORWARD, "layer.1"] == ("W.layer.1", "h1.0")
    assert waits[Op.FORWARD, "head"] == ("W.word", "W.head")
    assert waits[Op.BACKWARD, "layer.1"] == ("W.layer.1",)
    assert waits[Op.SEND, ""] == ("d1.0",)
    assert waits[Op.PUSH, "head"] == ("G.head",)
    assert waits[Op.PUSH, "layer.0"] == waits[Op.COMMIT, ""] == ()
