"""Description of a plan in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hydragraph.cost.costs import Costs
from hydragraph.planner.price_candidate import PricedPlan
from hydragraph.planner.state_shares import fractions, needed_ranks
from hydragraph.spec.home_text import owners_text
from hydragraph.spec.pipeline import GRADIENTS, Pipeline
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

SHOWN = 6
STREAMS = {True: "streaming weights and gradients", GRADIENTS: "streaming gradients"}
# Unmeasured plans that need more than this fraction of memory get a warning
TIGHT = 0.9


@dataclass(frozen=True)
class Rival:
    """A rejected strategy.

    Attributes:
        seconds: iteration time; infinite if the strategy does not fit.
    """

    strategy: Strategy
    seconds: float
    origin: str
    why: str
    settled: PricedPlan | None = None


def explanation(costs: Costs, workload: Workload, chosen: PricedPlan, bound: float, moved: int, took_s: float) -> str:
    """Return the text of `Plan.explain`, without rivals and reasons for idle devices."""
    how = "simulated" if chosen.simulated else "estimated: slowest pipeline plus traffic"
    error = costs.error_of(chosen.strategy)
    lines = [
        f"{workload} on {costs.ranks} device{'s' * (costs.ranks > 1)}: {chosen.seconds:.4g} s an iteration ({how}), "
        f"{chosen.seconds / bound - 1:.1%} above the bound of {bound:.4g} s; planned in {took_s:.2f} s"
        f"{'; ' * bool(error)}{error}",
        f"strategy: {chosen.strategy.name}",
    ]
    work = chosen.assignments[0].tokens
    described = [(pipeline_text(costs, p), _work(own)) for p, own in zip(chosen.strategy.pipelines, work, strict=True)]
    for (text, what), same in groupby(described):
        times = len(list(same))
        lines.append(f"  {f'{times} x ' if times > 1 else ''}{text}; {'each ' * (times > 1)}{what}")
    needed = needed_ranks(costs, chosen.strategy, chosen.home)
    owning = [rank for rank in needed if rank not in chosen.strategy.devices]
    for what, ranks in (("only own state", owning), ("idle", sorted(set(range(costs.ranks)) - set(needed)))):
        if ranks:
            types = Counter(costs.cluster.type_of(rank) or "device" for rank in ranks)
            named = " + ".join(f"{count} {name}" for name, count in types.items())
            lines.append(f"  {what}: {_ranks(costs, ranks)}, {named}")
    tightest = max(range(costs.ranks), key=lambda rank: chosen.memory[rank] / costs.memory_of(rank))
    lines.append(
        f"memory: at most {max(chosen.memory) / 1e9:.3g} GB; tightest: rank {tightest} with "
        f"{chosen.memory[tightest] / 1e9:.3g} of {costs.memory_of(tightest) / 1e9:.3g} GB"
    )
    if not costs.measured and chosen.memory[tightest] > TIGHT * costs.memory_of(tightest):
        lines[-1] += "; a GPU's allocator needs additional memory, so try a step before a long run"
    lines.append(f"state: {_owners(costs, chosen)}" + (f"; {moved / 1e9:.3g} GB change owners" if moved else ""))
    return "\n".join(lines)


def _work(micro_batches: Sequence[Sequence[int]]) -> str:
    if not micro_batches:
        return "no micro-batches"
    sequences = _range([len(lengths) for lengths in micro_batches])
    tokens = _range([sum(lengths) for lengths in micro_batches])
    count = len(micro_batches)
    plural = "" if sequences == "1" else "s"
    return f"{count} micro-batch{'es' * (count > 1)} of {sequences} sequence{plural} ({tokens} tokens)"


def _range(numbers: Sequence[int]) -> str:
    least = min(numbers)
    most = max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def pipeline_text(costs: Costs, pipeline: Pipeline) -> str:
    """Describe a pipeline's stages, with interleaved stages as "7 + 7 layers"."""
    stages = []
    for row in dict.fromkeys(pipeline.rows):
        mine = [stage for stage, there in zip(pipeline.stages, pipeline.rows, strict=True) if there == row]
        stage = mine[0]
        kind = costs.cluster.type_of(stage.devices[0]) or "device"
        rate = max(costs.rate(rank) for rank in stage.devices)
        slow = f" at {rate:.3g}" if f"{rate:.3g}" != "1" else ""
        layers = " + ".join(str(own_stage.layers) for own_stage in mine)
        streams = () if not stage.stream else (STREAMS[stage.stream],)
        offloads = ("offloading activations",) * stage.offload
        marks = "".join(f", {mark}" for mark in (*stage.kind.marks, *streams, *offloads))
        stages.append(f"{stage.tp} {kind}{slow}: {layers} layer{'s' * (layers != '1')}{marks}")
    return " -> ".join(stages)


def _owners(costs: Costs, chosen: PricedPlan) -> str:
    if chosen.home.buckets:
        return owners_text(chosen.home, [bucket.name for bucket in costs.buckets], costs.ranks)
    shares = fractions(costs, chosen.home)
    if max(shares) == min(shares):
        return "all ranks own equal parts"
    none = [rank for rank, share in enumerate(shares) if not share]
    owning = [share for share in shares if share]
    least = f"{min(owning):.2%}"
    most = f"{max(owning):.2%}"
    text = f"ranks own {least} to {most} each" if least != most else f"ranks own {least} each"
    return text + (f"; ranks without state: {_ranks(costs, none)}" if none else "")


def _ranks(costs: Costs, ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    lost = [rank for rank in ranks if rank in costs.health.lost]
    return f"{shown} ({len(lost)} lost)" if lost else shown
