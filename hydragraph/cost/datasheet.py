"""Profiles from datasheets: a model's operations and bytes, divided by fractions of peak rates.

Multiplying T tokens by a weight of P elements takes 2 P T operations. Attention over L tokens with H heads of size D
takes 4 L^2 H D operations, or 4 q(L) H D with a window or chunks (`cost.reach`); causal attention takes half. A
backward takes twice its forward, or as much for frozen weights. Tensor-parallel sums are priced separately. Kernels
follow a `Roofline` unless `efficiency` is given.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hydragraph.cost.block_pieces import AUX, BlockPiece, MemoryLines, PricedDevice
from hydragraph.cost.compiled_blocks import VariantOf
from hydragraph.cost.curves import ZERO, Constants
from hydragraph.cost.graph_footprint import aux_lines, held_by
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.reach import WHOLE, AttentionReach, ordered
from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Block, Program, Template
from hydragraph.kernels.gated_delta_rule import CHUNK
from hydragraph.passes.graph_node import (
    ATTENDING,
    delta_rule,
    is_grouped,
    known_product,
    operands,
    product,
    shape,
    varlen,
)
from hydragraph.private.tracing import hint_of
from hydragraph.spec.cluster import Cluster, check_efficiency
from hydragraph.spec.known_devices import UNKNOWN, known
from hydragraph.spec.stage_kind import StageKind, StagePart


@dataclass(frozen=True)
class Roofline:
    """Fractions of peak rates that kernels reach.

    Attributes:
        attention: speed of attention relative to large matrix products (`spec.known_devices`).
        half: size of a dimension (such as the token count) for which matrix products reach half speed; fitted by
            `benchmarks/published_runs.py --fit`.
        memory: assumed fraction of the bandwidth that element-wise operators reach.
        launch_s: assumed seconds per launch.
    """

    attention: float = 0.8
    half: float = 450
    memory: float = 0.8
    launch_s: float = 4e-6


# For a weight [n, k]: (uses per token, n, k)
Product = tuple[float, int, int]
ROOFLINE = Roofline()
# All operations at one fraction of the peak
UNIFORM = Roofline(1.0, 0.0, math.inf, 0.0)
KERNELS = 2  # kernels per product: the product, and fused element-wise operators
# Per element, AdamW reads four fp32 numbers and writes three.
UPDATE_BYTES = 28


def datasheet(
    program: Program,
    cluster: Cluster,
    efficiency: float | None = None,
    degrees: Sequence[int] | None = None,
    compiled: VariantOf | None = None,
) -> Profile:
    """Return a profile of all of a cluster's device types.

    Args:
        efficiency: fraction of `flops_per_s` that all operations reach, in (0, 1]; None: each type's efficiency or, if
            it has none, `ROOFLINE`.
        degrees: tensor-parallel degrees; default: all that divide the numbers of heads.
        compiled: returns a block's graphs (`passes.variants.Variants.get`); None: the profile has no memory.
    """
    if efficiency is not None:
        check_efficiency(efficiency)
    blocks = {block.template: block for block in program.blocks}
    kinds = list(_kinds(program, len(cluster.devices), degrees))
    aux = BlockPiece(ZERO, ZERO, held=aux_lines(program))
    profiles = []
    for name, device in cluster.types.items():
        sheet = known(device.flops_per_s, device.memory_bytes_per_s, name)
        uniform = device.efficiency if efficiency is None else efficiency
        most = uniform if uniform is not None else sheet.reached if sheet else UNKNOWN
        kernels = ROOFLINE if uniform is None else UNIFORM
        rates = _Rates(device.flops_per_s * most, device.memory_bytes_per_s, program.dtype.itemsize, kernels)
        what = f"{most:.0%} of {device.flops_per_s / 1e12:.4g} TFLOP/s"
        pieces = {
            kind: {AUX: aux} | {t: _piece(program, block, kind, rates, compiled) for t, block in blocks.items()}
            for kind in kinds
        }
        profiles.append(
            Profile(
                name=f"datasheet of {name or 'the devices'} at {'up to ' if uniform is None else ''}{what}",
                schemes={},
                util={kind.tp: 1 for kind in kinds},
                blocks=tuple(block.template for block in program.blocks),
                pieces=pieces,
                device=PricedDevice(name, float(device.memory_bytes), program.dtype.itemsize),
                type=name,
                sizes=ModelSizes.of(program),
                update=(0.0, UPDATE_BYTES / device.memory_bytes_per_s),
                efficiency=most,
                roofline=uniform is None,
            )
        )
    return Profile.merge(profiles)


def _kinds(program: Program, ranks: int, degrees: Sequence[int] | None) -> Iterator[StageKind]:
    for tp in degrees or range(1, ranks + 1):
        if program.allows(tp):
            for sequence_parallel in (False, True) if tp > 1 else (False,):
                for recompute in (False, True):
                    yield StageKind(tp, sequence_parallel, recompute)


@dataclass(frozen=True)
class _Rates:
    flops_per_s: float
    bytes_per_s: float
    itemsize: int
    kernels: Roofline

    def product(self, n: int, k: int) -> float:
        moved = (n + k) * self.itemsize / (self.bytes_per_s * self.kernels.memory)
        return 2 * n * k / self.flops_per_s * self._slower(n, k) + moved

    def _slower(self, n: int, k: int) -> float:
        return (1 + self.kernels.half / n) * (1 + self.kernels.half / k)

    def products(self, products: Iterable[Product]) -> float:
        return sum(times * self.product(n, k) for times, n, k in products)

    @property
    def attention(self) -> float:
        return self.flops_per_s * self.kernels.attention

    def fixed(self, products: Sequence[Product]) -> float:
        operations = sum(2 * times * n * k * self._slower(n, k) for times, n, k in products)
        return KERNELS * len(products) * self.kernels.launch_s + self.kernels.half * operations / self.flops_per_s


def _held(block: Block, kind: StageKind, compiled: VariantOf | None) -> MemoryLines | None:
    if compiled is None:
        return None
    part = StagePart(kind)
    try:
        return held_by(compiled(block, part), part)
    except Unsupported:
        # Lowering reports a degree that does not divide the block
        return None


def _piece(program: Program, block: Block, kind: StageKind, rates: _Rates, compiled: VariantOf | None) -> BlockPiece:
    work = operations(program, block, kind.tp)
    attention = {reach: per_pair / rates.attention for reach, per_pair in work.attention.items()}
    b = rates.products(work.products)
    c = rates.fixed(work.products)
    forward = Constants(attention.get(WHOLE, 0.0), b, c, ordered(attention))
    again = forward if kind.recompute else ZERO
    idle = Constants(0.0, rates.products(work.frozen_products), rates.fixed(work.frozen_products))
    backward = Constants.sum([(2, forward), (-1, idle), (1, again)])
    return BlockPiece(
        forward,
        backward,
        parameters=work.parameters,
        frozen=work.frozen,
        reduced=_sums(program, block) if kind.tp > 1 else (0, 0),
        during_sums=tuple(map(rates.products, work.during_sums)),
        before_sums=tuple(map(rates.products, work.before_sums)),
        held=_held(block, kind, compiled),
    )


@dataclass(frozen=True)
class Operations:
    """Work of one block on a stage's last rank, whose shards are largest.

    Attributes:
        attention: operations per unit of q(l), by `AttentionReach`.
        products: (uses per token, n, k) of each weight [n, k].
        during_sums: for each tensor-parallel sum in the backward, products whose weight gradients are computed during
            it.
        before_sums: for each sum (forward first), products whose results it adds up.
        frozen_products: products with frozen weights.
    """

    attention: Mapping[AttentionReach, float]
    products: tuple[Product, ...]
    parameters: int
    frozen: int
    during_sums: tuple[tuple[Product, ...], ...] = ()
    before_sums: tuple[tuple[Product, ...], ...] = ()
    frozen_products: tuple[Product, ...] = ()


def linear(products: Iterable[Product]) -> float:
    return sum(2.0 * times * n * k for times, n, k in products)


def operations(program: Program, block: Block, tp: int) -> Operations:
    graph = program.templates[block.template].graph.graph
    looked_up = {n.args[0].name for n in graph.nodes if n.target is torch.ops.aten.embedding.default}
    rows = _rows_of_experts(graph)
    products: list[Product] = []
    by_weight: dict[fx.Node, Product] = {}
    places = {node: i for i, node in enumerate(graph.nodes)}
    entered = [i for node, i in places.items() if node.target is communicate and node.args[1] == "enter"]
    # The first list has the products before any sum.
    during_sums: list[list[Product]] = [[] for _ in range(len(entered) + 1)]
    parameters = 0
    frozen = 0
    frozen_products: list[Product] = []
    for node, name in zip(graph.find_nodes(op="placeholder"), block.parameters, strict=False):
        local = program.parameters[name].local_shape(tp, tp - 1)
        parameters += math.prod(local)
        frozen += 0 if name in program.learning else math.prod(local)
        if len(local) > 1 and node.name not in looked_up:
            products.append((rows.get(node.name, math.prod(local[:-2])), local[-2], local[-1]))
            by_weight[node] = products[-1]
            frozen_products += [] if name in program.learning else products[-1:]
            # The head computes its weight's gradient before the sum.
            if name in program.learning and block is not program.blocks[-1]:
                during_sums[bisect_left(entered, min(places[user] for user in node.users))].append(products[-1])
    attention: dict[AttentionReach, float] = {}
    for node in graph.nodes:
        if node.target is delta_rule:
            products += [(times / tp, n, k) for times, n, k in _linear_attention(node)]
        if node.target in ATTENDING:
            reach = _reach(node)
            attention[reach] = attention.get(reach, 0.0) + _attention(node)
    parts = {reach: per_pair / tp for reach, per_pair in attention.items()}
    # The head's products are part of its fused operator.
    before_sums = tuple(_before_sums(graph, {} if block is program.blocks[-1] else by_weight))
    during = tuple(map(tuple, during_sums[1:]))
    return Operations(parts, tuple(products), parameters, frozen, during, before_sums, tuple(frozen_products))


def _before_sums(graph: fx.Graph, by_weight: Mapping[fx.Node, Product]) -> Iterator[tuple[Product, ...]]:
    for where in ("exit", "enter"):
        for node in (n for n in graph.nodes if n.target is communicate and n.args[1] == where):
            results = [operands(node)[0]] if where == "exit" else list(node.users)
            found = [None if is_grouped(result) else product(result) for result in results]
            weights = [parts.weight for parts in found if parts is not None and parts.weight in by_weight]
            yield tuple(by_weight[weight] for weight in weights) if len(weights) == len(results) else ()


def _rows_of_experts(graph: fx.Graph) -> dict[str, float]:
    hidden = next((n for n in graph.nodes if n.op == "placeholder" and n.name == "hidden"), None)
    rows_by_weight = {}
    for node in graph.nodes:
        if hidden is not None and is_grouped(node):
            parts = known_product(node)
            rows = math.prod(map(hint_of, shape(parts.x)[:-1]))
            rows_by_weight[parts.weight.name] = rows / hint_of(shape(hidden)[1])
    return rows_by_weight


def _linear_attention(node: fx.Node) -> list[tuple[float, int, int]]:
    keys, (heads, values) = int(value_of(node.args[1]).shape[2]), map(int, value_of(node.args[2]).shape[1:])
    return [(3.0 * heads, keys, values), (2.0 * heads, CHUNK, keys), (2.0 * heads, CHUNK, values)]


def reaches_of(template: Template) -> frozenset[AttentionReach]:
    return frozenset(_reach(node) for node in template.graph.graph.nodes if node.target in ATTENDING)


def _reach(node: fx.Node) -> AttentionReach:
    limits = operands(node)[7:9] if node.target is varlen else ()
    return AttentionReach(*limits)


def _attention(node: fx.Node) -> float:
    query = node.args[0]
    causal = node.args[5]
    heads, size = value_of(query).shape[1:]
    return 4.0 * int(heads) * int(size) / (2 if causal else 1)


def _sums(program: Program, block: Block) -> tuple[int, int]:
    where = [n.args[1] for n in program.templates[block.template].graph.graph.nodes if n.target is communicate]
    return where.count("exit"), where.count("enter")
