"""`hydragraph show DIR --traffic`: print the bytes sent between ranks and nodes, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hydragraph.commands.show_folder import ShownStrategy, shortened, table
from hydragraph.cost.collective_bytes import collective_bytes
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.link_bytes import Traffic, moved
from hydragraph.ir.instruction import Op
from hydragraph.passes.place import place
from hydragraph.passes.weight_layouts import layouts
from hydragraph.report.number_text import bytes_text
from hydragraph.spec.stage_kind import StagePart

# Maximum ranks or nodes in a printed matrix
FEW = 8
KINDS = {
    "pull": "weights from their owners to stages",
    "push": "gradients from stages to owners",
    "tp": "tensor-parallel sums, in rings",
    "pp": "activations and their gradients between stages",
}


def traffic_lines(strategies: Sequence[ShownStrategy], rank: int | None, tokens: int, node: int) -> Iterator[str]:
    """Yield traffic by kind, and a table of traffic between ranks or, if there are many, between nodes.

    Args:
        node: number of consecutive ranks per node.
    """
    yield f"bytes between ranks in one step with micro-batches of {tokens:,} tokens; nodes of {node} ranks"
    for strategy in strategies:
        yield f"under {strategy.name}"
        ranks = strategy.whole.summary.ranks
        by_kind = traffic_by_kind(strategy, tokens)
        yield from _totals(by_kind, node)
        everything = _all(by_kind)
        if rank is not None:
            yield from _of_rank(by_kind, rank)
        elif ranks <= FEW:
            yield "  from rank (row) to rank (column):"
            yield from _matrix(everything, ranks, 1)
        else:
            yield "  from node (row) to node (column); the diagonal is traffic within a node:"
            yield from _nodes(everything, -(-ranks // node), node)


def traffic_by_kind(each: ShownStrategy, tokens: int) -> dict[str, Traffic]:
    program = each.whole.program
    placed = layouts(program, each.strategy, each.whole.homes.by_name(program.buckets))
    return {
        "pull": moved(placed, "pull", program.dtype.itemsize),
        "push": moved(placed, "push", program.dtype.itemsize),
        "tp": Traffic.of(_within_stages(each, tokens), 0),
        "pp": Traffic.of(_between_stages(each, tokens), 0),
    }


def _within_stages(each: ShownStrategy, tokens: int) -> dict[tuple[int, int], int]:
    folder = each.whole
    first = {block.template: block for block in folder.program.blocks}

    @cache
    def sent(template: str, part: StagePart) -> int:
        return collective_bytes(folder.variants.get(first[template], part), part, MicroBatch(tokens, 1))

    # pairs[src, dst]: bytes. In a ring, ranks send only to the stage's next rank.
    pairs: dict[tuple[int, int], int] = {}
    for stage in place(folder.program.outline, each.strategy, each.record.micro_batches).stages:
        templates = [folder.program.blocks[position].template for position in stage.positions]
        for index, rank in enumerate(stage.ranks if len(stage.ranks) > 1 else ()):
            once = sum(sent(template, stage.part_of(rank)) for template in templates)
            pairs[rank, stage.ranks[(index + 1) % len(stage.ranks)]] = once * len(stage.micro_batches)
    return pairs


def _between_stages(each: ShownStrategy, tokens: int) -> Mapping[tuple[int, int], int]:
    programs = each.programs
    # sends[kind]: index in `peers` of each message's receiver.
    sends = [[i.peer for i in body if i.op is Op.SEND] for body in programs.bodies]
    size = tokens * each.whole.blocks.hidden_bytes
    pairs: Counter[tuple[int, int]] = Counter()
    for rank, (kind, peers) in enumerate(zip(programs.kinds, programs.peers, strict=True)):
        for place_of in sends[kind]:
            assert place_of is not None
            pairs[rank, peers[place_of]] += size
    return pairs


def _all(by_kind: Mapping[str, Traffic]) -> Traffic:
    src, dst, size = zip(*((traffic.src, traffic.dst, traffic.size) for traffic in by_kind.values()), strict=True)
    return Traffic(np.concatenate(src), np.concatenate(dst), np.concatenate(size), 0)


def _totals(by_kind: Mapping[str, Traffic], node: int) -> Iterator[str]:
    rows = [("kind", "what", "in all", "between nodes", "busiest rank")]
    for kind, traffic in by_kind.items():
        # `node` is the number of ranks per node.
        apart = traffic.src // node != traffic.dst // node
        row = (bytes_text(traffic.total), bytes_text(int(traffic.size[apart].sum())), bytes_text(traffic.most))
        rows.append((kind, KINDS[kind], *row))
    yield from table(rows, left=(0, 1))


def _of_rank(by_kind: Mapping[str, Traffic], rank: int) -> Iterator[str]:
    rows = [("kind", f"rank {rank} sends", "to ranks", "receives", "from ranks")]
    for kind, traffic in by_kind.items():
        out, into = traffic.src == rank, traffic.dst == rank
        sizes = (bytes_text(int(traffic.size[which].sum())) for which in (out, into))
        sent, received = zip(sizes, (str(int(out.sum())), str(int(into.sum()))), strict=True)
        rows.append((kind, *sent, *received))
    yield from table(rows)


def _sums(each: Traffic, count: int, node: int) -> NDArray[np.int64]:
    sums = np.zeros((count, count), np.int64)
    np.add.at(sums, (each.src // node, each.dst // node), each.size)
    return sums


def _matrix(each: Traffic, count: int, node: int) -> Iterator[str]:
    head = ("", *map(str, range(count)))
    sums = _sums(each, count, node).tolist()
    yield from table([head, *((str(i), *(bytes_text(n) if n else "." for n in row)) for i, row in enumerate(sums))])


def _nodes(each: Traffic, count: int, node: int) -> Iterator[str]:
    if count <= FEW:
        yield from _matrix(each, count, node)
        return
    sums = _sums(each, count, node)
    within = np.diag(sums).copy()
    np.fill_diagonal(sums, 0)
    rows = [("node", "ranks", "within", "sends", "receives", "most to node")]
    for i in range(count):
        to = int(sums[i].argmax())
        most = f"{to} ({bytes_text(int(sums[i, to]))})" if sums[i, to] else "-"
        ranks = f"{i * node}-{(i + 1) * node - 1}"
        inside, sent, received = (bytes_text(int(size)) for size in (within[i], sums[i].sum(), sums[:, i].sum()))
        rows.append((str(i), ranks, inside, sent, received, most))
    head, *body = table(rows, left=(0, 1))
    yield head
    yield from shortened(body, rows=16, more=" nodes")
