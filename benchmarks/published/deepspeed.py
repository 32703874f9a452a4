"""Seconds of an iteration on DeepSpeed, so that costs can be compared with runs of other runtimes.

From the source of its pipeline engine over NCCL: sends and receives are waited for by the stream that computes
(runtime/pipe/p2p.py), a stage alternates with its neighbours (runtime/pipe/schedule.py, TrainSchedule), and gradients
are reduced at the end: those of a weight that two stages use over these stages (_exec_reduce_tied_grads), then all over
the replicas of a stage, in one bucket (_exec_reduce_grads). Every replica then updates all of its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hydragraph.cost.block_pieces import GRADIENT_BYTES
from hydragraph.cost.costs import Costs
from hydragraph.cost.pricing import MESSAGE_BYTES
from hydragraph.cost.stage_costs import NeighborMessages
from hydragraph.errors import Unsupported
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.strategy import Strategy

Rows = Sequence[Sequence[float]]  # [stages, micro-batches]


@dataclass(frozen=True)
class Stack:
    """A version of the runtime.

    Attributes:
        parts: each tensor-parallel rank sends its part of a hidden state, and the receivers gather the whole
            (runtime/pipe/engine.py, PartitionedTensor; `pipe_partitioned` and `grad_partitioned` are on by default);
            else each receiver gets it whole.
        buffer_bytes: maximum size of a message whose sender continues immediately: NCCL_BUFFSIZE, 4 MiB by default
            (NCCL's documentation of its environment variables).
        mask_bytes: bytes of the attention mask that each rank sends with each hidden state (_exec_send_activations).
        staging: receivers first allocate a whole hidden state of zeros in pageable host memory, and copy it to the
            device over this link; None: it is allocated on the device.
    """

    parts: bool = True
    buffer_bytes: int = 4 << 20
    mask_bytes: int = 0
    staging: Interconnect | None = None


DEEPSPEED = Stack()
PLAIN = Stack(parts=False)


def deepspeed_s(costs: Costs, strategy: Strategy, assignment: Assignment, stack: Stack = DEEPSPEED) -> float:
    """Return the seconds of an iteration: the slowest pipeline, the all-reduce of gradients, and the update.

    Raises:
        Unsupported: pipelines share stages or have interleaved ones.
    """
    if strategy.shares or strategy.interleaved:
        raise Unsupported(
            "shared or interleaved stages on another runtime, which has no such order",
            where=f"strategy {strategy}",
            remedy="price it with costs.seconds, on hydragraph's own runtime",
        )
    ends = [
        _pipeline_end(costs, strategy, pipeline, batches, stack)
        for pipeline, batches in zip(strategy.pipelines, assignment.tokens, strict=True)
        if batches
    ]
    return max(ends, default=0.0) + _tied_s(costs, strategy) + _all_reduce_s(costs, strategy)


def _pipeline_end(
    costs: Costs, strategy: Strategy, pipeline: Pipeline, batches: Sequence[Sequence[int]], stack: Stack
) -> float:
    tokens = [sum(lengths) for lengths in batches]
    seconds = [[stage.seconds(lengths) for lengths in batches] for stage in costs.stages(pipeline)]
    forward = [[one for one, _ in row] for row in seconds]
    backward = [[two for _, two in row] for row in seconds]
    ahead, back, buffered = [], [], []
    for s, (stage, following) in enumerate(pairwise(pipeline.stages)):
        there, here = (_hop(costs, strategy, *pair, stack) for pair in ((stage, following), (following, stage)))
        mask_s = there.seconds(stack.mask_bytes / (there.token_bytes * there.part)) if stack.mask_bytes else 0.0
        ahead.append([there.seconds(n) + mask_s for n in tokens])
        back.append([here.seconds(n) for n in tokens])
        buffered.append([(_size(there, n) <= stack.buffer_bytes, _size(here, n) <= stack.buffer_bytes) for n in tokens])
        # Work of receivers on messages counts as computing.
        forward[s + 1] = [
            one + _receiving_s(costs, following, n, stack) for one, n in zip(forward[s + 1], tokens, strict=True)
        ]
        backward[s] = [two + _receiving_s(costs, stage, n, stack) for two, n in zip(backward[s], tokens, strict=True)]
    return exchanged_end(forward, backward, ahead, back, buffered)


def _hop(costs: Costs, strategy: Strategy, stage: Stage, other: Stage, stack: Stack) -> NeighborMessages:
    """Return the messages between two stages; those of all pipelines are sent at the same time and share cards."""
    hop = costs.hop(stage, other)
    at = next((p.stages.index(stage), p.stages.index(other)) for p in strategy.pipelines if stage in p.stages)
    pairs = [
        pair
        for p in strategy.pipelines
        if max(at) < len(p.stages)
        for pair in zip(*(p.stages[i].devices for i in at), strict=False)
    ]
    uses = Counter(resource for pair in pairs for resource in costs.cluster.resources(*pair))
    return replace(hop, sharing=max(uses.values()), part=hop.part / stage.tp if stack.parts else hop.part)


def _size(hop: NeighborMessages, tokens: int) -> float:
    return tokens * hop.token_bytes * hop.part


def _receiving_s(costs: Costs, receiver: Stage, tokens: int, stack: Stack) -> float:
    """Return a receiver's seconds to allocate a buffer and gather parts: a copy and a ring of t - 1 messages."""
    size = tokens * costs.sizes.hidden_bytes
    seconds = stack.staging.seconds(size) if stack.staging is not None else 0.0
    if stack.parts and receiver.tp > 1:
        link = costs.slowest_link(receiver.devices, MESSAGE_BYTES)
        seconds += (receiver.tp - 1) * link.seconds(size / receiver.tp)
    return seconds


def _tied_s(costs: Costs, strategy: Strategy) -> float:
    """Return the seconds to add the gradients of weights that two stages of a pipeline use, in the compute dtype."""
    slowest = 0.0
    for pipeline in strategy.pipelines:
        of_block = {
            block: stage
            for stage, (first, end) in zip(pipeline.stages, costs.spans(pipeline), strict=True)
            for block in costs.outline.blocks[first:end]
        }
        seconds = 0.0
        for bucket in costs.buckets:
            one, *others = {of_block[block] for block in bucket.blocks}
            for other in others:
                hop = _hop(costs, strategy, one, other, PLAIN)
                seconds += hop.seconds(bucket.size / one.tp * costs.sizes.itemsize / (hop.token_bytes * hop.part))
        slowest = max(slowest, seconds)
    return slowest


def _all_reduce_s(costs: Costs, strategy: Strategy) -> float:
    """Return the seconds of a ring over the replicas of every block and the update of a whole stage, at the end.

    A ring of d replicas moves 2 (d - 1) / d of the gradients through each of them; ranks that share a network card
    share its bandwidth.
    """
    replicas = len(strategy.pipelines)
    placed = [
        (p, stage, span) for p in strategy.pipelines for stage, span in zip(p.stages, costs.spans(p), strict=True)
    ]
    slowest = 0.0
    for pipeline, stage, (first, end) in placed:
        pieces = costs.pieces(costs.cluster.type_of(stage.devices[0]), stage.kind)
        elements = sum(pieces[t].parameters - pieces[t].frozen for t in costs.profile.blocks[first:end])
        here = set(costs.outline.blocks[first:end])
        for bucket in costs.buckets:  # a weight that several blocks use is reduced once
            elements -= max(0, len(here.intersection(bucket.blocks)) - 1) * bucket.size // stage.tp
        size = 2 * (replicas - 1) / replicas * elements * GRADIENT_BYTES
        ring = 0.0  # as slow as its slowest link
        for other, replica, (begin, last) in placed:
            if other is not pipeline and begin < end and first < last:
                hop = costs.hop(stage, replica)
                ring = max([ring, *(link.latency_s + hop.sharing * size / link.bytes_per_s for link in hop.links)])
        slowest = max(slowest, ring + max(_update_s(costs, rank, elements) for rank in stage.devices))
    return slowest


def _update_s(costs: Costs, rank: int, elements: int) -> float:
    update = costs.piece_profile(rank).update
    return 0.0 if update is None else costs.health.rate(rank) * (update[0] + update[1] * elements)


def exchanged_end(
    forward: Rows, backward: Rows, ahead: Rows, back: Rows, buffered: Sequence[Sequence[tuple[bool, bool]]]
) -> float:
    """Return when the last backward ends of a pipeline whose neighbours exchange between computations.

    Stage s of S computes the forward of micro-batch m in slot 2 m + s, and its backward in slot 2 m + 2 S - 1 - s, so
    the neighbour of a stage in a forward is in a backward. Before its forward, stage s + 1 sends the last gradient
    back, then receives the next hidden state. Both ends are occupied from a message's begin
    to its end, except that the sender of a buffered message continues immediately.

    Example, S = 2, V = 1, forward 1, backward 2, messages 3: 1 + 3 + (1 + 2) + 3 + 2 = 12.

    Args:
        forward, backward: seconds of each micro-batch on each stage, in the order in which they run [S][V].
        ahead: seconds of a hidden state from each stage to the next [S - 1][V].
        back: seconds of its gradient, from stage s + 1 to s [S - 1][V].
        buffered: whether hidden state and gradient are buffered [S - 1][V].
    """
    stages = len(forward)
    count = len(forward[0]) if forward else 0
    clock = [0.0] * stages

    def give(sender: int, receiver: int, seconds: float, on: bool) -> None:
        end = max(clock[sender], clock[receiver]) + seconds
        clock[receiver] = end
        if not on:
            clock[sender] = end

    for slot in range(2 * (count + stages - 1)):
        for s in range(stages - 1):
            came, odd = divmod(slot - s - 1, 2)
            if odd:
                continue
            gone = (slot + s + 1) // 2 - stages
            if 0 <= gone < count:
                give(s + 1, s, back[s][gone], buffered[s][gone][1])
            if 0 <= came < count:
                give(s, s + 1, ahead[s][came], buffered[s][came][0])
        for s in range(stages):
            m, odd = divmod(slot - s, 2)
            if not odd and 0 <= m < count:
                clock[s] += forward[s][m]
            m, odd = divmod(slot + s + 1, 2)
            if not odd and 0 <= m - stages < count:
                clock[s] += backward[s][m - stages]
    return max(clock, default=0.0)
