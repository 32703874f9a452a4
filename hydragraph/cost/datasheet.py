"""A profile without measurements: a model's floating-point operations at a given fraction of a datasheet's rate.

A product with a weight of P elements over T tokens is 2 P T operations forward and 4 P T backward (6 P T in total);
attention over H heads of size D adds 4 L^2 H D forward for a sequence of L tokens, half of it if it is causal, and
twice that backward. With a window or chunks, the pairs of `Reach` replace L^2. A block's backward also repeats its
recomputed operations. Tensor-parallel sums are priced separately, from the links of their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from hydragraph.cost.block_pieces import AUX, Piece, PricedDevice
from hydragraph.cost.curves import Constants
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.reach import WHOLE, Reach, ordered
from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Block, Program, Template
from hydragraph.passes.graph_node import ATTENDING, operands, varlen
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.stage_kind import StageKind

# Fraction of a datasheet's FLOP/s reached by well-tuned training of dense models (Megatron-LM, 2021).
EFFICIENCY = 0.45
# AdamW per element: reads weight, gradient and two moments, writes weight and two moments, in fp32.
UPDATE_BYTES = 28


def datasheet(
    program: Program, cluster: Cluster, efficiency: float = EFFICIENCY, degrees: Sequence[int] | None = None
) -> Profile:
    """Return a profile for every type of device of a cluster.

    Args:
        efficiency: the fraction of `flops_per_s` that computation reaches, above 0.
        degrees: the tensor-parallel degrees to price; default: all that divide the heads, up to the cluster's size.
    """
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency is {efficiency}: give a part of the datasheet's FLOP/s, above 0, at most 1")
    every = tuple(_of_type(program, cluster, name, efficiency, degrees) for name in cluster.types)
    return Profile.merge(every)


def _of_type(
    program: Program, cluster: Cluster, name: str, efficiency: float, degrees: Sequence[int] | None
) -> Profile:
    kind = cluster.types[name]
    rate = kind.flops_per_s * efficiency
    representatives = {block.template: block for block in program.blocks}
    pieces = {
        stage_kind: {
            AUX: Piece.apart(Constants(0.0, 0.0, 0.0), Constants(0.0, 0.0, 0.0)),
            **{template: _piece(program, block, stage_kind, rate) for template, block in representatives.items()},
        }
        for stage_kind in _kinds(program, len(cluster.devices), degrees)
    }
    elements = sum(bucket.size for bucket in program.buckets)
    frozen = sum(bucket.size for bucket in program.buckets if not bucket.learns)
    return Profile(
        name=f"datasheet of {name or 'the devices'} at {efficiency:.0%} of {kind.flops_per_s / 1e12:.4g} TFLOP/s",
        schemes={},
        util={stage_kind.tp: 1 for stage_kind in pieces},
        blocks=tuple(block.template for block in program.blocks),
        pieces=pieces,
        device=PricedDevice(name, float(kind.memory_bytes), elements, program.dtype.itemsize, frozen),
        type=name,
        sizes=ModelSizes.of(program),
        update=(0.0, UPDATE_BYTES / kind.memory_bytes_per_s),
        efficiency=efficiency,
        notes=(f"nothing was measured: computation takes its FLOPs at {efficiency:.0%} of the datasheet's rate",),
    )


def _kinds(program: Program, ranks: int, degrees: Sequence[int] | None) -> Iterator[StageKind]:
    for tp in degrees or range(1, ranks + 1):
        # Attention can only be cut by a divisor of the heads.
        if program.allows(tp):
            for sequence_parallel in (False, True) if tp > 1 else (False,):
                for recompute in (False, True):
                    yield StageKind(tp, sequence_parallel, recompute)


def _piece(program: Program, block: Block, kind: StageKind, rate: float) -> Piece:
    try:
        attention, b, parameters, frozen = operations(program, block, kind.tp)
    except Unsupported:  # this degree does not cut this block; lowering reports it
        attention, b, parameters, frozen = operations(program, block, 1)
        attention = {reach: each / kind.tp for reach, each in attention.items()}
        b /= kind.tp
        parameters //= kind.tp
        frozen //= kind.tp
    near = ordered({reach: each / rate for reach, each in attention.items()})
    forward = Constants(attention.get(WHOLE, 0.0) / rate, b / rate, 0.0, near)
    # Backward computes the gradients of both operands of a product: twice the forward's operations.
    again = forward.times(1.0) if kind.recompute else Constants(0.0, 0.0, 0.0)
    backward = Constants.sum([(2, forward), (1, again)])
    return Piece.apart(
        forward,
        backward,
        parameters=parameters,
        frozen=frozen,
        reduced=_sums(program, block) if kind.tp > 1 else (0, 0),
    )


def operations(program: Program, block: Block, tp: int) -> tuple[Mapping[Reach, float], float, int, int]:
    """Return the first rank's operations per pair by reach and per token, and its elements, all and frozen ones."""
    graph = program.templates[block.template].graph.graph
    # An embedding is looked up, not multiplied: its weight adds no operations.
    looked_up = {n.args[0].name for n in graph.nodes if n.target is torch.ops.aten.embedding.default}  # type: ignore[union-attr]
    nodes = [n.name for n in graph.nodes if n.op == "placeholder"]
    linear = 0.0
    parameters = 0
    frozen = 0
    for node, name in zip(nodes, block.parameters, strict=False):
        shape = program.parameters[name].local_shape(tp, tp - 1)  # the last rank holds the larger part
        parameters += math.prod(shape)
        frozen += 0 if name in program.learning else math.prod(shape)
        if len(shape) > 1 and node not in looked_up:
            linear += 2 * math.prod(shape)
    attention: dict[Reach, float] = {}
    for node in graph.nodes:
        if node.target in ATTENDING:
            reach = _reach(node)
            attention[reach] = attention.get(reach, 0.0) + _attention(node)
    return {reach: each / tp for reach, each in attention.items()}, linear, parameters, frozen


def reaches_of(template: Template) -> frozenset[Reach]:
    """Return the reaches of a template's attention, the only operator with quadratic work."""
    return frozenset(_reach(node) for node in template.graph.graph.nodes if node.target in ATTENDING)


def _reach(node: fx.Node) -> Reach:
    limits = operands(node)[7:9] if node.target is varlen else ()
    return Reach(*limits)


def _attention(node: fx.Node) -> float:
    """Return the operations of an attention node per pair of `Reach.pairs`."""
    query = node.args[0]
    causal = node.args[5]
    heads, size = value_of(query).shape[1:]  # type: ignore[arg-type]
    return 4.0 * int(heads) * int(size) / (2 if causal else 1)


def _sums(program: Program, block: Block) -> tuple[int, int]:
    """Return how many hidden states the ranks of a stage sum, forward and backward."""
    where = [n.args[1] for n in program.templates[block.template].graph.graph.nodes if n.target is communicate]
    return where.count("exit"), where.count("enter")
