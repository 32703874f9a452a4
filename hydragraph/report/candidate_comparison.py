"""Comparison of a plan's candidates, and of their times' parts (`candidate_comparison_text.MEANING`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from statistics import fmean

import numpy as np

from hydragraph.cost.measured_profile import PipelineCost, Profile, Scheme
from hydragraph.cost.schemes import Schemes, schemes_of
from hydragraph.planner.assignment.assign_mini_batch import PlannedAssignment, assign_pipelines
from hydragraph.planner.assignment.best_candidate import Choice, compare
from hydragraph.planner.generators.hydraulis import propose
from hydragraph.planner.improve_schemes import homogeneous, refine
from hydragraph.spec.training_workload import check_sequences

Strategy = tuple[Scheme, ...]

# Number of best candidates, and of best homogeneous candidates, to evaluate.
SHOWN = 10
HOMOGENEOUS_SHOWN = 3
# Mini-batches on which candidates are improved.
TUNING = 8
# Candidates whose pull and push are simulated.
SIMULATED = 24
REASON = {
    "work": "more device time for the same sequences",
    "waiting": "waiting for the slowest pipeline",
    "fixed": "fixed cost of more micro-batches",
    "bubble": "pipeline bubble",
    "sync": "pull, push and update",
}


@dataclass(frozen=True)
class TimeParts:
    """Seconds of an iteration, by part."""

    work: float
    waiting: float
    fixed: float
    bubble: float
    sync: float

    @property
    def seconds(self) -> float:
        return float(sum(astuple(self)))


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a device in a scheme's first stage, which is the fullest, for a micro-batch of MaxLen tokens.

    Attributes:
        devices: number of the strategy's devices, which share the optimizer state.
        states: bytes of the state; None, like the fields below, if `max_len` was measured.
        per_token: bytes of activations per token.
        reserved: bytes that must stay free.
        device: bytes of the device's memory.
    """

    scheme: Scheme
    devices: int
    max_len: int
    util_len: int
    states: float | None
    per_token: float | None
    reserved: float | None
    device: float | None


@dataclass(frozen=True)
class ComparedCandidate:
    """A strategy, as one scheme per pipeline, and its results.

    Attributes:
        memory: memory use of each distinct scheme.
        seconds: mean over mini-batches, or `bound` if they were not assigned; infinite if one does not fit.
        alone: mean seconds of mini-batches' longest sequences alone, on the fastest pipeline.
        wins: number of mini-batches on which this candidate is the fastest.
    """

    strategy: Strategy
    memory: tuple[MemoryUse, ...]
    seconds: float
    bound: float
    alone: float
    assigned: bool
    fits: int
    wins: int
    parts: TimeParts | None
    why: str

    @property
    def homogeneous(self) -> bool:
        return len(set(self.strategy)) == 1

    @property
    def devices(self) -> int:
        return sum(tp * pp for tp, pp in self.strategy)

    @property
    def max_len(self) -> int:
        return max(use.max_len for use in self.memory)


@dataclass(frozen=True)
class Example:
    """A planned mini-batch for `plan_picture`."""

    strategy: Strategy
    pipelines: tuple[PipelineCost, ...]
    lengths: tuple[int, ...]
    assignment: PlannedAssignment


@dataclass(frozen=True)
class PlanReport:
    """Candidates for a model, data and devices.

    Attributes:
        candidates: the best for all mini-batches first; those that do not fit the context length last.
        dynamic: mean seconds if each mini-batch uses its best candidate.
        sync: seconds outside computation, maximum over the candidates.
        cut: number of sequences truncated to `context`.
        left_out: schemes not considered, and why.
    """

    profile: str
    devices: int
    context: int
    tokens: int
    iterations: int
    candidates: tuple[ComparedCandidate, ...]
    dynamic: float
    sync: float
    cut: int
    left_out: tuple[tuple[Scheme, str], ...]
    example: Example

    @property
    def best(self) -> ComparedCandidate:
        return self.candidates[0]

    @property
    def homogeneous(self) -> ComparedCandidate | None:
        return next((c for c in self.candidates if c.homogeneous and c.assigned and c.max_len >= self.context), None)


def explain(
    measured: Profile,
    lengths: Sequence[int],
    devices: int,
    context: int,
    tokens: int = 100_000,
    *,
    strategies: Sequence[Sequence[Scheme]] = (),
    iterations: int = 4,
    seed: int = 0,
) -> PlanReport:
    """Compare candidates on mini-batches sampled from the data.

    Args:
        lengths: tokens per sequence, truncated to `context`.
        tokens: minimum tokens per mini-batch.
        strategies: candidates; default: proposals for the data, homogeneous strategies, and improved versions.

    Raises:
        Unsupported: no candidate fits a mini-batch, or the profile does not contain a scheme.
        ValueError: there are no sequences, or a strategy has too many devices.
    """
    profile = schemes_of(measured, devices)
    data = np.minimum(np.asarray(lengths, dtype=np.int64), context)
    data = data[data > 0]
    if not len(data) or tokens < 1 or iterations < 1:
        raise ValueError(
            f"{len(data)} sequences, {tokens} tokens per iteration, {iterations} iterations: give at least one of each"
        )
    batches = mini_batches(data.tolist(), tokens, iterations, seed)
    chosen = [tuple(s) for s in strategies] or _candidates(
        profile, data.tolist(), devices, context, mini_batches(data.tolist(), tokens, TUNING, seed + 1)
    )
    _check_devices(chosen, devices)
    choices = [compare(chosen, profile, batch, seed=seed) for batch in batches]
    compared = _SampledBatches(profile, chosen, batches, choices, seed).candidates(context)
    ranked = sorted(compared, key=lambda c: (c.max_len < context, *_rank(c)))
    ranked = [replace(c, why=_why(c, ranked[0], iterations, context)) for c in ranked]
    winner = chosen[choices[0].index]
    return PlanReport(
        profile.name,
        devices,
        context,
        tokens,
        iterations,
        tuple(ranked),
        fmean(choice.seconds for choice in choices),
        max(verdict.charge for verdict in choices[0].verdicts),
        int((np.asarray(lengths) > context).sum()),
        _left_out(profile, devices),
        Example(winner, profile.pipelines(winner), tuple(batches[0]), choices[0].assignment),
    )


def mini_batches(data: Sequence[int], tokens: int, count: int, seed: int) -> list[list[int]]:
    """Sample mini-batches of at least `tokens` tokens in shuffled passes over the data."""
    check_sequences(tokens * len(data) // sum(data))
    random = np.random.default_rng(seed)
    order: list[int] = []
    batches: list[list[int]] = []
    for _ in range(count):
        batch: list[int] = []
        total = 0
        while total < tokens:
            if not order:
                order = random.permutation(len(data)).tolist()
            batch.append(int(data[order.pop()]))
            total += batch[-1]
        batches.append(batch)
    return batches


def scheme_counts(strategy: Sequence[Scheme]) -> str:
    """Format a strategy, as in 2*<tp4,pp1> + <tp2,pp2>."""
    counts = Counter(strategy).items()
    return " + ".join(f"{n}*<tp{tp},pp{pp}>" if n > 1 else f"<tp{tp},pp{pp}>" for (tp, pp), n in counts)


def _candidates(
    profile: Schemes, lengths: Sequence[int], devices: int, context: int, tuning: Sequence[Sequence[int]]
) -> list[Strategy]:
    starts = [*propose(profile, lengths, devices, context), *homogeneous(profile, devices)]
    candidates = [tuple(s) for s in refine(starts, profile, tuning, devices, context=context)]
    if isinstance(profile, Profile):
        return candidates
    return [s for i, s in enumerate(candidates) if i < SIMULATED or len(set(s)) == 1]


def _check_devices(strategies: Sequence[Strategy], devices: int) -> None:
    for strategy in strategies:
        used = sum(tp * pp for tp, pp in strategy)
        if used > devices:
            raise ValueError(
                f"{scheme_counts(strategy)} needs {used} devices, but there are {devices}: remove some pipelines"
            )


@dataclass(frozen=True)
class _SampledBatches:
    """Sample mini-batches, and the strategy chosen for each."""

    profile: Schemes
    strategies: Sequence[Strategy]
    batches: Sequence[Sequence[int]]
    choices: Sequence[Choice]
    seed: int

    def candidates(self, context: int) -> list[ComparedCandidate]:
        count = len(self.strategies)
        # Bounds are cheap. Assign mini-batches for the best candidates first, then for those whose
        # bound is below the best time so far.
        bounds = [fmean(choice.verdicts[i].bound for choice in self.choices) for i in range(count)]
        order = sorted(range(count), key=lambda i: (bounds[i], i))
        alike = [i for i in order if len(set(self.strategies[i])) == 1]
        always = {*order[:SHOWN], *alike[:HOMOGENEOUS_SHOWN], *(c.index for c in self.choices)}
        best = math.inf
        candidates = []
        for i in sorted(order, key=lambda i: i not in always):
            candidate = self._candidate(i, assign=i in always or bounds[i] < best)
            candidates.append(candidate)
            if candidate.assigned and candidate.max_len >= context:
                best = min(best, candidate.seconds)
        return candidates

    def _candidate(self, index: int, assign: bool) -> ComparedCandidate:
        strategy = self.strategies[index]
        verdicts = [choice.verdicts[index] for choice in self.choices]
        fits = sum(math.isfinite(v.bound) for v in verdicts)
        bound = fmean(v.bound for v in verdicts)
        pipelines = self.profile.pipelines(strategy)
        devices = sum(tp * pp for tp, pp in strategy)
        parts = None
        if assign and fits == len(self.batches):
            assigned = ((batch, assign_pipelines(pipelines, batch, seed=self.seed)) for batch in self.batches)
            by_batch = [parts_of(pipelines, batch, found, verdicts[0].charge) for batch, found in assigned]
            parts = TimeParts(*(fmean(getattr(p, f.name) for p in by_batch) for f in fields(TimeParts)))
        alone = fmean(_alone(pipelines, batch) + v.charge for batch, v in zip(self.batches, verdicts, strict=True))
        memory = tuple(_memory_use(self.profile, scheme, devices) for scheme in dict.fromkeys(strategy))
        wins = sum(choice.index == index for choice in self.choices)
        seconds = bound if parts is None else parts.seconds
        return ComparedCandidate(strategy, memory, seconds, bound, alone, parts is not None, fits, wins, parts, "")


def _alone(pipelines: Sequence[PipelineCost], lengths: Sequence[int]) -> float:
    longest = max(lengths)
    return min((p.seconds([[longest]]) for p in dict.fromkeys(pipelines) if p.max_len >= longest), default=math.inf)


def parts_of(
    pipelines: Sequence[PipelineCost], lengths: Sequence[int], assignment: PlannedAssignment, sync: float
) -> TimeParts:
    # work: seconds of each pipeline; the last one to end determines the time, and each part is a
    # step from the even division of the work to that time
    work = [
        float(p.work([lengths[i] for m in batches for i in m]).sum())
        for p, batches in zip(pipelines, assignment.micro_batches, strict=True)
    ]
    last = max(range(len(pipelines)), key=lambda p: assignment.by_pipeline[p])
    # A second on eight devices is eight seconds of device time.
    even = sum(w * p.devices for w, p in zip(work, pipelines, strict=True)) / sum(p.devices for p in pipelines)
    fixed = pipelines[last].c * len(assignment.micro_batches[last])
    bubble = assignment.by_pipeline[last] - work[last] - fixed if pipelines[last].stages > 1 else 0.0
    return TimeParts(even, work[last] - even, fixed, bubble, sync)


def _memory_use(profile: Schemes, scheme: Scheme, devices: int) -> MemoryUse:
    limits = (profile.max_len(scheme, devices), profile.util_len(scheme))
    memory = profile.memory if isinstance(profile, Profile) and scheme not in profile.limits else None
    if memory is None:
        return MemoryUse(scheme, devices, *limits, None, None, None, None)
    reserved = memory.margin + memory.gap_bytes(scheme)
    states = memory.states_bytes(scheme, devices)
    return MemoryUse(scheme, devices, *limits, states, memory.token_bytes(scheme), reserved, memory.device)


def _rank(candidate: ComparedCandidate) -> tuple[bool, float, int, int, Strategy]:
    return not candidate.assigned, candidate.seconds, -candidate.fits, -candidate.max_len, candidate.strategy


def _why(candidate: ComparedCandidate, best: ComparedCandidate, iterations: int, context: int) -> str:
    if candidate is best:
        return ""
    if candidate.max_len < context:
        return (
            f"fits at most {candidate.max_len:,} tokens, less than the context; {candidate.fits} of {iterations} "
            "mini-batches fit"
        )
    if candidate.parts is None or best.parts is None:
        return f"takes at least {candidate.bound:.3f} s"
    # Name at most two parts, each more than a fifth of the difference.
    lost = candidate.seconds - best.seconds
    differences = {f.name: getattr(candidate.parts, f.name) - getattr(best.parts, f.name) for f in fields(TimeParts)}
    worst = sorted((n for n in differences if differences[n] > 0.2 * lost), key=lambda n: -differences[n])[:2]
    reasons = ", ".join(f"{differences[n]:+.3f} s {REASON[n]}" for n in worst)
    return f"{lost:+.3f} s: {reasons}" if reasons else f"{lost:+.3f} s"


def _left_out(profile: Schemes, devices: int) -> tuple[tuple[Scheme, str], ...]:
    reasons = [(scheme, why) for scheme, why in sorted(profile.failed.items())]
    for scheme in sorted(profile.schemes):
        if scheme[0] * scheme[1] > devices:
            reasons.append((scheme, f"needs {scheme[0] * scheme[1]} devices"))
        elif profile.max_len(scheme, devices) == 0:
            reasons.append((scheme, "the state does not fit into a device"))
    return tuple(reasons)
