"""The text of a strategy: "<tp2,pp1> + 2*<tp1,pp2>", or explicitly "<[0,1]x5s,[2]x3> zb-h1".

    strategy = term { "+" term } [ schedule ]
    term     = [ count "*" ] "<" "tp" int "," "pp" int [ "," "v" int ] ">" [ flags ]  |  "<" stage { "," stage } ">"
    stage    = "[" int { "," int } "]" "x" layers [ flags ]
    flags    = letters, each at most once: s = sequence parallel, r = recompute, w = stream weights and gradients,
               g = stream gradients (not with w), o = offload activations, p = sums in pieces (not with s); a memory
               budget may follow r, as in sr0.5w

A regular pipeline `<tpT,ppP>` uses the T*P devices after the highest one of earlier pipelines, and splits the layers
evenly. `<tpT,ppP,vV>` splits them into P*V stages, which the P groups of devices run in turn (interleaved).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from hydragraph.spec.cluster import MOST_DEVICES
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE, SCHEDULES
from hydragraph.spec.stage_kind import is_budget, recompute_flag

_MIXED = "|".join(re.escape(name) for name in SCHEDULES if not name.isalpha())
_TOKEN = re.compile(_MIXED + r"|[A-Za-z]+|[0-9]*\.[0-9]+|[0-9]+|\S")
_FLAGS = {
    "s": "sequence parallelism",
    "r": "recomputation",
    "w": "streaming of weights and gradients",
    "g": "streaming of gradients",
    "o": "offloading of activations",
    "p": "sums in pieces",
}
_STREAMED: dict[str, bool | str] = {"w": True, "g": "gradients"}
_SWITCHES = {"s": "sequence_parallel", "o": "offload", "p": "sums_in_pieces"}


def parse_strategy(text: str, layers: int) -> tuple[tuple[Pipeline, ...], str]:
    """Parse a strategy's text into pipelines and schedule; a ValueError underlines the wrong part."""
    reader = _TokenReader(text)
    pipelines = list(_parse_term(reader, layers, first=0))
    while reader.skip("+"):
        pipelines += _parse_term(reader, layers, first=_next_device(pipelines))
    if reader.at_end():
        return tuple(pipelines), DEFAULT_SCHEDULE
    schedule = reader.take()
    if schedule.text not in SCHEDULES:
        names = " or ".join(SCHEDULES)
        raise reader.error(f"expected '+' and a pipeline, a schedule ({names}) or the end", schedule)
    if not reader.at_end():
        raise reader.error("expected the end after the schedule", reader.take())
    return tuple(pipelines), schedule.text


def format_strategy(pipelines: Sequence[Pipeline], schedule: str) -> str:
    """Return the shortest text for `parse_strategy`."""
    # firsts: where a regular pipeline would begin, after the highest earlier device.
    firsts = accumulate((_next_device([pipeline]) for pipeline in pipelines), max, initial=0)
    texts = [_format_pipeline(pipeline, first) for pipeline, first in zip(pipelines, firsts, strict=False)]
    runs = [(text, len(list(run))) for text, run in groupby(texts)]
    joined = " + ".join(text if count == 1 else f"{count}*{text}" for text, count in runs)
    return joined if schedule == DEFAULT_SCHEDULE else f"{joined} {schedule}"


def regular_pipeline(tp: int, pp: int, layers: int, first: int, visits: int = 1, **flags: Any) -> Pipeline:
    """Return the pipeline `<tp,pp,v>` (v: `visits`) from device `first` on; last stages may have one more layer."""
    # 7 layers in 3 stages: 2, 2, 3.
    even, rest = divmod(layers, pp * visits)
    groups = [tuple(range(first + tp * i, first + tp * (i + 1))) for i in range(pp)] * visits
    stages = (Stage(devices, even + (i >= len(groups) - rest), **flags) for i, devices in enumerate(groups))
    return Pipeline(tuple(stages))


def _next_device(pipelines: Sequence[Pipeline]) -> int:
    return max((device for p in pipelines for stage in p.stages for device in stage.devices), default=-1) + 1


def _format_pipeline(pipeline: Pipeline, first: int) -> str:
    stages = pipeline.stages
    tp = stages[0].tp
    pp = len(set(pipeline.rows))
    visits = len(stages) // pp
    regular = regular_pipeline(tp, pp, pipeline.layers, first, visits).stages
    flags = {_flags(stage) for stage in stages}
    if len(flags) == 1 and [(s.devices, s.layers) for s in stages] == [(s.devices, s.layers) for s in regular]:
        interleaved = f",v{visits}" if visits > 1 else ""
        return f"<tp{tp},pp{pp}{interleaved}>{flags.pop()}"
    return f"<{','.join(map(_format_stage, stages))}>"


def _format_stage(stage: Stage) -> str:
    return f"[{','.join(map(str, stage.devices))}]x{stage.layers}{_flags(stage)}"


def _flags(stage: Stage) -> str:
    flags = "s" * stage.sequence_parallel + recompute_flag(stage.recompute)
    flags += "".join(letter for letter, stream in _STREAMED.items() if stage.stream == stream)
    return flags + "o" * stage.offload + "p" * stage.sums_in_pieces


class _Token(NamedTuple):
    # "" marks the end
    text: str
    start: int


class _TokenReader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [_Token(match[0], match.start()) for match in _TOKEN.finditer(text)]
        self.tokens.append(_Token("", len(text.rstrip())))
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at].text

    def at_end(self) -> bool:
        return not self.peek()

    def take(self) -> _Token:
        # Later calls return the last token, the end, again.
        token = self.tokens[self.at]
        self.at += bool(token.text)
        return token

    def skip(self, text: str) -> bool:
        is_next = self.peek() == text
        self.at += is_next
        return is_next

    def expect(self, text: str, example: str) -> _Token:
        token = self.take()
        if token.text != text:
            raise self.error(f"expected '{text}', as in {example}", token)
        return token

    def number(self, what: str, minimum: int) -> tuple[int, _Token]:
        token = self.take()
        if not token.text.isdecimal():
            raise self.error(f"expected {what}, an integer", token)
        if int(token.text) < minimum:
            raise self.error(f"{what} must be at least {minimum}", token)
        return int(token.text), token

    def error(self, message: str, token: _Token, last: _Token | None = None) -> ValueError:
        end = last or token
        width = max(end.start + len(end.text) - token.start, 1)
        # One line, in which columns are unchanged.
        shown = "".join(" " if c.isspace() else c for c in self.text)
        instead = "" if token.text else ", found the end"
        return ValueError(f"strategy text: {message}{instead}\n  {shown}\n  {' ' * token.start}{'^' * width}")


def _parse_term(reader: _TokenReader, layers: int, first: int) -> tuple[Pipeline, ...]:
    start = reader.tokens[reader.at]
    count = None
    if start.text.isdecimal():
        count, _ = reader.number("the number of pipelines", minimum=1)
        reader.expect("*", "2*<tp1,pp2>")
    opening = reader.expect("<", "<tp2,pp1>")
    if reader.peek() != "[":
        return _parse_regular(reader, layers, first, count or 1)
    stages = [_parse_stage(reader)]
    while reader.skip(","):
        stages.append(_parse_stage(reader))
    pipeline = Pipeline(tuple(stages))
    closing = reader.expect(">", "<[0,1]x5,[2]x3>")
    if count is not None:
        raise reader.error("a pipeline that names its devices cannot be repeated: write each pipeline", start, closing)
    if pipeline.layers != layers:
        have = f"this pipeline's stages have {pipeline.layers} layers, but the model has {layers}"
        raise reader.error(have, opening, closing)
    return (pipeline,)


def _parse_regular(reader: _TokenReader, layers: int, first: int, count: int) -> tuple[Pipeline, ...]:
    reader.expect("tp", "<tp2,pp1> (or name the devices: <[0,1]x5,[2]x3>)")
    tp, _ = reader.number("the tensor-parallel degree", minimum=1)
    reader.expect(",", "<tp2,pp1>")
    start = reader.expect("pp", "<tp2,pp1>")
    pp, token = reader.number("the number of stages", minimum=1)
    visits = 1
    if reader.skip(","):
        reader.expect("v", "<tp1,pp2,v2>")
        visits, token = reader.number("the number of stages of each device", minimum=1)
    reader.expect(">", "<tp2,pp1>")
    flags = _parse_flags(reader) if _are_flags(reader.peek()) else {}
    if pp * visits > layers:
        raise reader.error(f"{pp * visits} stages for {layers} layers: use at most one stage per layer", start, token)
    if first + count * tp * pp > MOST_DEVICES:
        raise reader.error(f"more than {MOST_DEVICES:,} devices: use fewer", start, token)
    if pp == 1 and visits > 1:
        raise reader.error("interleaved stages need at least pp2: with pp1, no device waits for others", token)
    return tuple(regular_pipeline(tp, pp, layers, first + i * tp * pp, visits, **flags) for i in range(count))


def _parse_stage(reader: _TokenReader) -> Stage:
    example = "[0,1]x5"
    opening = reader.expect("[", example)
    devices = [reader.number("a device", minimum=0)[0]]
    while reader.skip(","):
        devices.append(reader.number("a device", minimum=0)[0])
    closing = reader.expect("]", example)
    reader.expect("x", example)
    layers, _ = reader.number("the number of layers", minimum=1)
    flags = _parse_flags(reader) if reader.peek().isalpha() else {}
    try:
        return Stage(tuple(devices), layers, **flags)
    except ValueError as error:
        raise reader.error(str(error), opening, closing) from None


def _parse_flags(reader: _TokenReader) -> dict[str, Any]:
    start = reader.take()
    letters = start.text
    budget: float | None = None
    # sr0.5w is three tokens: letters, budget, letters.
    if letters.endswith("r") and "." in reader.peek():
        number = reader.take()
        budget = float(number.text)
        if not is_budget(budget):
            raise reader.error("a memory budget must be between 0 and 1 in hundredths, such as r0.5", number)
        letters += reader.take().text if _are_flags(reader.peek()) else ""
    if not _are_flags(letters):
        meanings = ", ".join(f"'{flag}' ({meaning})" for flag, meaning in _FLAGS.items())
        what = f"a stage's flags are {meanings}, each at most once; w excludes g, and s excludes p"
        raise reader.error(what, start)
    stream = next((_STREAMED[letter] for letter in letters if letter in _STREAMED), False)
    recompute = "r" in letters if budget is None else budget
    switches = {name: letter in letters for letter, name in _SWITCHES.items()}
    return {"recompute": recompute, "stream": stream, **switches}


def _are_flags(letters: str) -> bool:
    distinct = set(letters)
    once = len(distinct) == len(letters) > 0
    return once and distinct <= _FLAGS.keys() and not any(distinct >= pair for pair in ({*_STREAMED}, {"s", "p"}))
