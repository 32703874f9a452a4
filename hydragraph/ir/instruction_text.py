"""Printed form of an instruction, and its parser.

    compute  h1.0, s.layer.0.0 = forward layer.0 [0] (W.layer.0, h0.0, a.0)   after W.layer.0
    p2p      send h2.0 -> rank 3                                after h2.0

A line gives the stream, the values written (`=`) or added to (`+=`), the operation, the values read, and the awaited
values (`after`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hydragraph.ir.instruction import RULES, Instruction, Op, Stream
from hydragraph.ir.value import Value, message, parse_value

MARGIN = 60

_NAME = r"[^\s,()=#]+"
_NAMES = rf"{_NAME}(?:, {_NAME})*"
_READS = rf"(?: \((?P<reads>{_NAMES})\))?"


def _computed(op: Op, sign: str) -> str:
    writes = rf"(?:(?P<writes>{_NAMES}) {re.escape(sign)} )?"
    return rf"{writes}{op.value} (?P<target>{_NAME}) \[(?P<micro_batch>\d+)\]{_READS}"


_FORMS: tuple[tuple[Op, str, re.Pattern[str]], ...] = tuple(
    (op, form, re.compile(pattern))
    for op, form, pattern in (
        (Op.PULL, "W.BUCKET = link home -> here", rf"(?P<writes>W\.(?P<target>{_NAME})) = link home -> here"),
        (Op.PULL, "link W.BUCKET home -> others", rf"link W\.(?P<target>{_NAME}) home -> others"),
        (Op.PUSH, "link G.BUCKET -> home", rf"link (?P<reads>G\.(?P<target>{_NAME})) -> home"),
        (Op.PUSH, "link G.BUCKET others -> home", rf"link G\.(?P<target>{_NAME}) others -> home"),
        *(
            (op, f"VALUES {sign} {op.value} BLOCK [MICRO-BATCH] (VALUES)", _computed(op, sign))
            for op, sign in ((Op.FORWARD, "="), (Op.BACKWARD, "+="), (Op.OFFLOAD, "="), (Op.FETCH, "="))
        ),
        (Op.SEND, "send VALUE -> rank RANK", rf"send (?P<reads>{_NAME}) -> rank (?P<peer>\d+)"),
        (Op.RECEIVE, "VALUE = receive <- rank RANK", rf"(?P<writes>{_NAME}) = receive <- rank (?P<peer>\d+)"),
        (Op.FREE, "free VALUES", rf"free (?P<reads>{_NAMES})"),
        (Op.COMMIT, "commit (VALUES)", "commit" + _READS),
        (Op.UPDATE, "update", "update"),
    )
)
_WORDS = {"link": (Op.PULL, Op.PUSH), **{op.value: (op,) for op in Op}}


def instruction_text(instruction: Instruction) -> str:
    """Return a line: `p2p      h2.0 = receive <- rank 3`."""
    line = f"{instruction.stream.value:<9}{_statement(instruction)}"
    return f"{line:<{MARGIN}}  after {', '.join(instruction.after)}" if instruction.after else line


def _statement(instruction: Instruction) -> str:
    op = instruction.op
    target = instruction.target
    reads = ", ".join(instruction.reads)
    writes = ", ".join(instruction.writes)
    arguments = f" ({reads})" if reads else ""
    match op:
        case Op.PULL:
            return f"{writes} = link home -> here" if writes else f"link W.{target} home -> others"
        case Op.PUSH:
            return f"link {reads} -> home" if reads else f"link G.{target} others -> home"
        case Op.FORWARD | Op.BACKWARD | Op.OFFLOAD | Op.FETCH:
            sign = "+=" if op is Op.BACKWARD else "="
            assigned = f"{writes} {sign} " if writes else ""
            return f"{assigned}{op.value} {target} [{instruction.micro_batch}]{arguments}"
        case Op.SEND:
            return f"send {reads} -> rank {instruction.peer}"
        case Op.RECEIVE:
            return f"{writes} = receive <- rank {instruction.peer}"
        case Op.FREE:
            return f"free {reads}"
        case Op.COMMIT | Op.UPDATE:
            return f"{op.value}{arguments}"


def parse_instruction(line: str, number: int) -> Instruction:
    """Parse the output of `instruction_text`, or raise a ValueError that names line `number`."""
    name, _, rest = line.partition(" ")
    try:
        stream = Stream(name)
    except ValueError:
        streams = ", ".join(s.value for s in Stream)
        raise ValueError(f"line {number}: expected a stream ({streams}), found {name!r}") from None
    # Blanks that align instructions have no meaning.
    statement, waits, after = re.sub(r"\s+", " ", rest.strip()).partition(" after ")
    if waits and not re.fullmatch(_NAMES, after):
        raise ValueError(f"line {number}: expected values following 'after', such as 'h1.0, W.head', found {after!r}")
    for op, _, pattern in _FORMS:
        match = pattern.fullmatch(statement)
        if match is None:
            continue
        if stream is not RULES[op].stream:
            raise ValueError(f"line {number}: expected stream {RULES[op].stream.value} for {op.value}, found {name!r}")
        try:
            return _instruction(op, match.groupdict(), after)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    raise ValueError(f"line {number}: expected {_expected(statement)}, found {statement!r}")


def _instruction(op: Op, groups: Mapping[str, str | None], after: str) -> Instruction:
    micro_batch = groups.get("micro_batch")
    peer = groups.get("peer")
    reads = _values(groups.get("reads"))
    writes = _values(groups.get("writes"))
    if op is Op.SEND and peer is not None:
        writes = (message(reads[0], int(peer)),)
    return Instruction(
        op,
        target=groups.get("target") or "",
        micro_batch=None if micro_batch is None else int(micro_batch),
        peer=None if peer is None else int(peer),
        reads=reads,
        writes=writes,
        after=_values(after),
    )


def _values(text: str | None) -> tuple[Value, ...]:
    return tuple(parse_value(name) for name in text.split(", ")) if text else ()


def _expected(statement: str) -> str:
    ops = next((_WORDS[word] for word in re.findall(r"\w+", statement) if word in _WORDS), tuple(Op))
    return " or ".join(f"'{form}'" for op, form, _ in _FORMS if op in ops)
