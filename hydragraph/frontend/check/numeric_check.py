"""Numeric check of a captured program against its model."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.frontend.check import scratch_pages
from hydragraph.frontend.check.eager_and_captured import CapturedBatch, add_captured, depends_on_padding, run_alone
from hydragraph.frontend.check.loss_comparison import DOUBLE, SINGLE, Difference, ErrorBound, GradientComparison
from hydragraph.frontend.check.narrow_model import CheckedModel, LibraryModel, NarrowModel
from hydragraph.frontend.check.probe_lengths import LARGE, ProbeLengths, lengths_of
from hydragraph.frontend.check.probe_sequences import batches, draw_sequences, ids_of
from hydragraph.frontend.check.probe_weights import DrawnWeights
from hydragraph.frontend.check.reduced_model import OutputStructure, reduced
from hydragraph.frontend.check.unmodified_model import refuse_other_results
from hydragraph.frontend.loss_module import loss_buffers, wide_loss
from hydragraph.frontend.packed_batch import pack
from hydragraph.frontend.packed_inputs import token_cross_entropy
from hydragraph.frontend.repeated_blocks import block_list, entries
from hydragraph.frontend.same_masks import same_masks
from hydragraph.ir.program import Block, Program
from hydragraph.kernels.philox import keys_of
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StagePart

log = logging.getLogger("hydragraph.frontend.check")

MODES = ("auto", "full", "off")
# Maximum parameters in a group of several blocks
TOGETHER = 32_000_000

REMEDY = (
    "look for code that a trace does not capture (hooks, Python state, the model's own masks or positions, mixing of "
    "tokens outside attention), or report a bug with the model's config; check='off' trains with the captured graph "
    "despite the difference"
)
_OF_LOSS = (
    "mask every term of the loss by labels != -100, let no term combine sequences, and keep no state in the loss; "
    f"if the loss already does this, {REMEDY}"
)


@dataclass(frozen=True)
class Attempt:
    """Settings for one comparison of the model with its captured graph.

    Attributes:
        copied: whether weights are the model's plus noise, not random.
        widened: whether casts to narrower dtypes become casts to `dtype`.
    """

    dtype: torch.dtype
    copied: bool
    widened: bool
    seed: int

    @property
    def bound(self) -> ErrorBound:
        return DOUBLE if self.dtype is torch.float64 and self.widened else SINGLE

    @property
    def wide(self) -> torch.dtype | None:
        return self.dtype if self.widened else None

    @property
    def kind(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def is_training(self, dtype: torch.dtype) -> bool:
        """Return whether training in `dtype` computes exactly like this."""
        return not self.widened and self.dtype is dtype


@dataclass(frozen=True)
class CheckResult:
    """Result of a check.

    Attributes:
        blocks, layers: numbers of compared blocks and of all blocks.
        worst: largest gradient error, relative to the gradient's norm.
        untouched: names and values of the model's length limits that no sequence exceeded.
        problem: reason why the check did not run, or "".
        factor: ratio of the model's widths to the compared copy's.
    """

    model: str
    layers: int
    seconds: float
    blocks: int = 0
    tokens: tuple[int, ...] = ()
    worst: float = 0.0
    dtype: str = ""
    untouched: tuple[tuple[str, int], ...] = ()
    problem: str = ""
    factor: int = 1

    def __str__(self) -> str:
        if self.problem:
            return f"not checked: {self.model}: {self.problem}"
        beyond = ", ".join(f"{name} {value}" for name, value in self.untouched)
        widths = f" at 1/{self.factor} of its widths" if self.factor > 1 else ""
        return (
            f"checked {self.model}{widths}: embed, head and {self.blocks} of {self.layers} blocks give the same "
            f"results on packed batches of {' and '.join(map(str, self.tokens))} tokens as on single sequences in "
            f"{self.dtype}, worst gradient error {self.worst:.1e}, {self.seconds:.1f} s"
            + (f"; no sequence exceeds {beyond}" if beyond else "")
        )


class _Unrunnable(Exception):  # noqa: N818
    def __init__(self, side: str, error: Exception) -> None:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        super().__init__(f"{type(error).__name__}: {first[:200]}")
        self.side = side


def check(subject: CheckedModel, mode: str = "auto", variants: Variants | None = None) -> CheckResult:
    """Compare captured graphs on packed batches with the model on single sequences.

    Raises:
        Unsupported: the graphs differ from the model in all attempts, or fail to run.
    """
    began = time.perf_counter()
    if mode == "auto" and max(_size(subject, group) for group in _groups(subject, mode)) > LARGE:
        library_model = LibraryModel.of(subject)
        narrow = None if library_model is None else library_model.narrowed(subject.program)
        checked = None if narrow is None else _checked_narrow(subject, narrow)
        if checked is not None:
            return replace(checked, seconds=time.perf_counter() - began)
    return _checked(subject, mode, variants)


def _checked_narrow(subject: CheckedModel, narrow: NarrowModel) -> CheckResult | None:
    try:
        checked = _checked(replace(subject, model=narrow.model, program=narrow.program), "auto", None)
    except Unsupported as error:
        log.info("the check at 1/%d of the widths failed: %s", narrow.widths.factor, error)
        return None
    return None if checked.problem else replace(checked, factor=narrow.widths.factor)


def _checked(subject: CheckedModel, mode: str, variants: Variants | None) -> CheckResult:
    began = time.perf_counter()
    program = subject.program
    # An empty Variants is falsy
    variants = Variants(program, added=True) if variants is None else variants
    groups = _groups(subject, mode)
    most = max(_size(subject, group) for group in groups)
    comparer = _Comparer(subject, variants, lengths_of(subject.model, program, most))
    with scratch_pages.reused() if most > LARGE else nullcontext():
        results = [comparer.compare(group) for group in groups]
    checked = CheckResult(type(subject.model).__name__, program.layers, time.perf_counter() - began)
    for result in results:
        if isinstance(result, str):
            return replace(checked, problem=result)
    refuse_other_results(subject, variants, comparer.lengths)
    done = [result for result in results if not isinstance(result, str)]
    # `ratio` is relative to the allowed error, the product to the gradient's norm.
    errors = [difference.ratio * attempt.bound.own for difference, attempt in done]
    worst, attempt = done[errors.index(max(errors))]
    return replace(
        checked,
        blocks=sum(map(len, groups)),
        tokens=worst.tokens,
        worst=max(errors),
        dtype=attempt.kind,
        untouched=comparer.lengths.untouched,
    )


def attempts(dtype: torch.dtype) -> Iterator[Attempt]:
    """Yield attempts; later ones use fp64 against rounding errors, or random weights for finite results."""
    first = torch.float64 if dtype is torch.float64 else torch.float32
    yield Attempt(first, copied=True, widened=dtype is torch.bfloat16, seed=0)
    yield Attempt(torch.float64, copied=True, widened=True, seed=1)
    yield Attempt(torch.float64, copied=False, widened=True, seed=2)
    yield Attempt(first, copied=False, widened=dtype is torch.bfloat16, seed=3)


def _groups(subject: CheckedModel, mode: str) -> list[tuple[int, ...]]:
    _, layers = block_list(subject.model, subject.blocks)
    sizes = [sum(p.numel() for p in block.parameters()) for block in entries(layers)]
    chosen = list(range(len(sizes)))
    if mode == "auto":
        trainable = {name: parameter.trainable for name, parameter in subject.program.parameters.items()}
        # kinds[i]: graph of block i, and which of its parameters are trained. Compare each kind's
        # first block, and its last if memory allows.
        kinds = [(b.template, *map(trainable.get, b.parameters)) for b in subject.program.blocks[1:-1]]
        chosen = sorted({kinds.index(kind) for kind in kinds})
        last = sorted({len(kinds) - 1 - kinds[::-1].index(kind) for kind in kinds} - set(chosen))
        chosen += [i for i in last if sum(sizes[j] for j in (*chosen, *last)) <= TOGETHER]
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


def _size(subject: CheckedModel, group: Sequence[int]) -> int:
    used = {n for b in _kept(subject.program, group) for n in b.parameters}
    return sum(subject.program.parameters[n].size for n in used)


def _kept(program: Program, group: Sequence[int]) -> list[Block]:
    return [program.blocks[0], *(program.blocks[1 + i] for i in sorted(group)), program.blocks[-1]]


@dataclass(frozen=True)
class _Comparer:
    subject: CheckedModel
    variants: Variants
    lengths: ProbeLengths
    forms: OutputStructure = field(default_factory=OutputStructure)

    def compare(self, group: tuple[int, ...]) -> tuple[Difference, Attempt] | str:
        program = self.subject.program
        failed: list[tuple[Difference | _Unrunnable, Attempt]] = []
        problem = "the model's loss or gradients for single sequences are not finite with any weights tried"
        for attempt in attempts(program.dtype):
            try:
                difference = self._attempt(group, attempt)
            except _Unrunnable as error:
                if error.side == "captured":
                    failed.append((error, attempt))
                    # Training would fail too, so no other attempt helps.
                    if attempt.is_training(program.dtype):
                        break
                elif not failed:
                    problem = f"the model fails on a single sequence on the CPU ({error})"
                continue
            if difference is None:
                continue
            if difference.ratio <= 1:
                return difference, attempt
            failed.append((difference, attempt))
            if attempt.copied and attempt.dtype is torch.float64:
                # Neither rounding nor random weights explain the difference
                break
        if not failed:
            return problem
        raise self._refusal(group, failed)

    def _attempt(self, group: tuple[int, ...], attempt: Attempt) -> Difference | None:
        subject, program, wide = self.subject, self.subject.program, attempt.wide
        # Weights, sequences and batches depend on the attempt's seed.
        weights = DrawnWeights(attempt.seed, attempt.dtype, attempt.copied)
        model = reduced(subject.model, subject.blocks, group, self.forms, weights)
        loss_function = wide_loss(subject.loss, wide)
        # A repeated block's buffers have several names
        buffers = model.named_buffers(remove_duplicate=False)
        tensors = dict([*model.named_parameters(), *buffers]) | loss_buffers(loss_function)
        sequences = draw_sequences(self.lengths, ids_of(subject.model, program), program, subject.example, attempt.seed)
        packed = batches(sequences, attempt.seed if program.drops else None)
        captured = [CapturedBatch(program, tensors, batch, wide) for batch, _ in packed]
        # times[i]: number of batches with sequence i; `sums` adds all batches' gradients.
        times = Counter(i for _, indices in packed for i in indices)
        sums: dict[str, Tensor] = {}
        loss = torch.zeros((), dtype=torch.float64)
        failed: _Unrunnable | None = None
        ran: list[tuple[Block, Variant]] = []
        # Run the captured graphs on the packed batches.
        try:
            with _side("captured"):
                ran = [(block, self.variants.get(block, StagePart())) for block in _kept(program, group)]
                for batch in captured:
                    loss = loss + add_captured(batch, ran, sums).double()
        except _Unrunnable as error:
            if attempt.is_training(program.dtype):
                raise
            # Run the model first: if it fails too, its own error matters.
            failed = error
        # Run the model on one sequence at a time; each gradient is subtracted, then freed.
        comparison = GradientComparison(sums)
        expected = torch.zeros((), dtype=torch.float64)
        with _side("alone"):
            for i, sequence in enumerate(sequences):
                with same_masks(model, program, keys_of(attempt.seed, [len(sequence)], [i]), subject.blocks):
                    value = run_alone(model, loss_function, pack([sequence]), times[i], wide, comparison.subtract)
                expected = expected + value.double()
        if failed is not None:
            raise failed
        tokens = tuple(int(batch["input_ids"].shape[1]) for batch, _ in packed)
        difference = comparison.worst(float(loss), float(expected), attempt.bound, tokens)
        # A custom loss may read padding, unlike the default loss.
        padded = difference is not None and difference.ratio <= 1 and subject.loss is not token_cross_entropy
        if padded and depends_on_padding(captured[-1], ran[-1], attempt.bound.own):
            where = f"{type(subject.model).__name__} after its last block"
            raise Unsupported("padding tokens change the loss", where=where, remedy=_OF_LOSS)
        return difference

    def _refusal(
        self, group: tuple[int, ...], failed: Sequence[tuple[Difference | _Unrunnable, Attempt]]
    ) -> Unsupported:
        difference, attempt = next(((f, a) for f, a in failed if isinstance(f, Difference)), failed[0])
        where = self._where(group, attempt)
        if isinstance(difference, _Unrunnable):
            return Unsupported(f"the captured graph fails to run ({difference})", where=where, remedy=REMEDY)
        name = difference.parameter
        off = f"differs by {difference.relative:.2g} times {'its norm' if name else 'its value'}"
        tokens = " and ".join(map(str, difference.tokens))
        what = (
            f"in the captured graph, {f'the gradient of {name}' if name else 'the loss'} {off} from the value that the "
            f"model computes sequence by sequence (loss {difference.loss:.6g} instead of {difference.expected:.6g}, "
            f"batches of {tokens} tokens in {attempt.kind})"
        )
        remedy = REMEDY if self.subject.loss is token_cross_entropy else _OF_LOSS
        return Unsupported(what, where=where, remedy=remedy)

    def _where(self, group: tuple[int, ...], attempt: Attempt) -> str:
        name = type(self.subject.model).__name__

        def differs(kept: tuple[int, ...]) -> bool:
            try:
                difference = self._attempt(kept, attempt)
            except (_Unrunnable, Unsupported):
                return True
            return difference is not None and difference.ratio > 1

        # The empty group compares only the parts around the blocks.
        if differs(()):
            return f"{name} before its first block or after its last"
        culprit = next((i for i in group if differs((i,))), None)
        return f"{name}, layer.{culprit}" if culprit is not None else f"{name}, layers {', '.join(map(str, group))}"


@contextmanager
def _side(name: str) -> Iterator[None]:
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:
        raise _Unrunnable(name, error) from error


def report(checked: CheckResult) -> None:
    if checked.problem:
        remedy = "make each sequence's loss and gradients finite on the CPU, or pass check='off'"
        raise Unsupported(f"not checked: {checked.problem}", where=checked.model, remedy=remedy)
    log.info("%s", checked)
