"""Numeric check: compare a captured program with its model, and reject differences."""

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
from hydragraph.frontend.loss_module import loss_buffers, wide_loss
from hydragraph.frontend.packed_inputs import Loss, token_cross_entropy
from hydragraph.frontend.repeated_blocks import block_list, entries
from hydragraph.frontend.same_masks import same_masks
from hydragraph.ir.program import Block, Program
from hydragraph.kernels.philox import keys_of
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StagePart

log = logging.getLogger("hydragraph.frontend.check")

MODES = ("auto", "full", "off")
# Maximum number of block parameters in memory at a time, beyond one block.
TOGETHER = 32_000_000

REMEDY = (
    "its graph is not what the model computes: look for what a trace loses (hooks, Python state, masks or positions of "
    "the model's own, tokens that meet outside of attention), or report it with the model's config; check='off' trains "
    "with the graph as it is"
)


# Remedy for a custom loss, which is the likelier cause.
OF_LOSS = (
    "mask by labels != -100 whatever the loss adds up, have no terms across sequences, and keep no state in the loss; "
    f"where that is so, {REMEDY}"
)


@dataclass(frozen=True)
class CheckedModel:
    """Inputs of a check.

    Attributes:
        model: the user's model.
        program: the program captured from it.
        loss: function of its outputs and a packed batch.
        blocks: path of its list of blocks; None: as `capture` finds it.
        example: custom fields, as passed to `capture`.
    """

    model: nn.Module
    program: Program
    loss: Loss = token_cross_entropy
    blocks: str | None = None
    example: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Attempt:
    """One way to compute both sides: weights and a dtype.

    A correct program passes at least one attempt. A difference in fp64 with copied weights is final: no later attempt
    is made.

    Attributes:
        dtype: dtype of the weights.
        copied: weights are a noisy copy of the model's; otherwise they are drawn at random.
        widened: casts inside the model are widened to the dtype; otherwise both sides round as written.
        seed: seed for weights and tokens.
    """

    dtype: torch.dtype
    copied: bool
    widened: bool
    seed: int

    @property
    def bound(self) -> Bound:
        """Maximum allowed difference between both sides."""
        return DOUBLE if self.dtype is torch.float64 and self.widened else SINGLE


@dataclass(frozen=True)
class Checked:
    """Result of a check.

    Attributes:
        model: class name of the model.
        blocks, layers: number of blocks compared, and total number of blocks.
        tokens: number of tokens of each packed batch.
        worst: the largest gradient error, relative to the gradient's norm.
        dtype: compute dtype.
        seconds: duration.
        untouched: settings whose limit no sequence exceeded.
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
    """Raised when one side, "alone" or "captured", cannot compute."""

    def __init__(self, side: str, error: Exception) -> None:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        super().__init__(f"{type(error).__name__}: {first[:200]}")
        self.side = side


def check(subject: CheckedModel, mode: str = "auto", variants: Variants | None = None) -> Checked:
    """Compare loss and gradients of packed batches with the model on each sequence alone, block by block.

    Args:
        mode: "auto": each structurally distinct block once; "full": every block.
        variants: the program's variants, to keep what is compiled.

    Raises:
        Unsupported: both sides differ for all weights and dtypes tried, or the graphs do not run.
    """
    began = time.perf_counter()
    program = subject.program
    forms = Forms()
    variants = Variants(program, added=True) if variants is None else variants  # an empty Variants is falsy
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
    # Relative to the gradient's norm; for a zero gradient, relative to the error that the total norm allows.
    error = worst.ratio * attempt.bound.own
    kind = str(attempt.dtype).removeprefix("torch.")
    return Checked(name, kept, program.layers, worst.tokens, error, kind, seconds, lengths.untouched)


def attempts(dtype: torch.dtype) -> Iterator[Attempt]:
    """Yield how both sides are computed, in order, for a program of a given dtype."""
    # The user's own weights come first, at low cost. If that fails, fp64 distinguishes rounding from an error, and its
    # verdict is final; new weights are tried only if values are not finite (a model that was never initialised).
    first = torch.float64 if dtype is torch.float64 else torch.float32
    yield Attempt(first, copied=True, widened=dtype is torch.bfloat16, seed=0)
    yield Attempt(torch.float64, copied=True, widened=True, seed=1)
    yield Attempt(torch.float64, copied=False, widened=True, seed=2)
    yield Attempt(first, copied=False, widened=dtype is torch.bfloat16, seed=3)


def kept_together(subject: CheckedModel, mode: str) -> list[tuple[int, ...]]:
    """Return the indices of the blocks to compare, grouped by what is in memory at a time.

    Under "auto" these are the first block of each template and set of trainable parameters, plus the last of each if
    that costs little: gradual differences between blocks are largest between first and last.
    """
    _, layers = block_list(subject.model, subject.blocks)
    sizes = [sum(p.numel() for p in block.parameters()) for block in entries(layers)]
    names = [_kind(subject.program, block) for block in subject.program.blocks[1:-1]]
    chosen = sorted({names.index(name) for name in names}) if mode == "auto" else list(range(len(names)))
    if mode == "auto":
        last = sorted({len(names) - 1 - names[::-1].index(name) for name in names} - set(chosen))
        chosen += [i for i in last if sum(sizes[j] for j in (*chosen, *last)) <= TOGETHER]
    # As many blocks at a time as fit, but at least one; a difference fails its group and is then located within it.
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
    """Return a key that is equal for blocks that are differentiated alike."""
    return block.template, *(getattr(program.parameters[n], "trainable", True) for n in block.parameters)


def _size(subject: CheckedModel, group: Sequence[int]) -> int:
    """Return the number of parameters used while a group of blocks is compared."""
    used = {n for b in _kept(subject.program, group) for n in b.parameters}
    return sum(subject.program.parameters[n].size for n in used)


def _kept(program: Program, group: Sequence[int]) -> list[Block]:
    return [program.blocks[0], *(program.blocks[1 + i] for i in sorted(group)), program.blocks[-1]]


def _pass(
    subject: CheckedModel, variants: Variants, forms: Forms, group: tuple[int, ...], lengths: Lengths
) -> tuple[Difference, Attempt] | str:
    """Compare one group of blocks; return its worst difference, or why it is inconclusive.

    Raises:
        Unsupported: both sides differ in every attempt that could be made.
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
                    break  # training would use exactly this; running with other dtypes does not help
            elif not failed:
                problem = f"the model alone cannot compute a sequence on the CPU ({error})"
            continue
        if difference is None:
            continue
        if difference.ratio <= 1:
            return difference, attempt
        failed.append((difference, attempt))
        if attempt.copied and attempt.dtype is torch.float64:
            break  # rounding does not explain a difference in fp64, and the weights are the user's own
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
    """Compare both batches once; return None if the expected values are not finite."""
    program = subject.program
    wide = attempt.dtype if attempt.widened else None
    weights = DrawnWeights(attempt.seed, attempt.dtype, attempt.copied)
    model = reduced(subject.model, subject.blocks, group, forms, weights)
    loss_function = wide_loss(subject.loss, wide)
    tensors = dict([*model.named_parameters(), *model.named_buffers()]) | loss_buffers(loss_function)
    sequences = draw_sequences(lengths, ids_of(subject.model, program), program, subject.example, attempt.seed)
    packed = batches(sequences, attempt.seed if program.drops else None)
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
        # The failure is inconclusive if the model alone does not run either, so that side is computed as well, unless
        # this is exactly what would be trained.
        if as_trained:
            raise
        failed = error
    for name in _frozen(program):
        sums.pop(name, None)
    comparison = Comparison(sums)
    expected = torch.zeros((), dtype=torch.float64)
    with _side("alone"):
        for i, sequence in enumerate(sequences):
            with same_masks(model, program, keys_of(attempt.seed, [len(sequence)], [i]), subject.blocks):
                value = run_alone(model, loss_function, alone(sequence), times[i], wide, comparison.subtract)
            expected = expected + value.double()
    if failed is not None:
        raise failed
    tokens = tuple(int(batch["input_ids"].shape[1]) for batch, _ in packed)
    return comparison.worst(float(loss), float(expected), attempt.bound, tokens)


@contextmanager
def _side(name: str) -> Iterator[None]:
    """Mark exceptions with the side that could not compute."""
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:
        raise _Unrunnable(name, error) from error


def _frozen(program: Program) -> set[str]:
    """Return the names of the parameters that the program does not train."""
    return {n for n, p in program.parameters.items() if not getattr(p, "trainable", True)}


def _refusal(
    subject: CheckedModel,
    variants: Variants,
    forms: Forms,
    group: tuple[int, ...],
    lengths: Lengths,
    failed: Sequence[tuple[Difference | _Unrunnable, Attempt]],
) -> Unsupported:
    """Describe the difference and the first block that differs when compared alone."""
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
    """Name the part that differs on its own: outside the blocks, or the first such block."""
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
    """Log a one-line summary of a check.

    Raises:
        Unsupported: nothing could be compared, so the graph is unverified.
    """
    if checked.problem:
        raise Unsupported(
            f"not checked: {checked.problem}",
            where=checked.model,
            remedy="make loss and gradients of each single sequence finite on the CPU (a standard deviation of one "
            "value is not), or train with the graph as it is by check='off'",
        )
    log.info("%s", checked)
