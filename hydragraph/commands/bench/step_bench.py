"""Benchmark of a training step, compared with Hugging Face models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from hydragraph.commands.bench.bench_models import LlamaShape, draw_sequences, mixed_lengths
from hydragraph.commands.bench.bench_table import BenchReport, PictureBar, Target
from hydragraph.commands.bench.device_ceiling import DeviceCeilings, measure_ceilings
from hydragraph.commands.bench.eager_baselines import Baseline, baselines
from hydragraph.commands.bench.interleaved_timing import WARM_UP, Side, alternate, peak_bytes
from hydragraph.commands.bench.link_measure import transfers
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.link_bytes import DIRECTIONS
from hydragraph.engine import api
from hydragraph.engine.executable import Executable
from hydragraph.ir.program import Program
from hydragraph.kernels.adamw import AdamW
from hydragraph.planner.quick_plan import assign
from hydragraph.spec.cluster import Cluster, Device, Interconnect
from hydragraph.spec.known_devices import Datasheet, sheet_of
from hydragraph.spec.strategy import Strategy
from hydragraph.train.model_flops import step_flops

COLUMNS = ("side", "ms", "tokens/s", "TFLOP/s", "MFU %", "peak MB", "loss", "gradient norm")
OURS = "hydragraph"
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative


@dataclass(frozen=True)
class StepSettings:
    """Settings of the benchmark, which computes in bf16 on CUDA and fp32 on the CPU."""

    shape: LlamaShape
    tokens: int
    longest: int
    rounds: int
    device: torch.device
    compiled: bool
    backend: str | None = None
    shortest: int = 64

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def sequences(self, turn: int) -> list[Tensor]:
        lengths = mixed_lengths(self.tokens, turn, self.longest, self.shortest)
        return draw_sequences(lengths, self.shape.vocabulary, turn)


@dataclass(frozen=True)
class SideResult:
    seconds: float
    peak_megabytes: float
    loss: float
    norm: float


def bench_step(settings: StepSettings, tell: Callable[[str], None] = lambda what: None) -> BenchReport:
    """Train a model on one rank with every implementation ("side") in turn.

    Raises:
        ValueError: a loss or gradient norm differs from the eager model's on packed batches.
    """
    ceilings = measure_ceilings(settings.device, settings.dtype)
    tell("building the model and compiling it")
    torch.manual_seed(0)
    model = settings.shape.build(settings.device)
    strategy = Strategy.parse("<tp1,pp1>", settings.shape.layers)
    exe = compile_ours(copy.deepcopy(model).cpu(), strategy, settings)
    build = partial(settings.shape.build, settings.device)
    others = baselines(model, build, strategy, settings.device, settings.dtype, settings.compiled)
    try:
        times, notes = _measure(exe, others, settings, tell)
        tell("pulls and pushes without computation")
        links: dict[str, Side] = {way: transfers(exe, strategy, way) for way in DIRECTIONS}
        seconds = alternate(links, settings.device, settings.rounds)
        linked = (seconds["pull"], seconds["push"])
    finally:
        exe.close()
    timed_rounds = range(WARM_UP, WARM_UP + settings.rounds)
    batches = [[len(s) for s in settings.sequences(turn)] for turn in timed_rounds]
    sheet = sheet_of(ceilings.device)
    if sheet is not None:
        predicted = fmean(predicted_seconds(exe.program, strategy, lengths, sheet) for lengths in batches)
        notes.append(
            f"The GPU's datasheet predicts {predicted * 1e3:.4g} ms for hydragraph's step, "
            f"{predicted / times[OURS].seconds - 1:+.0%} relative to the measured time."
        )
    flops = fmean(step_flops(exe.program, lengths) for lengths in batches)
    return _report(settings, ceilings, model, times, linked, flops, notes)


def predicted_seconds(program: Program, strategy: Strategy, lengths: Sequence[int], sheet: Datasheet) -> float:
    device = Device(sheet.flops_per_s, int(sheet.memory_bytes), sheet.memory_bytes_per_s)
    unused = Interconnect(1e12, 0.0)
    cluster = Cluster((device,), unused, unused)
    costs = Costs(datasheet(program, cluster, degrees=(1,)), cluster)
    return costs.simulate(strategy, assign(strategy, lengths)).seconds


def compile_ours(model: nn.Module, strategy: Strategy, settings: StepSettings) -> Executable:
    return api.compile(
        model,
        strategy,
        lambda named: AdamW(named, lr=1e-4),
        dtype=settings.dtype,
        device=settings.device,
        check="off",
        backend=settings.backend,
    )


def _measure(
    exe: Executable, others: Mapping[str, Baseline], settings: StepSettings, tell: Callable[[str], None]
) -> tuple[dict[str, SideResult], list[str]]:
    first = settings.sequences(0)
    tell("the first step of hydragraph")
    report = exe.step(first)
    # values: side -> loss and gradient norm of the first step.
    values = {OURS: (report.loss, report.grad_norm)}
    notes = []
    for name, other in others.items():
        tell(f"the first step: {name}")
        try:
            values[name] = other.checked(first)
        except RuntimeError as error:
            if not name.startswith("compiled"):
                raise
            notes.append(f"{name} was not measured: {str(error).splitlines()[0]}.")
    check_same(values, TOLERANCES[settings.dtype])
    sides: dict[str, Side] = {OURS: lambda turn: exe.step(settings.sequences(turn))}
    for name in values:
        if name != OURS:
            sides[name] = lambda turn, side=others[name]: side.step(settings.sequences(turn))
    tell("steps of hydragraph and its rivals in turn")
    # Sides run in turn, so changes of the clock frequency affect all.
    seconds = alternate(sides, settings.device, settings.rounds)
    peaks = {name: peak_bytes(lambda side=side: side(0), settings.device) for name, side in sides.items()}
    return {n: SideResult(seconds[n], peaks[n] / 1e6, *values[n]) for n in sides}, notes


def check_same(values: Mapping[str, tuple[float, float]], tolerance: float) -> None:
    expected = values["eager, packed"]
    for name, value in values.items():
        for what, a, b in zip(("loss", "gradient norm"), value, expected, strict=True):
            if not abs(a - b) <= tolerance * abs(b):
                raise ValueError(f"{name}: {what} is {a:.6g}, but {b:.6g} for the eager model on packed batches")


def _report(
    settings: StepSettings,
    ceilings: DeviceCeilings,
    model: nn.Module,
    sides: Mapping[str, SideResult],
    linked: tuple[float, float],
    flops: float,
    notes: Sequence[str],
) -> BenchReport:
    rows = []
    for name, side in sides.items():
        rate = flops / side.seconds
        mfu = 100 * rate / ceilings.peak_flops_per_s
        numbers = (side.seconds * 1e3, settings.tokens / side.seconds, rate / 1e12, mfu)
        rows.append((name, *numbers, side.peak_megabytes, side.loss, side.norm))
    count = sum(p.numel() for p in model.parameters())
    size = f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count / 1e6:.3g} M"
    title = f"Step of one rank, {size} parameters, {settings.tokens:,} tokens, on {ceilings.device}"
    share = 100 * sum(linked) / sides[OURS].seconds
    said = (
        f"Ceilings, measured in this run: {ceilings}. MFU is relative to {ceilings.peak_name}, and counts only the "
        "unmasked half of attention, without recomputation (step_flops).",
        f"Sequence lengths are {settings.shortest} to {settings.longest}, drawn again in every round. Times are "
        f"medians of {settings.rounds} rounds in which all sides run in turn. tokens/s does not count padding.",
        _precision(settings),
        f"Without computation, a pull takes {linked[0] * 1e3:.3g} ms and a push {linked[1] * 1e3:.3g} ms, "
        f"together {share:.2f} % of a step.",
        "torch.compile compiles every layer and the loss, not the model as one graph."
        if settings.compiled
        else "torch.compile was not measured: pass --compiled to measure it.",
    )
    bars = tuple(PictureBar("one step", name, settings.tokens / side.seconds) for name, side in sides.items())
    measured = settings.device.type == "cuda"
    targets = step_targets(sides, flops, share) if measured else step_targets({}, 0, None)
    return BenchReport(title, COLUMNS, tuple(rows), (*said, *notes), (), targets, bars, "tokens/s")


def _precision(settings: StepSettings) -> str:
    if settings.device.type == "cuda":
        return (
            "hydragraph computes in bf16 from fp32 master weights. The other sides have fp32 weights and autocast to "
            "bf16, so their hidden states between layers are fp32. All sides update with fused AdamW in fp32."
        )
    return "All sides compute in fp32 and update with AdamW."


def step_targets(sides: Mapping[str, SideResult], flops: float, share: float | None) -> tuple[Target, ...]:
    """Return the targets for one H200; `share` is the percentage of a step spent in pulls and pushes."""
    ratio = None
    mfu = None
    if OURS in sides:
        mfu = 100 * flops / sides[OURS].seconds / 989e12
        if "compiled, packed" in sides:
            ratio = sides["compiled, packed"].seconds / sides[OURS].seconds
    return (
        Target.at_least("training step, about 1 B parameters, packed: against torch.compile", 1.0, ratio, "{:.2f}x"),
        Target.at_least("training step: MFU, of 989 TFLOP/s", 45, mfu, "{:.1f} %"),
        Target.at_most("one rank: share of the step in pull and push", 2, share, "{:.2f} %"),
    )
