"""Strategy text: parse and format are inverse, and errors underline what is wrong."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy_text import format_strategy, parse_strategy, regular_pipeline

Parsed = tuple[tuple[Pipeline, ...], str]  # pipelines and schedule


@st.composite
def explicit_pipelines(draw: st.DrawFn, layers: int, first: int) -> Pipeline:
    """Stages of uneven layers on devices in any order, with gaps, above `first`."""
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else ())
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    sizes = [draw(st.integers(1, 3)) for _ in counts]
    pool = draw(st.permutations(range(first, first + sum(sizes) + draw(st.integers(0, 2)))))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    streams: st.SearchStrategy[bool | str] = st.sampled_from([False, True, "gradients"])
    recomputations = st.booleans() | st.integers(1, 99).map(lambda hundredths: hundredths / 100)
    stages = tuple(
        Stage(
            tuple(pool[at : at + size]),
            count,
            sums == "scattered",
            draw(recomputations),
            draw(streams),
            draw(st.booleans()),
            sums == "in pieces",
        )
        for at, size, count in zip(starts, sizes, counts, strict=True)
        for sums in [draw(st.sampled_from(["", "scattered", "in pieces"]))]
    )
    return Pipeline(stages)


@st.composite
def strategy_texts(draw: st.DrawFn) -> tuple[Parsed, int]:
    """Strategies that mix regular pipelines (often repeated) with explicit ones, and their number of layers."""
    layers = draw(st.integers(1, 9))
    pipelines: list[Pipeline] = []
    for _ in range(draw(st.integers(1, 4))):
        tp, pp = draw(st.integers(1, 3)), draw(st.integers(1, min(3, layers)))
        for _ in range(draw(st.integers(0, 3))):
            pipelines.append(regular_pipeline(tp, pp, layers, _above(pipelines)))
        if not pipelines or draw(st.booleans()):
            pipelines.append(draw(explicit_pipelines(layers, _above(pipelines))))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
    return (tuple(draw(st.permutations(pipelines))), schedule), layers


def _above(pipelines: list[Pipeline]) -> int:
    return max((device for pipeline in pipelines for device in pipeline.devices), default=-1) + 1


@given(strategy_texts())
def test_format_then_parse_is_the_identity(drawn: tuple[Parsed, int]) -> None:
    strategy, layers = drawn
    assert parse_strategy(format_strategy(*strategy), layers) == strategy


@settings(max_examples=settings.default.max_examples // 2)
@given(strategy_texts(), st.data())
def test_white_space_is_free_except_between_flags_and_a_schedule(
    drawn: tuple[Parsed, int], data: st.DataObject
) -> None:
    strategy, layers = drawn
    tokens = re.findall(r"1f1b|zb-h1|[a-z]+|\d*\.\d+|\d+|\S", format_strategy(*strategy))
    spaces = ["", " ", "\t", "\n  "]
    spaced = tokens[0]
    for before, token in pairwise([*tokens, ""]):
        schedule_after_flags = before.isalpha() and token in ("gpipe", "zb-h1", "1f1b")
        spaced += data.draw(st.sampled_from(spaces[1:] if schedule_after_flags else spaces)) + token
    assert parse_strategy(spaced, layers) == strategy


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(4, 20),
)
def test_a_regular_text_takes_devices_in_order_and_layers_evenly(
    terms: list[tuple[int, int, int]], layers: int
) -> None:
    text = " + ".join(f"{n}*<tp{tp},pp{pp}>" for n, tp, pp in terms)
    pipelines, _ = parse_strategy(text, layers)
    devices = [device for pipeline in pipelines for device in pipeline.devices]
    assert devices == list(range(sum(n * tp * pp for n, tp, pp in terms)))
    assert [len(pipeline.stages) for pipeline in pipelines] == [pp for n, _, pp in terms for _ in range(n)]
    for pipeline in pipelines:
        counts = [stage.layers for stage in pipeline.stages]
        assert sum(counts) == layers
        assert counts == sorted(counts)  # remainders go to the last stages
        assert counts[-1] - counts[0] <= 1


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("<tp2,pp1>+2*<tp1,pp2>", "<tp2,pp1> + 2*<tp1,pp2>"),
        ("<tp1,pp2> + 2 * < tp1 , pp2 > 1f1b", "3*<tp1,pp2>"),
        ("1*<tp1,pp1> gpipe", "<tp1,pp1> gpipe"),
        ("<tp1,pp1> + <tp2,pp1> + <tp1,pp1>", "<tp1,pp1> + <tp2,pp1> + <tp1,pp1>"),
        ("<[0,1]x5,[2]x3>", "<[0,1]x5,[2]x3>"),
        ("<[0,1]x5,[2]x3> + <[3]x8>", "<[0,1]x5,[2]x3> + <tp1,pp1>"),
        ("<[3]x8> + <tp1,pp1>", "<[3]x8> + <tp1,pp1>"),
        ("<[3]x8> + <[0]x8> + <[1]x8>", "<[3]x8> + <[0]x8> + <[1]x8>"),
        ("<[0]x4,[1]x4>", "<tp1,pp2>"),
        ("<[0]x2,[1]x2,[0]x2,[1]x2>", "<tp1,pp2,v2>"),
        ("2*< tp1 , pp2 , v2 >r", "2*<tp1,pp2,v2>r"),
        ("<[0]x3,[1]x1,[0]x2,[1]x2>", "<[0]x3,[1]x1,[0]x2,[1]x2>"),
        ("<[1]x4,[0]x4>", "<[1]x4,[0]x4>"),
        ("<[0,1]x8rs>", "<tp2,pp1>sr"),
        ("<[0,1]x8wrs>", "<tp2,pp1>srw"),
        ("<[0,1]x8owr0.5s>", "<tp2,pp1>sr0.5wo"),
        ("<[0,1]x8por0.5>", "<tp2,pp1>r0.5op"),
        ("<tp1,pp1>w + <tp1,pp1>gr", "<tp1,pp1>w + <tp1,pp1>rg"),
        ("<[0,1]x5s,[2]x3r>gpipe", "<[0,1]x5s,[2]x3r> gpipe"),
        ("<tp1,pp2>zb-h1", "<tp1,pp2> zb-h1"),
    ],
)
def test_the_canonical_text(text: str, canonical: str) -> None:
    assert format_strategy(*parse_strategy(text, 8)) == canonical


def test_a_regular_pipeline_starts_after_the_highest_device_before_it() -> None:
    (_, second), _ = parse_strategy("<[4]x3,[1]x5> + <tp2,pp1>", 8)
    assert second.stages == (Stage((5, 6), 8),)


@pytest.mark.parametrize(
    ("text", "message", "underlined"),
    [
        ("", "expected '<'", ""),
        ("<tp2,pp1> +", "expected '<'", ""),
        ("tp2,pp1", "expected '<'", "tp"),
        ("<dp2,pp1>", "expected 'tp'", "dp"),
        ("<tp2 pp1>", "expected ','", "pp"),
        ("<tp2,qq1> + 2*<tp1,pp2>", "expected 'pp'", "qq"),
        ("<tp2,pp1> + 2*<tp1,cp3>", "expected 'pp'", "cp"),
        ("<tp,pp1>", "tensor-parallel degree, an integer", ","),
        ("<tp1,pp2,r2>", "expected 'v', as in <tp1,pp2,v2>", "r"),
        ("<tp1,pp2,v9>", "18 stages for 8 layers", "pp2,v9"),
        ("<tp1,pp1,v2>", "interleaved stages need at least pp2", "2"),
        ("<tp0,pp1>", "at least 1", "0"),
        ("<tp1,pp0>", "at least 1", "0"),
        ("<tp1,pp1", "expected '>'", ""),
        ("<tp1,pp9>", "9 stages for 8 layers", "pp9"),
        ("<[0]x8wg>", "w excludes g", "wg"),
        ("<[0,1]x8sp>", "s excludes p", "sp"),
        ("0*<tp1,pp1>", "number of pipelines must be at least 1", "0"),
        ("2<tp1,pp1>", "expected '*'", "<"),
        ("2 * <[0]x8>", "cannot be repeated", "2 * <[0]x8>"),
        ("<tp1,pp1> gpip", "a schedule (1f1b or gpipe or zb-h1)", "gpip"),
        ("<tp1,pp1> <tp1,pp1>", "expected '+'", "<"),
        ("<tp1,pp1> gpipe !", "expected the end after the schedule", "!"),
        ("<[]x8>", "expected a device", "]"),
        ("<[-1]x8>", "expected a device", "-"),
        ("<[0 1]x8>", "expected ']'", "1"),
        ("<[0]8>", "expected 'x'", "8"),
        ("<[0,1,0]x8>", "'devices' has 0 more than once", "[0,1,0]"),
        ("<[0]x0,[1]x8>", "number of layers must be at least 1", "0"),
        ("<[0]x8q>", "flags", "q"),
        ("<[0]x8ss>", "flags", "ss"),
        ("<[0]x8r1.5>", "a memory budget must be between 0 and 1", "1.5"),
        ("<[0]x8r0.125>", "a memory budget must be between 0 and 1", "0.125"),
        ("<[0]x8s0.5>", "expected '>'", "0.5"),
        ("<tp1,pp1>r0.0", "a memory budget must be between 0 and 1", "0.0"),
        ("<tp1,pp1> + <[1]x5,[2]x2>", "7 layers, but the model has 8", "<[1]x5,[2]x2>"),
        ("\n<tp1,\n\tqq1>", "expected 'pp'", "qq"),
    ],
)
def test_errors_underline_the_offending_piece(text: str, message: str, underlined: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_strategy(text, 8)
    _, shown, carets = str(caught.value).split("\n")
    assert shown[2:].split() == text.split()
    start, end = carets.index("^"), carets.rindex("^") + 1
    assert shown[start:end].strip() == underlined
    assert ("found the end" in str(caught.value)) == (not underlined)


def test_a_strategy_of_many_devices_is_parsed_and_formatted_in_linear_time() -> None:
    for text in ("20000*<tp1,pp1>", "<tp60000,pp1>"):
        assert format_strategy(*parse_strategy(text, 4)) == text
    with pytest.raises(ValueError, match="more than 65,536 devices"):
        parse_strategy("<tp60000,pp1> + 6000*<tp1,pp1>", 4)


def test_a_regular_pipeline_may_recompute_in_all_its_stages() -> None:
    assert parse_strategy("2*<tp1,pp2>r", 4) == parse_strategy("<[0]x2r,[1]x2r> + <[2]x2r,[3]x2r>", 4)
    assert parse_strategy("<tp2,pp1>sr", 4) == parse_strategy("<[0,1]x4sr>", 4)
    assert parse_strategy("<tp2,pp1>sr0.5w gpipe", 4) == parse_strategy("<[0,1]x4 sr .50 w> gpipe", 4)
