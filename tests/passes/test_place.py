# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.errors import Unsupported
from hydragraph.ir.program_outline import Outline
from hydragraph.passes.place import place
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy import Strategy


def outline(layers: int) -> Outline:
    """A model whose word embedding is tied to its head, which also has weights of its own."""
    blocks = ("embed", *(f"layer.{i}" for i in range(layers)), "head")
    own = tuple((block, (block,)) for block in blocks[1:])
    return Outline(blocks, (("word", ("embed", "head")), *own))


def around(stage):
    (role,) = stage.roles
    return role.previous, role.following


def test_uneven_pipelines():
    uneven = Strategy((Pipeline((Stage((3, 1), 3), Stage((0,), 1))), Pipeline((Stage((2,), 4),))))
    placement = place(outline(4), uneven, [2, 5])
    first, second, whole = placement.stages
    assert (first.ranks, first.blocks, *around(first)) == ((3, 1), ((0, 4),), (), (0,))
    assert (second.ranks, second.blocks, *around(second)) == ((0,), ((4, 6),), (3, 1), ())
    assert (whole.layers, whole.blocks, whole.micro_batches) == (((0, 4),), ((0, 6),), (0, 1, 2, 3, 4))
    assert placement.stage_of[1] is first


def test_interleaved_stages_of_the_same_ranks_are_placed_together():
    strategy = Strategy.parse("<[0]x1,[2,1]x1,[0]x2,[3]x1> + <[4]x5>", 5)
    placement = place(outline(5), strategy, [3, 1])
    first, second, last, whole = placement.stages
    assert (first.ranks, first.layers, first.blocks) == ((0,), ((0, 1), (2, 4)), ((0, 2), (3, 5)))
    assert [(role.stage, role.visit, role.previous, role.following) for role in first.roles] == [
        (0, 0, (), (2, 1)),
        (2, 1, (2, 1), (3,)),
    ]
    assert (first.micro_batches, first.positions) == ((0, 1, 2), (0, 1, 3, 4))
    assert [first.visit_of(k) for k in first.positions] == [0, 0, 1, 1]
    assert [stage.layers for stage in (second, last, whole)] == [((1, 2),), ((4, 5),), ((0, 5),)]
    assert dict(placement.holders)["word"] == ((0,), (3,), (4,))
    assert placement.held(0) == {"word", "layer.0", "layer.2", "layer.3"}


def test_tied_bucket_is_held_once_per_stage_that_uses_it():
    uneven = Strategy((Pipeline((Stage((3, 1), 3), Stage((0,), 1))), Pipeline((Stage((2,), 4),))))
    holders = dict(place(outline(4), uneven, [1, 1]).holders)
    assert holders["word"] == ((3, 1), (0,), (2,))
    assert holders["layer.3"] == ((0,), (2,))


def test_pipeline_without_micro_batches_holds_nothing():
    two = Strategy.parse("2*<tp1,pp1>", 2)
    placement = place(outline(2), two, [0, 3])
    assert set(placement.stage_of) == {1}
    assert {ranks for _, ranks in placement.holders} == {((1,),)}
    assert place(outline(2), two, [0, 0]).holders == ()


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_every_block_is_on_one_stage_and_weights_are_where_blocks_are(layers, degrees):
    starts = [sum(degrees[:i]) for i in range(len(layers))]
    stages = [Stage(range(s, s + tp), n) for s, tp, n in zip(starts, degrees, layers, strict=False)]  # pyrefly: ignore[bad-argument-type]
    strategy, model = Strategy((Pipeline(stages),)), outline(sum(layers))  # pyrefly: ignore[bad-argument-type]
    placement = place(model, strategy, [1])
    for k, block in enumerate(model.blocks):
        layer = min(max(k - 1, 0), model.layers - 1)
        ranks = {r for r in strategy.devices if (at := strategy.place(r)) and at.first_layer <= layer < at.last_layer}
        assert {r for r, stage in placement.stage_of.items() if k in stage.positions} == ranks
        assert all(set(model.weights[block]) <= placement.held(r) for r in ranks)
    assert {r: placement.held(r) for r in strategy.devices} == {
        r: {bucket for bucket, holders in placement.holders if any(r in stage for stage in holders)}
        for r in strategy.devices
    }


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [1, -1]])
def test_counts_must_fit_the_pipelines(counts):
    with pytest.raises(ValueError, match="one count, 0 or more, for each of the 2 pipelines"):
        place(outline(2), Strategy.parse("2*<tp1,pp1>", 2), counts)


def test_layers_must_fit_the_model():
    with pytest.raises(ValueError, match="2 layers, but the model has 3"):
        place(outline(3), Strategy.parse("<tp1,pp1>", 2), [1])


@pytest.mark.parametrize(
    ("blocks", "buckets", "message"),
    [
        (("embed",), (), "name at least two blocks"),
        (("aux", "head"), (), "rename the block"),
        (("embed", "embed"), (), "more than once"),
        (("embed", "the head"), (), "'the head'"),
        (("embed", "head"), (("w", ()),), "bucket 'w'"),
        (("embed", "head"), (("w", ("tail",)),), "tail"),
    ],
)
def test_outlines_that_make_no_sense_are_refused(blocks, buckets, message):
    with pytest.raises(ValueError, match=message):
        Outline(blocks, buckets)


def test_outline_orders_buckets_by_their_first_block():
    model = Outline(("embed", "layer.0", "head"), (("head", ("head",)), ("b", ("layer.0",)), ("w", ("head", "embed"))))
    assert model.pull_order == ("w", "b", "head")
    assert model.weights["head"] == ("w", "head")


@pytest.mark.parametrize("flag", ["w", "g"])
def test_stages_that_stream_run_whole_backwards(flag):
    strategy = Strategy.parse(f"<[0]x1,[1]x1{flag}> zb-h1", 2)
    with pytest.raises(Unsupported, match=r"streaming stages under schedule zb-h1.*use schedule 1f1b or gpipe"):
        place(outline(2), strategy, [1])
