"""One rank's program of one iteration, and its printed form, which parses back to an equal program.

    rank 2 of 4  strategy <tp2,pp1> + <tp1,pp2>@7c1e00  pipeline 1, stage 0: layers 0-1, tp 1 (ranks 2), micro-batches 3
    pull     W.layer.0 = link home -> here                      # comments are ignored
    compute  h1.0, s.layer.0.0 = forward layer.0 [0] (W.layer.0, h0.0, a.0)   after W.layer.0
    p2p      send h2.0 -> rank 3                                after h2.0

A header says where the rank works; each line below is an instruction (`ir.text`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hydragraph.ir.instruction import Instruction
from hydragraph.ir.text import MARGIN, instruction_text, parse_instruction

_HEADER = re.compile(
    r"rank (?P<rank>\d+) of (?P<ranks>\d+)  strategy (?P<strategy>.*)  (?P<place>idle|pipeline (?P<pipeline>\d+), "
    r"stage (?P<stage>\d+): layers (?P<first>\d+)-(?P<last>\d+), tp (?P<tp>\d+) \(ranks (?P<tp_ranks>\d+(?: \d+)*)\), "
    r"micro-batches (?P<micro_batches>\d+))"
)


@dataclass(frozen=True)
class RankProgram:
    """Everything one rank does in one iteration.

    Attributes:
        rank, ranks: which rank of how many.
        strategy: the strategy's text with its fingerprint, for people and for comparing ranks.
        pipeline, stage: where the rank works; None where the strategy leaves it idle or its pipeline has nothing to do.
        tp: the stage's ranks, in tensor-parallel order; empty where it has no stage.
        layers: the half-open range of layers it computes.
        micro_batches: how many micro-batches its pipeline runs.
        instructions: in issue order.
    """

    rank: int
    ranks: int
    strategy: str
    pipeline: int | None
    stage: int | None
    tp: tuple[int, ...]
    layers: tuple[int, int]
    micro_batches: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return to_text(self)

    @classmethod
    def parse(cls, text: str) -> RankProgram:
        """Read what `str` printed; comments behind # are ignored.

        Raises:
            ValueError: naming the line and what was expected.
        """
        return parse(text)


def to_text(program: RankProgram, comments: Mapping[int, str] | None = None) -> str:
    """Return a program as text, one line per instruction; `parse` gives it back.

    Fields that an operation does not have (a peer on a forward) are not printed.

    Args:
        program: what to print.
        comments: by the instruction's index, what to print behind it after a "#".

    Raises:
        ValueError: when the strategy's text or a comment would break the line structure.
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
    if program.pipeline is None:
        return head + "idle"
    first, last = program.layers
    ranks = " ".join(map(str, program.tp))
    return (
        f"{head}pipeline {program.pipeline}, stage {program.stage}: layers {first}-{last - 1}, "
        f"tp {len(program.tp)} (ranks {ranks}), micro-batches {program.micro_batches}"
    )


def parse(text: str) -> RankProgram:
    """Read the text that `to_text` prints; comments and blank lines are ignored.

    Raises:
        ValueError: naming the line, what was expected there, and what was found.
    """
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
            f"line {number}: expected the header 'rank R of N  strategy TEXT  idle' or '... pipeline P, stage S: "
            f"layers A-B, tp T (ranks R ...), micro-batches M', found {line!r}"
        )
    rank = int(header["rank"])
    ranks = int(header["ranks"])
    strategy = header["strategy"]
    if header["place"] == "idle":
        return RankProgram(rank, ranks, strategy, None, None, (), (0, 0), 0, ())
    tp = tuple(map(int, header["tp_ranks"].split()))
    if len(tp) != int(header["tp"]):
        raise ValueError(f"line {number}: expected {header['tp']} ranks behind 'tp {header['tp']}', found {len(tp)}")
    layers = (int(header["first"]), int(header["last"]) + 1)
    pipeline, stage, micro_batches = (int(header[name]) for name in ("pipeline", "stage", "micro_batches"))
    return RankProgram(rank, ranks, strategy, pipeline, stage, tp, layers, micro_batches, ())
