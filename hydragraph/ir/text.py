"""The printed form of a rank's program, which parses back to an equal program.

    rank 2 of 4  strategy <tp2,pp1> + <tp1,pp2>@7c1e00  pipeline 1, stage 0: layers 0-1, tp 1 (ranks 2), micro-batches 3
    pull     W.layer.0 = link home -> here                      # comments are ignored
    compute  h1.0, s.layer.0.0 = forward layer.0 [0] (W.layer.0, h0.0, a.0)   after W.layer.0
    p2p      send h2.0 -> rank 3                                after h2.0

Each line is a stream, what is made or (`+=`) added to, the operation with what it reads, and what it waits for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hydragraph.ir.instruction import Instruction, Op, RankProgram, Stream

_MARGIN = 60  # where `after` starts on lines that are short enough

_HEADER = re.compile(
    r"rank (?P<rank>\d+) of (?P<ranks>\d+)  strategy (?P<strategy>.*)  (?P<place>idle|pipeline (?P<pipeline>\d+), "
    r"stage (?P<stage>\d+): layers (?P<first>\d+)-(?P<last>\d+), tp (?P<tp>\d+) \(ranks (?P<tp_ranks>\d+(?: \d+)*)\), "
    r"micro-batches (?P<micro_batches>\d+))"
)

_NAME = r"[^\s,()=#]+"
_NAMES = rf"{_NAME}(?:, {_NAME})*"
_MADE = rf"(?:(?P<writes>{_NAMES}) {{}} )?"
_READS = rf"(?: \((?P<reads>{_NAMES})\))?"
_COMPUTED = rf"(?P<target>{_NAME}) \[(?P<micro_batch>\d+)\]{_READS}"

# One pattern per form; what each group holds is named after the instruction's field.
_FORMS: tuple[tuple[Op, str, re.Pattern[str]], ...] = tuple(
    (op, form, re.compile(pattern))
    for op, form, pattern in (
        (Op.PULL, "W.BUCKET = link home -> here", rf"(?P<writes>W\.(?P<target>{_NAME})) = link home -> here"),
        (Op.PULL, "link W.BUCKET home -> others", rf"link W\.(?P<target>{_NAME}) home -> others"),
        (Op.PUSH, "link G.BUCKET -> home", rf"link (?P<reads>G\.(?P<target>{_NAME})) -> home"),
        (Op.PUSH, "link G.BUCKET others -> home", rf"link G\.(?P<target>{_NAME}) others -> home"),
        (Op.FORWARD, "VALUES = forward BLOCK [MICRO-BATCH] (VALUES)", _MADE.format("=") + "forward " + _COMPUTED),
        (
            Op.BACKWARD,
            "VALUES += backward BLOCK [MICRO-BATCH] (VALUES)",
            _MADE.format(r"\+=") + "backward " + _COMPUTED,
        ),
        (Op.SEND, "send VALUE -> rank RANK", rf"send (?P<reads>{_NAME}) -> rank (?P<peer>\d+)"),
        (Op.RECEIVE, "VALUE = receive <- rank RANK", rf"(?P<writes>{_NAME}) = receive <- rank (?P<peer>\d+)"),
        (Op.FREE, "free VALUES", rf"free (?P<reads>{_NAMES})"),
        (Op.COMMIT, "commit (VALUES)", "commit" + _READS),
        (Op.UPDATE, "update", "update"),
    )
)
# The word that tells a line's operation, for an error that shows the form it should have.
_WORDS = {"link": (Op.PULL, Op.PUSH), **{op.value: (op,) for op in Op}}


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
            line = f"{line:<{_MARGIN}}  # {comment}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def instruction_text(instruction: Instruction) -> str:
    """Return one instruction's line, such as `p2p      h2.0 = receive <- rank 3`."""
    line = f"{instruction.stream.value:<9}{_statement(instruction)}"
    return f"{line:<{_MARGIN}}  after {', '.join(instruction.after)}" if instruction.after else line


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


def _statement(instruction: Instruction) -> str:
    op, target = instruction.op, instruction.target
    reads, writes = ", ".join(instruction.reads), ", ".join(instruction.writes)
    arguments = f" ({reads})" if reads else ""
    match op:
        case Op.PULL:
            return f"{writes} = link home -> here" if writes else f"link W.{target} home -> others"
        case Op.PUSH:
            return f"link {reads} -> home" if reads else f"link G.{target} others -> home"
        case Op.FORWARD | Op.BACKWARD:
            sign = "=" if op is Op.FORWARD else "+="
            made = f"{writes} {sign} " if writes else ""
            return f"{made}{op.value} {target} [{instruction.micro_batch}]{arguments}"
        case Op.SEND:
            return f"send {reads} -> rank {instruction.peer}"
        case Op.RECEIVE:
            return f"{writes} = receive <- rank {instruction.peer}"
        case Op.FREE:
            return f"free {reads}"
        case Op.COMMIT | Op.UPDATE:
            return f"{op.value}{arguments}"


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
            instructions.append(_parse_instruction(line, number))
    if program is None:
        raise ValueError(f"line {number + 1}: expected a header such as 'rank 0 of 4  strategy ...', found the end")
    fields = {name: getattr(program, name) for name in program.__dataclass_fields__}
    return RankProgram(**{**fields, "instructions": tuple(instructions)})


def _parse_header(line: str, number: int) -> RankProgram:
    found = _HEADER.fullmatch(line)
    if found is None:
        raise ValueError(
            f"line {number}: expected the header 'rank R of N  strategy TEXT  idle' or '... pipeline P, stage S: "
            f"layers A-B, tp T (ranks R ...), micro-batches M', found {line!r}"
        )
    rank, ranks, strategy = int(found["rank"]), int(found["ranks"]), found["strategy"]
    if found["place"] == "idle":
        return RankProgram(rank, ranks, strategy, None, None, (), (0, 0), 0, ())
    tp = tuple(map(int, found["tp_ranks"].split()))
    if len(tp) != int(found["tp"]):
        raise ValueError(f"line {number}: expected {found['tp']} ranks behind 'tp {found['tp']}', found {len(tp)}")
    layers = (int(found["first"]), int(found["last"]) + 1)
    pipeline, stage, micro_batches = (int(found[name]) for name in ("pipeline", "stage", "micro_batches"))
    return RankProgram(rank, ranks, strategy, pipeline, stage, tp, layers, micro_batches, ())


def _parse_instruction(line: str, number: int) -> Instruction:
    name, _, rest = line.partition(" ")
    try:
        stream = Stream(name)
    except ValueError:
        streams = ", ".join(each.value for each in Stream)
        raise ValueError(f"line {number}: expected a stream ({streams}), found {name!r}") from None
    statement, waits, after = re.sub(r"\s+", " ", rest.strip()).partition(" after ")
    if waits and not re.fullmatch(_NAMES, after):
        raise ValueError(f"line {number}: expected values behind 'after', such as 'h1.0, W.head', found {after!r}")
    for op, _, pattern in _FORMS:
        if found := pattern.fullmatch(statement):
            return _instruction(op, stream, found.groupdict(), after)
    raise ValueError(f"line {number}: expected {_expected(statement)}, found {statement!r}")


def _instruction(op: Op, stream: Stream, found: Mapping[str, str | None], after: str) -> Instruction:
    micro_batch, peer = found.get("micro_batch"), found.get("peer")
    return Instruction(
        op,
        stream,
        target=found.get("target") or "",
        micro_batch=None if micro_batch is None else int(micro_batch),
        peer=None if peer is None else int(peer),
        reads=_values(found.get("reads")),
        writes=_values(found.get("writes")),
        after=_values(after),
    )


def _values(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


def _expected(statement: str) -> str:
    """Return the forms a statement may have meant, judging by its first operation word."""
    ops = next((_WORDS[word] for word in re.findall(r"\w+", statement) if word in _WORDS), tuple(Op))
    return " or ".join(f"'{form}'" for op, form, _ in _FORMS if op in ops)
