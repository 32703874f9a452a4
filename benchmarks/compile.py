"""How long compiling takes, and how much memory: each case in fresh processes, median of three, against its target.

    python benchmarks/compile.py

Models have the dimensions of Llama 7B and 70B on the meta device, so no weight exists. User seconds are printed next to
the wall clock because a busy machine stretches only the latter.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

DEGREES = (1, 2, 4, 8)
RUNS = 3


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a Llama."""

    hidden: int
    width: int
    heads: int
    kv_heads: int
    vocabulary: int
    layers: int


@dataclass(frozen=True)
class Case:
    """One measured case: its sizes, and its targets in seconds and bytes (None: no target)."""

    title: str
    sizes: Sizes
    seconds: float
    peak_bytes: float | None = None


LLAMA_7B = Sizes(4096, 11008, 32, 32, 32000, 32)
LLAMA_70B = Sizes(8192, 28672, 64, 8, 128256, 80)

CASES = {
    "7b": Case("capture and lower Llama 7B, tp 1 2 4 8", LLAMA_7B, 8.0, 1.5e9),
    "70b": Case("capture and lower Llama 70B, tp 1 2 4 8", LLAMA_70B, 10.0),
    "check": Case("first capture of Llama 7B, with its check", LLAMA_7B, 5.0, 1e9),
    "check 70b": Case("first capture of Llama 70B, with its check", LLAMA_70B, 5.0, 1e9),
    "rank": Case("one rank's program and links, 64 ranks, 32 layers", LLAMA_7B, 0.05),
}


@dataclass(frozen=True)
class Measured:
    """One run: wall clock and user seconds of what is measured, and the process's peak resident bytes."""

    seconds: float
    user_s: float
    peak_bytes: float


def measure(action: Callable[[], object]) -> Measured:
    """Run an action once."""
    before, user = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    action()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Measured(time.perf_counter() - before, usage.ru_utime - user, usage.ru_maxrss * 1024.0)


def compile_all(sizes: Sizes) -> Measured:
    """Capture a model and compile every template for rank 0 of each tensor-parallel degree."""
    from hydragraph.frontend.capture import capture
    from hydragraph.passes.differentiate import differentiate
    from hydragraph.passes.shard import shard
    from hydragraph.spec.stage_kind import StageKind, StagePart

    model = _llama(sizes)

    def action() -> None:
        program = capture(model)
        for block in {block.template: block for block in program.blocks}.values():
            template = program.templates[block.template]
            names = zip(template.parameters, block.parameters, strict=True)
            parameters = {local: program.parameters[name] for local, name in names}
            for part in (StagePart(StageKind(tp)) for tp in DEGREES):
                sharded = shard(template, parameters, part)
                differentiate(template, sharded, parameters, part, program.dtype)

    return measure(action)


def check_once(sizes: Sizes) -> Measured:
    """Capture a model and check it by numbers: what `hg.compile` does the first time that it meets a model."""
    from hydragraph.frontend.capture import capture
    from hydragraph.frontend.check.narrow_model import CheckedModel
    from hydragraph.frontend.check.numeric_check import check

    model = _llama(sizes)
    return measure(lambda: check(CheckedModel(model, capture(model))))


def one_rank(sizes: Sizes) -> Measured:
    """Build one rank's program and link tables for a strategy that it has not seen, on 64 ranks."""
    from hydragraph.ir.home_layout import HomeLayouts
    from hydragraph.ir.layout import GradientKind, propagation
    from hydragraph.ir.link import copy, reduce
    from hydragraph.ir.parameter import Bucket
    from hydragraph.ir.program_outline import Outline
    from hydragraph.passes.pipeline import rank_program
    from hydragraph.passes.place import place
    from hydragraph.spec.home import EQUAL
    from hydragraph.spec.strategy import Strategy

    ranks, rank, counts = 64, 17, [8, 8, 4, 4]
    buckets = _buckets(sizes)
    outline = Outline(tuple(b.blocks[0] for b in buckets), tuple((b.name, b.blocks) for b in buckets))
    strategy = Strategy.parse("<tp8,pp2> + <tp4,pp4> + 2*<tp2,pp8>", sizes.layers)
    homes = HomeLayouts(EQUAL, ranks).by_name(buckets)  # the same for every strategy

    def links(bucket: Bucket, stages: tuple[tuple[int, ...], ...]) -> None:
        target = propagation(bucket, stages, {p.name: GradientKind.REPLICA for p in bucket.parameters})
        copy(homes[bucket.name], target, rank)
        reduce(target, homes[bucket.name], rank)

    def action() -> None:
        rank_program(outline, strategy, counts, rank, ranks=ranks)
        holders = dict(place(outline, strategy, counts).holders)
        forms = {(bucket.form, holders[bucket.name]): bucket for bucket in buckets}  # layers of a stage share links
        for (_, stages), bucket in forms.items():
            links(bucket, stages)

    return measure(action)


def _llama(sizes: Sizes):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=sizes.hidden,
                intermediate_size=sizes.width,
                num_attention_heads=sizes.heads,
                num_key_value_heads=sizes.kv_heads,
                vocab_size=sizes.vocabulary,
                num_hidden_layers=sizes.layers,
            )
        )


def _buckets(sizes: Sizes):
    """Return a Llama's buckets with the rules that capture finds, without capturing one."""
    from hydragraph.ir.parameter import Bucket, Parameter, ShardRule

    hidden, size = sizes.hidden, sizes.hidden // sizes.heads
    shapes = {
        "q": ((hidden, hidden), ShardRule(0, (sizes.heads,), size, heads=True)),
        "k": ((size * sizes.kv_heads, hidden), ShardRule(0, (sizes.kv_heads,), size, heads=True)),
        "v": ((size * sizes.kv_heads, hidden), ShardRule(0, (sizes.kv_heads,), size, heads=True)),
        "o": ((hidden, hidden), ShardRule(1, (sizes.heads,), size, heads=True)),
        "gate": ((sizes.width, hidden), ShardRule(0, (sizes.width,))),
        "up": ((sizes.width, hidden), ShardRule(0, (sizes.width,))),
        "down": ((hidden, sizes.width), ShardRule(1, (sizes.width,))),
        "norm.0": ((hidden,), None),
        "norm.1": ((hidden,), None),
    }
    words = Parameter("words", (sizes.vocabulary, hidden), rule=ShardRule(0, (sizes.vocabulary,)))
    head = (Parameter("norm", (hidden,)), Parameter("head", words.shape, rule=words.rule))
    layers = (
        Bucket(f"layer.{i}", tuple(Parameter(f"{i}.{n}", s, rule=r) for n, (s, r) in shapes.items()), (f"layer.{i}",))
        for i in range(sizes.layers)
    )
    return [Bucket("embed", (words,), ("embed",)), *layers, Bucket("head", head, ("head",))]


def run_alone(name: str) -> Measured:
    """Measure a case in a process of its own, with an empty cache of programs and checks."""
    command = [sys.executable, "-W", "ignore", __file__, "--case", name]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def row(case: Case, runs: list[Measured]) -> str:
    """Format the medians of a case's runs beside its targets."""
    seconds, user, peak = (
        statistics.median(values) for values in zip(*((r.seconds, r.user_s, r.peak_bytes) for r in runs), strict=True)
    )
    met = seconds <= case.seconds and (case.peak_bytes is None or peak <= case.peak_bytes)
    memory = "-" if case.peak_bytes is None else f"{case.peak_bytes / 1e9:.2f} GB"
    return (
        f"{case.title:<52}{seconds:>9.3f} s{case.seconds:>9.3f} s{user:>9.3f} s{peak / 1e9:>9.2f} GB{memory:>10}"
        f"{'   met' if met else '   missed'}"
    )


def main() -> None:
    """Print the table, or measure one case (`--case`, used for the fresh processes)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="measure this case once and print it as JSON")
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES), help="the cases of the table")
    parser.add_argument("--runs", type=int, default=RUNS)
    chosen = parser.parse_args()
    if chosen.case:
        run = {"rank": one_rank, "check": check_once, "check 70b": check_once}.get(chosen.case, compile_all)
        print(json.dumps(run(CASES[chosen.case].sizes).__dict__))
        return
    print(f"{'':<52}{'wall':>11}{'target':>11}{'user':>11}{'peak':>12}{'target':>10}")
    for name in chosen.only:
        print(row(CASES[name], [run_alone(name) for _ in range(chosen.runs)]), flush=True)


if __name__ == "__main__":
    main()
