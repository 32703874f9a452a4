"""`hydragraph show DIR --memory`: print each rank's peak memory by kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hydragraph.commands.show_folder import ShownStrategy, shortened, table
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.rank_memory import MemoryWalk
from hydragraph.cost.traffic_bytes import HomeTraffic
from hydragraph.ir.instruction_text import instruction_text
from hydragraph.ir.shared_programs_text import runs_text
from hydragraph.report.number_text import bytes_text

# Maximum ranks to print individually
FEW = 16
_HOME = ("home_weights", "optimizer_state", "home_gradients")
_PARTS = (*_HOME, "weights", "gradients", "activations", "working", "messages")


def memory_lines(
    strategies: Sequence[ShownStrategy], rank: int | None, tokens: int, limit: float | None
) -> Iterator[str]:
    """Yield ranks' peak memory by kind; if there are many, show only the first rank of each program.

    Args:
        tokens: tokens per micro-batch, all in one sequence.
        limit: memory of a device in bytes.
    """
    yield f"bytes at the peak of a training step with micro-batches of {tokens:,} tokens, AdamW in fp32:"
    yield "  home weights, optimizer state, home gradients: owned by the rank; weights, gradients: used by the stage"
    yield "  activations: saved by forwards; working: temporary values of a graph; messages: in flight"
    if any(strategy.strategy.offloads for strategy in strategies):
        yield "  host: offloaded bytes, which are not part of the total"
    if limit:
        yield f"  limit: used share of {bytes_text(limit)}; ! marks ranks that do not fit"
    for strategy in strategies:
        yield f"under {strategy.name}"
        head, *body = table(_rows(strategy, rank, tokens, limit))
        yield head
        yield from shortened(body, more=": --rank N shows one")
        if rank is not None:
            yield from _when(strategy, rank, tokens)
        elif strategy.whole.summary.ranks > FEW:
            yield "  each kind of program is shown for its first rank; --rank N shows another rank"


def _rows(each: ShownStrategy, rank: int | None, tokens: int, limit: float | None) -> list[tuple[str, ...]]:
    host = ("host",) * each.strategy.offloads
    names = (part.replace("_", " ") for part in _PARTS)
    rows: list[tuple[str, ...]] = [("ranks", *names, *host, "in all", *(["limit"] if limit else []))]
    for ranks in _groups(each, rank):
        peak = walk(each, ranks[0], tokens).peak()
        parts = (bytes_text(getattr(peak, part)) for part in (*_PARTS, *host))
        name = runs_text(ranks)
        name = name if len(name) <= 12 else f"{ranks[0]} (of {len(ranks)})"
        share = [f"{peak.total / limit:.0%}" + "!" * (peak.total > limit)] if limit else []
        rows.append((name, *parts, bytes_text(peak.total), *share))
    return rows


def _groups(each: ShownStrategy, rank: int | None) -> list[tuple[int, ...]]:
    ranks = each.whole.summary.ranks
    if rank is not None:
        return [(rank,)]
    if ranks <= FEW:
        return [(each_rank,) for each_rank in range(ranks)]
    return [each.programs.of_kind(kind) for kind in range(len(each.programs.bodies))]


def _when(each: ShownStrategy, rank: int, tokens: int) -> Iterator[str]:
    _, at, _ = walk(each, rank, tokens).curve()
    instructions = each.programs[rank].instructions
    if 0 <= at < len(instructions):
        text = " ".join(instruction_text(instructions[at]).split())
        yield f"  peak in instruction {at} of {len(instructions)}: {text}"


def walk(each: ShownStrategy, rank: int, tokens: int) -> MemoryWalk:
    folder = each.whole
    batches = [[MicroBatch(tokens, 1)] * count for count in each.record.micro_batches]
    traffic = HomeTraffic(folder.blocks.buckets, folder.homes.of)
    return MemoryWalk(folder.blocks, each.strategy, batches, rank, folder.summary.ranks, traffic=traffic)
