"""What each part of the planner gains: plans of drawn clusters without one part at a time.

    python benchmarks/ablation.py                            # 64 clusters (hours: a cell takes 2 to 9 minutes)
    python benchmarks/ablation.py --cells 8 --most-devices 16
    python benchmarks/ablation.py --only "Metis's stages" "fewer nodes"

Each cell is a cluster of 8 to 64 devices of one to three types (`spec.known_devices`), some with stragglers, and some
with slow links, tight memory or sequences of varying lengths. It is planned by `hg.plan` with every part, then without
each part in turn. The table shows how much longer the plan's iteration takes (simulated, also where a part is missing).

Plans of a cell share a cache of memory walks and simulations, which would distort planning times. CPU seconds are
therefore measured on the first `--timed` cells only, which are planned again without this cache.

The second table is of `planner.assign`: sequences of varying lengths to the pipelines of the cell's plan, without
traffic, as every iteration of a dynamic run assigns them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from plans import captured, drawn_lengths, length_of
from rich.console import Console
from rich.table import Table

import hydragraph as hg
from hydragraph.cost.datasheet import datasheet
from hydragraph.errors import Unsupported
from hydragraph.planner import finalists, plan, price_candidate, refinements
from hydragraph.planner.assignment import assign_mini_batch
from hydragraph.planner.assignment.assign_mini_batch import assign_pipelines
from hydragraph.planner.assignment.spread_search import SearchEffort
from hydragraph.planner.generators import malleus_autohet
from hydragraph.planner.plan import Plan
from hydragraph.spec.cluster import Cluster, Interconnect, Node
from hydragraph.spec.health import Health
from hydragraph.spec.known_devices import KNOWN
from hydragraph.spec.training_workload import Workload

VARYING = 12  # most devices of a cell with varying lengths: planning for more takes minutes
LONGER = 5e-4  # plans that take less longer are equal
DEGREES = (1, 2, 4, 8)
MODELS = {"tiny": 6e6, "LLaMA 6.7B": 6.7e9, "32b": 32e9, "70b": 70e9}  # parameters
TYPES = ("a100-80gb", "a100-40gb", "h100-sxm", "v100-32gb", "rtx-4090", "l4", "a10g", "t4")
STATE_BYTES = 14  # of a parameter: weight, moments and 16-bit copy
INNER = {"a100-80gb": 300e9, "a100-40gb": 300e9, "h100-sxm": 450e9, "v100-32gb": 150e9}  # the others: PCIe
CARDS = (1.25e9, 3e9, 12.5e9, 25e9, 50e9)  # bytes/s of a network card: 10 to 400 Gbit/s

# A replacement that disables a part: an object, the name of its attribute, and the attribute's new value.
Change = tuple[Any, str, Any]


def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def _without_way(way: malleus_autohet.SearchMethod) -> Change:
    ways = tuple(each for each in plan.WAYS["auto"] if each != way)
    return plan, "WAYS", {**plan.WAYS, "auto": ways}


def _without_across(candidates: Any) -> Any:
    return [replace(candidate, across=None) for candidate in _CANDIDATES(candidates)]


def _unimproved(candidate: Any, _: float | None) -> Any:
    return candidate


_CANDIDATES = plan.placed_candidates


def _first(problem: Any, relaxed: Any, starts: Any, *_: Any) -> Any:
    return starts[-1]


def _strong(*_: Any) -> Iterator[Any]:
    yield from ()


PLANNING: Mapping[str, Sequence[Change]] = {
    "AutoHet and Malleus in one search": [_without_way(malleus_autohet.TOGETHER)],
    "AutoHet's search": [_without_way(malleus_autohet.MIXED)],
    "Malleus's search": [_without_way(malleus_autohet.STRAGGLER)],
    "AutoHet's and Malleus's searches": [(plan, "WAYS", {**plan.WAYS, "auto": (malleus_autohet.TOGETHER,)})],
    "Metis's stages": [(plan, "_staged", _nothing)],
    "symmetric plans": [(plan, "_simple", _nothing)],
    "layers by pooled memory": [(plan, "_pooled", _nothing)],
    "pooled memory of larger plans": [(plan, "TIGHT", math.inf)],
    "fewer nodes": [(plan, "with_fewer", _nothing)],
    "moves of devices (varying lengths)": [(plan, "CLIMBS", 0)],
    "exchanges of groups": [(malleus_autohet, "_improved", _unimproved)],
    "weak sites idle": [(malleus_autohet, "_strong", _strong)],
    "placement across nodes": [(plan, "placed_candidates", _without_across)],
    "fewer pipelines": [(finalists, "LEANER", 0)],
    "micro-batches cut as in a run": [(finalists, "CUT", 0)],
    "equal owners": [(finalists, "_equal_home", lambda *_: None)],
    "owners by block": [(finalists, "owners_by_block", lambda *_: None)],
    "several simulations": [(finalists, "_simulations", lambda _: 1)],
    "several candidates per search": [(plan, "SETTLED", 1)],
    "streaming": [(plan, "streamed", _nothing)],
    "budgets of recomputation": [(plan, "refined", _nothing)],
    "interleaved stages": [(refinements, "interleaved", lambda *_: None)],
    "less memory if nothing fits": [(plan, "SAFETIES", plan.SAFETIES[:1])],
}

_LONGER_SCHEDULE_SEARCH: Sequence[Change] = [
    (assign_mini_batch, "EFFORT", replace(assign_mini_batch.EFFORT, kicks=200)),
    (assign_mini_batch, "TASKS", 2_000_000),
]

ASSIGNING: Mapping[str, Sequence[Change]] = {
    "search by the envelope": [(assign_mini_batch, "search", _first)],
    "rounds with packing's excess": [(assign_mini_batch, "ROUNDS", 1)],
    "kicks of packing": [(assign_mini_batch, "PACKING_KICKS", 0)],
    "search by the schedule": [(assign_mini_batch, "improved", lambda start, cut, effort, seed: cut)],
    "kicks of the schedule search": [(assign_mini_batch, "EFFORT", replace(assign_mini_batch.EFFORT, kicks=0))],
    "kicks by the envelope": [(assign_mini_batch, "SPREADING", SearchEffort(kicks=0, enough=3e-3))],
    "envelope and its rounds": [(assign_mini_batch, "search", _first), (assign_mini_batch, "ROUNDS", 1)],
    "kicks but the schedule's, which gets 2M tasks": [
        (assign_mini_batch, "SPREADING", SearchEffort(kicks=0, enough=3e-3)),
        (assign_mini_batch, "PACKING_KICKS", 0),
        *_LONGER_SCHEDULE_SEARCH,
    ],
    "search but the schedule's, which gets 2M tasks": [
        (assign_mini_batch, "search", _first),
        (assign_mini_batch, "ROUNDS", 1),
        (assign_mini_batch, "PACKING_KICKS", 0),
        *_LONGER_SCHEDULE_SEARCH,
    ],
}
PARTS = {**PLANNING, **ASSIGNING}


@dataclass(frozen=True)
class Cell:
    """A drawn cluster, model and workload."""

    name: str
    costs: hg.Costs
    workload: Workload
    lengths: tuple[tuple[int, ...], ...]  # of mini-batches for the second table


def drawn(number: int, most: int) -> Cell:
    """Draw a cell; the same number gives the same cell."""
    random = np.random.default_rng([17, number])
    devices = int(random.choice([n for n in (8, 12, 16, 24, 32, 48, 64) if n <= most]))
    kinds = random.choice(TYPES, size=int(random.choice([1, 2, 2, 3])), replace=False)
    size = int(random.choice([n for n in (2, 4, 8) if devices // n >= len(kinds)]))
    outer = Interconnect(float(random.choice(CARDS)), 1e-5)
    count = devices // size
    shares = np.sort(random.choice(np.arange(1, count), size=len(kinds) - 1, replace=False)) if len(kinds) > 1 else []
    ends = [0, *map(int, shares), count]
    nodes = tuple(
        Node(
            str(kind),
            size,
            Interconnect(INNER.get(str(kind), 12e9), 5e-6),
            outer,
            count=b - a,
            cards=int(random.choice([1, size])),
        )
        for kind, a, b in zip(kinds, ends, ends[1:], strict=False)
    )
    cluster = Cluster.of({}, nodes)
    memory = sum(KNOWN[each.type].memory_bytes * each.devices * each.count for each in nodes)
    full = {name: STATE_BYTES * parameters / memory for name, parameters in MODELS.items()}
    model = str(random.choice([name for name, part in full.items() if part < 0.45 and name != "tiny"] or ["tiny"]))
    slow = {}
    if random.random() < 0.5:
        for rank in random.choice(devices, size=int(random.integers(1, 1 + devices // 8)), replace=False):
            slow[int(rank)] = float(random.choice([1.5, 2.57, 5.42]))
    sequences = int(random.choice([2, 4, 8])) * devices
    lengths = tuple(
        map(tuple, drawn_lengths(None, 2_000 * devices, 2, length_of(model), int(random.integers(1 << 30))))
    )
    varying = random.random() < 0.3 and devices <= VARYING
    workload = Workload(lengths=lengths) if varying else Workload(sequences, length_of(model))
    program, blocks = captured(model)
    costs = hg.Costs(datasheet(program, cluster, degrees=DEGREES), cluster, Health(slow), blocks=blocks)
    words = [f"{each.count} x {each.devices} {each.type}" for each in nodes]
    name = f"{model} ({full[model]:.0%} of memory) on {' + '.join(words)}, {outer.bytes_per_s / 1e9:g} GB/s"
    name += f", {len(slow)} slow" if slow else ""
    return Cell(f"{name}, {workload}", costs, workload, lengths)


@contextlib.contextmanager
def without(changes: Sequence[Change]) -> Iterator[None]:
    """Leave a part out."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, changed in changes:
            stack.enter_context(mock.patch.object(owner, attribute, changed))
        yield


@contextlib.contextmanager
def results_kept() -> Iterator[None]:
    """Keep what a cell's plans walk and simulate: without a part, most of it is the same."""
    known: dict[object, Any] = {}

    def of_costs(function: Callable[..., Any]) -> Callable[..., Any]:
        def found(costs: hg.Costs, strategy: Any, *what: Any) -> Any:
            key = (function, costs.cluster, costs.health, costs.home, strategy, *what)
            if key not in known:
                known[key] = function(costs, strategy, *what)
            return known[key]

        return found

    of_stage = of_costs(price_candidate._walked)
    with contextlib.ExitStack() as stack:
        for owner, name, function in (
            (hg.Costs, "memory", of_costs(hg.Costs.memory)),
            (hg.Costs, "simulate", of_costs(hg.Costs.simulate)),
            (price_candidate, "_walked", lambda c, s, b, r: of_stage(c, s, tuple(map(tuple, b)), r)),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def planned(cell: Cell) -> tuple[float, float, Plan | None]:
    """Plan a cell: seconds of an iteration (infinite if nothing fits), CPU seconds of planning, and the plan."""
    began = time.process_time()
    try:
        found = hg.plan(cell.costs, cell.workload)
    except Unsupported:
        return math.inf, time.process_time() - began, None
    return found.choosing_s, time.process_time() - began, found


def assigned(cell: Cell, found: Plan) -> tuple[float, float]:
    """Assign the cell's mini-batches to the pipelines of its plan: seconds, and CPU seconds of assigning."""
    began = time.process_time()
    pipelines = cell.costs.pipelines(found.strategy)
    try:
        seconds = sum(assign_pipelines(pipelines, lengths).seconds for lengths in cell.lengths)
    except Unsupported:  # the plan for equal sequences takes no longer ones
        seconds = math.inf
    return seconds, time.process_time() - began


def measured(cell: Cell, parts: Sequence[str]) -> dict[str, Any]:
    """Plan and assign a cell with everything, and without each part."""
    with results_kept():
        seconds, _, found = planned(cell)
        planning = {"": seconds}
        assigning = {"": assigned(cell, found)} if found else {}
        for part in parts:
            with without(PARTS[part]):
                if part in PLANNING:
                    planning[part] = planned(cell)[0]
                elif found:
                    assigning[part] = assigned(cell, found)
    return {"name": cell.name, "planning": planning, "assigning": assigning}


def timed(number: int, most: int, parts: Sequence[str]) -> dict[str, float]:
    """Return the CPU seconds of planning a cell with everything, and without each part, each time without a cache."""
    found = {"": planned(drawn(number, most))[1]}
    for part in parts:
        if part in PLANNING:
            with without(PARTS[part]):
                found[part] = planned(drawn(number, most))[1]
    return found


def planning_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of `hg.plan`."""
    table = Table(title=f"hg.plan: {len(rows)} drawn clusters")
    for column in ("without", "cells longer", "median", "95th percentile", "maximum", "no plan", "CPU s saved"):
        table.add_column(column, justify="left" if column == "without" else "right")
    able = [row["planning"] for row in rows if math.isfinite(row["planning"][""])]
    clocks = [row["cpu"] for row in rows if "cpu" in row]
    for part in PLANNING:
        more = [each[part] / each[""] - 1 for each in able if part in each]
        times = [each for each in clocks if part in each]
        saved = 1 - sum(each[part] for each in times) / sum(each[""] for each in times) if times else math.nan
        if more:
            table.add_row(part, *_spread(more), str(sum(map(math.isinf, more))), f"{saved:.0%}")
    return table


def assigning_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of `planner.assign`."""
    every = [row["assigning"] for row in rows if math.isfinite(row["assigning"].get("", (math.inf,))[0])]
    table = Table(title=f"planner.assign: {len(every)} plans of drawn clusters, two mini-batches each")
    for column in ("without", "plans longer", "median", "95th percentile", "maximum", "CPU s saved"):
        table.add_column(column, justify="left" if column == "without" else "right")
    for part in ASSIGNING:
        both = [(each[""], each[part]) for each in every if part in each]
        more = [after[0] / before[0] - 1 for before, after in both]
        if more:
            saved = 1 - sum(after[1] for _, after in both) / sum(before[1] for before, _ in both)
            table.add_row(part, *_spread(more), f"{saved:.0%}")
    return table


def _spread(more: Sequence[float]) -> Iterator[str]:
    """Yield the columns on how much longer plans take."""
    yield f"{sum(each > LONGER for each in more)} of {len(more)}"
    for share in (50, 95, 100):
        yield f"{np.percentile(more, share, method='higher'):.2%}"


def main() -> None:
    """Draw cells, plan each with and without the parts, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=64)
    parser.add_argument("--first", type=int, default=0, help="number of the first cell")
    parser.add_argument("--most-devices", type=int, default=64)
    parser.add_argument("--timed", type=int, default=8, help="number of cells to plan again without the cache")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS), help="parts")
    parser.add_argument("--log", type=Path, help="JSON lines: cells in it are not repeated, others are added")
    options = parser.parse_args()
    rows = list(map(json.loads, options.log.read_text().splitlines())) if options.log and options.log.exists() else []
    known = {row["cell"] for row in rows}
    for number in range(options.first, options.first + options.cells):
        if number in known:
            continue
        began = time.monotonic()
        cell = drawn(number, options.most_devices)
        row = {"cell": number, **measured(cell, options.only)}
        if number < options.first + options.timed:
            row["cpu"] = timed(number, options.most_devices, options.only)
        rows.append(row)
        best = row["planning"][""]
        longer = {part: s / best - 1 for part, s in row["planning"].items() if s > best * (1 + LONGER)}
        print(f"{number} {cell.name}: {best:.3f} s, {time.monotonic() - began:.0f} s", file=sys.stderr)
        print("   " + ", ".join(f"{part} {more:+.1%}" for part, more in longer.items()), file=sys.stderr, flush=True)
        if options.log:
            with options.log.open("a") as file:
                file.write(json.dumps(row) + "\n")
    console = Console(width=130)
    console.print(planning_table(rows))
    console.print(assigning_table(rows))


if __name__ == "__main__":
    main()
