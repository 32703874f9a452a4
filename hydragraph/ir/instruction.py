"""What one rank does in one iteration: a short list of instructions over named values.

Values: `h{k}.{m}` the output of block k for micro-batch m, `d{k}.{m}` its gradient, `s.{block}.{m}` what the forward of
a block saves for its backward, `a.{m}` a micro-batch's positions and rotary tables, `W.{bucket}` a bucket's pulled
weights, `G.{bucket}` its accumulated gradients, `loss.{m}` a micro-batch's summed loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """The instruction set."""

    PULL = "pull"  # W.bucket = link home -> here
    FORWARD = "forward"  # run one block's forward graph on one micro-batch
    BACKWARD = "backward"  # run one block's backward graph, accumulate into G.bucket
    SEND = "send"  # one value to one rank
    RECEIVE = "receive"  # one value from one rank
    PUSH = "push"  # link G.bucket -> home, summed at the owner
    FREE = "free"  # drop values
    COMMIT = "commit"  # agree with all ranks that the gradients are finite; nothing communicates after it
    UPDATE = "update"  # optimizer step on the home shard


class Stream(Enum):
    """Where an instruction runs; instructions of one stream run in order."""

    PULL = "pull"
    COMPUTE = "compute"
    P2P = "p2p"
    PUSH = "push"


@dataclass(frozen=True)
class Instruction:
    """One step of one rank.

    Attributes:
        op: what it does.
        stream: where it runs.
        target: the bucket of a pull or push, the block of a forward or backward, else "".
        micro_batch: the micro-batch of a forward or backward, counted within the pipeline; else None.
        peer: the other rank of a send or receive; else None.
        reads: the values it needs.
        writes: the values it makes, or (G.*) adds to.
        after: those of its reads that another stream makes, and that it therefore waits for.
    """

    op: Op
    stream: Stream
    target: str = ""
    micro_batch: int | None = None
    peer: int | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


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
        from hydragraph.ir.text import to_text  # the text module reads this one

        return to_text(self)

    @classmethod
    def parse(cls, text: str) -> RankProgram:
        """Read what `str` printed; comments behind # are ignored.

        Raises:
            ValueError: naming the line and what was expected.
        """
        from hydragraph.ir.text import parse

        return parse(text)
