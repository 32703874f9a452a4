"""How fast and how good plans for uneven devices are: against published figures, simple plans, ideals and bounds.

    python benchmarks/plans.py                       # all tables
    python benchmarks/plans.py --only autohet        # some of: metis, power, planning, autohet, breakdown, profile,
                                                     # asymmetric, malleus, trace, replanning, slowed, beyond, pairs
    python benchmarks/plans.py --only malleus --models 32b --devices 32
    python benchmarks/plans.py --data DIR            # where metis/, sailor/ and length_distributions.json are
    python benchmarks/plans.py --quick               # few cells of each

Devices are datasheets': A100 and A800 312 TFLOP/s, 80 GB; H800 twice an A100 (AutoHet, section II-D), 80 GB; H20
148 TFLOP/s, 96 GB; 45 % of the FLOP/s are reached. Links: NVLink 300 GB/s (A800: 200), one network card of 400 Gbit/s
per node for AutoHet's platform (its section V), one per device for Malleus'. All plans of a cell are priced by the same
`Costs` and simulated by the same simulator.

- Megatron-like: pipelines of equal depth and tensor-parallel degree, stages in node order, equal layers and batches;
  the best of all degrees that fit by Megatron-LM's memory: 18 bytes of weights, gradients and AdamW's state per
  parameter, all with the stage (no distributed optimizer), which keeps GPT-3 6.7B off single devices in the paper.
- Whale-like: the same strategies, with batches by speed.
- symmetric: ours. The same strategies and those whose pipelines are in node order, with layers and batches by speed,
  where they fit by our memory (the state is shared by all ranks).

Without data, `metis` and `pairs` are skipped, and the lengths of `beyond` are drawn from a lognormal, not of web text.
`profile` (benchmarks/profiles.py), `asymmetric` and `slowed` (benchmarks/*.py) measure on processes here.

Planning times are CPU seconds of this process; the wall clock next to them depends on what else runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

import hydragraph as hg
from hydragraph.cost.compiled_blocks import CompiledBlocks
from hydragraph.cost.datasheet import datasheet
from hydragraph.errors import Unsupported
from hydragraph.ir.program import Program
from hydragraph.passes.variants import Variants
from hydragraph.planner.exact.autohet_grouping import EntityKind, most_power_by_scip
from hydragraph.planner.generators.device_groups import nodes_of
from hydragraph.planner.generators.group_prices import LayerPrices, site_of, state_bytes
from hydragraph.planner.generators.pipeline_layers import spread
from hydragraph.planner.generators.stage_layout import Option
from hydragraph.planner.plan import Plan
from hydragraph.planner.price_candidate import Shortage, settle, share_out, simulated
from hydragraph.planner.price_mini_batches import MiniBatchPrices
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from hydragraph.spec.health import Health
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

TYPES = {
    "A100": DeviceType(flops_per_s=312e12, memory_bytes=80e9, memory_bytes_per_s=2.0e12),
    "A800": DeviceType(flops_per_s=312e12, memory_bytes=80e9, memory_bytes_per_s=2.0e12),
    "H800": DeviceType(flops_per_s=624e12, memory_bytes=80e9, memory_bytes_per_s=3.35e12),
    "H20": DeviceType(flops_per_s=148e12, memory_bytes=96e9, memory_bytes_per_s=4.0e12),
}
NVLINK = {"A100": 300e9, "A800": 200e9, "H800": 200e9, "H20": 450e9}
NETWORK = Interconnect(50e9, 1e-5)  # 400 Gbit/s
DEGREES = (1, 2, 4, 8)
BATCHES = (64, 512)  # sequences in a mini-batch: the ends of the range
SIZES = (1, 2, 4, 8, 16)  # sequences in a micro-batch of the simple plans
MEGATRON_BYTES = 18 / 6  # per byte of a 16-bit weight and its 32-bit gradient
NEARLY = 1.1  # batches that differ by no more are equal
NEAREST = 2  # simple plans that are simulated, of those that were estimated

PLANNED = {16: (0.3, 1.23), 24: (0.3, 5.72), 32: (0.5, 16.96), 64: (1.0, 159.12), 1024: (20.0, None)}
GAINS = {  # published averages over Megatron-LM and Whale
    ("BERT-Large", "uniform"): (1.38, None),
    ("GPT-3 6.7B", "uniform"): (1.53, 1.27),
    ("LLaMA 6.7B", "H800+A100"): (1.79, 1.51),
    ("LLaMA 6.7B", "A100+H20"): (1.44, 1.16),
}
UNIFORM = tuple((a, b, n) for a, b in (("A100", "H800"), ("A100", "H20")) for n in (2, 4, 8))
# 4+2, 5+3, 3+5 and 1+4 are the counts that the paper's text names; the others of its figure 8 are not legible.
UNEVEN = (
    ({"A100": 4, "H800": 2}, "H800+A100"),
    ({"A100": 5, "H800": 3}, "H800+A100"),
    ({"A100": 3, "H800": 5}, "H800+A100"),
    ({"A100": 1, "H20": 4}, "A100+H20"),
)
PARTS = (
    *("metis", "power", "planning", "autohet", "breakdown", "profile", "asymmetric"),
    *("malleus", "trace", "replanning", "slowed", "beyond", "pairs"),
)
LEVELS = (2.57, 5.42, 12.53)
REPLANNED = {64: 0.5, 1024: 3.0}
ABOVE_IDEAL = 1.05
# Limits that the ideal ignores: the factors on memory and on sequences that remove each.
REASONS = {"whole sequences": (1, 8), "memory": (4, 1), "both": (4, 8), "both, more of them": (4, 32)}

Row = Sequence[str]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Timed:
    """Result of a call, with its CPU and wall-clock seconds."""

    value: Any
    cpu: float
    wall: float


def timed(call: Callable[[], Any]) -> Timed:
    """Call it, and time it."""
    cpu = time.process_time()
    wall = time.monotonic()
    value = call()
    return Timed(value, time.process_time() - cpu, time.monotonic() - wall)


# Models and clusters.


def config_of(name: str) -> transformers.PretrainedConfig:
    """Return a model's configuration by its published dimensions."""
    if name == "BERT-Large":
        return transformers.BertConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    if name == "GPT-3 6.7B":
        none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2Config(n_embd=4096, n_layer=32, n_head=32, n_positions=2048, use_cache=False, **none)
    hidden, inner, layers, heads = {
        "tiny": (256, 688, 8, 8),
        "LLaMA 6.7B": (4096, 11008, 32, 32),
        "32b": (6656, 17920, 60, 52),
        "70b": (8192, 28672, 80, 64),
        "110b": (8192, 49152, 80, 64),
    }[name]
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=32_000,
        max_position_embeddings=32_768,
        use_cache=False,
    )


LENGTH = {"BERT-Large": 512, "tiny": 256, "32b": 4096, "70b": 4096, "110b": 4096}
MODELS = {"BERT-Large": transformers.BertForMaskedLM, "GPT-3 6.7B": transformers.GPT2LMHeadModel}


def length_of(model: str) -> int:
    """Return the tokens of a sequence that a model is trained with."""
    return LENGTH.get(model, 2048)


@cache
def captured(name: str) -> tuple[Program, CompiledBlocks]:
    """Return a model's program and the memory of its blocks; no weight is made."""
    with torch.device("meta"):
        model = MODELS.get(name, transformers.LlamaForCausalLM)(config_of(name))
    program = hg.capture(model, dtype=torch.bfloat16, check="off")
    return program, CompiledBlocks(program, Variants(program, added=True).get)


def node(kind: str, devices: int, cards: int = 1, count: int = 1) -> Node:
    """Return nodes of one type of device."""
    return Node(kind, devices, Interconnect(NVLINK[kind], 5e-6), NETWORK, count=count, cards=cards)


def cluster_of(*nodes: Node) -> Cluster:
    """Return a cluster of these nodes."""
    return Cluster.of({each.type: TYPES[each.type] for each in nodes}, nodes)


def costs_of(model: str, cluster: Cluster, health: Mapping[int, float] | None = None) -> hg.Costs:
    """Return the costs of a model on a cluster."""
    program, blocks = captured(model)
    profile = datasheet(program, cluster, degrees=DEGREES)
    return hg.Costs(profile, cluster, Health(health or {}), blocks=blocks)


# Simple plans.


@dataclass(frozen=True)
class Simple:
    """A symmetric strategy with its sharing out of sequences: what it takes, estimated or simulated."""

    strategy: Strategy
    assignment: Assignment
    seconds: float


def symmetric_pipelines(costs: hg.Costs, by_stage: bool) -> Iterator[tuple[tuple[tuple[int, ...], ...], ...]]:
    """Yield pipelines of stages of ranks, all of one depth and degree, ranks in order.

    Args:
        by_stage: all pipelines' first stages come first, as Megatron-LM orders ranks; else pipeline after pipeline.
    """
    ranks = costs.ranks
    for tp in DEGREES:
        if ranks % tp or any(heads % tp for heads in costs.sizes.heads):
            continue
        groups = [tuple(range(first, first + tp)) for first in range(0, ranks, tp)]
        if any(len({costs.cluster.node_of(rank) for rank in group}) > 1 for group in groups):
            continue
        for depth in range(1, min(len(groups), costs.outline.layers) + 1):
            if len(groups) % depth == 0:
                width = len(groups) // depth
                yield tuple(
                    tuple(groups[s * width + p] if by_stage else groups[p * depth + s] for s in range(depth))
                    for p in range(width)
                )


def equal_parts(whole: int, parts: int) -> list[int]:
    """Return a whole number in parts that are as equal as can be."""
    ends = [whole * (i + 1) // parts for i in range(parts)]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def by_megatron_memory(option: Option, layers: int, in_flight: int, ends: tuple[bool, bool], limit: float) -> bool:
    """Whether a stage fits whose rank holds all of its parameters' state."""
    first, last = ends
    state = layers * option.state_bytes + first * option.first_bytes + last * option.last_bytes
    held = MEGATRON_BYTES * state + layers * in_flight * option.kept_bytes + option.own_bytes
    return held <= limit


def megatron_strategies(costs: hg.Costs, length: int, together: int) -> Iterator[Strategy]:
    """Yield Megatron-like strategies that fit by its memory, each with the least recomputation."""
    prices = LayerPrices(costs, [length] * together)
    for pipelines in symmetric_pipelines(costs, by_stage=True):
        depth = len(pipelines[0])
        layers = equal_parts(costs.outline.layers, depth)
        tp = len(pipelines[0][0])
        for recompute in (False, True):
            kind = StageKind(tp, tp > 1, recompute)
            fits = all(
                by_megatron_memory(
                    next(o for o in prices.options(site_of(costs, stage[0]), tp) if o.kind == kind),
                    layers[s],
                    depth - s,
                    (s == 0, s == depth - 1),
                    min(costs.memory_of(rank) for rank in stage),
                )
                for pipeline in pipelines
                for s, stage in enumerate(pipeline)
            )
            if fits:
                yield strategy_of(pipelines, [layers] * len(pipelines), [kind] * depth)
                break


def strategy_of(
    pipelines: Sequence[Sequence[tuple[int, ...]]], layers: Sequence[Sequence[int]], kinds: Sequence[StageKind]
) -> Strategy:
    """Return a strategy of these ranks, with these layers of each pipeline's stages."""
    return Strategy(
        tuple(
            Pipeline(
                tuple(
                    Stage(ranks, n, kind.sequence_parallel, kind.recompute)
                    for ranks, n, kind in zip(pipeline, mine, kinds, strict=True)
                )
            )
            for pipeline, mine in zip(pipelines, layers, strict=True)
        )
    )


def balanced_strategies(costs: hg.Costs, length: int, together: int, sequences: int) -> Iterator[Strategy]:
    """Yield symmetric strategies of ours: one depth and one degree, layers by speed, the same in all pipelines."""
    prices = LayerPrices(costs, [length] * together)
    state = state_bytes(prices.costs)
    free = [0.9 * costs.memory_of(rank) - state / costs.ranks for rank in range(costs.ranks)]
    for by_stage in (True, False):
        for pipelines in symmetric_pipelines(costs, by_stage):
            depth = len(pipelines[0])
            tp = len(pipelines[0][0])
            count = max(1, sequences // together // len(pipelines))
            kinds = [option.kind for option in prices.options(site_of(costs, 0), tp)]
            layer = np.zeros((depth, len(kinds)))
            extra = np.zeros((depth, len(kinds)))
            cap = np.zeros((depth, len(kinds)), np.int64)
            for s in range(depth):
                first = s == 0
                last = s == depth - 1
                for k, kind in enumerate(kinds):
                    rows = [
                        _row(
                            prices,
                            costs,
                            pipeline[s],
                            kind,
                            first,
                            last,
                            min(depth - s, count),
                            free,
                        )
                        for pipeline in pipelines
                    ]
                    # The slowest and the smallest pipeline decide for all.
                    layer[s, k] = max(row[0] for row in rows)
                    extra[s, k] = max(row[1] for row in rows)
                    cap[s, k] = min(row[2] for row in rows)
            total, layers, chosen = spread(costs.outline.layers, count, layer, extra, cap)
            if math.isfinite(total):
                yield strategy_of(
                    pipelines, [[int(n) for n in layers]] * len(pipelines), [kinds[int(k)] for k in chosen]
                )


def _row(
    prices: LayerPrices,
    costs: hg.Costs,
    ranks: tuple[int, ...],
    kind: StageKind,
    first: bool,
    last: bool,
    in_flight: int,
    free: Sequence[float],
) -> tuple[float, float, int]:
    """Return seconds per layer, seconds beside, and the most layers of a stage."""
    options = prices.options(site_of(costs, ranks[0]), kind.tp)
    option = next(each for each in options if each.kind == kind)
    rate = max(costs.rate(rank) for rank in ranks)
    # In these plans as many stages follow as micro-batches are in flight.
    behind = 1 - 1 / in_flight
    most = math.inf
    for held, kept in zip(prices.held(1 - first - behind, behind), (in_flight * option.kept_bytes, 0), strict=True):
        outer = held * (first * option.first_bytes + last * option.last_bytes)
        left = min(free[rank] for rank in ranks) - option.own_bytes - outer
        most = min(most, left / (held * option.state_bytes + kept))
    return rate * option.layer_s, rate * (first * option.first_s + last * option.last_s), max(0, int(most))


def dealt(strategy: Strategy, lengths: Sequence[int], together: int) -> Assignment:
    """Deal sequences to pipelines in equal numbers, in micro-batches of so many."""
    counts = equal_parts(-(-len(lengths) // together), len(strategy.pipelines))
    batches = [tuple(range(i, min(i + together, len(lengths)))) for i in range(0, len(lengths), together)]
    firsts = [sum(counts[:p]) for p in range(len(counts))]
    return Assignment(tuple(tuple(batches[a : a + n]) for a, n in zip(firsts, counts, strict=True)), tuple(lengths))


def best_simple(costs: hg.Costs, found: Sequence[tuple[Strategy, Assignment, float]]) -> Simple | None:
    """Simulate what is estimated to end first, and return the best, or None if no strategy fits."""
    best: Simple | None = None
    for strategy, assignment, _ in sorted(found, key=lambda each: each[2])[:NEAREST]:
        seconds = costs.simulate(strategy, assignment).seconds
        if best is None or seconds < best.seconds:
            best = Simple(strategy, assignment, seconds)
    return best


def megatron_and_whale(costs: hg.Costs, workload: Workload) -> tuple[Simple | None, Simple | None]:
    """Return the best Megatron-like and the best Whale-like plan."""
    lengths = workload.batches[0]
    equal = []
    by_speed = []
    for together in SIZES:
        for strategy in megatron_strategies(costs, lengths[0], together):
            if together * len(strategy.pipelines) > len(lengths):
                continue
            assignment = dealt(strategy, lengths, together)
            fixed = costs.fixed(strategy)
            # A remainder makes batches unequal, which Megatron-LM does not allow.
            if max(assignment.counts) <= NEARLY * min(assignment.counts):
                equal.append((strategy, assignment, costs.pipelines_end(strategy, assignment) + fixed))
            shared, last = share_out(costs, strategy, lengths, together)
            by_speed.append((strategy, shared, last + fixed))
    return best_simple(costs, equal), best_simple(costs, by_speed)


def symmetric(costs: hg.Costs, workload: Workload) -> Simple | None:
    """Return our best symmetric plan."""
    lengths = workload.batches[0]
    found = []
    for together in SIZES:
        for strategy in balanced_strategies(costs, lengths[0], together, len(lengths)):
            if together * len(strategy.pipelines) <= len(lengths):
                shared, last = share_out(costs, strategy, lengths, together)
                found.append((strategy, shared, last + costs.fixed(strategy)))
    for strategy, assignment, expected in sorted(found, key=lambda each: each[2]):
        settled = settle(costs, strategy, assignment, "symmetric", expected)
        if not isinstance(settled, Shortage):
            return Simple(strategy, assignment, simulated(costs, settled).seconds)
    return None


# AutoHet.


def power_table(say: Say, quick: bool) -> Table:
    """Return times and gaps of its grouping (equation 3)."""
    from benchmarks.published.most_power import most_power

    table = Table(title="Grouping by effective computing power (AutoHet, equation 3): exact optimum and SCIP")
    for column in ("entities", "micro-batches", "memory", "value", "CPU s", "SCIP", "SCIP wall s"):
        table.add_column(column, justify="right")
    for entities in (8,) if quick else (16, 24, 32, 64, 128):
        for micro_batches in (64, 512):
            for least in (120e9, 300e9):
                kinds = [EntityKind(1, 80e9, entities // 2), EntityKind(2, 80e9, entities // 2)]
                ours = timed(partial(most_power, kinds, micro_batches, least))
                row = [str(entities), str(micro_batches), f"{least / 1e9:.0f} GB"]
                row += [f"{ours.value.value:.4f}", f"{ours.cpu:.3f}"]
                if entities <= 24 and micro_batches == 64:
                    published = timed(partial(most_power_by_scip, kinds, micro_batches, least))
                    row += [f"{published.value.value:.4f}", f"{published.wall:.2f}"]
                else:
                    row += ["", ""]
                say(" ".join(row))
                table.add_row(*row)
    return table


def planning_table(say: Say, model: str, quick: bool) -> Table:
    """Return times of planning devices of two types."""
    table = Table(title=f"Planning {model} on half A100, half H800, nodes of 8 (AutoHet, section V-B)")
    for column in ("devices", "published s", "target s", "CPU s", "wall s", "seconds an iteration", "above the bound"):
        table.add_column(column, justify="right")
    for devices, (target, published) in PLANNED.items():
        if quick and devices > 16:
            break
        costs = costs_of(model, mixed_cluster(devices))
        workload = Workload(8 * devices, length_of(model))
        if devices == min(PLANNED):
            hg.plan(costs, workload, method="mixed")  # blocks are compiled, and so is what searches
        found = timed(partial(hg.plan, costs, workload, method="mixed"))
        row = [str(devices), f"{published}" if published else "", f"{target}", f"{found.cpu:.2f}", f"{found.wall:.2f}"]
        row += [f"{found.value.seconds:.3f}", f"{found.value.gap:.1%}"]
        say(" ".join(row))
        table.add_row(*row)
    return table


def mixed_cluster(devices: int) -> Cluster:
    """Return half A100, half H800, in nodes of at most 8."""
    half = devices // 2
    size = min(half, 8) if half % min(half, 8) == 0 else 4
    return cluster_of(node("A100", size, size, half // size), node("H800", size, size, half // size))


@dataclass(frozen=True)
class Gain:
    """A cell of figure 7 or 8: how many times as fast ours is."""

    model: str
    group: str
    devices: str
    sequences: int
    plan: Plan
    megatron: Simple | None
    whale: Simple | None
    symmetric: Simple | None

    def over(self, other: Simple | None, bound: bool = False) -> float:
        """Return the gain over another plan, or by our `bound` what no plan's gain exceeds; NaN, where it has none."""
        return math.nan if other is None else other.seconds / (self.plan.bound if bound else self.plan.seconds)


def gain(model: str, group: str, counts: Mapping[str, int], sequences: int) -> Gain:
    """Plan and simulate one cell."""
    costs = costs_of(model, cluster_of(*(node(kind, n) for kind, n in counts.items())))
    workload = Workload(sequences, length_of(model))
    megatron, whale = megatron_and_whale(costs, workload)
    found = hg.plan(costs, workload, method="mixed")
    devices = " + ".join(f"{n} {kind}" for kind, n in counts.items())
    return Gain(model, group, devices, sequences, found, megatron, whale, symmetric(costs, workload))


def gains(say: Say, models: Sequence[str], batches: Sequence[int], quick: bool) -> list[Gain]:
    """Return all cells of figures 7 and 8."""
    cells = [(m, "uniform", {a: n, b: n}) for m in ("BERT-Large", "GPT-3 6.7B") for a, b, n in UNIFORM]
    cells += [("LLaMA 6.7B", group, counts) for counts, group in UNEVEN]
    if quick:
        cells = [("tiny", "H800+A100", UNEVEN[0][0])]
    found = []
    for model, group, counts in cells:
        if models and model not in models and not quick:
            continue
        for sequences in batches:
            found.append(gain(model, group, counts, sequences))
            say(" ".join(gain_row(found[-1])))
    return found


def gain_row(each: Gain) -> Row:
    """Return a cell's line."""
    named = [name_of(one) for one in (each.megatron, each.whale)]
    return (
        each.model,
        each.devices,
        str(each.sequences),
        f"{each.plan.seconds:.3f}",
        f"{each.over(each.megatron):.2f}",
        f"{each.over(each.whale):.2f}",
        f"{each.over(each.symmetric):.2f}",
        f"{each.plan.gap:.1%}",
        each.plan.strategy.name[:60],
        *named,
    )


def name_of(simple: Simple | None) -> str:
    """Return a symmetric strategy in few characters."""
    if simple is None:
        return "nothing fits"
    first = simple.strategy.pipelines[0]
    return f"dp{len(simple.strategy.pipelines)} tp{first.stages[0].tp} pp{len(first.stages)}"


def gains_table(cells: Sequence[Gain]) -> Table:
    """Return all cells, and averages: ours, of the most that the bounds allow, next to the published ones."""
    table = Table(title="Gain of our plans, simulated (AutoHet, figures 7 and 8)")
    for column in ("model", "devices", "batch", "ours s", "x Megatron-like", "x Whale-like", "x symmetric", "gap"):
        table.add_column(column, justify="right" if column != "model" else "left")
    for each in cells:
        table.add_row(*gain_row(each)[:8])
    for (model, group), published in GAINS.items():
        of = [each for each in cells if (each.model, each.group) == (model, group)]
        for batch in sorted({each.sequences for each in of}):
            table.add_row(*average_row(model, group, str(batch), [e for e in of if e.sequences == batch], published))
        if len({each.sequences for each in of}) > 1:
            table.add_row(*average_row(model, group, "all", of, published))
    return table


def average_row(
    model: str, group: str, batch: str, cells: Sequence[Gain], published: tuple[float | None, float | None]
) -> Row:
    """Return the averages of cells: ours, what no plan exceeds by the proven bounds, what was published."""
    gained = []
    for other, claimed in ((_megatron, published[0]), (_whale, published[1]), (_symmetric, None)):
        ours, most = (mean([each.over(other(each), bound=bound) for each in cells]) for bound in (False, True))
        gained.append(f"{ours:.2f} of {most:.2f}" + (f" (published {claimed})" if claimed else ""))
    return (f"{model}: average", group, batch, "", *gained, "")


def _megatron(each: Gain) -> Simple | None:
    return each.megatron


def _whale(each: Gain) -> Simple | None:
    return each.whale


def _symmetric(each: Gain) -> Simple | None:
    return each.symmetric


def mean(values: Sequence[float]) -> float:
    """Return the mean of what is known."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def breakdown(say: Say, model: str, sequences: int) -> Table:
    """Return what each part of planning adds (AutoHet, figure 9)."""
    costs = costs_of(model, cluster_of(node("A100", 4), node("H800", 4)))
    workload = Workload(sequences, length_of(model))
    lengths = workload.batches[0]
    layers = costs.outline.layers
    planned = hg.plan(costs, workload, method="mixed")
    groups = grouped_by_power(costs, workload)
    steps: dict[str, list[tuple[tuple[int, ...], ...]]] = {
        "one pipeline in node order": [tuple((rank,) for rank in range(costs.ranks))],
        "+ grouping": groups,
        "+ mapping": [tuple(s.devices for s in p.stages) for p in planned.strategy.pipelines],
    }
    table = Table(title=f"Gain from each part: {model}, 4 A100 + 4 H800, {sequences} sequences (AutoHet, figure 9)")
    for column in ("", "published", "s", "gain"):
        table.add_column(column, justify="right")
    base = math.nan
    for (title, pipelines), published in zip(steps.items(), (1.0, 1.11, 1.16), strict=True):
        found = []
        for together in SIZES[:3]:
            for recompute in (False, True):
                strategy = Strategy(
                    tuple(
                        Pipeline(
                            tuple(
                                Stage(ranks, n, len(ranks) > 1, recompute)
                                for ranks, n in zip(stages, equal_parts(layers, len(stages)), strict=True)
                            )
                        )
                        for stages in pipelines
                    )
                )
                assignment, last = share_out(costs, strategy, lengths, together)
                settled = settle(costs, strategy, assignment, title, last)
                if not isinstance(settled, Shortage):
                    found.append(simulated(costs, settled).seconds)
        seconds = min(found, default=math.nan)
        base = seconds if math.isnan(base) else base
        row = [title, f"{published}", f"{seconds:.3f}", f"{base / seconds:.2f}"]
        say(" ".join(row))
        table.add_row(*row)
    table.add_row("+ layers", "1.79", f"{planned.seconds:.3f}", f"{base / planned.seconds:.2f}")
    say(f"+ layers {planned.seconds:.3f} {base / planned.seconds:.2f}: {planned.strategy.name}")
    return table


def grouped_by_power(costs: hg.Costs, workload: Workload) -> list[tuple[tuple[int, ...], ...]]:
    """Return pipelines of single devices by equation 3, each in node order."""
    from benchmarks.published.most_power import most_power

    prices = LayerPrices(costs, [workload.longest])
    kinds = []
    members = []
    for each in nodes_of(costs):
        option = prices.options(each.site, 1)[0]
        memory = min(costs.memory_of(rank) for rank in each.devices)
        kinds.append(EntityKind(1 / option.layer_s, memory, len(each.devices)))
        members.append(list(each.devices))
    # Weights, gradients and state by Megatron-LM's memory, and one micro-batch's activations.
    option = prices.options(nodes_of(costs)[0].site, 1)[0]
    least = costs.outline.layers * (MEGATRON_BYTES * option.state_bytes + option.kept_bytes)
    found = most_power(kinds, workload.sequences, least)
    return [
        tuple(sorted((members[k].pop(0),) for k, n in enumerate(group) for _ in range(n))) for group in found.groups
    ]


# Malleus.


@dataclass(frozen=True)
class Straggling:
    """A case of slow ranks: which ranks, and their rates."""

    name: str
    rates: Mapping[int, float]

    def ideal(self, ranks: int) -> float:
        """Return T_opt over the healthy time: N / ((N - n) + sum 1/x)."""
        return ranks / (ranks - len(self.rates) + sum(1 / x for x in self.rates.values()))


def situations(ranks: int, quick: bool) -> list[Straggling]:
    """Return one to eight stragglers: alone, in one node, spread, a whole node."""
    spread_over = [n * 8 for n in range(ranks // 8)]
    places = {
        "1": [0],
        "2 in a node": [0, 1],
        "2 spread": spread_over[:2],
        "4 in a node": [0, 1, 2, 3],
        "4 spread": spread_over[:4],
        "a node": list(range(8)),
    }
    if ranks >= 64:
        places["8 spread"] = spread_over[:8]
    found = [Straggling(f"{name} at {x}", dict.fromkeys(at, x)) for name, at in places.items() for x in LEVELS]
    return found[:1] if quick else found


def trace(ranks: int) -> list[Straggling]:
    """Return situations that follow one another: none, one light, two, a node, healing."""
    return [
        Straggling("none", {}),
        Straggling("one light", {3: 2.57}),
        Straggling("two", {3: 2.57, ranks // 2: 5.42}),
        Straggling("a node", dict.fromkeys(range(8), 5.42)),
        Straggling("healing", {3: 2.57}),
        Straggling("none again", {}),
    ]


def straggling_table(
    say: Say,
    model: str,
    ranks: int,
    cases: Sequence[Straggling],
    sequences: int,
    following: bool = False,
    memory: float = 1.0,
    bounds: bool = False,
) -> Table:
    """Return our plans' times over the healthy one's, next to the ideal and the static plan.

    Rows that are more than 5 % above the ideal say why (`reason_of`).

    Args:
        following: each plan starts from the one before it (a trace), rather than from the healthy one.
        memory: of a device, times so much.
        bounds: whether such rows also have the proven bound of whole layers and sequences, which takes minutes.
    """
    costs = roomy_costs(model, ranks, memory)
    workload = Workload(sequences, length_of(model))
    healthy = hg.plan(costs, workload, method="straggler")
    what = f"{model} on {ranks} A800" + (f" of {memory:g} times the memory" if memory != 1 else "")
    title = f"{what}, {workload}: healthy {healthy.seconds:.3f} s, {healthy.gap:.1%} above its bound"
    say(f"{title}: {healthy.strategy.name[:100]}")
    table = Table(title=title)
    columns = ("stragglers", "static x", "ours x", "ideal x", "above ideal", "of that proven", "above the proven")
    for column in (*columns, "moved GB", "CPU s", "reason", "strategy"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    running = healthy
    total = [0.0, 0.0]
    above: list[float] = []
    proven: list[float] = []
    without: list[str] = []
    reasons: Counter[str] = Counter()
    for case in cases:
        slow = costs.changed(health=Health(case.rates))
        static = slow.changed(home=healthy.home).simulate(healthy.strategy, healthy.assignment).seconds
        try:
            found = timed(partial(hg.plan, slow, workload, method="straggler", running=running))
        except Unsupported as error:
            say(f"{case.name}: {error}")
            without.append(case.name)
            table.add_row(case.name, f"{static / healthy.seconds:.2f}", "nothing fits", *[""] * 8)
            continue
        planned: Plan = found.value
        ours = planned.seconds / healthy.seconds
        ideal = case.ideal(ranks)
        total[0] += ours
        total[1] += ideal
        above.append(ours / ideal - 1)
        missed = ours > ABOVE_IDEAL * ideal
        reason = reason_of(model, ranks, case, sequences, memory) if missed else ""
        reasons[reason.partition(" (")[0]] += 1
        # No pipelines of whole layers and sequences that fit into memory are quicker: why the ideal is out of reach.
        least = math.nan
        if missed and bounds:
            from benchmarks.published.whole_bound import whole_bound

            least = whole_bound(slow, sequences, length_of(model), (1,), below_s=planned.seconds) / healthy.seconds
        proven.append(least / ideal - 1)
        row = [case.name, f"{static / healthy.seconds:.2f}", f"{ours:.3f}", f"{ideal:.3f}", f"{ours / ideal - 1:.1%}"]
        row += ["", ""] if math.isnan(least) else [f"{least / ideal - 1:.1%}", f"{ours / least - 1:.1%}"]
        row += [f"{planned.moved_bytes / 1e9:.1f}", f"{found.cpu:.2f}", reason, planned.strategy.name]
        say(" ".join(row))
        table.add_row(*row[:-1], row[-1][:60])
        running = planned if following else healthy
    table.add_row("all", "", f"{total[0]:.3f}", f"{total[1]:.3f}", f"{total[0] / total[1] - 1:.1%}", *[""] * 6)
    near = sum(each <= ABOVE_IDEAL - 1 for each in above)
    reasoned = sum(a > ABOVE_IDEAL - 1 and p > ABOVE_IDEAL - 1 for a, p in zip(above, proven, strict=True))
    counted = f"{near} of {len(above)} by at most 5 %"
    counted += "".join(f", {n} more for {reason}" for reason, n in reasons.items() if reason)
    if bounds:
        counted += f"; for {reasoned} it is proven that no plan comes within 5 %"
    say(f"{title}: all {total[0] / total[1] - 1:.1%} above ideal, {counted}")
    table.caption = f"{counted} (see reason_of); the median {statistics.median(above):.1%} above it"
    if without:
        table.caption += f"; no plan fits: {', '.join(without)}"
    return table


def roomy_costs(model: str, ranks: int, memory: float) -> hg.Costs:
    """Return the costs of a model on nodes of A800s with `memory` times their memory."""
    size = min(8, ranks)
    nodes = (node("A800", size, size, ranks // size),)
    roomy = replace(TYPES["A800"], memory_bytes=int(memory * TYPES["A800"].memory_bytes))
    return costs_of(model, Cluster.of({"A800": roomy}, nodes))


def reason_of(model: str, ranks: int, case: Straggling, sequences: int, memory: float) -> str:
    """Say what keeps a plan from its ideal: planned again with more of it, healthy and not, it comes within 5 %.

    The ideal has no pipelines to fill, no sequence and no layer that is whole, and all the memory that it likes.
    """
    above = {}
    for reason, (roomier, more) in REASONS.items():
        above[reason] = above_ideal(model, ranks, case, more * sequences, roomier * memory)
        if above[reason] <= ABOVE_IDEAL - 1:
            return f"{reason} ({above[reason]:.1%})"
    nearest = min(above, key=lambda reason: above[reason])
    return f"none of these: {nearest} ({above[nearest]:.1%})"


def above_ideal(model: str, ranks: int, case: Straggling, sequences: int, memory: float) -> float:
    """Return how far above its ideal a plan is, for `sequences` sequences and `memory` times the memory."""
    costs, healthy = healthy_of(model, ranks, sequences, memory)
    slow = costs.changed(health=Health(case.rates))
    seconds = hg.plan(slow, Workload(sequences, length_of(model)), method="straggler").seconds
    return seconds / healthy.seconds / case.ideal(ranks) - 1


@cache
def healthy_of(model: str, ranks: int, sequences: int, memory: float) -> tuple[hg.Costs, Plan]:
    """Return the costs of devices with `memory` times their memory, and the plan without stragglers."""
    costs = roomy_costs(model, ranks, memory)
    return costs, hg.plan(costs, Workload(sequences, length_of(model)), method="straggler")


def replanning_table(say: Say, model: str, quick: bool) -> Table:
    """Return what planning again takes."""
    table = Table(title=f"Planning {model} again after devices slow down")
    for column in ("devices", "stragglers", "target s", "CPU s", "wall s"):
        table.add_column(column, justify="right")
    for ranks, target in REPLANNED.items():
        if quick and ranks > 64:
            break
        costs = costs_of(model, cluster_of(node("A800", 8, 8, ranks // 8)))
        workload = Workload(ranks, length_of(model))
        healthy = hg.plan(costs, workload, method="straggler")
        for case in (Straggling("1", {3: 5.42}), Straggling("8 spread", {8 * n: 5.42 for n in range(8)})):
            slow = costs.changed(health=Health(case.rates))
            found = timed(partial(hg.plan, slow, workload, method="straggler", running=healthy, deadline_s=target))
            row = [str(ranks), case.name, f"{target}", f"{found.cpu:.2f}", f"{found.wall:.2f}"]
            say(" ".join(row))
            table.add_row(*row)
    return table


# All at once.


def drawn_lengths(data: Path | None, tokens: int, batches: int, longest: int, seed: int) -> list[list[int]]:
    """Draw mini-batches of about `tokens` tokens: lengths of web text, or of a lognormal if `data` is missing."""
    random = np.random.default_rng(seed)
    file = None if data is None else data / "length_distributions.json"
    quantiles = json.loads(file.read_text())["web_text"] if file is not None and file.exists() else None
    found = []
    for _ in range(batches):
        batch: list[int] = []
        while sum(batch) < tokens:
            if quantiles is not None:
                drawn = float(np.interp(random.random(), np.linspace(0, 1, len(quantiles)), quantiles))
            else:
                drawn = float(random.lognormal(6.5, 1.2))
            batch.append(int(min(max(drawn, 16), longest)))
        found.append(batch)
    return found


def beyond_table(
    say: Say, model: str, data: Path | None, quick: bool, cases: Sequence[str] = (), tokens: int = 2_000
) -> Table:
    """Return a table of "auto" and each single method, for mixed types, stragglers and varying lengths at once.

    Each method is asked with what its paper knows, its plans once with its own shares of sequences and once with ours
    (`as_published`); and with all that `Costs` know.
    """
    kinds = ("A100", "H800") if quick else ("A100", "A100", "H800", "H20")
    size = 2 if quick else 8
    nodes = [node(kind, size, size, 1 if quick else 2) for kind in kinds]
    cluster = cluster_of(*nodes)
    ranks = len(cluster.devices)
    places = {"none": {}, "2": {1: 2.57, ranks // 2: 5.42}}
    if not quick:
        places["8 spread"] = {8 * n: 5.42 for n in range(8)}
        places["a node"] = dict.fromkeys(range(32, 40), 2.57)
        places["4 in a node"] = dict.fromkeys(range(48, 52), 12.53)
    table = Table(title=f"All at once: {model} on {ranks} devices of {len(set(kinds))} types, varying lengths")
    methods = ("mixed", "search", "straggler")
    published = [f"{method}, as published" for method in methods]
    assigned = [f"{method}, our shares" for method in methods]
    ratios_to = ("x best published", "x best of our shares", "x best alone", "x at most")
    for column in ("stragglers", *published, *assigned, *methods, "auto", *ratios_to, "CPU s"):
        table.add_column(column, justify="right")
    ratios: list[list[float]] = []
    for name, rates in places.items():
        if cases and not name.startswith(tuple(cases)):
            continue
        costs = costs_of(model, cluster, rates)
        lengths = drawn_lengths(data, tokens * ranks if not quick else 2_000, 1 if quick else 2, 16_384, seed=7)
        workload = Workload(lengths=lengths)
        alone = {method: seconds_of(costs, workload, method) for method in methods}
        together = timed(partial(hg.plan, costs, workload, method="auto"))
        of_papers = {method: as_published(costs, workload, method) for method in methods}
        own, ours = ({m: both[i] for m, both in of_papers.items()} for i in range(2))
        auto = together.value.choosing_s
        # No plan ends before the bound, which knows neither traffic nor that sequences are whole.
        at_most = min(alone.values()) / together.value.bound
        ratios.append([*(min(found.values()) / auto for found in (own, ours, alone)), at_most])
        row = [name, *(f"{found[method]:.3f}" for found in (own, ours, alone) for method in methods)]
        row += [f"{auto:.3f}", *(f"{each:.3f}" for each in ratios[-1]), f"{together.cpu:.1f}"]
        say(" ".join(row))
        table.add_row(*row)
    medians = [f"{statistics.median(each):.3f}" for each in zip(*ratios, strict=True)]
    say(" ".join(("median", *medians)))
    table.add_row("median (target 1.1)", *[""] * 10, *medians, "")
    return table


def as_published(costs: hg.Costs, workload: Workload, method: Any) -> tuple[float, float]:
    """Return what a method's plan takes that was made with what its paper knows: as it shares out sequences, as we do.

    AutoHet and Metis know types and no rates, in what they plan and in how they share out sequences. Malleus measures
    what a device takes, so it is given types as well as rates. None of the three knows that lengths vary: each plan is
    made for equal sequences that are as much work, and for sequences of the longest length, and the better one counts;
    but the sequences as they are, are then assigned by our planner of iterations for all three.
    """
    known = costs if method == "straggler" else costs.changed(health=Health())
    tokens = sum(map(sum, workload.batches)) // len(workload.batches)
    own_s = ours_s = math.inf
    for assumed in (workload.typical, Workload(max(1, tokens // workload.longest), workload.longest)):
        try:
            strategy = hg.plan(known, assumed, method=method).strategy
        except Unsupported:
            continue
        own = MiniBatchPrices(known, workload.batches).settle(strategy, method)
        if not isinstance(own, Shortage):
            owned = costs.changed(home=own.home)
            each = [owned.simulate(strategy, assignment).seconds for assignment in own.assignments]
            own_s = min(own_s, statistics.fmean(each))
        ours = MiniBatchPrices(costs, workload.batches).settle(strategy, method)
        if not isinstance(ours, Shortage):
            ours_s = min(ours_s, ours.seconds)
    return own_s, ours_s


def seconds_of(costs: hg.Costs, workload: Workload, method: Any) -> float:
    """Return what a method's plan takes; infinite where there is none."""
    try:
        return float(hg.plan(costs, workload, method=method).seconds)
    except (Unsupported, KeyError):
        return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS)
    parser.add_argument("--models", nargs="*", default=[], help="some of a part's models")
    parser.add_argument("--devices", nargs="*", type=int, default=[32, 64], help="for stragglers")
    parser.add_argument("--sequences", type=int, default=64, help="in a mini-batch, for stragglers")
    parser.add_argument("--tokens", type=int, default=2_000, help="of a mini-batch per device, for varying lengths")
    parser.add_argument("--cases", nargs="*", default=[], help="some stragglers' cases, by their beginnings")
    parser.add_argument("--memory", type=float, default=1.0, help="times that of a device, for stragglers")
    parser.add_argument("--bounds", action="store_true", help="proven bounds of rows that miss their ideals: minutes")
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES), help="sequences, for mixed types")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="where length_distributions.json and metis/ are"
    )
    parser.add_argument("--quick", action="store_true", help="few cells of each part")
    given = parser.parse_args()
    console = Console(width=160)
    say = Console(stderr=True, width=400, highlight=False).print
    large = given.models or (["tiny"] if given.quick else ["32b", "70b", "110b"])
    small = "tiny" if given.quick else "LLaMA 6.7B"
    devices = [16] if given.quick else given.devices
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder
    if "metis" in given.only:
        from benchmarks.published import metis_table

        metis_table.print_part(given.data / "metis", 1 if given.quick else 4)
    if "power" in given.only:
        console.print(power_table(say, given.quick))
    if "autohet" in given.only:
        console.print(
            gains_table(gains(say, given.models, given.batches[:1] if given.quick else given.batches, given.quick))
        )
    if "planning" in given.only:
        console.print(planning_table(say, small, given.quick))
    if "breakdown" in given.only:
        for sequences in given.batches[:1] if given.quick else given.batches:
            console.print(breakdown(say, "tiny" if given.quick else "GPT-3 6.7B", sequences))
    if "profile" in given.only:
        from benchmarks.profiles import print_profiles

        print_profiles(layers=6 if given.quick else 12)
    if "asymmetric" in given.only:
        from benchmarks.asymmetric import print_asymmetric

        print_asymmetric(layers=1 if given.quick else 4)
    for model in large:
        for ranks in devices:
            for part in ("malleus", "trace"):
                if part in given.only:
                    cases = situations(ranks, given.quick) if part == "malleus" else trace(ranks)
                    named = [c for c in cases if not given.cases or c.name.startswith(tuple(given.cases))]
                    try:
                        table = straggling_table(
                            say, model, ranks, named, given.sequences, following=part == "trace", memory=given.memory,
                            bounds=given.bounds,
                        )  # fmt: skip
                    except Unsupported as error:
                        console.print(f"{part}, {model} on {ranks}, without stragglers: {error}", soft_wrap=True)
                    else:
                        console.print(table)
    if "replanning" in given.only:
        console.print(replanning_table(say, large[-1], given.quick))
    if "slowed" in given.only:
        from benchmarks.slowed import CASES, print_slowed

        print_slowed(CASES[:1] if given.quick else CASES)
    if "beyond" in given.only:
        console.print(beyond_table(say, small, given.data, given.quick, given.cases, given.tokens))
    if "pairs" in given.only:
        from benchmarks.costs import print_clusters_of

        print_clusters_of(given.data / "sailor")


if __name__ == "__main__":
    main()
