"""Comparison of losses and gradients with those of the unmodified model in plain PyTorch.

The reference runs sequences one by one, and shares only dropout's random numbers (`Masks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hydragraph.spec.strategy import Strategy

# Allowed relative error of the loss
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-5  # allowed error of a gradient, relative to the gradient's norm
# Additional error, relative to the norm of all gradients: some exact gradients (of key biases) are 0
GLOBAL_TOLERANCE = 1e-7

Sequences = Sequence[Tensor | Mapping[str, Tensor]]
# Maps a sequence's index in the mini-batch (-1: no dropout) and length to a context of masks
Masks = Callable[[int, int], AbstractContextManager[None]]


class Verifiable(Protocol):
    """Object to verify, such as an `Executable`."""

    def evaluate(self, sequences: Any, strategy: Strategy | None = None) -> Any:
        """Return a report with the loss."""

    def gradients(self, sequences: Any, strategy: Strategy | None = None) -> dict[str, Tensor]:
        """Return full gradients by name on rank 0."""


@dataclass(frozen=True)
class Reference:
    """Mean loss per target and gradients by parameter name, from one device."""

    loss: float
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class ParityRow:
    """Comparison for the parameter with the largest `ratio`.

    Attributes:
        error: L2 norm of the error of gradient g.
        norm: L2 norm of g.
        ratio: error / (1e-5 |g|_2 + 1e-7 |all gradients|_2).
    """

    strategy: str
    loss: float
    reference_loss: float
    parameter: str
    error: float
    norm: float
    ratio: float

    @property
    def loss_error(self) -> float:
        return abs(self.loss - self.reference_loss) / max(abs(self.reference_loss), 1e-30)

    @property
    def passed(self) -> bool:
        return self.loss_error <= LOSS_TOLERANCE and self.ratio <= 1


def reference(
    model: nn.Module, sequences: Sequences, masks: Masks | None = None, label_smoothing: float = 0.0
) -> Reference:
    """Compute loss and gradients with plain autograd, one sequence at a time.

    Args:
        model: a Hugging Face model with weights.
        sequences: 1-D token ids, or mappings with `input_ids`, `labels` (-100 is ignored) and optional loss factors
            `weights`.
        masks: dropout masks for gradients; the loss has no dropout.

    Raises:
        ValueError: no sequence has a target.
    """
    causal = not type(model).__name__.endswith("ForMaskedLM")
    pairs = [_targets(sequence, causal) for sequence in sequences]
    count = sum(int((labels != -100).sum()) for _, labels in pairs)
    if not count:
        raise ValueError("no sequence has a target: give sequences of at least two tokens")
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sums: dict[str, Tensor] = {}
    loss = 0.0

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=ids[None], use_cache=False).logits[0][: len(labels)]
        total = nn.functional.cross_entropy(
            logits, labels, ignore_index=-100, reduction="sum", label_smoothing=label_smoothing
        )
        return total / count

    factors = [1.0 if isinstance(sequence, Tensor) else float(sequence.get("weights", 1.0)) for sequence in sequences]
    for number, (ids, labels) in enumerate(pairs):
        if not bool((labels != -100).any()):
            continue
        # Gradients use dropout masks; the loss, as in `evaluate`, does not,
        # and needs a second pass.
        with masks(number, len(ids)) if masks else nullcontext():
            part = factors[number] * loss_of(ids, labels)
        if masks is None:
            loss += part.item()
        else:
            with torch.no_grad(), masks(-1, len(ids)):
                loss += factors[number] * loss_of(ids, labels).item()
        gradients = torch.autograd.grad(part, list(named.values()), allow_unused=True)
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                sums[name] = sums[name] + gradient if name in sums else gradient
    return Reference(loss, sums)


def compare(expected: Reference, gradients: Mapping[str, Tensor], loss: float, strategy: str) -> ParityRow:
    """Return the row with the largest `ratio`.

    Raises:
        ValueError: strategy and reference have gradients of different parameters, not counting the strategy's zeros.
    """
    # Experts without tokens
    silent = {name for name, gradient in gradients.items() if not gradient.any()}
    different = sorted((expected.gradients.keys() ^ gradients.keys()) - silent)
    if different:
        raise ValueError(f"strategy {strategy} and the reference have gradients of different parameters: {different}")
    everything = math.sqrt(sum(float(g.double().square().sum()) for g in expected.gradients.values()))
    rows = []
    for name, gradient in expected.gradients.items():
        norm = float(gradient.double().norm())
        error = float((gradients[name].double().cpu() - gradient.double()).norm())
        tolerance = GRADIENT_TOLERANCE * norm + GLOBAL_TOLERANCE * everything
        ratio = error / tolerance if tolerance else (math.inf if error else 0.0)
        ratio = math.inf if math.isnan(ratio) else ratio
        rows.append(ParityRow(strategy, loss, expected.loss, name, error, norm, ratio))
    return max(rows, key=lambda row: row.ratio)


def verify(
    executor: Verifiable, strategies: Sequence[Strategy], sequences: Sequences, expected: Reference | None
) -> list[ParityRow]:
    """Compare strategies with one device; return a row for each, or [] without `expected`. All ranks call this."""
    rows = []
    for strategy in strategies:
        loss = executor.evaluate(sequences, strategy).loss
        gradients = executor.gradients(sequences, strategy)
        if expected is not None:
            rows.append(compare(expected, gradients, loss, str(strategy)))
    return rows


def _targets(sequence: Tensor | Mapping[str, Tensor], causal: bool) -> tuple[Tensor, Tensor]:
    if isinstance(sequence, Tensor):
        ids = labels = sequence
    else:
        ids, labels = sequence["input_ids"], sequence["labels"]
    return ids, labels[1:] if causal else labels
