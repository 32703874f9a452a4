"""Predicted beside published: training runs of other systems, priced by this project's costs from datasheets.

    python benchmarks/published_runs.py              # the table and the errors
    python benchmarks/published_runs.py --only BS    # runs whose name contains this
    python benchmarks/published_runs.py --fit        # fit the constants again

The runs are read from ../shared/data/published/runs.json: sizes, clusters, strategies and published seconds, each with
its source. The file is not part of the project; without it, the benchmark skips. Constants of
`hydragraph.cost.datasheet` and `hydragraph.spec.known_devices` were fitted on a third of the runs by `--fit`, and the
errors of the others are printed apart.

Some systems differ from hydragraph in what they compute. `Otherwise` lists the differences. Each is priced by the
formula of the system's own paper or source, without a fitted constant:

    scores        attention of 2021 and 2022 wrote the matrix of scores to memory, and computed both of its triangles
                  (Korthikanti et al. 2022, section 4.1): per head and pair of tokens 2 bytes are moved 6.5 times
                  forward and 9.5 times backward (a dropout mask counts as half)
    first flash   the first FlashAttention reaches 25 to 40 % of an A100's peak, the second 50 to 73 % (Dao 2023): about
                  half. llm-foundry's runs of 2023 used the first
    again         selective recomputation runs this attention again in the backward (ibid., section 5)
    interleaved   v stages on each device: the bubble (p - 1) t of a pipeline is divided by v (Narayanan et al. 2021,
                  section 2.2)
    overlapped    a tensor-parallel collective is cut into t pieces, one for each rank; all but the first overlap with
                  the products of the other pieces (Transformer Engine's user buffers)
    sums wait     Megatron-LM of 2021, which BLOOM and AMP used, computes weight gradients after the backward's sums
    DeepSpeed     BLOOM and AMP ran DeepSpeed: messages and reductions overlap with nothing (published/deepspeed.py)
    eager         AMP launched kernels one by one, so that a layer's forward takes at least the 4.16 ms that its authors
                  measured where GPUs have least to compute (4.52 ms on four V100s, less 0.36 ms of sums), and its
                  backward twice as long; and the attention mask travels with hidden states
    context       c ranks that share each sequence's tokens compute as much as c ranks with whole sequences
    budget        torchtitan's selective recomputation saves every second product: `recompute: 0.5`

AMP's authors also measured forwards on one sequence (src/known_cost in their repository). The runs on mixed GPUs are
priced a second time with these times, and the result is printed apart from all errors: what a layer takes longer than
predicted is added to every micro-batch, and twice to its backward; what is faster is scaled.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.optimize import least_squares

import hydragraph as hg
from benchmarks.published.deepspeed import DEEPSPEED, deepspeed_s
from hydragraph.cost import datasheet as roofline
from hydragraph.cost.block_pieces import BlockPiece
from hydragraph.cost.compiled_blocks import CompiledBlocks
from hydragraph.cost.costs import Costs
from hydragraph.cost.curves import LengthSums
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.pricing import micro_batches_of
from hydragraph.ir.program import Program
from hydragraph.passes.variants import Variants
from hydragraph.report.simulation_price import price
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from hydragraph.spec.known_devices import KNOWN
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy import Strategy

DATA = Path(__file__).parents[1] / ".." / "shared" / "data" / "published" / "runs.json"
# Datasheets whose fractions are fitted, by GPU of the runs. torchtitan's H100s were limited to 500 W of their 700 W.
GPUS = {"a100": "a100-80gb", "h100": "h100-sxm", "h100_hbm2e": "h100-96gb"}
FITTED_RANKS = 1100  # the constants were not fitted on larger runs, whose simulation takes a minute or more
FIRST_FLASH = (0.25 + 0.40) / (0.50 + 0.73)
# Beginnings of the names of runs of 2021 and 2022, before attention was fused.
BEFORE_FUSED = ("K22", "N21", "BS", "AMP")
BEFORE_OVERLAP = ("N21", "BS", "AMP")  # whose sums wait
ON_DEEPSPEED = ("BS", "AMP")
# AMP's measured milliseconds of forwards of a layer and of the head with its loss, on a sequence of 1024 tokens, by GPU
# and tensor-parallel degree.
EAGER_TOKENS = 1024
LAYER_MS = {"v100": {1: 3.92, 2: 5.24, 4: 4.52}, "t4": {1: 5.47, 2: 5.96, 4: 5.58}}
HEAD_MS = {"v100": {1: 3.33, 2: 1.74, 4: 0.95}, "t4": {1: 4.56, 2: 2.01, 4: 1.07}}
LAUNCHED_S = 4.16e-3
MASK_BYTES = 2 * EAGER_TOKENS**2


@dataclass(frozen=True)
class Otherwise:
    """Differences between a run's system and hydragraph; the top of this file lists their formulas.

    Attributes:
        scores: attention writes its scores to memory.
        first_flash: attention is the first FlashAttention.
        again: its backward computes attention again.
        interleaved: stages on each device.
        overlapped: tensor-parallel collectives overlap with products.
        sums_wait: the backward's sums do not overlap with weight gradients.
        deepspeed: the runtime is DeepSpeed.
        eager: kernels are launched one by one, which takes LAUNCHED_S per layer, and the attention mask travels.
        measured: layers take the times that AMP's authors measured; no run has this unless asked.
        context: ranks that share a sequence and are counted as tensor parallel in the file.
        budget: memory budget of recomputation, or 0.
        streamed: weights are gathered for each block (ZeRO-3).
    """

    scores: bool = False
    first_flash: bool = False
    again: bool = False
    interleaved: int = 1
    overlapped: bool = False
    sums_wait: bool = False
    deepspeed: bool = False
    eager: bool = False
    measured: bool = False
    context: int = 1
    budget: float = 0.0
    streamed: bool = False

    @staticmethod
    def of(record: Mapping[str, Any]) -> Otherwise:
        """Read the remarks of a record."""
        said = record["cannot"]
        scores = record["id"].startswith(BEFORE_FUSED)
        interleaved = re.search(r"interleaved x(\d+)", said)
        context = re.search(r"context parallel (\d+) \(priced as tp", said)
        selective = "selective recomputation" in said
        return Otherwise(
            scores,
            first_flash=record["id"].startswith("MPT"),
            again=scores and selective,
            interleaved=int(interleaved[1]) if interleaved else 1,
            overlapped=bool(re.search(r"tp (and dp )?overlap", said)),
            sums_wait=record["tp"] > 1 and record["id"].startswith(BEFORE_OVERLAP),
            deepspeed=record["id"].startswith(ON_DEEPSPEED),
            eager=record["id"].startswith("AMP"),
            context=int(context[1]) if context else 1,
            budget=0.5 if selective and not scores else 0.0,
            streamed="ZeRO-3" in said,
        )

    def __str__(self) -> str:
        words = {
            "scores in memory": self.scores,
            "first FlashAttention": self.first_flash,
            "attention again": self.again,
            f"interleaved x{self.interleaved}": self.interleaved > 1,
            "tp overlapped": self.overlapped,
            "sums wait": self.sums_wait,
            "DeepSpeed": self.deepspeed,
            "eager": self.eager,
            f"context parallel {self.context}": self.context > 1,
            f"recompute {self.budget}": self.budget > 0,
            "streamed (ZeRO-3)": self.streamed,
        }
        return ", ".join(word for word, holds in words.items() if holds)

    def seconds(self, costs: Costs, strategy: Strategy, assignment: Assignment) -> float:
        """Return the seconds of an iteration on this system's runtime."""
        if not self.deepspeed:
            return price(costs, strategy, assignment).seconds
        stack = replace(DEEPSPEED, mask_bytes=MASK_BYTES if self.eager else 0)
        return deepspeed_s(costs, strategy, assignment, stack)

    def price(self, profile: Profile, cluster: Cluster, heads: int, lengths: Sequence[int]) -> Profile:
        """Return a datasheet's profile for micro-batches of these lengths, with this system's kernels."""

        def measured_s(type_: str, kind: StageKind, layer: bool, piece: BlockPiece, hidden_bytes: int) -> float:
            ranks = [rank for rank in range(len(cluster.devices)) if cluster.type_of(rank) == type_][: kind.tp]
            sums_s = sum(
                2 * piece.reduced[0] * cluster.link(a, b).seconds(EAGER_TOKENS * hidden_bytes / kind.tp)
                for a, b in pairwise(ranks)
            )
            return (LAYER_MS if layer else HEAD_MS)[type_][kind.tp] / 1e3 - sums_s

        def changed(type_: str, kind: StageKind, piece: BlockPiece, hidden_bytes: int) -> BlockPiece:
            bytes_per_s = cluster.types[type_].memory_bytes_per_s
            forward = piece.forward
            backward = piece.backward
            if self.first_flash:
                forward, backward = (replace(c, a=c.a / FIRST_FLASH) for c in (forward, backward))
            if self.scores and forward.a > 0:
                moved_s = 2 * heads / kind.tp / (bytes_per_s * roofline.ROOFLINE.memory)
                first = 2 * forward.a + 6.5 * moved_s
                second = 2 * (backward.a - kind.recompute * forward.a) + 9.5 * moved_s
                second += first * (kind.recompute or self.again)
                forward, backward = replace(forward, a=first), replace(backward, a=second)
            if self.measured and forward.b > 0:
                found, own = (
                    measured_s(type_, kind, forward.a > 0, piece, hidden_bytes),
                    forward.at(LengthSums([EAGER_TOKENS])),
                )
                forward, backward = (c.times(min(1.0, found / own)) for c in (forward, backward))
                forward, backward = (
                    replace(c, c=c.c + times * max(0.0, found - own)) for times, c in ((1, forward), (2, backward))
                )
            if self.eager and forward.a > 0:
                forward, backward = (
                    replace(c, c=c.c + max(0.0, least_s - c.at(LengthSums(lengths))))
                    for c, least_s in ((forward, LAUNCHED_S), (backward, 2 * LAUNCHED_S))
                )
            exposed = kind.tp if self.overlapped else 1
            reduced = (piece.reduced[0] / exposed, piece.reduced[1] / exposed)
            return replace(
                piece,
                forward=forward,
                backward=backward,
                reduced=reduced,
                during_sums=() if self.sums_wait or self.overlapped or self.context > 1 else piece.during_sums,
            )

        def of(each: Profile) -> Profile:
            assert each.sizes is not None
            hidden_bytes = each.sizes.hidden_bytes
            pieces = {
                kind: {template: changed(each.type, kind, piece, hidden_bytes) for template, piece in templates.items()}
                for kind, templates in each.pieces.items()
            }
            return replace(each, pieces=pieces, others=tuple(map(of, each.others)))

        return of(profile)


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        id: its name in the file; `kind` says what it is counted with.
        gpu: name of its cluster.
        gpus: number of GPUs.
        model: name of its model.
        seq: tokens of each sequence.
        tp, pp, dp: degrees.
        micro_batch, global_batch: sequences.
        seconds: published time of an iteration.
        split: layers of each stage; None: equal.
        peak_bytes: published peak memory of a GPU; None: not published.
    """

    id: str
    gpu: str
    gpus: int
    model: str
    seq: int
    tp: int
    pp: int
    dp: int
    micro_batch: int
    global_batch: int
    seconds: float
    recompute: bool | float
    sequence_parallel: bool
    split: tuple[int, ...] | None
    otherwise: Otherwise
    peak_bytes: float | None

    @staticmethod
    def of(record: Mapping[str, Any]) -> Run:
        """Read a run of the file."""
        names = ("id", "gpu", "gpus", "model", "seq", "pp", "micro_batch", "global_batch")
        memory = record["published_mem_gb"]
        otherwise = Otherwise.of(record)
        context = otherwise.context
        split: tuple[int, ...] = tuple(record["split"] or ())
        if otherwise.eager and len(split) > 1:
            # AMP divides 30 entries, of which 2 to 25 are layers (GPT2ModelPipe); the file counts 3 to 26.
            split = (split[0] + 1, *split[1:-1], split[-1] - 1)
        return Run(
            **{name: record[name] for name in names},
            tp=record["tp"] // context,
            dp=record["dp"] * context,
            seconds=record["published_s"],
            recompute=otherwise.budget or record["recompute"],
            sequence_parallel=record["sequence_parallel"] and record["tp"] > context,
            split=split or None,
            otherwise=otherwise,
            peak_bytes=None if memory is None else memory * 1e9,
        )

    def strategy(self, layers: int) -> Strategy:
        """Return equal pipelines over consecutive ranks: of each stage, those of all pipelines are neighbours."""
        counts = self.split or tuple(layers // self.pp + (i < layers % self.pp) for i in range(self.pp))
        pipelines = []
        for p in range(self.dp):
            stages = []
            for s, count in enumerate(counts):
                first = (s * self.dp + p) * self.tp
                devices = tuple(range(first, first + self.tp))
                stages.append(
                    Stage(
                        devices,
                        count,
                        sequence_parallel=self.sequence_parallel,
                        recompute=self.recompute,
                        stream=self.otherwise.streamed,
                    )
                )
            pipelines.append(Pipeline(tuple(stages)))
        return Strategy(tuple(pipelines))

    @property
    def count(self) -> int:
        """Micro-batches of each pipeline."""
        return self.global_batch // self.dp // self.micro_batch

    def assignment(self, count: int) -> Assignment:
        """Return `count` micro-batches of equal sequences for each pipeline."""
        numbers = iter(range(self.dp * count * self.micro_batch))
        pipelines = tuple(
            tuple(tuple(next(numbers) for _ in range(self.micro_batch)) for _ in range(count)) for _ in range(self.dp)
        )
        return Assignment(pipelines, (self.seq,) * (self.dp * count * self.micro_batch))


@dataclass(frozen=True)
class Priced:
    """A run with what is predicted."""

    run: Run
    seconds: float
    peak_bytes: float
    took_s: float = field(default=0.0, compare=False)

    @property
    def error(self) -> float:
        """Predicted over published seconds, less 1."""
        return self.seconds / self.run.seconds - 1


def cluster_of(name: str, gpus: int, data: Mapping[str, Any]) -> Cluster:
    """Return a cluster of the file, with as many equal nodes as a run has, or its own nodes."""
    if name in data["mixed_clusters"]:
        records = data["mixed_clusters"][name]
        types = {
            r["type"]: DeviceType(r["flops_per_s"], int(r["memory_bytes"]), r["memory_bytes_per_s"]) for r in records
        }
        nodes = (
            Node(r["type"], r["devices_per_node"], Interconnect(**r["inner"]), Interconnect(**r["outer"]), r["count"])
            for r in records
        )
        return Cluster.of(types, tuple(nodes))
    record = data["clusters"][name]
    device = DeviceType(record["flops_per_s"], int(record["memory_bytes"]), record["memory_bytes_per_s"])
    inner, outer = (Interconnect(**record[key]) for key in ("inner", "outer"))
    each = min(gpus, record["devices_per_node"])
    node = Node(name, each, inner, outer, gpus // each, min(each, record["cards"]))
    return Cluster.of({name: device}, (node,))


@functools.cache
def program_of(architecture: str, config: str) -> Program:
    """Return the captured program of a model with these settings, without weights."""
    kind = getattr(transformers, architecture)
    with torch.device("meta"):
        model = kind(kind.config_class(**json.loads(config)))
    return hg.capture(model, dtype=torch.bfloat16, check="off")


@functools.cache
def variants_of(program: Program) -> Variants:
    """Return a program's compiled blocks."""
    return Variants(program)


def priced(run: Run, data: Mapping[str, Any], memory: bool = True) -> Priced:
    """Simulate a run's iteration with state where it is used.

    Once the pipelines are full, each further micro-batch adds the same time. Long iterations are therefore extrapolated
    from two shorter ones.

    Args:
        memory: also predict its peak, if that is published.
    """
    began = time.perf_counter()
    model = data["models"][run.model]
    program = program_of(model["architecture"], json.dumps(model["config"], sort_keys=True))
    cluster = cluster_of(run.gpu, run.gpus, data)
    memory = memory and run.peak_bytes is not None
    profile = roofline.datasheet(
        program, cluster, degrees=(run.tp,), compiled=variants_of(program).get if memory else None
    )
    costs = Costs(
        run.otherwise.price(profile, cluster, max(program.heads), [run.seq] * run.micro_batch),
        cluster,
        home=hg.Home.parse("auto"),
        blocks=CompiledBlocks(program, variants_of(program).get) if run.otherwise.budget else None,
    )
    strategy = run.strategy(program.layers)
    counts = sorted({min(run.count, run.pp + 2), min(run.count, 2 * run.pp + 2)})
    took = [run.otherwise.seconds(costs, strategy, run.assignment(count)) for count in counts]
    seconds = took[-1]
    if len(counts) > 1:
        each = (took[-1] - took[0]) / (counts[-1] - counts[0])
        seconds += (run.count - counts[-1]) * each
        seconds -= (run.pp - 1) * each * (1 - 1 / run.otherwise.interleaved)
    peak = 0.0
    if memory:
        placed, batches = costs.of_strategies(strategy), micro_batches_of(strategy, run.assignment(counts[-1]))
        lasts = [stage.devices[-1] for stage in strategy.pipelines[0].stages]  # the last rank holds the larger part
        peak = max(placed.walk(strategy, batches, rank).peak().total for rank in lasts)
    return Priced(run, seconds, peak, time.perf_counter() - began)


def third_of(runs: Iterable[Run]) -> frozenset[str]:
    """Return every third run on A100s and on H100s, with and without pipelines, in the file's order, unless larger."""
    seen: Counter[tuple[str, bool]] = Counter()
    chosen = set()
    for run in runs:
        kind = (run.gpu[:4], run.pp > 1)
        seen[kind] += 1
        if seen[kind] % 3 == 0 and not run.otherwise.eager and run.gpus <= FITTED_RANKS:
            chosen.add(run.id)
    return frozenset(chosen)


def fitted(runs: Sequence[Run], data: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the constants with the least squared errors on some runs: `Roofline.half` and `reached` by GPU."""

    @functools.cache
    def error(run: Run, half: float, fraction: float) -> float:
        changed = replace(roofline.ROOFLINE, half=half)
        sheet = replace(KNOWN[GPUS["a100"]], reached=fraction)
        with patch.multiple(roofline, ROOFLINE=changed, known=lambda *_: sheet):
            return math.log(priced(run, data, memory=False).seconds / run.seconds)

    start = {"half": roofline.ROOFLINE.half} | {name: KNOWN[name].reached for name in GPUS.values()}

    def errors(factors: NDArray[np.float64]) -> list[float]:
        values = dict(zip(start, np.round(factors * list(start.values()), 6).tolist(), strict=True))
        found = [error(run, values["half"], values[GPUS.get(run.gpu) or GPUS[run.gpu[:4]]]) for run in runs]
        print(values, f"mean |error| {fmean(map(abs, found)):.3f}", file=sys.stderr, flush=True)
        return found

    factors = least_squares(errors, np.ones(len(start)), diff_step=0.05, max_nfev=3).x
    return {name: value * factor for (name, value), factor in zip(start.items(), factors.tolist(), strict=True)}


FAMILIES = {"a100": "on A100s", "h100": "on H100s", "amp_mixed": "on V100s mixed with T4s", "amp_t4": "on T4s"}
SIZES = ("on 1 to 8 GPUs", "on more GPUs")


def kinds_of(run: Run) -> tuple[str, ...]:
    """Return the kinds of runs that a run is counted with, as in `hydragraph.cost.published_errors.PUBLISHED`."""
    how = "with pipelines" if run.pp > 1 else "without pipelines"
    (family,) = (words for name, words in FAMILIES.items() if run.gpu.startswith(name))
    return ("all", how, family, f"{family} {how}", SIZES[run.gpus > 8])


def ranks(values: Sequence[float]) -> list[int]:
    """Return the place of each value in ascending order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def rank_correlation(found: Sequence[Priced]) -> float:
    """Return Spearman's correlation of predicted and published seconds."""
    a, b = ranks([p.seconds for p in found]), ranks([p.run.seconds for p in found])
    n = len(found)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / (n * (n * n - 1))


def summary(found: Iterable[Priced], third: frozenset[str]) -> Table:
    """Return the errors by kind of run, of those that the constants were not fitted on and of the others."""
    title = "predicted seconds against published ones"
    table = Table("runs", "not fitted", "mean |error|", "bias", "largest", "fitted", "mean |error|", title=title)
    every = [(kinds_of(p.run), p) for p in found]
    hows = ("without pipelines", "with pipelines")
    for name in ("all", *hows, *(f"{f} {how}".strip() for f in FAMILIES.values() for how in ("", *hows)), *SIZES):
        errors, used = (
            [p.error for kinds, p in every if name in kinds and (p.run.id in third) == fitted]
            for fitted in (False, True)
        )
        if errors:
            row = [str(len(errors)), f"{fmean(map(abs, errors)):.1%}", f"{fmean(errors):+.1%}"]
            row += [f"{max(errors, key=abs):+.0%}", str(len(used)), f"{fmean(map(abs, used)):.1%}" if used else ""]
            table.add_row(name, *row)
    return table


def main() -> None:
    """Price the runs and print the table and the errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--fit", action="store_true", help="fit the constants on a third of the runs (half an hour)")
    chosen = parser.parse_args()
    if not DATA.exists():
        print(f"{DATA.resolve()} does not exist: skipped, because the published runs are not part of the project")
        return
    data = json.loads(DATA.read_text())
    runs = [Run.of(record) for record in data["runs"]]
    known = [run for run in runs if chosen.only in run.id]
    third = third_of(runs)
    if chosen.fit:
        for name, value in fitted([run for run in known if run.id in third], data).items():
            print(f"{name}: {value:.3g}")
        return
    console = Console(width=150)
    table = Table("run", "GPUs", "published s", "predicted s", "error", "memory", "error", "priced otherwise", title="")
    found = []
    for run in track(known, "pricing", console=Console(stderr=True)):
        each = priced(run, data)
        found.append(each)
        print(
            f"{run.id}: {each.seconds:.4g} s, {each.error:+.0%}, took {each.took_s:.0f} s", file=sys.stderr, flush=True
        )
        memory = "" if run.peak_bytes is None else f"{each.peak_bytes / run.peak_bytes - 1:+.0%}"
        gb = f"{each.peak_bytes / 1e9:.0f} GB" if memory else ""
        table.add_row(
            run.id + " *" * (run.id in third),
            str(run.gpus),
            f"{run.seconds:.3g}",
            f"{each.seconds:.3g}",
            f"{each.error:+.0%}",
            gb,
            memory,
            str(run.otherwise),
        )
    console.print(table)
    console.print("*: the constants were fitted on these runs")
    console.print(summary(found, third))
    peaks = [abs(p.peak_bytes / p.run.peak_bytes - 1) for p in found if p.run.peak_bytes is not None]
    if peaks:
        console.print(f"memory: mean |error| {fmean(peaks):.1%} of {len(peaks)} runs, at most {max(peaks):.0%}")
    mixed = [p for p in found if p.run.gpu == "amp_mixed"]
    if len(mixed) > 1:
        timed = [priced(replace(p.run, otherwise=replace(p.run.otherwise, measured=True)), data) for p in mixed]
        for how, plans in (("", mixed), (" with the measured times of layers", timed)):
            console.print(
                f"plans on mixed GPUs{how}: mean |error| {fmean(abs(p.error) for p in plans):.1%}, rank correlation "
                f"{rank_correlation(plans):.2f}"
            )
    console.print(f"left out: {len(runs) - len(known)} runs")


if __name__ == "__main__":
    main()
