"""Predicted beside published: training runs of other systems, priced by this project's costs from datasheets.

    python benchmarks/published_runs.py              # the table and the errors
    python benchmarks/published_runs.py --only BS    # runs whose name contains this

The runs are read from ../shared/data/published/runs.json: sizes, clusters, strategies and published seconds, each with
its source. The file is not part of the project; without it, the benchmark skips. The constants of
`hydragraph.cost.datasheet` were adjusted by hand with these runs in view, so errors on other runs may be larger.

Some systems differ from hydragraph in what they compute. `Otherwise` lists the differences. Each is priced by the
formula of the system's own paper, without a fitted constant:

    scores        attention of 2021 and 2022 wrote the matrix of scores to memory, and computed both of its triangles
                  (Korthikanti et al. 2022, section 4.1): per head and pair of tokens 2 bytes are moved 6.5 times
                  forward and 9.5 times backward (a dropout mask counts as half)
    first flash   the first FlashAttention reaches 25 to 40 % of an A100's peak (Dao 2023, section 4.1), 0.72 of what
                  `cost.datasheet` assumes; llm-foundry's runs of 2023 used it
    again         selective recomputation runs this attention again in the backward (ibid., section 5)
    interleaved   v stages on each device: the bubble (p - 1) t of a pipeline is divided by v (Narayanan et al. 2021,
                  section 2.2)
    overlapped    a tensor-parallel collective is cut into t pieces, one for each rank; all but the first overlap with
                  the products of the other pieces (Transformer Engine's user buffers)
    sums wait     Megatron-LM of 2021, which BLOOM and AMP used, computes weight gradients after the backward's sums
    context       c ranks that share each sequence's tokens compute as much as c ranks with whole sequences
    budget        torchtitan's selective recomputation saves every second product: `recompute: 0.5`
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

import hydragraph as hg
from hydragraph.cost.block_pieces import BlockPiece
from hydragraph.cost.costs import Costs
from hydragraph.cost.curves import Constants
from hydragraph.cost.datasheet import ROOFLINE, datasheet
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.rank_memory import CompiledBlocks
from hydragraph.ir.program import Program
from hydragraph.passes.variants import Variants
from hydragraph.report.simulation_price import price
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, Device, DeviceType, Interconnect, Node
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy import Strategy

DATA = Path(__file__).parents[1] / ".." / "shared" / "data" / "published" / "runs.json"
MOST_RANKS = 1100  # larger runs take minutes to simulate each


FIRST_FLASH = 0.325 / (0.6 * 0.75)
# Beginnings of the names of runs of 2021 and 2022, before attention was fused.
BEFORE_FUSED = ("K22", "N21", "BS", "AMP")
BEFORE_OVERLAP = ("N21", "BS", "AMP")  # whose sums wait


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
            f"context parallel {self.context}": self.context > 1,
            f"recompute {self.budget}": self.budget > 0,
            "streamed (ZeRO-3)": self.streamed,
        }
        return ", ".join(word for word, holds in words.items() if holds)

    def price(self, profile: Profile, cluster: Cluster, heads: int) -> Profile:
        """Return a datasheet's profile with the attention and the collectives of this system."""

        def changed(kind: StageKind, piece: BlockPiece, bytes_per_s: float) -> BlockPiece:
            forward, backward = piece.parts(kind.recompute)
            assert isinstance(forward, Constants)
            assert isinstance(backward, Constants)
            if self.first_flash:
                forward, backward = (replace(c, a=c.a / FIRST_FLASH) for c in (forward, backward))
            if self.scores and forward.a > 0:
                moved_s = 2 * heads / kind.tp / (bytes_per_s * ROOFLINE.memory)
                first = 2 * forward.a + 6.5 * moved_s
                second = 2 * (backward.a - kind.recompute * forward.a) + 9.5 * moved_s
                second += first * (kind.recompute or self.again)
                forward, backward = replace(forward, a=first), replace(backward, a=second)
            exposed = kind.tp if self.overlapped else 1
            reduced = (piece.reduced[0] / exposed, piece.reduced[1] / exposed)
            return replace(
                piece,
                forward=forward,
                backward=backward,
                seconds=Constants.sum([(1, forward), (1, backward)]),
                reduced=reduced,  # type: ignore[arg-type]
                during_sums=() if self.sums_wait or self.overlapped or self.context > 1 else piece.during_sums,
            )

        def of(each: Profile) -> Profile:
            bytes_per_s = cluster.types[each.type].memory_bytes_per_s
            pieces = {
                kind: {template: changed(kind, piece, bytes_per_s) for template, piece in templates.items()}
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
        return Run(
            **{name: record[name] for name in names},
            tp=record["tp"] // context,
            dp=record["dp"] * context,
            seconds=record["published_s"],
            recompute=otherwise.budget or record["recompute"],
            sequence_parallel=record["sequence_parallel"] and record["tp"] > context,
            split=tuple(record["split"]) if record["split"] else None,
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
    device = Device(record["flops_per_s"], int(record["memory_bytes"]), record["memory_bytes_per_s"])
    each = min(gpus, record["devices_per_node"])
    return Cluster.homogeneous(
        gpus,
        device=device,
        within_node=Interconnect(**record["inner"]),
        between_nodes=Interconnect(**record["outer"]),
        ranks_per_node=each,
    )


@functools.cache
def program_of(architecture: str, config: str) -> Program:
    """Return the captured program of a model with these settings, without weights."""
    kind = getattr(transformers, architecture)
    with torch.device("meta"):
        model = kind(kind.config_class(**json.loads(config)))
    return hg.capture(model, dtype=torch.bfloat16, check="off")


def priced(run: Run, data: Mapping[str, Any]) -> Priced:
    """Simulate a run's iteration with state where it is used.

    Once the pipelines are full, each further micro-batch adds the same time. Long iterations are therefore extrapolated
    from two shorter ones.
    """
    began = time.perf_counter()
    model = data["models"][run.model]
    program = program_of(model["architecture"], json.dumps(model["config"], sort_keys=True))
    cluster = cluster_of(run.gpu, run.gpus, data)
    compiled = None if run.peak_bytes is None else Variants(program).get
    profile = datasheet(program, cluster, degrees=(run.tp,), compiled=compiled)
    costs = Costs(
        run.otherwise.price(profile, cluster, max(program.heads)),
        cluster,
        home=hg.Home.parse("auto"),
        blocks=CompiledBlocks(program, Variants(program).get) if run.otherwise.budget else None,
    )
    strategy = run.strategy(program.layers)
    counts = sorted({min(run.count, run.pp + 2), min(run.count, 2 * run.pp + 2)})
    took = [price(costs, strategy, run.assignment(count)).seconds for count in counts]
    seconds = took[-1]
    if len(counts) > 1:
        each = (took[-1] - took[0]) / (counts[-1] - counts[0])
        seconds += (run.count - counts[-1]) * each
        seconds -= (run.pp - 1) * each * (1 - 1 / run.otherwise.interleaved)
    peak = 0.0
    if run.peak_bytes is not None:
        peak = max(m.total for m in costs.of_strategies(strategy).memory(strategy, run.assignment(counts[-1])))
    return Priced(run, seconds, peak, time.perf_counter() - began)


KINDS = {
    "all": lambda run: True,
    "with pipelines": lambda run: run.pp > 1,
    "without pipelines": lambda run: run.pp == 1,
    "1 to 8 GPUs": lambda run: run.gpus <= 8,
    "more GPUs": lambda run: run.gpus > 8,
    "mixed GPUs": lambda run: run.gpu == "amp_mixed",
}


def ranks(values: Sequence[float]) -> list[int]:
    """Return the place of each value in ascending order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def rank_correlation(found: Sequence[Priced]) -> float:
    """Return Spearman's correlation of predicted and published seconds."""
    a, b = ranks([p.seconds for p in found]), ranks([p.run.seconds for p in found])
    n = len(found)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / (n * (n * n - 1))


def summary(found: Iterable[Priced], title: str) -> Table:
    """Return the errors by kind of run."""
    table = Table("runs", "number", "mean |error|", "bias", "largest", title=title, title_justify="left")
    every = list(found)
    for name, belongs in KINDS.items():
        errors = [p.error for p in every if belongs(p.run)]
        if errors:
            mean, worst = fmean(map(abs, errors)), max(errors, key=abs)
            table.add_row(name, str(len(errors)), f"{mean:.1%}", f"{fmean(errors):+.1%}", f"{worst:+.0%}")
    return table


def main() -> None:
    """Price the runs and print the table and the errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--most-ranks", type=int, default=MOST_RANKS, help="leave out runs on more GPUs")
    chosen = parser.parse_args()
    if not DATA.exists():
        print(f"{DATA.resolve()} does not exist: skipped, because the published runs are not part of the project")
        return
    data = json.loads(DATA.read_text())
    runs = [Run.of(record) for record in data["runs"]]
    known = [run for run in runs if chosen.only in run.id and run.gpus <= chosen.most_ranks]
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
            run.id,
            str(run.gpus),
            f"{run.seconds:.3g}",
            f"{each.seconds:.3g}",
            f"{each.error:+.0%}",
            gb,
            memory,
            str(run.otherwise),
        )
    console.print(table)
    console.print(summary(found, "predicted seconds against published ones"))
    mixed = [p for p in found if p.run.gpu == "amp_mixed"]
    if len(mixed) > 1:
        console.print(f"order of the plans on mixed GPUs: rank correlation {rank_correlation(mixed):.2f}")
    console.print(f"left out: {len(runs) - len(known)} runs, on more than {chosen.most_ranks} GPUs or not named")


if __name__ == "__main__":
    main()
