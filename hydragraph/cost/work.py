"""Work: what the instructions of one iteration cost on a cluster, estimated from a program's sizes.

A product with a weight of P elements over T tokens is 2 P T floating-point operations forward and 4 P T backward
(6 P T in all); attention over H heads of size D adds 4 T L H D forward for sequences of L tokens, half of it where it
is causal, and twice that backward. All-reduces are priced as rings: 2 (t - 1) messages of 1/t of the value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hydragraph.ir.graph_data import value_of
from hydragraph.ir.instruction import Op
from hydragraph.ir.layout import GradientKind, Layout, home, propagation
from hydragraph.ir.link import Slices, copy, reduce
from hydragraph.ir.parameter import Bucket
from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Block, Program
from hydragraph.passes.place import PlacedStage, place
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.strategy import Strategy

Pair = tuple[int, int]  # (sending rank, receiving rank)

GRADIENT_BYTES = 4  # gradients are accumulated and pushed in fp32
UPDATE_BYTES = 28  # AdamW per element: reads weight, gradient and two moments, writes weight and two moments, in fp32


@dataclass(frozen=True)
class Work:
    """What instructions cost; what is absent costs nothing.

    Attributes:
        seconds: (operation, block or "", rank) -> seconds of one forward or backward of one micro-batch, or of the
            update, tensor-parallel communication included.
        pull_bytes, push_bytes: bucket -> (sending rank, receiving rank) -> bytes; local movements are left out.
        activation_bytes: pipeline -> bytes of one micro-batch's hidden state.
    """

    seconds: Mapping[tuple[Op, str, int], float]
    pull_bytes: Mapping[str, Mapping[Pair, float]]
    push_bytes: Mapping[str, Mapping[Pair, float]]
    activation_bytes: Mapping[int, float]


def work_of(program: Program, strategy: Strategy, tokens: Sequence[int], cluster: Cluster) -> Work:
    """Estimate the work of one iteration.

    Args:
        program: the model.
        strategy: on ranks that the cluster has.
        tokens: for each pipeline, the tokens of one of its micro-batches, taken as one sequence; 0 where a pipeline
            has nothing to do.
        cluster: one device per rank.

    Raises:
        ValueError: when these do not fit one another.
    """
    ranks = len(cluster.devices)
    strategy.check(program.layers, ranks, program.heads)
    placement = place(program.outline, strategy, [min(count, 1) for count in tokens])
    seconds = {(Op.UPDATE, "", rank): _update_seconds(program, rank, cluster) for rank in range(ranks)}
    for stage in placement.stages:
        recompute = strategy.pipelines[stage.pipeline].stages[stage.stage].recompute
        for block in program.blocks[slice(*stage.blocks)]:
            for rank in stage.ranks:
                compute = (
                    _flops(program, block, stage, rank, tokens[stage.pipeline]) / cluster.devices[rank].flops_per_s
                )
                forward, backward = _all_reduce_seconds(program, block, stage, tokens[stage.pipeline], cluster)
                seconds[Op.FORWARD, block.name, rank] = compute + forward
                seconds[Op.BACKWARD, block.name, rank] = (3 if recompute else 2) * compute + backward
    holders = dict(placement.holders)
    pulls, pushes = {}, {}
    for bucket in program.buckets:
        if bucket.name in holders:
            owners, users = home(bucket.size, range(ranks)), _propagation(bucket, holders[bucket.name])
            pulls[bucket.name] = _pair_bytes(copy(owners, users), program.dtype.itemsize)
            if bucket.learns:
                pushes[bucket.name] = _pair_bytes(reduce(users, owners), GRADIENT_BYTES)
    hidden = {i: float(count * _hidden_bytes(program)) for i, count in enumerate(tokens)}
    return Work(seconds, pulls, pushes, hidden)


def _flops(program: Program, block: Block, stage: PlacedStage, rank: int, tokens: int) -> float:
    """Return one rank's floating-point operations for the forward of a block on `tokens` tokens."""
    tp, index = len(stage.ranks), stage.ranks.index(rank)
    graph = program.templates[block.template].graph.graph
    looked_up = {n.args[0].name for n in graph.nodes if n.target is torch.ops.aten.embedding.default}  # type: ignore[union-attr]
    nodes = [n.name for n in graph.nodes if n.op == "placeholder"]
    total = 0.0
    for node, name in zip(nodes, block.parameters, strict=False):
        shape = program.parameters[name].local_shape(tp, index)
        if len(shape) > 1 and node not in looked_up:
            total += 2 * math.prod(shape) * tokens
    return total + sum(_attention_flops(node, tokens) for node in graph.nodes) / tp


def _attention_flops(node: fx.Node, tokens: int) -> float:
    if node.target is not torch.ops.hydragraph.varlen_attention.default:
        return 0.0
    query, causal = node.args[0], node.args[5]
    heads, size = value_of(query).shape[1:]  # type: ignore[union-attr]
    return 4.0 * tokens * tokens * int(heads) * int(size) / (2 if causal else 1)


def _all_reduce_seconds(
    program: Program, block: Block, stage: PlacedStage, tokens: int, cluster: Cluster
) -> tuple[float, float]:
    """Return what a block's all-reduces of hidden states take, forward and backward."""
    tp = len(stage.ranks)
    if tp == 1:
        return 0.0, 0.0
    links = [cluster.link(a, b) for a, b in zip(stage.ranks, (*stage.ranks[1:], stage.ranks[0]), strict=True)]
    part = tokens * _hidden_bytes(program) / tp
    one = 2 * (tp - 1) * max(link.latency_s + part / link.bytes_per_s for link in links)
    where = [n.args[1] for n in program.templates[block.template].graph.graph.nodes if n.target is communicate]
    return where.count("exit") * one, where.count("enter") * one


def _hidden_bytes(program: Program) -> int:
    """Return the bytes of one token's hidden state."""
    last = program.templates[program.blocks[-1].template]
    node = next(n for n in last.graph.graph.nodes if n.name == "hidden")
    return int(value_of(node).shape[-1]) * int(value_of(node).dtype.itemsize)


def _propagation(bucket: Bucket, stages: Sequence[tuple[int, ...]]) -> Layout:
    return propagation(bucket, stages, {p.name: GradientKind.REPLICA for p in bucket.parameters})


def _pair_bytes(slices: Slices, itemsize: int) -> dict[Pair, float]:
    moved: dict[Pair, float] = defaultdict(float)
    there = slices.travelling
    for source, target, elements in zip(
        there.src.tolist(), there.dst.tolist(), (there.hi - there.lo).tolist(), strict=True
    ):
        moved[source, target] += elements * itemsize
    return dict(moved)


def _update_seconds(program: Program, rank: int, cluster: Cluster) -> float:
    owned = sum(home(b.size, range(len(cluster.devices))).local_size(rank) for b in program.buckets if b.learns)
    return owned * UPDATE_BYTES / cluster.devices[rank].memory_bytes_per_s
