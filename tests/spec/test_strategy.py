"""Strategy: what is refused and how the error reads, places, and lossless text and YAML."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy import Place, Strategy

EXAMPLES = Path(__file__).parents[2] / "examples"


recomputations = st.booleans() | st.integers(1, 99).map(lambda hundredths: hundredths / 100)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    """Any valid strategy: devices in any order and with gaps, uneven layers, any flags and schedule."""
    layers = draw(st.integers(1, 8))
    free = list(draw(st.permutations(range(24))))
    pipelines = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=2)) if layers > 1 else ())
        stages = []
        for a, b in zip([0, *cuts], [*cuts, layers], strict=True):
            devices = [free.pop() for _ in range(draw(st.integers(1, 2)))]
            stages.append(Stage(tuple(devices), b - a, draw(st.booleans()), draw(recomputations)))
        pipelines.append(Pipeline(tuple(stages)))
    return Strategy(tuple(pipelines), draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])))


def lopsided(**changes: Any) -> Strategy:
    pipelines = (Pipeline((Stage((0, 1), 5), Stage((2,), 3))), Pipeline((Stage((3,), 8),)))
    return replace(Strategy(pipelines), **changes)


# Lossless forms -------------------------------------------------------------------------------------------------------


@given(strategies())
def test_name_and_str_parse_back(strategy: Strategy) -> None:
    assert Strategy.parse(strategy.name, strategy.layers) == strategy
    assert Strategy.parse(str(strategy), strategy.layers) == strategy


@given(strategies())
def test_dict_and_yaml_read_back(strategy: Strategy) -> None:
    assert Strategy.from_dict(strategy.to_dict()) == strategy
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.yaml"
        strategy.save(path)
        assert Strategy.load(path) == strategy
        assert yaml.safe_load(path.read_text()) == strategy.to_dict()


def test_saved_yaml_leaves_out_defaults(tmp_path: Path) -> None:
    lopsided().save(tmp_path / "s.yaml")
    assert (tmp_path / "s.yaml").read_text() == (
        "pipelines:\n"
        "  - stages: [{devices: [0, 1], layers: 5}, {devices: [2], layers: 3}]\n"
        "  - stages: [{devices: [3], layers: 8}]\n"
    )
    flagged = Strategy([Pipeline([Stage([0, 1], 2, sequence_parallel=True)])], schedule="gpipe")  # pyrefly: ignore[bad-argument-type]
    flagged.save(tmp_path / "s.yaml")
    assert (tmp_path / "s.yaml").read_text() == (
        "pipelines:\n  - stages: [{devices: [0, 1], layers: 2, sequence_parallel: true}]\nschedule: gpipe\n"
    )


def test_the_example_is_what_its_comments_say() -> None:
    example = Strategy.load(EXAMPLES / "lopsided.yaml")
    assert example == lopsided()
    example.check(layers=8, ranks=4, heads=(8,))


def test_parse_numbers_devices_and_splits_layers() -> None:
    parsed = Strategy.parse("<tp2,pp1> + 2*<tp1,pp2>", layers=9)
    assert parsed.devices == (0, 1, 2, 3, 4, 5)
    assert [[s.layers for s in p.stages] for p in parsed.pipelines] == [[9], [4, 5], [4, 5]]
    assert [s.devices for s in parsed.pipelines[1].stages] == [(2,), (3,)]
    assert parsed.name == "<tp2,pp1> + 2*<tp1,pp2>"


# Values ---------------------------------------------------------------------------------------------------------------


def test_lists_become_tuples_and_strategies_are_values() -> None:
    two: Any = [Stage(devices=[0, 1], layers=5), Stage(devices=range(2, 3), layers=3)]  # pyrefly: ignore[bad-argument-type]
    both: Any = [Pipeline(stages=two), Pipeline(stages=(Stage(devices=(3,), layers=8),))]
    listed = Strategy(pipelines=both, schedule="1f1b")
    assert listed == lopsided()
    assert hash(listed) == hash(lopsided())
    assert (listed.layers, listed.devices, listed.pipelines[0].devices) == (8, (0, 1, 2, 3), (0, 1, 2))
    assert [stage.tp for stage in listed.pipelines[0].stages] == [2, 1]


def test_the_fingerprint_tells_apart_what_the_name_does_not() -> None:
    small, large = Strategy.parse("<tp2,pp2>", 4), Strategy.parse("<tp2,pp2>", 8)
    assert small.name == large.name
    assert small.fingerprint != large.fingerprint
    assert re.fullmatch(r"<tp2,pp2>@[0-9a-f]{6}", str(small))
    # Pinned: ranks of different processes, and logs of different days, compare it.
    assert lopsided().fingerprint == "955033"


@given(strategies(), strategies())
def test_the_fingerprint_follows_equality(a: Strategy, b: Strategy) -> None:
    # With six digits two different ones collide once in 16.7 million pairs.
    assert (a.fingerprint == b.fingerprint) == (a == b)


def test_every_field_changes_the_fingerprint() -> None:
    stage = Stage((0, 1), 8)
    changed = [
        replace(stage, devices=(1, 0)),
        replace(stage, layers=7),
        replace(stage, sequence_parallel=True),
        replace(stage, recompute=True),
        replace(stage, stream=True),
        replace(stage, stream="gradients"),
        replace(stage, offload=True),
        replace(stage, sums_in_pieces=True),
    ]
    made = [Strategy((Pipeline((each,)),)) for each in (stage, *changed)]
    made.append(replace(made[0], schedule="gpipe"))
    assert len({strategy.fingerprint for strategy in made}) == len(made)


@given(strategies())
def test_place_against_an_enumeration(strategy: Strategy) -> None:
    expected = {}
    for i, pipeline in enumerate(strategy.pipelines):
        owner = [j for j, stage in enumerate(pipeline.stages) for _ in range(stage.layers)]  # stage of each layer
        for j, stage in enumerate(pipeline.stages):
            held = [layer for layer, at in enumerate(owner) if at == j]
            for index, device in enumerate(stage.devices):
                expected[device] = Place(i, j, index, held[0], held[-1] + 1)
    assert {rank: strategy.place(rank) for rank in range(24)} == {rank: expected.get(rank) for rank in range(24)}


# Shared stages --------------------------------------------------------------------------------------------------------

SHARED = (
    "<[0]x2,[4,5]x2> + <[1]x2,[4,5]x2>",
    "<[0]x1,[1]x1,[4]x2sr> + <[2]x2,[4]x2sr>",
    "<[9]x1,[0]x3> + <[9]x1,[1]x3> gpipe",
    "<tp1,pp2> + <[0]x2,[2]x2> + <[3]x2,[2]x2>",
)


@pytest.mark.parametrize("text", SHARED)
def test_pipelines_may_share_a_stage(text: str, tmp_path: Path) -> None:
    strategy = Strategy.parse(text, 4)
    assert strategy.name == text
    assert Strategy.parse(str(strategy), 4) == Strategy.from_dict(strategy.to_dict()) == strategy
    strategy.save(tmp_path / "s.yaml")
    assert Strategy.load(tmp_path / "s.yaml") == strategy
    assert len(set(strategy.devices)) == len(strategy.devices)
    assert strategy.shares
    strategy.check(layers=4, ranks=10)


def test_a_shared_stage_has_a_place_in_each_of_its_pipelines() -> None:
    strategy = Strategy.parse("<[0]x1,[1]x1,[4]x2> + <[2]x2,[4]x2> + <[3]x4>", 4)
    assert strategy.places(4) == (Place(0, 2, 0, 2, 4), Place(1, 1, 0, 2, 4))
    assert strategy.place(4) == Place(0, 2, 0, 2, 4)
    assert strategy.places(9) == ()
    assert strategy.joined == ((0, 1), (2,))
    assert strategy.devices == (0, 1, 4, 2, 3)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("3*<tp1,pp1>", ((0,), (1,), (2,))),
        ("<[0]x2,[1]x2> + <[2]x2,[3]x2> + <[0]x2,[3]x2>", ((0, 1, 2),)),
        ("<[0]x2,[1]x2> + <[2]x4> + <[0]x2,[3]x2> + <[4]x2,[3]x2>", ((0, 2, 3), (1,))),
    ],
)
def test_pipelines_are_joined_by_stages_in_common(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    strategy = Strategy.parse(text, 4)
    assert strategy.joined == groups
    assert strategy.shares == (len(groups) < len(strategy.pipelines))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<[0]x2,[4,5]x2> + <[1]x2,[5,4]x2>", "these two stages differ in devices ([5, 4] and [4, 5])"),
        (
            "<[0]x2,[4,5]x2> + <[1]x2,[4]x2>",
            "([4] and [4, 5]); give every stage its own devices",
        ),
        ("<[0]x1,[4]x3> + <[1]x2,[4]x2>", "pipeline 1, stage 1: device 4 is already in pipeline 0, stage 1"),
        ("<[0]x1,[4]x3> + <[1]x2,[4]x2>", "these two stages differ in layers (2-3 and 1-3)"),
        ("<[0]x2,[4]x2r> + <[1]x2,[4]x2>", "these two stages differ in recompute (False and True)"),
        ("<[0]x2,[4,5]x2s> + <[1]x2,[4,5]x2>", "these two stages differ in sequence_parallel (False and True)"),
        ("<[0]x2,[0]x2>", "pipeline 0, stage 1: this stage follows one on the same devices; merge the two"),
        (
            "<[0]x1,[1]x1,[0]x2r>",
            "differ in recompute (True and False); give every stage its own devices",
        ),
        ("<[0,1]x1,[2]x1,[1,0]x2>", "these two stages differ in devices ([1, 0] and [0, 1])"),
        ("<[0]x2,[1]x1,[0]x1> + <[0]x2,[2]x2>", "a pipeline with interleaved stages cannot share a stage with another"),
        ("<[0]x2,[1]x2> + <[2]x4> + <[0]x2,[1]x2>", "pipeline 2, stage 0: device 0 is already in pipeline 0, stage 0"),
    ],
)
def test_what_repeats_a_device_otherwise_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Strategy.parse(text, 4)


# Interleaved stages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "rows"),
    [
        ("<[0]x2,[1]x2,[0]x2,[1]x2>", "<tp1,pp2,v2>", (0, 1, 0, 1)),
        ("<tp2,pp2,v2>sr", "<tp2,pp2,v2>sr", (0, 1, 0, 1)),
        ("<[5]x1,[3]x2,[5]x4,[1]x1>", "<[5]x1,[3]x2,[5]x4,[1]x1>", (0, 1, 0, 2)),
    ],
)
def test_a_pipeline_may_return_to_its_devices(text: str, name: str, rows: tuple[int, ...], tmp_path: Path) -> None:
    strategy = Strategy.parse(text, 8)
    (pipeline,) = strategy.pipelines
    assert (strategy.name, pipeline.rows) == (name, rows)
    assert strategy.interleaved
    assert not strategy.shares
    assert Strategy.parse(str(strategy), 8) == Strategy.from_dict(strategy.to_dict()) == strategy
    strategy.save(tmp_path / "s.yaml")
    assert Strategy.load(tmp_path / "s.yaml") == strategy
    assert len(set(strategy.devices)) == len(strategy.devices)
    first = strategy.places(pipeline.stages[0].devices[0])
    assert [place.stage for place in first] == [i for i, row in enumerate(rows) if row == 0]
    strategy.check(layers=8, ranks=6)


# Strategies that construction refuses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "layers", "message"),
    [
        ((), 1, "'devices' is empty"),
        ((0, -1), 1, "'devices' has -1"),
        ((True,), 1, "'devices' has True"),
        ((0.0,), 1, "'devices' has 0.0"),
        ((3, 3), 1, "'devices' has 3 more than once"),
        (0, 1, "'devices' is 0: give a list"),
        ("01", 1, "'devices' is '01': give a list"),
        ({0, 1}, 1, "give a list"),  # a set has no order
        ((0,), 0, "'layers' is 0"),
        ((0,), 1.0, "'layers' is 1.0"),
        ((0,), True, "'layers' is True"),
    ],
)
def test_a_stage_refuses(devices: Any, layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Stage(devices, layers)


def test_sequence_parallel_is_a_boolean() -> None:
    with pytest.raises(ValueError, match="'sequence_parallel' is 1: use true or false"):
        Stage((0,), 1, sequence_parallel=1)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, 0.125, -0.5, "0.5", None])
def test_recompute_is_a_boolean_or_a_budget_in_hundredths(value: object) -> None:
    with pytest.raises(ValueError, match=r"use true .*, false, or the fraction of activations to save"):
        Stage((0,), 1, recompute=value)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("make", "argument", "message"),
    [
        (Pipeline, (), "'stages' is empty"),
        (Pipeline, Stage((0,), 1), "give a list"),
        (Pipeline, ((0, 1),), "use Stage(devices=..., layers=...)"),
        (Strategy, (), "'pipelines' is empty"),
        (Strategy, (Stage((0,), 1),), "use Pipeline(stages=[...])"),
        (
            Strategy,
            (lopsided().pipelines[0], Pipeline((Stage((3,), 6), Stage((4, 2), 2)))),
            "pipeline 1, stage 1: device 2 is already in pipeline 0, stage 1",
        ),
        (
            Strategy,
            (Pipeline((Stage((0,), 8),)), Pipeline((Stage((1,), 4), Stage((2,), 3)))),
            "pipeline 1 has 4 + 3 = 7 layers, but pipeline 0 has 8: every pipeline holds the whole model",
        ),
    ],
)
def test_pipelines_and_strategies_refuse(make: Any, argument: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(argument)


@pytest.mark.parametrize("schedule", ["1b1f", ["gpipe"], None])
def test_an_unknown_schedule_is_refused(schedule: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"'schedule' is {schedule!r}: use '1f1b' or 'gpipe' or 'zb-h1'")):
        lopsided(schedule=schedule)


@pytest.mark.parametrize(
    ("text", "layers", "message"),
    [
        ("<tp1,pp1> + <[0]x8>", 8, "'<tp1,pp1> + <[0]x8>': pipeline 1, stage 0: device 0 is already in"),
        ("<tp1,pp1>", 0, "'layers' is 0"),
        ("<tp1,pp1>@000000", 8, "with 8 layers, this text describes <tp1,pp1>@"),
        ("<tp1,pp1>@", 8, "with 8 layers, this text describes <tp1,pp1>@"),
        (str(Strategy.parse("<tp1,pp1>", 8)), 4, "with 4 layers, this text describes <tp1,pp1>@"),
    ],
)
def test_parse_refuses(text: str, layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Strategy.parse(text, layers)


# Check against a model and a world ------------------------------------------------------------------------------------


@given(strategies(), st.integers(1, 8), st.integers(1, 30), st.lists(st.integers(1, 12), max_size=2))
def test_check_against_the_definition(strategy: Strategy, layers: int, ranks: int, heads: list[int]) -> None:
    fits = (
        all(sum(s.layers for s in p.stages) == layers for p in strategy.pipelines)
        and set(strategy.devices) <= set(range(ranks))
        and all(count % len(s.devices) == 0 for p in strategy.pipelines for s in p.stages for count in heads)
    )
    if fits:
        strategy.check(layers, ranks, tuple(heads))
    else:
        with pytest.raises(ValueError, match=r"pipeline \d"):
            strategy.check(layers, ranks, tuple(heads))


@pytest.mark.parametrize(
    ("layers", "ranks", "heads", "message"),
    [
        (10, 4, (), "pipeline 0: 5 + 3 = 8 layers, but the model has 10; add 2 in every pipeline"),
        (7, 4, (), "pipeline 0: 5 + 3 = 8 layers, but the model has 7; remove 1 in every pipeline"),
        (
            8,
            2,
            (),
            "pipeline 0, stage 1: there is no rank 2, only ranks 0 to 1: start 4 processes",
        ),
        (8, 4, (4, 9), "pipeline 0, stage 0: tensor-parallel degree 2 (its number of devices) does not divide 9 "),
        (8, 4, (9,), "attention heads; use 1, 3 or 9 devices"),
        (8, 4, (4, 9), "attention heads; use 1 devices"),
    ],
)
def test_check_names_the_place_and_the_fix(layers: int, ranks: int, heads: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        lopsided().check(layers, ranks, heads)


# Wrong YAML -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pipelines: [{stages: [{devices: [0], layers: 1}, {devices: [1], layer: 1}]}]",
            "pipelines[0].stages[1]: unknown field 'layer': did you mean 'layers'?",
        ),
        ("pipelines: [{stages: [{devices: [0], layers: 1, 7: x}]}]", "pipelines[0].stages[0]: unknown field 7: known"),
        ("pipeline: []", "strategy: unknown field 'pipeline': did you mean 'pipelines'?"),
        ("", "the file is empty: write {pipelines: ...}"),
        ("schedule: gpipe", "strategy: missing field 'pipelines'"),
        ("pipelines: [{stages: [{layers: 1}]}]", "pipelines[0].stages[0]: missing field 'devices'"),
        ("pipelines: 3", "pipelines: expected a list, but it is 3"),
        ("pipelines: [{stages: {devices: [0], layers: 1}}]", "pipelines[0].stages: expected a list"),
        ("pipelines: [[]]", "pipelines[0]: expected a mapping with stages, but it is []"),
        ("pipelines: [{stages: []}]", "pipelines[0]: 'stages' is empty"),
        ("pipelines: [{stages: [{devices: 0, layers: 1}]}]", "pipelines[0].stages[0]: 'devices' is 0: give a list"),
        ("pipelines: [{stages: [{devices: [0], layers: 0}]}]", "pipelines[0].stages[0]: 'layers' is 0"),
        ("pipelines: [{stages: [{devices: [0], layers: '1'}]}]", "pipelines[0].stages[0]: 'layers' is '1'"),
        ("pipelines: [{stages: [{devices: [0], layers: 1, recompute: 1}]}]", "stages[0]: 'recompute' is 1: use true"),
        (
            "pipelines: [{stages: [{devices: [0], layers: 1, offload: 1}]}]",
            "stages[0]: 'offload'",
        ),
        (
            "pipelines: [{stages: [{devices: [0], layers: 1, stream: weights}]}]",
            "stages[0]: 'stream' is 'weights': use true, false or gradients",
        ),
        ("pipelines: [{stages: [{devices: [0], layers: 1, layers: 2}]}]", "field 'layers' is given twice"),
        ("pipelines: [{stages: [{devices: [0], layers: 1}]}]\nschedule: zb", "'schedule' is 'zb': use"),
        ("pipelines: [", "not readable as YAML"),
    ],
)
def test_yaml_errors_name_the_file_and_the_field(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Strategy.load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_sums_in_pieces_are_of_tensor_parallel_stages_without_sequence_parallelism() -> None:
    stage = Stage((0, 1), 2, sums_in_pieces=True)
    assert stage.kind.sums_in_pieces
    assert not Stage((0,), 2, sums_in_pieces=True).kind.sums_in_pieces
    with pytest.raises(ValueError, match="sums_in_pieces and sequence_parallel"):
        replace(stage, sequence_parallel=True)
    with pytest.raises(ValueError, match="'sums_in_pieces' is 1: use true or false"):
        replace(stage, sums_in_pieces=1)  # pyrefly: ignore[bad-argument-type]


def test_an_offloading_stage_is_the_same_as_text_and_as_yaml(tmp_path: Path) -> None:
    strategy = Strategy.parse("<[0,1]x2sr0.5wo,[2]x1>", layers=3)
    strategy.save(tmp_path / "s.yaml")
    assert "offload: true" in (tmp_path / "s.yaml").read_text()
    assert Strategy.load(tmp_path / "s.yaml") == strategy == Strategy.parse(strategy.name, layers=3)
    assert strategy.offloads
    assert not Strategy.parse("<[0,1]x2sr0.5w,[2]x1>", layers=3).offloads
