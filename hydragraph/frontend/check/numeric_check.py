"""Compare a captured program with the model that it was captured from, by numbers, and refuse what differs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.check import scratch_pages
from hydragraph.frontend.check.eager_and_captured import add_captured, run_alone
from hydragraph.frontend.check.loss_comparison import DOUBLE, SINGLE, Bound, Comparison, Difference
from hydragraph.frontend.check.probe_lengths import LARGE, Lengths, lengths_of
from hydragraph.frontend.check.probe_sequences import alone, batches, draw_sequences, ids_of
from hydragraph.frontend.check.probe_weights import DrawnWeights
from hydragraph.frontend.check.reduced_model import Forms, reduced
from hydragraph.frontend.packed_inputs import Loss, token_cross_entropy
from hydragraph.frontend.repeated_blocks import block_list
from hydragraph.ir.program import Block, Program
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StagePart

log = logging.getLogger("hydragraph.frontend.check")

MODES = ("auto", "full", "off")
# How many parameters of blocks are in memory at a time, beyond one block.
TOGETHER = 32_000_000

REMEDY = (
    "its graph is not what the model computes: look for what a trace loses (hooks, Python state, masks or positions of "
    "the model's own, tokens that meet outside of attention), or report it with the model's config; check='off' trains "
    "with the graph as it is"
)


# Of a loss of the user's own, which is the likelier cause.
OF_LOSS = (
    "mask by labels != -100 whatever the loss adds up, have no terms across sequences, and keep no state in the loss; "
    f"where that is so, {REMEDY}"
)


@dataclass(frozen=True)
class CheckedModel:
    """What is checked.

    Attributes:
        model: the user's.
        program: captured from it.
        loss: of its outputs and a packed batch.
        blocks: the path of its list of blocks; None: as `capture` finds it.
        example: fields of the user's own, as `capture` was given them.
    """

    model: nn.Module
    program: Program
    loss: Loss = token_cross_entropy
    blocks: str | None = None
    example: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Attempt:
    """One way to compute both sides: weights and a dtype.

    A right program passes one of several. A difference in fp64 with copied weights is final: no later attempt is made.

    Attributes:
        dtype: of the weights.
        copied: weights are a noisy copy of the model's; otherwise drawn.
        widened: casts inside are widened to the dtype; otherwise both sides round as they are written.
        seed: of weights and tokens.
    """

    dtype: torch.dtype
    copied: bool
    widened: bool
    seed: int

    @property
    def bound(self) -> Bound:
        """How far both sides may be apart."""
        return DOUBLE if self.dtype is torch.float64 and self.widened else SINGLE


@dataclass(frozen=True)
class Checked:
    """What a check found.

    Attributes:
        model: its class.
        blocks, layers: how many were compared, of how many.
        tokens: of each packed batch.
        worst: the largest error of a gradient, as a part of its norm.
        dtype: what was computed in.
        seconds: what it took.
        untouched: settings whose limit no sequence went beyond.
        problem: why nothing could be compared; "" if something was.
    """

    model: str
    blocks: int
    layers: int
    tokens: tuple[int, ...]
    worst: float
    dtype: str
    seconds: float
    untouched: tuple[tuple[str, int], ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"not checked: {self.model}: {self.problem}"
        beyond = ", ".join(f"{name} {value}" for name, value in self.untouched)
        return (
            f"checked {self.model}: embed, head and {self.blocks} of {self.layers} blocks, packed batches of "
            f"{' and '.join(map(str, self.tokens))} tokens against each sequence alone in {self.dtype}, worst gradient "
            f"error {self.worst:.1e}, {self.seconds:.1f} s" + (f"; not reached: {beyond}" if beyond else "")
        )


class _Unrunnable(Exception):  # noqa: N818
    """A side that could not compute: "alone" or "captured"."""

    def __init__(self, side: str, error: Exception) -> None:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        super().__init__(f"{type(error).__name__}: {first[:200]}")
        self.side = side


def check(subject: CheckedModel, mode: str = "auto", variants: Variants | None = None) -> Checked:
    """Compare loss and gradients of packed batches, block by block, with the model on each sequence alone.

    Args:
        mode: "auto": each structurally distinct block once; "full": every block.
        variants: of the program, where what is compiled is to be kept.

    Raises:
        Unsupported: they differ, whatever weights and dtype were tried; or the graphs do not run.
    """
    began = time.perf_counter()
    program = subject.program
    forms = Forms()
    variants = Variants(program, added=True) if variants is None else variants  # empty ones are false
    groups = kept_together(subject, mode)
    sizes = [_size(subject, group) for group in groups]
    lengths = lengths_of(subject.model, program, max(sizes))
    done: list[tuple[Difference, Attempt]] = []
    problem = ""
    with scratch_pages.reused() if max(sizes) > LARGE else nullcontext():
        for group in groups:
            difference = _pass(subject, variants, forms, group, lengths)
            if isinstance(difference, str):
                problem = problem or difference
            else:
                done.append(difference)
    kept = sum(map(len, groups))
    name = type(subject.model).__name__
    seconds = time.perf_counter() - began
    if problem or not done:
        return Checked(name, 0, program.layers, (), 0.0, "", seconds, problem=problem)
    worst, attempt = max(done, key=lambda pair: pair[0].ratio * pair[1].bound.own)
    # As a part of the gradient's norm; of one that is 0, as a part of what the norm of all allows it.
    error = worst.ratio * attempt.bound.own
    kind = str(attempt.dtype).removeprefix("torch.")
    return Checked(name, kept, program.layers, worst.tokens, error, kind, seconds, lengths.untouched)


def attempts(dtype: torch.dtype) -> Iterator[Attempt]:
    """Yield how both sides are computed, in order, for a program of some dtype."""
    # The user's own weights first, and cheaply. Where that fails, fp64 tells rounding from an error, and its verdict is
    # final; only where values are not finite (a model that was never initialised) are new weights tried.
    first = torch.float64 if dtype is torch.float64 else torch.float32
    yield Attempt(first, copied=True, widened=dtype is torch.bfloat16, seed=0)
    yield Attempt(torch.float64, copied=True, widened=True, seed=1)
    yield Attempt(torch.float64, copied=False, widened=True, seed=2)
    yield Attempt(first, copied=False, widened=dtype is torch.bfloat16, seed=3)


def kept_together(subject: CheckedModel, mode: str) -> list[tuple[int, ...]]:
    """Return the indices of the blocks to compare, in groups that are in memory at a time.

    Under "auto" these are the first of each template, and of what is trained of it; and, where that costs little, the
    last of each: what differs from block to block differs most between these.
    """
    _, layers = block_list(subject.model, subject.blocks)
    sizes = [sum(p.numel() for p in block.parameters()) for block in layers]
    names = [_kind(subject.program, block) for block in subject.program.blocks[1:-1]]
    chosen = sorted({names.index(name) for name in names}) if mode == "auto" else list(range(len(names)))
    if mode == "auto":
        last = sorted({len(names) - 1 - names[::-1].index(name) for name in names} - set(chosen))
        chosen += [i for i in last if sum(sizes[j] for j in (*chosen, *last)) <= TOGETHER]
    # As many blocks at a time as fit, and at least one: a difference anywhere in a group fails it, and is then sought.
    groups: list[tuple[int, ...]] = []
    together = 0
    for i in chosen:
        if groups and together + sizes[i] <= TOGETHER:
            groups[-1] = (*groups[-1], i)
            together += sizes[i]
        else:
            groups.append((i,))
            together = sizes[i]
    return groups


def _kind(program: Program, block: Block) -> tuple[object, ...]:
    """Return what two blocks share that are differentiated alike."""
    return block.template, *(getattr(program.parameters[n], "trainable", True) for n in block.parameters)


def _size(subject: CheckedModel, group: Sequence[int]) -> int:
    """Return how many parameters compute while a group of blocks is compared."""
    used = {n for b in _kept(subject.program, group) for n in b.parameters}
    return sum(subject.program.parameters[n].size for n in used)


def _kept(program: Program, group: Sequence[int]) -> list[Block]:
    return [program.blocks[0], *(program.blocks[1 + i] for i in sorted(group)), program.blocks[-1]]


def _pass(
    subject: CheckedModel, variants: Variants, forms: Forms, group: tuple[int, ...], lengths: Lengths
) -> tuple[Difference, Attempt] | str:
    """Compare one group of blocks; return its worst difference, or why nothing can be said.

    Raises:
        Unsupported: they differ in every attempt that could be made.
    """
    failed: list[tuple[Difference | _Unrunnable, Attempt]] = []
    problem = "loss or gradients of the model alone are not finite with any weights that were tried"
    for attempt in attempts(subject.program.dtype):
        try:
            difference = _attempt(subject, variants, forms, group, lengths, attempt)
        except _Unrunnable as error:
            if error.side == "captured":
                failed.append((error, attempt))
                if not attempt.widened and attempt.dtype is subject.program.dtype:
                    break  # so it would be trained; that it runs with other dtypes helps nobody
            elif not failed:
                problem = f"the model alone cannot compute a sequence on the CPU ({error})"
            continue
        if difference is None:
            continue
        if difference.ratio <= 1:
            return difference, attempt
        failed.append((difference, attempt))
        if attempt.copied and attempt.dtype is torch.float64:
            break  # rounding explains no difference in fp64, and other weights than the user's excuse none
    if not failed:
        return problem
    raise _refusal(subject, variants, forms, group, lengths, failed)


def _attempt(
    subject: CheckedModel,
    variants: Variants,
    forms: Forms,
    group: tuple[int, ...],
    lengths: Lengths,
    attempt: Attempt,
) -> Difference | None:
    """Compare both batches once; None: the expected values are not finite."""
    program = subject.program
    wide = attempt.dtype if attempt.widened else None
    weights = DrawnWeights(attempt.seed, attempt.dtype, attempt.copied)
    model = reduced(subject.model, subject.blocks, group, forms, weights)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    sequences = draw_sequences(lengths, ids_of(subject.model, program), program, subject.example, attempt.seed)
    packed = batches(sequences)
    times = Counter(i for _, indices in packed for i in indices)
    sums: dict[str, Tensor] = {}
    loss = torch.zeros((), dtype=torch.float64)
    failed: _Unrunnable | None = None
    as_trained = not attempt.widened and attempt.dtype is program.dtype
    try:
        with _side("captured"):
            ran = [(block, variants.get(block, StagePart())) for block in _kept(program, group)]
            for batch, _ in packed:
                loss = loss + add_captured(program, ran, tensors, sums, batch, wide).double()
    except _Unrunnable as error:
        # It says nothing where the model alone does not run either, so that side is computed as well; but for what
        # would be trained as it is.
        if as_trained:
            raise
        failed = error
    for name in _frozen(program):
        sums.pop(name, None)
    comparison = Comparison(sums)
    expected = torch.zeros((), dtype=torch.float64)
    with _side("alone"):
        for i, sequence in enumerate(sequences):
            value = run_alone(model, subject.loss, alone(sequence), times[i], wide, comparison.subtract)
            expected = expected + value.double()
    if failed is not None:
        raise failed
    tokens = tuple(int(batch["input_ids"].shape[1]) for batch, _ in packed)
    return comparison.worst(float(loss), float(expected), attempt.bound, tokens)


@contextmanager
def _side(name: str) -> Iterator[None]:
    """Say which side could not compute, where one raises."""
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:
        raise _Unrunnable(name, error) from error


def _frozen(program: Program) -> set[str]:
    """Return the parameters that the program does not train."""
    return {n for n, p in program.parameters.items() if not getattr(p, "trainable", True)}


def _refusal(
    subject: CheckedModel,
    variants: Variants,
    forms: Forms,
    group: tuple[int, ...],
    lengths: Lengths,
    failed: Sequence[tuple[Difference | _Unrunnable, Attempt]],
) -> Unsupported:
    """Describe what differs, and in which block: the first that differs when it stands alone."""
    difference, attempt = next(((f, a) for f, a in failed if isinstance(f, Difference)), failed[0])
    where = _where(subject, variants, forms, group, lengths, attempt)
    if isinstance(difference, _Unrunnable):
        return Unsupported(f"its captured graph does not run ({difference})", where=where, remedy=REMEDY)
    what = (
        f"the gradient of {difference.parameter} is {difference.relative:.2g} times its norm off"
        if difference.parameter
        else f"the loss is {difference.relative:.2g} times itself off"
    )
    tokens = " and ".join(map(str, difference.tokens))
    kind = str(attempt.dtype).removeprefix("torch.")
    return Unsupported(
        f"packed and captured, {what} (loss {difference.loss:.6g} for {difference.expected:.6g}, batches of {tokens} "
        f"tokens in {kind}) from what the model computes of each sequence alone",
        where=where,
        remedy=REMEDY if subject.loss is token_cross_entropy else OF_LOSS,
    )


def _where(
    subject: CheckedModel, variants: Variants, forms: Forms, group: tuple[int, ...], lengths: Lengths, attempt: Attempt
) -> str:
    """Name the part that differs by itself: what is around the blocks, or the first block that does."""
    name = type(subject.model).__name__

    def differs(kept: tuple[int, ...]) -> bool:
        try:
            difference = _attempt(subject, variants, forms, kept, lengths, attempt)
        except (_Unrunnable, Unsupported):
            return True
        return difference is not None and difference.ratio > 1

    if differs(()):
        return f"{name} before its first block or after its last"
    culprit = next((i for i in group if differs((i,))), None)
    return f"{name}, layer.{culprit}" if culprit is not None else f"{name}, layers {', '.join(map(str, group))}"


def report(checked: Checked) -> None:
    """Say in one line what was checked.

    Raises:
        Unsupported: nothing could be compared, so that nothing is known of the graph.
    """
    if checked.problem:
        raise Unsupported(
            f"not checked: {checked.problem}",
            where=checked.model,
            remedy="make loss and gradients of each single sequence finite on the CPU (a standard deviation of one "
            "value is not), or train with the graph as it is by check='off'",
        )
    log.info("%s", checked)
