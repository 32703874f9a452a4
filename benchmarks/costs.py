"""How near prices are: to measured runs of real clusters, and how quickly large ones are simulated.

    python benchmarks/costs.py                    # the whole table
    python benchmarks/costs.py --only clusters    # a part of it
    python benchmarks/costs.py --only predicted   # which takes some minutes: OMP_NUM_THREADS=1, on an idle machine
    python benchmarks/costs.py --data DIR         # where the folder `sailor` is

`clusters` prices runs that the authors of Sailor measured (GH200 nodes; nodes of RTX 3090, RTX 2080 and Titan RTX),
from their measured blocks and links, through `hg.Profile`, `hg.Cluster` and `hg.Costs` alone. Those runs were
DeepSpeed's, so they are priced with that runtime's way of moving data (`published/deepspeed.py`: from its source, not
from these runs) and with what the authors' version of it adds (`STAGING`), and also with hydragraph's own.
Constants that are not in the data: sequences have 2,048 tokens and numbers 4 bytes, as the sizes in `model_memory.json`
say; a node has as many network cards as its whole bandwidth is a multiple of one sender's in `network.json`. `sizes`
simulates large strategies, lowering and pricing included.
`overlap` prices pull and push of a published case, hidden and not, next to the published seconds.
`assign` compares assignments of small drawn mini-batches with the best of all there are, by the end of the schedule.
`predicted` profiles a model here and runs it, in turn (`benchmarks/predicted.py`); `--device cuda` does so on one GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import numpy as np
from rich.console import Console
from rich.table import Table as Printed

import hydragraph as hg
from benchmarks.published.deepspeed import DEEPSPEED, Stack, deepspeed_s
from hydragraph.cost.block_pieces import AUX, BlockPiece, PricedDevice
from hydragraph.cost.curves import Constants, LengthSums
from hydragraph.cost.measured_profile import PipelineCost, Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.stage_costs import NeighborMessages, StageCost
from hydragraph.planner.assignment.assign_mini_batch import assign_pipelines, bounded_pipelines, enveloped
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node, Pair
from hydragraph.spec.stage_kind import StageKind

SEQUENCE = 2048  # tokens: act_output_floats of model_memory.json over the hidden size
FLOAT = 4  # bytes
OTHERS = {("clariden", "OPT-350"): 0.089, ("clariden", "GPT-Neo-2.7"): 0.101, ("mit", "OPT-350"): 0.103}  # Sailor's own
PARTS = ("clusters", "sizes", "overlap", "assign", "predicted")
OVERLAPPED = 5  # iterations of `overlap`
DRAWN = 339  # mini-batches that are assigned
# Their version of the engine makes each hidden state that arrives as zeros in pageable host memory and copies it to the
# device (`reconstruct_tensor` of their deepspeed/utils.py). The speed of such copies, as (MB, GB/s), as CUDA's
# bandwidth test was reported to find on a PCIe machine: forums.developer.nvidia.com, thread 56270. Theirs may differ.
PAGEABLE = ((2, 8.39), (4, 9.87), (8, 10.93), (16, 11.44), (32, 11.39), (64, 8.67), (128, 8.34), (1024, 8.32))
STAGING = Interconnect(8.32e9, 0.0, tuple((size * 1e6, speed * 1e9) for size, speed in PAGEABLE))
SAILORS = replace(DEEPSPEED, staging=STAGING)
# Bytes that their simulator adds for kernels on that cluster (`megatron_mem` of its runtime_simulator.py).
KERNELS = {"clariden": 4.76e9 + 300e6}
OTHERS_MEMORY = {("clariden", "OPT-350"): 0.059}
CLEARLY = 1.05  # two plans are compared in rank only if their measured seconds differ by this factor
SIZES = (  # strategy, ranks, layers, micro-batches of each pipeline, seconds that it may take
    ("8*<tp2,pp4>", 64, 32, 16, 1),
    ("16*<tp8,pp8>", 1024, 80, 64, 20),
    ("8*<tp8,pp8> + 64*<tp1,pp8>", 1024, 80, 64, 60),
)


@dataclass(frozen=True)
class Table(Constants):
    """Seconds by tokens, measured for sequences of one length: linear between what was measured, and beyond."""

    rows: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, seconds: dict[int, float]) -> Table:
        """Return a table whose constants are its last row's."""
        rows = tuple(sorted(seconds.items()))
        return cls(0.0, rows[-1][1] / rows[-1][0], 0.0, rows=rows)

    def at(self, load: LengthSums) -> float:
        tokens = load.tokens
        if len(self.rows) == 1:
            return self.rows[0][1] * tokens / self.rows[0][0]
        after = min(max(1, sum(row[0] < tokens for row in self.rows)), len(self.rows) - 1)
        (low, early), (high, late) = self.rows[after - 1 : after + 1]
        return max(0.0, early + (late - early) * (tokens - low) / (high - low))

    def times(self, factor: float) -> Table:
        rows = tuple((tokens, seconds * factor) for tokens, seconds in self.rows)
        return Table(self.a * factor, self.b * factor, self.c * factor, rows=rows)


class Sailor:
    """The published profiles, networks and runs.

    Args:
        folder: of profile_*.json, network.json, model_memory.json and measured_runs.json.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.runs: list[dict[str, Any]] = self._read("measured_runs.json")["runs"]
        self._network, self._memory = self._read("network.json"), self._read("model_memory.json")["models"]

    def _read(self, name: str) -> Any:
        return json.loads((self._folder / name).read_text(encoding="utf-8"))

    @cache  # noqa: B019
    def profile(self, gpu: str, model: str) -> Profile:
        """Return what was measured of a model on a type of device: tables by micro-batch size."""
        tables = self._read(f"profile_{gpu}.json")["models"][model]
        memory = {int(tp): _expanded(rows) for tp, rows in self._memory[model].items()}
        pieces, update = {}, 0.0
        for tp in sorted({int(tp) for each in tables.values() for tp in each}):
            rows = {int(n): _expanded(each[str(tp)]) for n, each in tables.items() if str(tp) in each}
            sizes = [int(row[0]) for row in memory[tp]] if tp in memory else [int(row[0]) // tp for row in memory[1]]
            pieces[StageKind(tp)] = {
                f"block {i}": BlockPiece(
                    Table.of({n * SEQUENCE: each[i][0] for n, each in rows.items()}),
                    Table.of({n * SEQUENCE: each[i][1] for n, each in rows.items()}),
                    parameters=size,
                )
                for i, size in enumerate(sizes)
            }
            update = fmean(sum(row[2] for row in each) for each in rows.values()) / sum(sizes)
        whole = [int(row[0]) for row in memory[1]]
        hidden = FLOAT * int(memory[1][0][1]) // SEQUENCE
        return Profile(
            f"{model} on {gpu}",
            {},
            {kind.tp: SEQUENCE for kind in pieces},
            blocks=tuple(f"block {i}" for i in range(len(whole))),
            pieces=pieces,
            device=PricedDevice(gpu, 1e15, FLOAT),
            type=gpu,
            sizes=ModelSizes.rough(tuple(whole), hidden, FLOAT),
            update=(0.0, update),
        )

    def node(self, gpu: str, devices: int) -> Node:
        """Return a node with `used` devices in use."""
        inner = self._network["intra_node"][gpu]
        between = self._network["inter_node_same_zone"][gpu]
        one = _link(*between["1"][gpu]["1"])
        most = str(max(int(n) for n in between if int(n) <= devices))
        cards = max(1, min(devices, round(between[most][gpu][most][1] / one.bytes_per_s)))
        near = _link(*inner[str(max((int(n) for n in inner if int(n) <= devices), default=min(map(int, inner))))])
        return Node(gpu, devices, near, one, cards=cards)

    def pairs(self, types: Sequence[str]) -> tuple[Pair, ...]:
        """Return the links between nodes of different types, as one sender found them."""
        between = self._network["inter_node_same_zone"]
        found = []
        for a, b in itertools.combinations(types, 2):
            link = _link(*between[a]["1"][b]["1"])
            found.append(Pair((a, b), link.bytes_per_s, link.latency_s, link.points))
        return tuple(found)

    def priced(self, run: dict[str, Any], stack: Stack | None) -> float:
        """Return the seconds of an iteration of a measured run, on DeepSpeed or, without a stack, on hydragraph."""
        pipelines, nodes, first, last = [], [], 0, run["pp"] - 1
        for replica in range(run["dp"][0]):
            stages = []
            for s in range(run["pp"]):
                tp, gpu = (_of(run[name][s], replica) for name in ("tp_per_stage", "types_per_stage"))
                layers = run["layers_per_stage"][s] - (s == 0) - (s == last)
                stages.append(hg.Stage(devices=tuple(range(first, first + tp)), layers=layers))
                nodes.append(self.node(gpu, tp))
                first += tp
            pipelines.append(hg.Pipeline(stages=tuple(stages)))
        types = {node.type: DeviceType(1e12, 10**15, 1e12) for node in nodes}  # do not affect the results
        profile = Profile.merge([self.profile(gpu, run["model"]) for gpu in types])
        cluster = Cluster.of(types, tuple(nodes), self.pairs(tuple(types)))
        costs = hg.Costs(profile, cluster)
        count, size = run["gbs"] // (run["mbs"] * len(pipelines)), run["mbs"]
        at = iter(range(run["gbs"]))
        micro_batches = tuple(tuple(tuple(next(at) for _ in range(size)) for _ in range(count)) for _ in pipelines)
        assignment = hg.Assignment(micro_batches, (SEQUENCE,) * (count * size * len(pipelines)))
        strategy = hg.Strategy(pipelines=tuple(pipelines))
        if stack is None:
            return costs.simulate(strategy, assignment).seconds
        return deepspeed_s(costs, strategy, assignment, stack)

    def memory(self, run: dict[str, Any]) -> float:
        """Return the bytes of the fullest device by DeepSpeed's accounting, as `model_memory.json` counts.

        In fp32: weights, gradients and AdamW's two moments, and gradients once more in the one bucket in which they
        are reduced over replicas; what is saved for backwards, of as many micro-batches as 1F1B has begun.
        """
        replicas = run["dp"][0]
        copies = 5 if replicas > 1 else 4
        count = run["gbs"] // (run["mbs"] * replicas)
        most = 0.0
        for replica in range(replicas):
            first = 0
            for s in range(run["pp"]):
                rows = _expanded(self._memory[run["model"]][str(_of(run["tp_per_stage"][s], replica))])
                here = rows[first : first + run["layers_per_stage"][s]]
                first += len(here)
                begun = run["mbs"] * min(run["pp"] - s, count)
                most = max(most, FLOAT * sum(copies * row[0] + begun * row[3] for row in here))
        return most + KERNELS.get(run["cluster"], 0.0)


def _of(given: Sequence[Any], replica: int) -> Any:
    return given[replica] if len(given) > replica else given[0]


def _expanded(rows: Sequence[Sequence[Any]]) -> list[tuple[float, ...]]:
    """Return a run-length list as one row per block."""
    return [tuple(row[1:]) for row in rows for _ in range(row[0])]


def _link(polynomial: Sequence[float], most: float) -> Interconnect:
    """Return a link from its bandwidth in GB/s as a polynomial of log2(MB), from 1/4 MB to 1 GB."""
    low, mid, high = polynomial
    speeds = ((2.0**x * 1e6, 1e9 * (low * x * x + mid * x + high)) for x in range(-2, 11))
    return Interconnect(most, 0.0, tuple((size, speed) for size, speed in speeds if speed > 0))


@dataclass(frozen=True)
class PricedRun:
    """A measured run: seconds as priced for its runtime and for hydragraph, and bytes."""

    run: dict[str, Any]
    seconds: float
    own: float
    memory: float

    @property
    def devices(self) -> int:
        """How many it used."""
        return sum(_of(tps, replica) for tps in self.run["tp_per_stage"] for replica in range(self.run["dp"][0]))


def print_clusters(folder: Path) -> None:
    """Print measured beside priced seconds and bytes, run by run, the mean absolute errors, and pairs ranked right."""
    data = Sailor(folder)
    runs = [PricedRun(run, data.priced(run, SAILORS), data.priced(run, None), data.memory(run)) for run in data.runs]
    table = Printed(title="measured runs of real clusters (Sailor's)", title_justify="left")
    for heading in ("run", "measured s", "as DeepSpeed", "error", "as hydragraph", "measured GB", "counted", "error"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for each in runs:
        run = each.run
        error = each.seconds / run["real_s"] - 1
        held = each.memory / run["max_mem_bytes"] - 1
        errors.setdefault((run["cluster"], run["model"]), []).append((abs(error), abs(held)))
        table.add_row(
            f"{run['cluster']} {run['model']} {run['file'].removeprefix('plan_config_').removesuffix('.json')}",
            *(f"{run['real_s']:.3f}", f"{each.seconds:.3f}", f"{error:+.1%}", f"{each.own:.3f}"),
            *(f"{run['max_mem_bytes'] / 1e9:.2f}", f"{each.memory / 1e9:.2f}", f"{held:+.1%}"),
        )
    Console().print(table)
    for key, found in errors.items():
        for what, at, others in (("time", 0, OTHERS), ("memory", 1, OTHERS_MEMORY)):
            other = f", Sailor's own {others[key]:.1%}" if key in others else ""
            mean = fmean(each[at] for each in found)
            print(f"{' '.join(key)}: mean absolute error of {what} {mean:.1%} of {len(found)} runs{other}")
    ours, counted, pairs = rank_pairs(runs)
    print(
        f"of {pairs} pairs of plans of one cluster, model and global batch, whose measured seconds differ by more than "
        f"{CLEARLY - 1:.0%}: {ours} ranked right, {counted} by the number of devices alone"
    )


def rank_pairs(runs: Sequence[PricedRun]) -> tuple[int, int, int]:
    """Return how many pairs are ranked right by price, how many by having more devices, and how many there are."""
    ours = counted = pairs = 0
    for one, other in itertools.combinations(runs, 2):
        if any(one.run[key] != other.run[key] for key in ("cluster", "model", "gbs")):
            continue
        fast, slow = sorted((one, other), key=lambda each: float(each.run["real_s"]))
        if slow.run["real_s"] > CLEARLY * fast.run["real_s"]:
            pairs += 1
            ours += fast.seconds < slow.seconds
            counted += fast.devices > slow.devices
    return ours, counted, pairs


@dataclass(frozen=True)
class Sized:
    """What a large simulation took: the wall clock and this process's CPU, in seconds, and the most memory, in MB."""

    wall: float
    cpu: float
    megabytes: float
    simulated: float


def big_profile(layers: int, hidden: int = 8192) -> Profile:
    """Return a made-up profile of a large model; what it says does not matter here."""

    def pieces(tp: int) -> dict[str, BlockPiece]:
        forward = Constants(1e-11 / tp, 1e-6 / tp, 1e-5)
        vocabulary, layer = 128_000 * hidden // tp, 12 * hidden * hidden // tp
        return {
            AUX: BlockPiece(Constants(0.0, 0.0, 1e-6), Constants(0.0, 0.0, 0.0)),
            "embed": BlockPiece(Constants(0.0, 1e-9, 1e-5), Constants(0.0, 1e-9, 1e-5), parameters=vocabulary),
            "layer": BlockPiece(forward, forward.times(2), parameters=layer),
            "head": BlockPiece(forward, forward.times(2), parameters=vocabulary),
        }

    sizes = ModelSizes.rough((128_000 * hidden, *[12 * hidden * hidden] * layers, 128_000 * hidden), 2 * hidden, 2)
    return Profile(
        "large",
        {},
        dict.fromkeys((1, 2, 8), 2048),
        blocks=("embed", *["layer"] * layers, "head"),
        pieces={StageKind(tp): pieces(tp) for tp in (1, 2, 8)},
        device=PricedDevice("large", 80e9, 2),
        sizes=sizes,
        update=(1e-5, 1e-11),
        commit_s=1e-4,
    )


def simulated(text: str, ranks: int, layers: int, count: int) -> Sized:
    """Simulate an iteration of micro-batches of drawn lengths."""
    node = Node("gpu", 8, Interconnect(450e9, 5e-6), Interconnect(50e9, 1e-5), count=ranks // 8, cards=8)
    costs = hg.Costs(big_profile(layers), Cluster.of({"gpu": DeviceType(1e15, 80 * 10**9, 3e12)}, (node,)))
    strategy = hg.Strategy.parse(text, layers=layers)
    draw, pipelines = random.Random(0), len(strategy.pipelines)
    lengths = tuple(draw.randint(500, 4000) for _ in range(count * pipelines))
    micro_batches = tuple(tuple((p * count + m,) for m in range(count)) for p in range(pipelines))
    began, cpu = time.perf_counter(), time.process_time()
    timeline = hg.simulate(costs, strategy, hg.Assignment(micro_batches, lengths))
    seconds = timeline.seconds
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Sized(time.perf_counter() - began, time.process_time() - cpu, most, seconds)


def print_sizes() -> None:
    """Print what large simulations take."""
    table = Printed(title="simulations, lowering and pricing included", title_justify="left")
    for heading in (
        "strategy",
        "ranks x layers x micro-batches",
        "wall s",
        "CPU s",
        "target s",
        "memory MB (target 2000)",
    ):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    simulated(*SIZES[0][:4])  # what is imported and cached first is not counted
    for text, ranks, layers, count, target in SIZES:
        found = simulated(text, ranks, layers, count)
        sizes = f"{ranks} x {layers} x {count}"
        table.add_row(text, sizes, f"{found.wall:.2f}", f"{found.cpu:.2f}", str(target), f"{found.megabytes:.0f}")
    Console().print(table)


def print_overlap(constants: Path, lengths: Path) -> None:
    """Print what pull and push add to iterations of the paper's Table 1, published and simulated."""
    from benchmarks.published import llamas, overlap, paper_grid

    published = llamas.read_profiles(constants)[paper_grid.CASE.model]
    quantiles = json.loads(lengths.read_text(encoding="utf-8"))[paper_grid.CASE.data]
    Console(width=150).print(overlap.table(overlap.found(published, quantiles, OVERLAPPED), OVERLAPPED))


# Assigning.


def drawn(seed: int) -> tuple[list[PipelineCost], list[int]]:
    """Draw 1 to 3 pipelines of 1 to 4 stages, half of them uneven with links, and 2 to 7 sequences.

    Attention is from a hundredth of a typical sequence's time to all of it, a micro-batch has no fixed cost, a small
    one or a large one; and MaxLen holds anything from one sequence to all.
    """
    random = np.random.default_rng([339, seed])
    kinds = []
    for k in range(int(random.integers(1, 4))):
        stages = int(random.integers(1, 5))
        limit = 4000 if k == 0 else int(random.integers(500, 4000))
        costs = Constants(
            10 ** random.uniform(-9, -6.5), 10 ** random.uniform(-5, -3.5), float(random.choice([0, 0.01, 0.1]))
        )
        useful = int(random.integers(1, limit // 2))
        parts: tuple[StageCost, ...] = ()
        if random.random() < 0.5:
            rates = random.uniform(0.5, 1, stages)
            hop = NeighborMessages((Interconnect(float(10 ** random.uniform(8, 10)), 1e-4),), 8192)
            hops = [hop] * (stages - 1) + [None]
            parts = tuple(
                StageCost((((r / 3, costs),),), (((2 * r / 3, costs),),), ahead=h, back=h)
                for r, h in zip((rates / rates.max()).tolist(), hops, strict=True)
            )
        kinds.append(PipelineCost(costs.a, costs.b, costs.c, stages, limit, useful, 1, parts))
    pipelines = [kinds[0], *(kinds[int(random.integers(len(kinds)))] for _ in range(int(random.integers(0, 3))))]
    tokens = random.lognormal(np.log(random.uniform(200, 1500)), 1.0, int(random.integers(2, 8)))
    return pipelines, np.clip(tokens, 1, 4000).astype(int).tolist()


def print_assign() -> None:
    """Print how far above the best of all assignments those of drawn mini-batches end."""
    from tests.planner.every_assignment import exact_assignment

    envelope: list[float] = []
    excess: list[float] = []
    spent = 0.0
    for seed in range(-1, DRAWN):  # the first is not counted: it compiles
        pipelines, lengths = drawn(abs(seed))
        best = exact_assignment(pipelines, lengths)[0]
        before = enveloped(bounded_pipelines(pipelines, lengths)).seconds
        began = time.process_time()
        found = assign_pipelines(pipelines, lengths)
        if seed >= 0:
            spent += time.process_time() - began
            envelope.append(before / best - 1)
            excess.append(found.seconds / best - 1)
    table = Printed(title=f"assign above the best of all assignments, {DRAWN} drawn cases", title_justify="left")
    for heading in ("", "worst", "mean", "above 2 %"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for name, each in (("by the envelope alone", envelope), ("by the schedule", excess)):
        over = f"{sum(e > 0.02 for e in each)} of {len(each)}"
        table.add_row(name, f"{max(each):.3%}", f"{fmean(each):.4%}", over)
    table.add_row("target", "2 %", "0.1 %", "")
    Console().print(table)
    print(f"{1e3 * spent / DRAWN:.1f} ms CPU each")


def main() -> None:
    """Print the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="where the folder sailor and the constants are"
    )
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the part predicted")
    parser.add_argument("--rounds", type=int, default=5, help="of the part predicted")
    parser.add_argument("--json", type=Path, help="write what the part predicted found to this file")
    chosen = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "clusters": lambda: print_clusters_of(chosen.data / "sailor"),
        "sizes": print_sizes,
        "overlap": lambda: _overlap(chosen.data),
        "assign": print_assign,
        "predicted": lambda: _predicted(chosen.rounds, chosen.device, chosen.json),
    }
    for name in PARTS:
        if chosen.only in (None, name):
            parts[name]()


def _predicted(rounds: int, device: str, path: Path | None) -> None:
    from benchmarks.predicted import print_predicted  # which imports torch

    print_predicted(rounds, device, path=path)


def print_clusters_of(folder: Path) -> None:
    """Print the clusters' table and the pairs of plans that are ranked right, where the data is."""
    if (folder / "measured_runs.json").exists():
        print_clusters(folder)
    else:
        print(f"clusters skipped: {folder} has no measured_runs.json; give the folder above it with --data")


def _overlap(folder: Path) -> None:
    constants, lengths = folder / "hydraulis_profiles.json", folder / "length_distributions.json"
    if constants.exists() and lengths.exists():
        print_overlap(constants, lengths)
    else:
        print(f"overlap skipped: {constants} or {lengths} is not there; give their folder with --data")


if __name__ == "__main__":
    main()
