"""Values that a rank's instructions read and write, as strings:

text         kind                  meaning
h{k}.{m}     ACTIVATION            output of the block at position k, for micro-batch m
d{k}.{m}     ACTIVATION_GRADIENT   the loss's gradient with respect to h{k}.{m}
s.{block}.{m}  SAVED               values that a forward saves for its backward
o.{block}.{m}  OFFLOADED           saved values in host memory (`passes.offload`)
c.{block}.{m}  COPYING             saved values being copied to host memory
f.{block}.{m}  FETCHED             saved values, copied back to the device
t.{block}.{m}  POSTPONED           values that a backward's first half passes to its second
a.{m}        AUX                   positions and rotary tables
loss.{m}     LOSS                  summed loss
W.{bucket}   WEIGHTS               pulled weights
G.{bucket}   GRADIENTS             gradients, summed over the rank's micro-batches
W.{bucket}@{n}, G.{bucket}@{n}     values of the bucket's n-th streamed pull or push (`passes.stream`)
{value}>{r}  MESSAGE               an h or d being sent to rank r
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from functools import lru_cache

NONE = -1


class ValueKind(Enum):
    ACTIVATION = "h"
    ACTIVATION_GRADIENT = "d"
    SAVED = "s"
    OFFLOADED = "o"
    COPYING = "c"
    FETCHED = "f"
    POSTPONED = "t"
    AUX = "a"
    LOSS = "loss"
    WEIGHTS = "W"
    GRADIENTS = "G"
    MESSAGE = ">"


class Value(str):
    """A value's text, with its parts as attributes ("" or -1 if the kind does not have the part).

    Attributes:
        micro_batch: number within the pipeline, or within all pipelines that share stages.
    """

    __slots__ = ("block", "bucket", "exchange", "kind", "micro_batch", "peer", "position")
    kind: ValueKind
    position: int
    block: str
    bucket: str
    exchange: str
    micro_batch: int
    peer: int

    def __new__(
        cls,
        text: str,
        kind: ValueKind,
        position: int = NONE,
        block: str = "",
        exchange: str = "",
        micro_batch: int = NONE,
        peer: int = NONE,
    ) -> Value:
        self = super().__new__(cls, text)
        self.kind = kind
        self.position = position
        self.block = block
        self.bucket = bucket_of(exchange)
        self.exchange = exchange
        self.micro_batch = micro_batch
        self.peer = peer
        return self

    def __reduce__(self) -> tuple[Callable[[str], Value], tuple[str]]:
        return parse_value, (str(self),)


def streamed(bucket: str, turn: int) -> str:
    """Return the name of a bucket's streamed pull or push number `turn`."""
    return f"{bucket}@{turn}"


def bucket_of(exchange: str) -> str:
    return exchange.partition("@")[0]


_once = lru_cache(maxsize=1 << 16)


def _at_position(kind: ValueKind) -> Callable[[int, int], Value]:
    return _once(lambda k, m: Value(f"{kind.value}{k}.{m}", kind, position=k, micro_batch=m))


def _of_block(kind: ValueKind) -> Callable[[str, int], Value]:
    return _once(lambda block, m: Value(f"{kind.value}.{block}.{m}", kind, block=block, micro_batch=m))


def _of_micro_batch(kind: ValueKind) -> Callable[[int], Value]:
    return _once(lambda m: Value(f"{kind.value}.{m}", kind, micro_batch=m))


def _of_exchange(kind: ValueKind) -> Callable[[str], Value]:
    return _once(lambda exchange: Value(f"{kind.value}.{exchange}", kind, exchange=exchange))


activation = _at_position(ValueKind.ACTIVATION)
activation_gradient = _at_position(ValueKind.ACTIVATION_GRADIENT)
saved = _of_block(ValueKind.SAVED)
offloaded = _of_block(ValueKind.OFFLOADED)
copying = _of_block(ValueKind.COPYING)
fetched = _of_block(ValueKind.FETCHED)
postponed = _of_block(ValueKind.POSTPONED)
aux = _of_micro_batch(ValueKind.AUX)
loss = _of_micro_batch(ValueKind.LOSS)
weights = _of_exchange(ValueKind.WEIGHTS)
gradients = _of_exchange(ValueKind.GRADIENTS)


@_once
def message(sent: Value, peer: int) -> Value:
    return Value(f"{sent}>{peer}", ValueKind.MESSAGE, position=sent.position, micro_batch=sent.micro_batch, peer=peer)


@_once
def readdressed(sent: Value, peer: int) -> Value:
    return message(parse_value(sent.partition(">")[0]), peer)


_OF_BLOCKS = {"s": saved, "o": offloaded, "c": copying, "f": fetched, "t": postponed}
_NUMBER = r"(0|[1-9]\d*)"
_NAME = r"([\w.\-/:]+)"
_EXCHANGE = r"([\w.\-/:]+(?:@(?:0|[1-9]\d*))?)"
_READERS: tuple[tuple[re.Pattern[str], Callable[..., Value]], ...] = (
    (re.compile(rf"h{_NUMBER}\.{_NUMBER}"), lambda k, m: activation(int(k), int(m))),
    (re.compile(rf"d{_NUMBER}\.{_NUMBER}"), lambda k, m: activation_gradient(int(k), int(m))),
    (
        re.compile(rf"([{''.join(_OF_BLOCKS)}])\.{_NAME}\.{_NUMBER}"),
        lambda kind, block, m: _OF_BLOCKS[kind](block, int(m)),
    ),
    (re.compile(rf"a\.{_NUMBER}"), lambda m: aux(int(m))),
    (re.compile(rf"loss\.{_NUMBER}"), lambda m: loss(int(m))),
    (re.compile(rf"W\.{_EXCHANGE}"), weights),
    (re.compile(rf"G\.{_EXCHANGE}"), gradients),
    (re.compile(rf"([hd]\d+\.\d+)>{_NUMBER}"), lambda sent, peer: message(parse_value(sent), int(peer))),
)


def parse_value(text: str) -> Value:
    """Parse a value's text, or raise a ValueError."""
    for pattern, make in _READERS:
        match = pattern.fullmatch(text)
        if match is not None:
            return make(*match.groups())
    raise ValueError(
        f"{text!r} is not a value: write h2.0 or d2.0 (block, micro-batch), s.layer.0.0, t.layer.0.0, a.0, loss.0, "
        "W.layer.0, G.layer.0, or h2.0>3 (on its way to rank 3)"
    )
