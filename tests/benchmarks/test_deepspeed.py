"""Iterations on DeepSpeed, compared with sums by hand and with every stage's program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.deepspeed import Stack, deepspeed_s, exchanged_end
from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.strategy import Strategy
from tests.cost.priced import HIDDEN, cluster, profile
from tests.cost.test_costs import assigned
from tests.cost.test_schedule_replay import Rows, pipelines


def test_other_runtimes_share_no_stages() -> None:
    other = Costs(profile(4, "fast"), cluster(4))
    with pytest.raises(Unsupported, match="shared or interleaved stages on another runtime"):
        deepspeed_s(other, Strategy.parse("<[0]x2,[2]x2> + <[1]x2,[2]x2>", 4), assigned([[9]], [[9]]))
    with pytest.raises(Unsupported, match="shared or interleaved stages on another runtime"):
        deepspeed_s(other, Strategy.parse("<tp1,pp2,v2>", 4), assigned([[9]]))


def test_another_runtime_is_priced_by_hand() -> None:
    """Two replicas of two stages: messages in parts that hold up their senders, and a ring over the replicas."""
    where = cluster(4, per_node=1, outer=Interconnect(1e6, 0.0))
    each = profile(4, "fast", elements=10**6)
    found = Costs(each, where)
    plain = Stack(parts=False, buffer_bytes=0)
    strategy, assignment = Strategy.parse("2*<tp1,pp2>", 4), Assignment.even([1, 1], 100)
    hop = 100 * HIDDEN / 1e6
    first, last = found.stages(strategy.pipelines[0])
    computing = sum(first.apart([100])) + sum(last.apart([100])[1:])
    ring = 4 * (4 + 2) * 10**6 * 2 * (1 / 2) / 1e6  # 2 (d - 1) / d of a stage's gradients
    update = 1e-5 + 1e-9 * 6 * 10**6
    assert deepspeed_s(found, strategy, assignment, plain) == pytest.approx(computing + 2 * hop + ring + update)
    # Two ranks send halves at once, through a card each, and gather the halves: a message of one to the other.
    both = Strategy.parse("<tp2,pp2>", 4)

    def seconds(stack: Stack) -> float:
        return deepspeed_s(found, both, Assignment.even([1], 100), stack)

    saved = seconds(plain) - seconds(replace(plain, parts=True))
    assert saved == pytest.approx(2 * (hop / 2 - where.link(0, 1).seconds(100 * HIDDEN / 2)), abs=1e-9)
    added = seconds(replace(plain, staging=Interconnect(1e7, 0.5))) - seconds(plain)
    assert added == pytest.approx(2 * (0.5 + 100 * HIDDEN / 1e7))


def test_messages_of_all_pipelines_share_a_card_and_masks_travel_beside_them() -> None:
    where = cluster(4, per_node=2, cards=1, outer=Interconnect(1e6, 0.0))
    found = Costs(profile(4, "fast"), where)
    plain = Stack(parts=False, buffer_bytes=0)
    for text, sharing in (("<[0]x2,[2]x2>", 1), ("<[0]x2,[2]x2> + <[1]x2,[3]x2>", 2)):
        strategy, assignment = Strategy.parse(text, 4), Assignment.even([1] * sharing, 100)
        without, masked = (deepspeed_s(found, strategy, assignment, replace(plain, mask_bytes=n)) for n in (0, 3000))
        assert masked - without == pytest.approx(sharing * 3000 / 1e6)


def test_gradients_of_a_weight_of_two_stages_are_added_up_first() -> None:
    each = profile(4, "fast", elements=10**6)
    assert each.sizes is not None
    first, *others = each.sizes.buckets
    tied = replace(each, sizes=replace(each.sizes, buckets=(replace(first, blocks=("embed", "head")), *others)))
    where = cluster(4, per_node=1, outer=Interconnect(1e6, 0.0))

    def added_s(text: str, replicas: int) -> float:
        strategy, assignment = Strategy.parse(text, 4), Assignment.even([1] * replicas, 100)
        one, other = (deepspeed_s(Costs(known, where), strategy, assignment) for known in (each, tied))
        return other - one

    assert added_s("<tp1,pp2>", 1) == pytest.approx(first.size * each.sizes.itemsize / 1e6)
    once = first.size * (4 * 2 * (1 / 2) / 1e6 + 1e-9)  # on one stage it is reduced and updated once
    assert added_s("2*<tp1,pp1>", 2) == pytest.approx(-once)


def exchanged(forward: Rows, backward: Rows, ahead: Rows, back: Rows, buffered: list[list[tuple[bool, bool]]]) -> float:
    """Return when all programs end: each stage's own, in DeepSpeed's order, matched message by message."""
    stages, count = len(forward), len(forward[0])
    programs: list[list[tuple[str, int, int]]] = []
    for s in range(stages):
        program, before = [], ("", -1)
        for slot in range(2 * (count + stages - 1)):
            first, second = (slot - s) / 2, (slot - 2 * stages + 1 + s) / 2
            kind, m = ("f", first) if first.is_integer() else ("b", second)
            now = (kind, int(m)) if 0 <= m < count else ("", -1)
            # Before a forward, the last gradient is sent back and a hidden state arrives; before a backward, the
            # reverse.
            side = s - 1 if first.is_integer() else s + 1
            if 0 <= side < stages:
                gone = ("send", side, before[1]) if before[0] else None
                come = ("receive", side, now[1]) if now[0] else None
                both = (gone, come) if first.is_integer() else (come, gone)
                program += [each for each in both if each]
            if now[0]:
                program.append((now[0], s, now[1]))
            before = now
        programs.append(program)
    clock, at = [0.0] * stages, [0] * stages
    posted: dict[tuple[int, int, int], float] = {}  # buffered messages: when their senders continued
    while any(at[s] < len(programs[s]) for s in range(stages)):
        for s in range(stages):
            if at[s] == len(programs[s]):
                continue
            kind, peer, m = programs[s][at[s]]
            if kind in "fb":
                clock[s] += (forward if kind == "f" else backward)[s][m]
                at[s] += 1
            elif kind == "send" and buffered[min(s, peer)][m][peer < s]:
                posted[s, peer, m] = clock[s]
                at[s] += 1
            elif kind == "receive":
                seconds = ahead[peer][m] if peer < s else back[s][m]
                if (peer, s, m) in posted:
                    clock[s] = max(clock[s], posted.pop((peer, s, m))) + seconds
                    at[s] += 1
                elif buffered[min(s, peer)][m][s < peer]:
                    continue  # its sender has not come to it
                elif programs[peer][at[peer] : at[peer] + 1] == [("send", s, m)]:
                    clock[s] = clock[peer] = max(clock[s], clock[peer]) + seconds
                    at[s] += 1
                    at[peer] += 1
    return max(clock)


@given(pipelines(), st.data())
def test_stages_that_exchange_end_when_their_programs_do(
    rows: tuple[Rows, Rows, Rows, Rows, Rows], data: st.DataObject
) -> None:
    _, forward, backward, ahead, back = rows
    flags = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=len(forward[0]), max_size=len(forward[0]))
    buffered = data.draw(st.lists(flags, min_size=len(ahead), max_size=len(ahead)))
    assert exchanged_end(*rows[1:], buffered) == exchanged(forward, backward, ahead, back, buffered)


def test_two_stages_exchange_by_hand() -> None:
    """One micro-batch: forward 1, message 3, forward 1 and backward 2, gradient 3, backward 2."""
    assert exchanged_end([[1.0]] * 2, [[2.0]] * 2, [[3.0]], [[3.0]], [[(False, False)]]) == 12.0
    # Of three micro-batches, the middle of the run: each stage computes 3, and is held up by two messages.
    held = [
        exchanged_end([[1.0] * n] * 2, [[2.0] * n] * 2, [[3.0] * n], [[3.0] * n], [[(False,) * 2] * n]) for n in (3, 4)
    ]
    assert held[1] - held[0] == 9.0
