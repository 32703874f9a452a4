"""Bytes between ranks and nodes in a simulated iteration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydragraph.cost.costs import Costs
from hydragraph.cost.timeline import Timeline
from hydragraph.ir.instruction import Op
from hydragraph.ir.layout import Floats
from hydragraph.report.facts import MOVED, Matrix
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Strategy

# Maximum rows in a matrix; of more ranks or nodes, neighbors share a row.
MOST = 32


def matrices(costs: Costs, strategy: Strategy, assignment: Assignment, timeline: Timeline) -> tuple[Matrix, ...]:
    """Return the traffic between nodes, and between ranks unless many ranks are on several nodes."""
    moved = bytes_between(costs, strategy, assignment, timeline)
    nodes = [device.node for device in costs.cluster.devices]
    traffic = []
    several = len(set(nodes)) > 1
    if costs.ranks <= MOST or not several:
        traffic.append(_grouped("ranks", "rank", moved, list(range(costs.ranks)), nodes))
    if several:
        numbers = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        traffic.append(_grouped("nodes", "node", moved, [numbers[node] for node in nodes], list(numbers)))
    return tuple(traffic)


def bytes_between(costs: Costs, strategy: Strategy, assignment: Assignment, timeline: Timeline) -> Floats:
    """Return sent bytes, an array [kinds (`MOVED`), senders, receivers]."""
    work = costs.work(strategy, assignment)
    moved = np.zeros((len(MOVED), costs.ranks, costs.ranks))
    # exchanged: (pull or push, bucket); `work.moved` lists transfers between all ranks, so an
    # exchange counts once
    exchanged: set[tuple[Op, str]] = set()
    for actor in timeline.actors:
        for i, instruction in enumerate(actor.program.instructions):
            if instruction.op is Op.SEND:
                message, _ = actor.program.messages[i]
                role = actor.role_of[message.micro_batch]
                size = work.message_bytes(role.pipeline, message.micro_batch - role.micro_batches.start)
                src, dst = np.array(actor.pairs(i), dtype=np.int64).reshape(-1, 2).T
                np.add.at(moved[2], (src, dst), size)
            elif instruction.op in (Op.PULL, Op.PUSH):
                exchanged.add((instruction.op, instruction.target))
    for op, bucket in exchanged:
        handed = [work.handed_on(bucket)] if op is Op.PUSH else []
        for transfers in (work.moved(op, bucket), *handed):
            np.add.at(moved[MOVED.index(op.value)], (transfers.src, transfers.dst), transfers.size)
    for between, sent in work.ring_bytes().items():
        moved[MOVED.index("tp"), *between] += sent
    return moved


def _grouped(title: str, word: str, moved: Floats, group: Sequence[int], nodes: Sequence[int]) -> Matrix:
    # group[rank]: row before merging; 100 rows and MOST = 32 give 4 per row: 25 rows
    count = max(group) + 1
    per_row = -(-count // MOST)
    rows = -(-count // per_row)
    row_of = np.array(group) // per_row
    sums = np.zeros((len(moved), rows, rows))
    for kind, between in enumerate(moved):
        src, dst = np.nonzero(between)
        np.add.at(sums[kind], (row_of[src], row_of[dst]), between[src, dst])
    names = []
    for row in range(rows):
        first = row * per_row
        last = min((row + 1) * per_row, count) - 1
        names.append(f"{word} {first}" if first == last else f"{word}s {first}–{last}")
    cells = tuple(tuple(map(tuple, kind)) for kind in sums.tolist())
    return Matrix(title, tuple(names), tuple(nodes[row * per_row] for row in range(rows)), cells)
