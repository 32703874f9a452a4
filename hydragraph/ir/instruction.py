"""The instruction set: what one rank does in one iteration is a short list of these, over values (`ir.value`).

Everything that is fixed by an operation stands in `RULES`: the stream that it runs on, and which kinds of values it
reads and makes. `ir.text` prints by it, `ir.verify` checks by it, and the runtime and the simulator queue by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from hydragraph.ir.value import Value, ValueKind


class Op(Enum):
    """The instruction set."""

    PULL = "pull"  # W.bucket = link home -> here
    FORWARD = "forward"  # run one block's forward graph on one micro-batch
    BACKWARD = "backward"  # run one block's backward graph, accumulate into G.bucket
    SEND = "send"  # one value to one rank
    RECEIVE = "receive"  # one value from one rank
    PUSH = "push"  # link G.bucket -> home: summed at first owners, who hand the sum on to second ones
    FREE = "free"  # drop values; of a message, once it has left
    COMMIT = "commit"  # agree with all ranks that the gradients are finite; nothing communicates after it
    UPDATE = "update"  # optimizer step on the home shard

    # There is one object of each: hashing that is ten times as quick as hashing its name, which prices do millions of
    # times.
    __hash__ = object.__hash__


class Stream(Enum):
    """Where an instruction runs; instructions of one stream run in order."""

    PULL = "pull"
    COMPUTE = "compute"
    P2P = "p2p"
    PUSH = "push"


@dataclass(frozen=True)
class Rule:
    """What is the same for all instructions of an operation.

    Attributes:
        stream: where they run.
        reads: the kinds of values that they may read.
        writes: the kinds of values that they may make or, of `GRADIENTS`, add to.
    """

    stream: Stream
    reads: frozenset[ValueKind] = frozenset()
    writes: frozenset[ValueKind] = frozenset()


def _rule(stream: Stream, reads: tuple[ValueKind, ...] = (), writes: tuple[ValueKind, ...] = ()) -> Rule:
    return Rule(stream, frozenset(reads), frozenset(writes))


_MOVED = (ValueKind.ACTIVATION, ValueKind.ACTIVATION_GRADIENT)  # what stages hand to one another

RULES: Mapping[Op, Rule] = {
    Op.PULL: _rule(Stream.PULL, writes=(ValueKind.WEIGHTS,)),
    Op.FORWARD: _rule(
        Stream.COMPUTE,
        reads=(ValueKind.WEIGHTS, ValueKind.ACTIVATION, ValueKind.AUX),
        writes=(ValueKind.ACTIVATION, ValueKind.LOSS, ValueKind.SAVED, ValueKind.AUX),
    ),
    Op.BACKWARD: _rule(
        Stream.COMPUTE,
        reads=(ValueKind.SAVED, ValueKind.ACTIVATION_GRADIENT, ValueKind.WEIGHTS),
        writes=(ValueKind.ACTIVATION_GRADIENT, ValueKind.GRADIENTS),
    ),
    Op.SEND: _rule(Stream.P2P, reads=_MOVED, writes=(ValueKind.MESSAGE,)),
    Op.RECEIVE: _rule(Stream.P2P, writes=_MOVED),
    Op.PUSH: _rule(Stream.PUSH, reads=(ValueKind.GRADIENTS,)),
    Op.FREE: _rule(Stream.COMPUTE, reads=tuple(ValueKind)),
    Op.COMMIT: _rule(Stream.COMPUTE, reads=(ValueKind.LOSS, ValueKind.GRADIENTS)),
    Op.UPDATE: _rule(Stream.COMPUTE),
}


@dataclass(frozen=True)
class Instruction:
    """One step of one rank.

    Attributes:
        op: what it does.
        target: the bucket of a pull or push, the block of a forward or backward, else "".
        micro_batch: the number of a forward's or backward's micro-batch (`ir.rank_program.Role`); else None.
        peer: the other rank of a send or receive; else None.
        reads: the values it needs.
        writes: the values it makes, or (G.*) adds to.
        after: those of its reads that another stream makes, and that it therefore waits for. Of a free, messages alone:
            it lets go of a message once that has left, and of other values at once. Of a pull or push, the weights or
            gradients of earlier ones, too, which must be over: so few bytes are in flight (`passes.window`).
    """

    op: Op
    target: str = ""
    micro_batch: int | None = None
    peer: int | None = None
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    after: tuple[Value, ...] = ()

    @property
    def stream(self) -> Stream:
        """Where it runs."""
        return RULES[self.op].stream


def waits(instruction: Instruction, stream_of: Mapping[Value, Stream]) -> tuple[Value, ...]:
    """Return what an instruction must wait for, given which stream has made each value that it reads."""
    stream = instruction.stream
    free = instruction.op is Op.FREE
    found = [value for value in instruction.reads if stream_of[value] is not stream]
    return tuple(value for value in found if not free or value.kind is ValueKind.MESSAGE) if found else ()
