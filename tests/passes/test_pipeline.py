"""The passes together. Golden texts: HYDRAGRAPH_UPDATE_GOLDEN=1 pytest tests/passes/test_pipeline.py rewrites them."""

# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return, bad-argument-type]
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.ir.instruction import Op
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.rank_program import RankProgram, Role, parse, to_text
from hydragraph.ir.schedules.schedule import Work
from hydragraph.ir.verify import verify
from hydragraph.passes.pipeline import PASSES, rank_program, rank_programs
from hydragraph.passes.place import place
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy import Strategy
from tests.thorough import only, thorough

GOLDEN = Path(__file__).parent / "golden"


def model(layers, tied=True):
    blocks = ("embed", *(f"layer.{i}" for i in range(layers)), "head")
    own = tuple((block, (block,)) for block in blocks[1 if tied else 0 :])
    return Outline(blocks, ((("word", ("embed", "head")),) if tied else ()) + own)


# Two tensor-parallel ranks feed one; a second pipeline has one rank; rank 4 is idle.
SMALL = Strategy((Pipeline((Stage((0, 1), 1), Stage((2,), 1))), Pipeline((Stage((3,), 2),))))


def check_golden(name, text):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("HYDRAGRAPH_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs; if that is meant, see this file's first line"


# These have no effect here; `test_stream.py` and `test_offload.py` have their golden texts.
@pytest.mark.parametrize("count", [i for i, (n, _) in enumerate(PASSES, start=1) if n not in ("stream", "offload")])
def test_golden_text_after_each_pass(count):
    placement = place(model(2), SMALL, [2, 1])
    programs = []
    for rank in (1, 2):
        at = placement.stage_of[rank]
        roles = tuple(Role(r.pipeline, r.stage, r.micro_batches) for r in at.roles)
        program = RankProgram(rank, 5, "small", roles, at.ranks, at.layers, ())
        for _, run in PASSES[:count]:
            program = run(placement, "train", program)
        programs.append(program)
    check_golden(PASSES[count - 1][0], "\n".join(map(to_text, programs)))


def test_golden_text_of_halved_backwards():
    halved = Strategy((Pipeline((Stage((0,), 1), Stage((1, 2), 2))),), "zb-h1")
    check_golden("zb_h1", "\n".join(map(to_text, rank_programs(model(3), halved, [2], ranks=3)[:2])))


@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_golden_text_of_all_ranks(mode):
    check_golden(mode, "\n".join(map(to_text, rank_programs(model(2), SMALL, [1, 1], mode, ranks=5))))


@st.composite
def outlines(draw, layers):
    """Draw a model of so many layers, whose window may be smaller than a bucket."""
    outline = model(layers, draw(st.booleans()))
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from([n for n, _ in outline.buckets]), unique=True))
        outline = replace(outline, frozen=tuple(names))
    if draw(st.booleans()):
        elements = tuple(draw(st.integers(1, 3)) for _ in outline.buckets)
        outline = replace(outline, elements=elements, window=draw(st.none() | st.integers(0, 6)))
    return outline


@st.composite
def returning(draw: st.DrawFn, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Draw a pipeline of these stages, in which later ones may be on the devices of earlier ones (interleaved)."""
    found: list[Stage] = []
    for stage in stages:
        earlier = dict.fromkeys(each for each in found[:-1] if each.devices != found[-1].devices)
        again = draw(st.sampled_from([None, None, *earlier]))
        found.append(replace(again, layers=stage.layers) if again else stage)
    return tuple(found)


@st.composite
def iterations(draw):
    layers = draw(st.integers(1, 5))
    shapes = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else set()
        bounds = [0, *sorted(cuts), layers]
        shapes.append([(draw(st.integers(1, 3)), b - a) for a, b in pairwise(bounds)])
    ranks = sum(tp for shape in shapes for tp, _ in shape) + draw(st.integers(0, 2))
    devices = iter(draw(st.permutations(range(ranks))))
    pipelines = tuple(
        Pipeline(draw(returning([Stage(tuple(next(devices) for _ in range(tp)), n) for tp, n in shape])))
        for shape in shapes
    )
    counts = [draw(st.integers(0, 5)) for _ in pipelines]
    strategy = Strategy(pipelines, draw(st.sampled_from(["1f1b", "gpipe"])))
    outline = draw(outlines(layers))
    return outline, strategy, counts, draw(st.sampled_from(["train", "evaluate"])), ranks


@st.composite
def shared(draw):
    """Draw an iteration of pipelines that may continue, at any layer, in a stage of another pipeline."""
    layers = draw(st.integers(1, 6))
    devices = itertools.count()
    pipelines: list[Pipeline] = []
    for _ in range(draw(st.integers(2, 5))):
        stages: list[Stage] = []
        while (first := sum(s.layers for s in stages)) < layers:
            there = [s for p in pipelines for at, s in zip(p.first_layers, p.stages, strict=True) if at == first]
            if there and draw(st.booleans()):
                stages.append(draw(st.sampled_from(there)))
            else:
                tp = draw(st.integers(1, 3))
                stages.append(Stage([next(devices) for _ in range(tp)], draw(st.integers(1, layers - first))))
        if Pipeline(tuple(stages)) not in pipelines:
            pipelines.append(Pipeline(tuple(stages)))
    counts = [draw(st.integers(0, 9)) for _ in pipelines]
    strategy = Strategy(tuple(pipelines), draw(st.sampled_from(["1f1b", "1f1b", "gpipe"])))
    outline = draw(outlines(layers))
    return outline, strategy, counts, draw(st.sampled_from(["train", "train", "evaluate"])), next(devices)


@settings(max_examples=50)
@given(iterations())
def test_what_is_frozen_is_pulled_but_never_pushed_and_backward_ends_at_the_lowest_that_learns(iteration):
    outline, strategy, counts, mode, ranks = iteration
    programs = rank_programs(outline, strategy, counts, mode, ranks=ranks)
    each = [i for program in programs for i in program.instructions]
    pulled, pushed = ({i.target for i in each if i.op is op} for op in (Op.PULL, Op.PUSH))
    assert pushed == (pulled - {*outline.frozen} if mode == "train" else set())
    backward = {outline.index[i.target] for i in each if i.op is Op.BACKWARD}
    computed = range(outline.lowest, len(outline.blocks)) if mode == "train" and any(counts) else ()
    assert backward == set(computed)
    for i in each:
        if i.op is Op.FORWARD and i.target != "aux":
            assert (len(i.writes) == 2) == (outline.index[i.target] in backward)


@thorough
@settings(max_examples=300)
@given(st.one_of(iterations(), shared()))
def test_every_iteration_verifies_and_prints_and_parses(iteration):
    outline, strategy, counts, mode, ranks = iteration
    programs = rank_programs(outline, strategy, counts, mode, ranks=ranks)
    verify(programs, outline, mode)
    assert tuple(parse(to_text(program)) for program in programs) == programs


@settings(max_examples=100)
@given(shared())
def test_of_each_pipeline_a_shared_stage_holds_no_more_at_once_than_a_stage_of_its_own_would(iteration):
    outline, strategy, counts, _, _ = iteration
    placement = place(outline, replace(strategy, schedule="1f1b"), counts)
    for stage in placement.stages:
        run = placement.actions(stage, "train")
        for role in stage.roles:
            mine = [action for action in run if action.micro_batch in role.micro_batches]
            alive = itertools.accumulate(1 if action.work is Work.FORWARD else -1 for action in mine)
            assert max(alive) <= min(role.depth - role.stage, len(role.micro_batches))
            for work in (Work.FORWARD, Work.BACKWARD):
                assert [action.micro_batch for action in mine if action.work is work] == list(role.micro_batches)


@pytest.mark.parametrize(
    ("text", "counts", "rank", "expected"),
    [
        # Fan-in: the shared last stage takes the pipelines in turns, and theirs run one forward ahead.
        ("<[0]x1,[2]x1> + <[1]x1,[2]x1>", [3, 3], 2, "F0 B0 F3 B3 F1 B1 F4 B4 F2 B2 F5 B5"),
        ("<[0]x1,[2]x1> + <[1]x1,[2]x1>", [3, 3], 1, "F3 F4 B3 F5 B4 B5"),
        # Fan-out: the shared first stage keeps both supplied.
        ("<[0]x1,[1]x1> + <[0]x1,[2]x1>", [3, 3], 0, "F0 F3 F1 B0 F4 B3 F2 B1 F5 B4 B2 B5"),
        # A pipeline with half as many micro-batches gets every third turn.
        ("<[0]x1,[2]x1> + <[1]x1,[2]x1>", [4, 2], 2, "F0 B0 F1 B1 F4 B4 F2 B2 F3 B3 F5 B5"),
        ("<[0]x1,[2]x1> + <[1]x1,[2]x1>", [2, 0], 2, "F0 B0 F1 B1"),
        ("<[0]x1,[2]x1> + <[1]x1,[2]x1> gpipe", [2, 2], 2, "F0 F2 F1 F3 B0 B2 B1 B3"),
    ],
)
def test_orders_of_shared_stages(text, counts, rank, expected):
    strategy = Strategy.parse(text, 2)
    placement = place(model(2), strategy, counts)
    run = placement.actions(placement.stage_of[rank], "train")
    assert " ".join(f"{action.work.value}{action.micro_batch}" for action in run) == expected


@settings(max_examples=30)
@given(st.one_of(iterations(), shared()), st.data())
def test_one_rank_alone_gets_the_same_program(iteration, data):
    outline, strategy, counts, mode, ranks = iteration
    rank = data.draw(st.integers(0, ranks - 1))
    alone = rank_program(outline, strategy, counts, rank, mode, ranks=ranks)
    assert alone == rank_programs(outline, strategy, counts, mode, ranks=ranks)[rank]


@only("gpipe")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_pipeline_of_many_stages_with_alternating_degrees_verifies(schedule):
    stages, device = [], 0
    for tp in (1, 3, 2, 1, 2, 3, 1, 2):
        stages.append(Stage(range(device, device + tp), 1))
        device += tp
    strategy = Strategy((Pipeline(stages),), schedule)
    for count in (1, 7, 8, 20):
        verify(rank_programs(model(8), strategy, [count], ranks=device), model(8))


def test_rank_without_work_has_no_place():
    idle = rank_program(model(2), SMALL, [1, 0], 3, ranks=5)
    assert (idle.roles, idle.tp, idle.layers, idle.micro_batches) == ((), (), (), ())
    assert idle.strategy == str(SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 3}, "pipeline 1, stage 0: there is no rank 3"),
        ({"mode": "infer"}, "'mode' is 'infer'"),
        ({"micro_batches": [1]}, "for each of the 2 pipelines"),
        ({"rank": 5}, "ranks 0 to 4"),
        ({"outline": model(3)}, "the model has 3"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    arguments = {"outline": model(2), "strategy": SMALL, "micro_batches": [1, 1], "rank": 0, "ranks": 5}
    with pytest.raises(ValueError, match=message):
        rank_program(**{**arguments, **change})
