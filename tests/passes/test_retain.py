# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return]
import pytest

from hydragraph.ir.instruction import Op, Stream
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.rank_program import RankProgram
from hydragraph.ir.value import ValueKind
from hydragraph.passes.order import order
from hydragraph.passes.overlap import overlap
from hydragraph.passes.place import place
from hydragraph.passes.retain import retain
from hydragraph.spec.strategy import Strategy

BLOCKS = ("embed", "layer.0", "layer.1", "layer.2", "head")
MODEL = Outline(BLOCKS, (("word", ("embed", "head")), *((block, (block,)) for block in BLOCKS[1:])))


def before_and_after(text, counts, rank, mode):
    placement = place(MODEL, Strategy.parse(text, 3), counts)
    blank = RankProgram(rank, rank + 1, text, (), (), (), ())
    before = overlap(placement, mode, order(placement, mode, blank))
    return before.instructions, retain(placement, mode, before).instructions


@pytest.mark.parametrize("mode", ["train", "evaluate"])
@pytest.mark.parametrize("rank", range(6))
def test_values_are_freed_once_right_after_their_last_use(rank, mode):
    before, after = before_and_after("<tp3,pp1> + <tp1,pp2>", [2, 3], rank, mode)
    assert tuple(i for i in after if i.op is not Op.FREE) == tuple(i for i in before if i.op is not Op.FREE)
    used = [{*i.reads, *i.writes} for i in after]
    for value in (v for v in set().union(*used) if v.kind is not ValueKind.MESSAGE):
        *earlier, use, free = (n for n, values in enumerate(used) if value in values)
        assert after[free].op is Op.FREE
        assert free == use + 1
        assert all(after[n].op is not Op.FREE for n in (*earlier, use))


def test_gradients_and_losses_live_until_the_commit():
    _, after = before_and_after("<tp1,pp1>", [2], 0, "train")
    assert [i.op for i in after[-3:]] == [Op.COMMIT, Op.FREE, Op.UPDATE]
    assert set(after[-2].reads) == {"loss.0", "loss.1", *(f"G.{bucket}" for bucket in MODEL.pull_order)}


def test_sent_and_unused_values_are_freed():
    _, sender = before_and_after("<tp1,pp2>", [1], 0, "evaluate")
    at = next(n for n, i in enumerate(sender) if i.op is Op.SEND)
    assert sender[at + 1].reads == ("h1.0",)
    assert sender[at + 1].stream is Stream.COMPUTE
    assert sender[at + 1].after == ()
