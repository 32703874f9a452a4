"""Program of one rank for one iteration, with its printed form and parser.

    rank 2 of 4  strategy <tp2,pp1> + <tp1,pp2>@7c1e00  pipeline 1, stage 0: layers 0-1, tp 1 (ranks 2), micro-batches 3
    pull     W.layer.0 = link home -> here                      # comments are ignored

Instructions (`ir.instruction_text`) follow the header, which lists all pipelines and micro-batches of a shared stage,
and all stages and layers of interleaved stages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hydragraph.ir.instruction import Instruction
from hydragraph.ir.instruction_text import MARGIN, instruction_text, parse_instruction

_ROLE = r"pipeline \d+, stage \d+"
_COUNT = r"\d+(?:-\d+)?"
_LAYERS = r"\d+-\d+"
_HEADER = re.compile(
    r"rank (?P<rank>\d+) of (?P<ranks>\d+)  strategy (?P<strategy>.*)  (?P<place>idle|"
    rf"(?P<roles>{_ROLE}(?: \+ {_ROLE})*): layers (?P<layers>{_LAYERS}(?: \+ {_LAYERS})*), "
    r"tp (?P<tp>\d+) \(ranks (?P<tp_ranks>\d+(?: \d+)*)\), "
    rf"micro-batches (?P<micro_batches>{_COUNT}(?: \+ {_COUNT})*))"
)

Span = tuple[int, int]  # half-open interval


@dataclass(frozen=True)
class Role:
    """A stage's position in a pipeline, and its micro-batches, numbered across pipelines that share stages."""

    pipeline: int
    stage: int
    micro_batches: range


@dataclass(frozen=True)
class RankProgram:
    """All instructions of one rank in one iteration.

    Attributes:
        strategy: the strategy's text with its fingerprint.
        roles: one per pipeline of the stage, or per interleaved stage; empty if idle.
        tp: the stage's ranks, in tensor-parallel order.
        layers: half-open range of layers of each interleaved stage.
    """

    rank: int
    ranks: int
    strategy: str
    roles: tuple[Role, ...]
    tp: tuple[int, ...]
    layers: tuple[Span, ...]
    instructions: tuple[Instruction, ...]

    @property
    def micro_batches(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(m for role in self.roles for m in role.micro_batches))

    def span_of(self, role: Role) -> Span:
        # With interleaved stages, a pipeline's n-th role has the n-th range. Pipelines that share a
        # stage have one role each, and thus the first range.
        return self.layers[[earlier.pipeline for earlier in self.roles[: self.roles.index(role)]].count(role.pipeline)]

    def __str__(self) -> str:
        return to_text(self)

    @classmethod
    def parse(cls, text: str) -> RankProgram:
        return parse(text)


def to_text(program: RankProgram, comments: Mapping[int, str] | None = None) -> str:
    """Return the text that `parse` reads.

    Args:
        comments: comment for each instruction index.

    Raises:
        ValueError: `parse` would misread the strategy's text or a comment.
    """
    if re.search(r"[#\n\r]", program.strategy) or program.strategy != program.strategy.strip():
        raise ValueError(f"strategy {program.strategy!r}: remove '#', line breaks and surrounding blanks")
    lines = [_header(program)]
    for i, instruction in enumerate(program.instructions):
        line = instruction_text(instruction)
        comment = comments.get(i) if comments else None
        if comment is not None:
            if len(comment.splitlines()) > 1:
                raise ValueError(f"comment on instruction {i}: {comment!r} has line breaks; use one line")
            line = f"{line:<{MARGIN}}  # {comment}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _header(program: RankProgram) -> str:
    head = f"rank {program.rank} of {program.ranks}  strategy {program.strategy}  "
    if not program.roles:
        return head + "idle"
    roles = " + ".join(f"pipeline {role.pipeline}, stage {role.stage}" for role in program.roles)
    layers = " + ".join(f"{first}-{last - 1}" for first, last in program.layers)
    ranks = " ".join(map(str, program.tp))
    counts = " + ".join(_count(role.micro_batches) for role in program.roles)
    return f"{head}{roles}: layers {layers}, tp {len(program.tp)} (ranks {ranks}), micro-batches {counts}"


def _count(micro_batches: range) -> str:
    return f"{micro_batches.start}-{micro_batches.stop - 1}" if micro_batches.start else str(len(micro_batches))


def _parse_count(text: str) -> range:
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


def parse(text: str) -> RankProgram:
    """Parse the output of `to_text`, and ignore comments."""
    program: RankProgram | None = None
    instructions: list[Instruction] = []
    number = 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        if program is None:
            program = _parse_header(line, number)
        else:
            instructions.append(parse_instruction(line, number))
    if program is None:
        raise ValueError(f"line {number + 1}: expected a header such as 'rank 0 of 4  strategy ...', found the end")
    return replace(program, instructions=tuple(instructions))


def _parse_header(line: str, number: int) -> RankProgram:
    header = _HEADER.fullmatch(line)
    if header is None:
        raise ValueError(
            f"line {number}: {line!r} is not a header: write 'rank R of N  strategy TEXT  idle', or 'rank R of N  "
            "strategy TEXT  pipeline P, stage S: layers A-B, tp T (ranks R ...), micro-batches M'. If a rank has "
            "several stages, join them by ' + ', and so their micro-batches: 'pipeline 0, stage 0 + pipeline 0, "
            "stage 2' and 'micro-batches 4 + 0-3'"
        )
    rank = int(header["rank"])
    ranks = int(header["ranks"])
    strategy = header["strategy"]
    if header["place"] == "idle":
        return RankProgram(rank, ranks, strategy, (), (), (), ())
    tp = tuple(map(int, header["tp_ranks"].split()))
    if len(tp) != int(header["tp"]):
        raise ValueError(f"line {number}: expected {header['tp']} ranks following 'tp {header['tp']}', found {len(tp)}")
    places = [tuple(map(int, re.findall(r"\d+", role))) for role in header["roles"].split(" + ")]
    counts = [_parse_count(count) for count in header["micro_batches"].split(" + ")]
    if len(places) != len(counts):
        raise ValueError(
            f"line {number}: expected one count of micro-batches for each of the {len(places)} pipelines, found "
            f"{len(counts)}"
        )
    roles = tuple(Role(pipeline, stage, count) for (pipeline, stage), count in zip(places, counts, strict=True))
    spans = [tuple(map(int, span.split("-"))) for span in header["layers"].split(" + ")]
    visits = max(sum(other.pipeline == role.pipeline for other in roles) for role in roles)
    if len(spans) != visits:
        raise ValueError(
            f"line {number}: expected the layers of {visits} {'stages' if visits > 1 else 'stage'}, found {len(spans)}"
        )
    return RankProgram(rank, ranks, strategy, roles, tp, tuple((first, last + 1) for first, last in spans), ())
