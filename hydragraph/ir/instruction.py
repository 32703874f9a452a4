"""Instructions of a rank's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from hydragraph.ir.schedules.schedule import Work
from hydragraph.ir.value import Value, ValueKind, gradients, weights


class Op(Enum):
    # Receive a bucket's weights from owners, or send them
    PULL = "pull"
    FORWARD = "forward"
    # Run a block's backward, or half of it; add weight gradients to G.bucket
    BACKWARD = "backward"
    # Copy a block's saved values to host memory
    OFFLOAD = "offload"
    # Copy saved values back to the device, after all earlier computations
    FETCH = "fetch"
    SEND = "send"
    RECEIVE = "receive"
    # Sum a bucket's gradients on first owners, then send them to second owners
    PUSH = "push"
    # Release values; messages only after they are sent
    FREE = "free"
    # Agree whether all ranks' gradients are finite
    COMMIT = "commit"
    UPDATE = "update"

    __hash__ = object.__hash__


class Stream(Enum):
    """Execution stream, whose instructions run in order."""

    PULL = "pull"
    COMPUTE = "compute"
    P2P = "p2p"
    PUSH = "push"
    OFFLOAD = "offload"


@dataclass(frozen=True)
class Rule:
    stream: Stream
    reads: tuple[ValueKind, ...] = ()
    writes: tuple[ValueKind, ...] = ()


EXCHANGED: Mapping[Op, Callable[[str], Value]] = {Op.PULL: weights, Op.PUSH: gradients}
_MOVED = (ValueKind.ACTIVATION, ValueKind.ACTIVATION_GRADIENT)

RULES: Mapping[Op, Rule] = {
    Op.PULL: Rule(Stream.PULL, writes=(ValueKind.WEIGHTS,)),
    Op.FORWARD: Rule(
        Stream.COMPUTE,
        reads=(ValueKind.WEIGHTS, ValueKind.ACTIVATION, ValueKind.AUX),
        writes=(ValueKind.ACTIVATION, ValueKind.LOSS, ValueKind.SAVED, ValueKind.AUX),
    ),
    Op.BACKWARD: Rule(
        Stream.COMPUTE,
        reads=(
            ValueKind.SAVED,
            ValueKind.FETCHED,
            ValueKind.POSTPONED,
            ValueKind.ACTIVATION_GRADIENT,
            ValueKind.WEIGHTS,
        ),
        writes=(ValueKind.ACTIVATION_GRADIENT, ValueKind.POSTPONED, ValueKind.GRADIENTS),
    ),
    Op.OFFLOAD: Rule(Stream.OFFLOAD, reads=(ValueKind.SAVED,), writes=(ValueKind.OFFLOADED, ValueKind.COPYING)),
    Op.FETCH: Rule(Stream.OFFLOAD, reads=(ValueKind.OFFLOADED,), writes=(ValueKind.FETCHED,)),
    Op.SEND: Rule(Stream.P2P, reads=_MOVED, writes=(ValueKind.MESSAGE,)),
    Op.RECEIVE: Rule(Stream.P2P, writes=_MOVED),
    Op.PUSH: Rule(Stream.PUSH, reads=(ValueKind.GRADIENTS,)),
    Op.FREE: Rule(Stream.COMPUTE, reads=tuple(ValueKind)),
    Op.COMMIT: Rule(Stream.COMPUTE, reads=(ValueKind.LOSS, ValueKind.GRADIENTS)),
    Op.UPDATE: Rule(Stream.COMPUTE),
}


@dataclass(frozen=True)
class Instruction:
    """One operation of a rank on named values.

    Attributes:
        target: a bucket (pull, push), a block (forward, backward, offload, fetch), or "".
        writes: values that are created or, for gradients, added to.
        after: values to wait for: `reads` that other streams produce and, to limit the bytes in flight, values of
            earlier pulls or pushes.
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
        return RULES[self.op].stream

    @property
    def step(self) -> tuple[Op, str, int | None]:
        """Key that is equal on all ranks of a tensor-parallel stage."""
        return self.op, self.target, self.micro_batch

    @property
    def partner(self) -> int:
        assert self.peer is not None, f"a {self.op.value} must have a peer"
        return self.peer

    @property
    def batch(self) -> int:
        assert self.micro_batch is not None, f"a {self.op.value} must have a micro-batch"
        return self.micro_batch

    def waiting_for(self, after: tuple[Value, ...]) -> Instruction:
        # `dataclasses.replace` is several times slower.
        return Instruction(self.op, self.target, self.micro_batch, self.peer, self.reads, self.writes, after)

    @property
    def work(self) -> Work:
        if self.op is Op.FORWARD:
            return Work.FORWARD
        if any(value.kind is ValueKind.POSTPONED for value in self.reads):
            return Work.WEIGHT_GRADIENT
        halved = any(value.kind is ValueKind.POSTPONED for value in self.writes)
        return Work.INPUT_GRADIENT if halved else Work.BACKWARD


def waits(instruction: Instruction, stream_of: Mapping[Value, Stream]) -> tuple[Value, ...]:
    # A free waits only for messages and copies. Instructions that used the other values have waited
    # for them.
    stream = instruction.stream
    free = instruction.op is Op.FREE
    cross_stream = [value for value in instruction.reads if stream_of[value] is not stream]
    return tuple(value for value in cross_stream if not free or value.kind in _ON_THEIR_WAY) if cross_stream else ()


_ON_THEIR_WAY = (ValueKind.MESSAGE, ValueKind.COPYING)
