"""Assign sequences to pipelines and micro-batches: longest first, each where the load stays least."""

from __future__ import annotations

from collections.abc import Sequence

from hydragraph.spec.strategy import Strategy
from hydragraph.spec.workload import Assignment

QUADRATIC_FROM = 4096  # tokens at which attention's quadratic cost is taken to equal the linear one
MICRO_BATCH_TOKENS = 8192  # a micro-batch is cut at this many tokens where one sequence is not longer
MICRO_BATCHES_PER_STAGE = 2  # enough to keep a pipeline's bubble at a third


def cost(length: int) -> float:
    """Return the relative cost of a sequence in a packed micro-batch: linear, plus quadratic for attention."""
    return length + length * length / QUADRATIC_FROM


def assign(strategy: Strategy, lengths: Sequence[int], micro_batch_tokens: int = MICRO_BATCH_TOKENS) -> Assignment:
    """Assign every sequence with at least one token once; the same arguments give the same assignment.

    Args:
        strategy: a pipeline's share is proportional to its devices.
        lengths: tokens per sequence; those of length 0 are left out.
        micro_batch_tokens: how many tokens a micro-batch should not exceed.
    """
    by_cost = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i))
    devices = [len(p.devices) for p in strategy.pipelines]
    shares = _longest_first(by_cost, lengths, devices)
    return Assignment(
        tuple(
            _micro_batches(share, lengths, len(pipeline.stages), micro_batch_tokens)
            for share, pipeline in zip(shares, strategy.pipelines, strict=True)
        )
    )


def _longest_first(order: Sequence[int], lengths: Sequence[int], speeds: Sequence[int]) -> list[list[int]]:
    """Put each sequence where it would finish first; ties go to the least loaded."""
    loads, bins = [0.0] * len(speeds), [[] for _ in speeds]  # type: ignore[var-annotated]
    for i in order:
        best = min(range(len(speeds)), key=lambda b: ((loads[b] + cost(lengths[i])) / speeds[b], loads[b], b))
        loads[best] += cost(lengths[i])
        bins[best].append(i)
    return bins


def _micro_batches(
    share: Sequence[int], lengths: Sequence[int], stages: int, limit: int
) -> tuple[tuple[int, ...], ...]:
    if not share:
        return ()
    tokens = sum(lengths[i] for i in share)
    wanted = MICRO_BATCHES_PER_STAGE * stages if stages > 1 else 1
    count = min(len(share), max(wanted, -(-tokens // limit)))
    return tuple(tuple(b) for b in _longest_first(share, lengths, [1] * count) if b)
