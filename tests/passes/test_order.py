# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return, bad-argument-type]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.ir.instruction import Op
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.rank_program import RankProgram
from hydragraph.passes.order import order
from hydragraph.passes.place import place
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy import Strategy

MODEL = Outline(("embed", "layer.0", "layer.1", "head"), (("embed", ("embed",)), ("head", ("head",))))


def ordered(strategy, counts, rank, mode="train"):
    blank = RankProgram(rank, rank + 1, str(strategy), (), (), (), ())
    return order(place(MODEL, strategy, counts), mode, blank).instructions


def stage_tasks(schedule, depth, stage, count, mode="train"):
    strategy = Strategy((Pipeline([Stage((i,), 1) for i in range(depth)]),), schedule)
    blocks = ("embed", *(f"layer.{i}" for i in range(depth)), "head")
    placement = place(Outline(blocks, ()), strategy, [count])
    return " ".join(map(str, placement.actions(placement.stages[stage], mode)))


@pytest.mark.parametrize(
    ("schedule", "stage", "count", "expected"),
    [
        ("1f1b", 0, 4, "F0 F1 F2 B0 F3 B1 B2 B3"),
        ("1f1b", 1, 4, "F0 F1 B0 F2 B1 F3 B2 B3"),
        ("1f1b", 2, 4, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("1f1b", 0, 1, "F0 B0"),
        ("1f1b", 0, 2, "F0 F1 B0 B1"),
        ("gpipe", 1, 3, "F0 F1 F2 B0 B1 B2"),
        ("zb-h1", 1, 3, "F0 F1 I0 W0 F2 I1 W1 I2 W2"),
    ],
)
def test_schedules_of_three_stages(schedule, stage, count, expected):
    assert stage_tasks(schedule, 3, stage, count) == expected
    assert stage_tasks(schedule, 3, stage, count, "evaluate") == " ".join(f"F{m}" for m in range(count))


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 6), st.integers(1, 8), st.data())
def test_tasks_run_once_in_order_and_bound_what_is_alive(schedule, depth, count, data):
    stage = data.draw(st.integers(0, depth - 1))
    run = stage_tasks(schedule, depth, stage, count).split()
    assert [t for t in run if t[0] == "F"] == [f"F{m}" for m in range(count)]
    assert [t for t in run if t[0] == "B"] == [f"B{m}" for m in range(count)]
    alive, peak = 0, 0
    for task in run:
        alive += 1 if task[0] == "F" else -1
        assert alive >= 0
        peak = max(peak, alive)
    assert peak == (min(count, depth - stage) if schedule == "1f1b" else count)


@given(st.integers(1, 4), st.integers(1, 4))
def test_receiver_j_takes_from_sender_j_mod_t(t, u):
    senders, receivers = tuple(range(10, 10 + t)), tuple(range(30, 30 + u))
    strategy = Strategy((Pipeline((Stage(senders, 1), Stage(receivers, 1))),))
    for value, one, other in (("h1.0", senders, receivers), ("d1.0", receivers, senders)):
        for j, rank in enumerate(other):
            (receive,) = (i for i in ordered(strategy, [1], rank) if i.op is Op.RECEIVE and i.writes == (value,))
            assert receive.peer == one[j % len(one)]
        for j, rank in enumerate(one):
            sent = [i.peer for i in ordered(strategy, [1], rank) if i.op is Op.SEND and i.reads == (value,)]
            assert sent == [peer for k, peer in enumerate(other) if k % len(one) == j]


def test_receives_follow_the_order_in_which_a_peer_on_both_sides_sends():
    blocks = ("embed", *(f"layer.{i}" for i in range(4)), "head")
    outline = Outline(blocks, tuple((block, (block,)) for block in blocks))
    placement = place(outline, Strategy.parse("<[0]x1,[1]x1,[0]x1,[2]x1>", 4), [4])
    made = []
    for rank in (0, 1):
        blank = RankProgram(rank, 2, "s", (), (), (), ())
        made.append(order(placement, "train", blank).instructions)
    for sender, receiver in ((0, 1), (1, 0)):
        sent = [i.reads[0] for i in made[sender] if i.op is Op.SEND and i.peer == receiver]
        assert [i.writes[0] for i in made[receiver] if i.op is Op.RECEIVE and i.peer == sender] == sent
    # Rank 0 sends d2.0 before h1.3, which rank 1 needs first.
    kinds = [str(i.writes[0]) for i in made[1] if i.op is Op.RECEIVE]
    assert kinds.index("d2.0") < kinds.index("h1.3")
    used = [str(value) for i in made[1] if i.op in (Op.FORWARD, Op.BACKWARD) for value in i.reads]
    assert used.index("h1.3") < used.index("d2.0")


def test_values_of_a_whole_model_on_one_rank():
    forward, backward = {}, {}
    for each in ordered(Strategy.parse("<tp1,pp1>", 2), [1], 0):
        (forward if each.op is Op.FORWARD else backward)[each.target] = (each.reads, each.writes)
    assert forward == {
        "aux": ((), ("a.0",)),
        "embed": (("W.embed", "a.0"), ("h0.0", "s.embed.0")),
        "layer.0": (("h0.0", "a.0"), ("h1.0", "s.layer.0.0")),
        "layer.1": (("h1.0", "a.0"), ("h2.0", "s.layer.1.0")),
        "head": (("W.head", "h2.0", "a.0"), ("loss.0", "s.head.0")),
    }
    assert backward == {
        "head": (("s.head.0", "W.head"), ("d2.0", "G.head")),
        "layer.1": (("s.layer.1.0", "d2.0"), ("d1.0",)),
        "layer.0": (("s.layer.0.0", "d1.0"), ("d0.0",)),
        "embed": (("s.embed.0", "d0.0", "W.embed"), ("G.embed",)),
    }


def test_evaluation_saves_nothing_and_runs_no_backward():
    run = ordered(Strategy.parse("<tp1,pp2>", 2), [2], 1, "evaluate")
    assert {i.op for i in run} == {Op.RECEIVE, Op.FORWARD}
    assert {v.partition(".")[0] for i in run for v in i.writes} == {"h1", "h2", "a", "loss"}


def test_ranks_without_work_get_nothing():
    strategy = Strategy.parse("2*<tp1,pp1>", 2)
    assert ordered(strategy, [0, 1], 0) == ()
    assert ordered(strategy, [0, 1], 5) == ()
