"""Expected memory of the ranks of a small Llama, against sums by hand."""

from __future__ import annotations

from functools import cache

import pytest

from hydragraph import capture
from hydragraph.cost.compiled_blocks import CompiledBlocks
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.graph_footprint import footprint
from hydragraph.cost.rank_memory import Memory
from hydragraph.ir.program import Program
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StagePart
from hydragraph.spec.strategy import Strategy
from tests.adapted import frozen
from tests.cost.walked import rank_memory
from tests.models import captured
from tests.thorough import only, thorough

TOKENS = MicroBatch(tokens=48, sequences=3)
ALONE = StagePart()
HEAD = 101 * 64 + 64  # elements of the last block, whose weights go first


def llama() -> Program:
    return captured("llama")[0]


@cache
def variants() -> Variants:
    return Variants(llama())


def size() -> int:
    return sum(p.size for p in llama().parameters.values())


def memory(text: str, counts: list[int], rank: int = 0, ranks: int = 1, messages: bool = False) -> Memory:
    batches = [[TOKENS] * count for count in counts]
    return rank_memory(CompiledBlocks(llama(), variants().get), Strategy.parse(text, 2), batches, rank, ranks, messages)


def test_alone_a_rank_holds_its_home_state_and_no_copies_of_it() -> None:
    found = memory("<tp1,pp1>", [1])
    assert (found.home_weights, found.optimizer_state, found.home_gradients) == (4 * size(), 8 * size(), 4 * size())
    assert (found.weights, found.gradients, found.messages) == (0, 0, 0)
    assert found.activations > 2 * footprint(variants().get(llama().blocks[1], ALONE), ALONE, TOKENS).saved


def test_data_parallel_ranks_hold_all_weights_and_a_part_of_the_state() -> None:
    alone, shared = memory("<tp1,pp1>", [1]), memory("2*<tp1,pp1>", [1, 1], rank=1, ranks=2)
    assert shared.home == pytest.approx(alone.home / 2, rel=1e-3)
    assert 4 * (size() - HEAD) <= shared.weights <= 4 * size()  # it holds most during the last layer's backward
    assert shared.activations == pytest.approx(alone.activations, rel=0.01)
    more = memory("2*<tp1,pp1>", [2, 1], ranks=2)  # gradients of the first micro-batch, and all weights for the next
    assert min(more.weights, more.gradients) >= 4 * (size() - HEAD)


@thorough
def test_tensor_parallel_ranks_hold_a_part_of_the_weights() -> None:
    found = memory("<tp2,pp1>", [2], ranks=2)
    assert 4 * (size() - HEAD) / 2 <= found.weights <= 4 * (size() / 2 + 5 * 64)  # norms are whole everywhere
    assert found.gradients <= 4 * (size() / 2 + 5 * 64)


def test_an_idle_rank_holds_its_home_state_and_copies_for_others() -> None:
    idle = memory("<[0]x2>", [1], rank=1, ranks=2)
    assert idle.weights == idle.gradients == idle.working == 0
    assert idle.total == pytest.approx(16 * size() / 2, rel=0.01)
    assert memory("<[0]x2>", [1], rank=1, ranks=2, messages=True) == idle  # one rank gets its shard as it is
    assert memory("<[0]x2> + <[1]x2>", [1, 1], rank=2, ranks=3, messages=True).messages > 0


def test_a_pipeline_keeps_as_many_micro_batches_alive_as_stages_follow() -> None:
    few, many = (memory("<tp1,pp2>", [count], ranks=2).activations for count in (4, 8))
    assert many < 1.1 * few  # ids of more micro-batches, but no more saved values
    assert memory("<tp1,pp2> gpipe", [8], ranks=2).activations > 2 * few


def test_the_first_stage_holds_under_zb_h1_what_it_holds_under_1f1b() -> None:
    plain, halved = (memory(f"<tp1,pp2>{schedule}", [4], ranks=2) for schedule in ("", " zb-h1"))
    assert halved == plain
    # A later stage holds one micro-batch's postponed values, and fewer micro-batches than the first stage.
    plain, halved = (memory(f"<tp1,pp2>{schedule}", [4], rank=1, ranks=2) for schedule in ("", " zb-h1"))
    assert plain.total < halved.total < 1.5 * plain.total


def test_recomputation_trades_saved_values_for_working_memory() -> None:
    saving, again = memory("<[0]x2>", [1]), memory("<[0]x2r>", [1])
    assert again.activations < 0.6 * saving.activations
    assert again.working > saving.working or again.total < saving.total


@thorough
def test_sequence_parallel_ranks_share_what_lies_between_products() -> None:
    whole, parts = memory("<[0,1]x2>", [1], ranks=2), memory("<[0,1]x2s>", [1], ranks=2)
    assert parts.activations < whole.activations


@only("2*<tp1,pp1>-[1, 1]", "<[0]x1,[1]x1>-[3]")
@pytest.mark.parametrize(
    ("text", "counts"), [("2*<tp1,pp1>", [1, 1]), ("<[0]x1,[1]x1>", [3]), ("<[0,1]x1,[2]x1>", [3])], ids=str
)
def test_messages_only_add(text: str, counts: list[int]) -> None:
    ranks = len(Strategy.parse(text, 2).devices)
    for rank in range(ranks):
        without = memory(text, counts, rank, ranks)
        assert memory(text, counts, rank, ranks, messages=True).total >= without.total


@thorough
def test_what_is_frozen_costs_its_weight_at_home_and_saves_nothing() -> None:
    program = capture(frozen(lambda name: "layers.2" in name))
    blocks = CompiledBlocks(program, Variants(program).get)
    elements = {learns: sum(b.size for b in program.buckets if b.learns is learns) for learns in (True, False)}
    assert min(elements.values()) > 0
    one = rank_memory(blocks, Strategy.parse("<tp1,pp1>", 3), [[TOKENS]], 0, 1)
    assert one.home_weights == 4 * (elements[True] + elements[False])
    assert (one.optimizer_state, one.home_gradients) == (8 * elements[True], 4 * elements[True])
    two = [rank_memory(blocks, Strategy.parse("<tp1,pp2>", 3), [[TOKENS]], r, 2) for r in (0, 1)]
    assert two[0].gradients == 0 < two[1].gradients + two[1].working
    assert two[0].activations < two[1].activations  # the first stage has forwards only
