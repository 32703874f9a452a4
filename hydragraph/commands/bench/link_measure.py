"""Measurement of pulls and pushes, in a step and without computation."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hydragraph.cluster.communicators import Channel
from hydragraph.commands.bench.bench_models import draw_sequences, meta_model, mixed_lengths
from hydragraph.commands.bench.interleaved_timing import WARM_UP, Side, timed
from hydragraph.commands.bench.link_overlap import Overlap
from hydragraph.cost.link_bytes import DIRECTIONS, Direction
from hydragraph.engine import api
from hydragraph.engine.executable import Executable
from hydragraph.engine.step_report import StepReport
from hydragraph.passes.weight_layouts import layouts
from hydragraph.runtime.buffers import Buffers
from hydragraph.runtime.exchange import Transfer, hand_exchange, pull_exchange, push_exchange
from hydragraph.runtime.pending_work import Finish
from hydragraph.runtime.streams import streams_of
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True)
class LinkMeasurement:
    """Bytes that a rank sends in pulls or pushes, and their overlap with computation."""

    sent: int
    overlap: Overlap


def measure_rank(
    model: str, strategies: tuple[Strategy, ...], tokens: int, rounds: int, home: Home | None = None
) -> list[dict[Direction, LinkMeasurement]]:
    skeleton = meta_model(model)
    factory = partial(torch.optim.AdamW, lr=1e-4)
    exe = api.compile(skeleton, strategies[0], factory, device="cpu", check="off", home=home)
    sent = _count_bytes(exe)
    config: Any = skeleton.config
    seen: list[list[tuple[StepReport, dict[Direction, int]]]] = [[] for _ in strategies]
    for turn in range(WARM_UP + rounds):
        lengths = mixed_lengths(tokens, turn, longest=max(16, tokens // 8), shortest=8)
        sequences = draw_sequences(lengths, config.vocab_size, turn)
        for i, strategy in enumerate(strategies):
            sent.clear()
            report = exe.step(sequences, strategy)
            # Includes gradients sent to second owners
            pushed = sent[Channel.PUSH] + sent[Channel.COMMIT]
            seen[i].append((report, {"pull": sent[Channel.PULL], "push": pushed}))
    results: list[dict[Direction, LinkMeasurement]] = []
    for strategy, steps in zip(strategies, seen, strict=True):
        reports = [report for report, _ in steps[WARM_UP:]]
        seconds = statistics.median(report.seconds for report in reports)
        results.append({})
        for way in DIRECTIONS:
            waited = statistics.median(getattr(report.exposed, way) for report in reports)
            overlap = Overlap(_alone(exe, strategy, way, rounds), waited, seconds)
            results[-1][way] = LinkMeasurement(steps[-1][1][way], overlap)
    exe.close()
    return results


def _count_bytes(exe: Executable) -> Counter[Channel]:
    sent: Counter[Channel] = Counter()
    rank, ranks = exe.rank, exe.ranks
    sizes: dict[str, Callable[..., int]] = {
        "all_to_all": lambda out, inp, _, splits: (sum(splits) - splits[rank]) * inp.element_size(),
        "all_gather": lambda out, inp: inp.nbytes * (ranks - 1),
        "reduce_scatter": lambda out, inp: inp.nbytes * (ranks - 1) // ranks,
    }

    def counted(call: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def run(role: Channel, *arguments: Any) -> Any:
            sent[role] += size(*arguments)
            return call(role, *arguments)

        return run

    for name, size in sizes.items():
        setattr(exe.groups, name, counted(getattr(exe.groups, name), size))
    return sent


def transfers(exe: Executable, strategy: Strategy, direction: Direction) -> Side:
    device = exe.world.device
    rank, ranks = exe.rank, exe.ranks
    buffers = Buffers(device, streams_of(device, exe.world.backend, ranks))
    starts: list[Callable[[], Finish]] = []
    for placed in layouts(exe.program, strategy, exe.home.layouts):
        weights = exe.home.weights[placed.bucket.name]
        shard = exe.home.gradients[placed.bucket.name]
        if direction == "pull":
            pull = pull_exchange(placed.home, placed.used, rank, ranks, device)
            starts.append(partial(Transfer(pull, exe.groups, buffers).pull, weights, exe.program.dtype))
        else:
            push = push_exchange(placed.used, placed.home, rank, ranks, device)
            handing = hand_exchange(placed.home, rank, ranks, device)
            gradients = shard if push.is_identity else torch.zeros(push.source, device=device)
            starts.append(partial(Transfer(push, exe.groups, buffers).push, gradients, shard, handing))

    def move(turn: int) -> None:
        buffers.begin()
        with torch.no_grad():
            finishes = [start() for start in starts]
            for finish in finishes:
                buffers.give(finish())

    return move


def _alone(exe: Executable, strategy: Strategy, direction: Direction, rounds: int) -> float:
    move = transfers(exe, strategy, direction)
    seconds = []
    for turn in range(1 + rounds):
        if dist.is_initialized():
            dist.barrier()
        seconds.append(timed(move, turn, exe.world.device))
    return statistics.median(seconds[1:])


def over_ranks(per_rank: list[LinkMeasurement]) -> LinkMeasurement:
    names = ("alone_s", "exposed_s", "step_s")
    means = Overlap(*(statistics.fmean(getattr(m.overlap, name) for m in per_rank) for name in names))
    return LinkMeasurement(sum(m.sent for m in per_rank), means)
