"""Losses drawn from a grammar: sums of what each token or each sequence has, and what couples tokens of a micro-batch.

A case is a function of its seed alone, and one in five runs on two ranks. The loss of a packed mini-batch must be the
sum of the losses of its sequences one by one, or the loss must be refused; `outcome` says which of the two it is, and
anything else is a finding. The mini-batches are larger than those of the check, so that thresholds are reached which it
does not reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hydragraph as hg
from tests import reference
from tests.module_cases import VOCAB, Model

Batch = dict[str, Tensor]
Step = Callable[["Loss", Tensor, Tensor, Batch], Tensor]


def _counted(batch: Batch) -> Tensor:
    return batch["labels"][0] != -100


def _arange(values: Tensor) -> Tensor:
    return torch.arange(values.shape[0], device=values.device)


def _of_sequences(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sum of each sequence, [N], and the sequence of each token, [T]."""
    bounds = batch["cu_seqlens"][1:]
    number = torch.searchsorted(bounds, _arange(values), right=True)
    return values.new_zeros(bounds.shape[0]).index_add(0, number, values), number


# A value for each token, [T], from logits [T, V].
STARTS: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "cross-entropy": lambda x, b: F.cross_entropy(x, b["labels"][0], ignore_index=-100, reduction="none"),
    "smoothed": lambda x, b: F.cross_entropy(
        x, b["labels"][0], ignore_index=-100, reduction="none", label_smoothing=0.1
    ),
    "token_logprobs": lambda x, b: -hg.token_logprobs(x[None], b),
    "gathered": lambda x, b: -x.log_softmax(-1).gather(1, b["labels"][0].clamp(min=0)[:, None])[:, 0] * _counted(b),
    "entropy": lambda x, b: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1) * _counted(b),
    "z-loss": lambda x, b: torch.where(_counted(b), 1e-2 * x.logsumexp(-1).square(), 0.0),
    "unmasked z-loss": lambda x, b: 1e-2 * x.logsumexp(-1).square(),
}
# Changes to the values n of tokens; the first ones keep tokens or sequences apart.
STEPS: dict[str, Step] = {
    "clamped": lambda s, n, x, b: n.clamp(max=s.number),
    "focal": lambda s, n, x, b: (1 - (-n).exp()).square() * n,
    "weights": lambda s, n, x, b: n * b["weights"][0],
    "positions": lambda s, n, x, b: n / (b["position_ids"][0] + 1),
    "where": lambda s, n, x, b: torch.where(n > s.number, 0.1 * n, n),
    "ratio": lambda s, n, x, b: torch.minimum(n.exp().clamp(max=9), 1 + s.number * n) * _counted(b),
    "detached": lambda s, n, x, b: n * (-n.detach()).exp(),
    "sequences clamped": lambda s, n, x, b: _spread(n, b, lambda total: total.clamp(max=10 * s.number)),
    "sequences logsigmoid": lambda s, n, x, b: _spread(n, b, lambda total: -F.logsigmoid(s.number - total)),
    "index": lambda s, n, x, b: n * (1 + 0.1 * (_arange(n) % 3)),
    "softmax": lambda s, n, x, b: n * n.softmax(0) * 9,
    "centred": lambda s, n, x, b: n - n.mean(),
    "standardised sequences": lambda s, n, x, b: _spread(n, b, lambda t: t * (t - t.mean()).detach()),
    "sequences by the largest": lambda s, n, x, b: _spread(n, b, lambda t: t / t.max()),
    "the first tokens": lambda s, n, x, b: torch.where(_arange(n) < 64, n, 0.0),
    "slice": lambda s, n, x, b: F.pad(n[:64], (0, max(0, n.shape[0] - 64))),
    "previous token": lambda s, n, x, b: n * (1 + 0.1 * n.roll(1, 0).detach()),
    "running sum": lambda s, n, x, b: n * (-0.1 * n.detach().cumsum(0)).exp(),
    "threshold of the mean": lambda s, n, x, b: torch.where(n.mean() > s.number, 0.1 * n, n),
    "by tokens": lambda s, n, x, b: n / n.shape[0],
    "by targets": lambda s, n, x, b: n / _counted(b).sum(),
    "by sequences": lambda s, n, x, b: n / (b["cu_seqlens"].shape[0] - 1),
    "counter": lambda s, n, x, b: n * (1 + 0.1 * next(s.counter)),
    "calls": lambda s, n, x, b: n * s.called(),
    "noise": lambda s, n, x, b: n * (1 + 0.1 * s.random.random()),
    "anneal": lambda s, n, x, b: n * min(1.0, s.called() / 40),
}
ENDS: dict[str, Step] = {
    "sum": lambda s, n, x, b: n.sum(),
    "picked": lambda s, n, x, b: n[_counted(b)].sum(),
    "scaled": lambda s, n, x, b: 0.5 * n.sum(),
    "sum of sequences": lambda s, n, x, b: _of_sequences(n, b)[0].sum(),
    "root of sequences": lambda s, n, x, b: (_of_sequences(n, b)[0].square() + 1).sqrt().sum(),
    "clamped total": lambda s, n, x, b: n.sum().clamp(max=60 * s.number),
    "square of the total": lambda s, n, x, b: 0.01 * n.sum().square(),
    "mean": lambda s, n, x, b: n.mean(),
    "median": lambda s, n, x, b: n.median(),
    "picked and sliced": lambda s, n, x, b: n[_counted(b)][:64].sum(),
    "norm": lambda s, n, x, b: n.norm(),
    "norm of sequences": lambda s, n, x, b: _of_sequences(n, b)[0].norm(),
}


def _spread(values: Tensor, batch: Batch, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Weigh each token by its sequence's function of the sum, divided by the sequence's number of tokens."""
    total, number = _of_sequences(values, batch)
    lengths = batch["cu_seqlens"].long().diff()
    return (function(total) / lengths)[number] * 1.0


@dataclass
class Loss:
    """A drawn loss, and the state that a bad habit changes."""

    start: str
    steps: tuple[str, ...]
    end: str
    number: float
    counter: Any
    calls: list[int] = field(default_factory=list)
    random: Random = field(default_factory=lambda: Random(1))

    def called(self) -> int:
        """Count the calls."""
        self.calls.append(1)
        return len(self.calls)

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of a packed batch."""
        logits = outputs[0].float()
        values = STARTS[self.start](logits, batch)
        for name in self.steps:
            values = STEPS[name](self, values, logits, batch)
        return ENDS[self.end](self, values, logits, batch)


# Starting two ranks takes seconds, so one case in five has them.
ONE_RANK, TWO_RANKS = "<tp1,pp1>", ("2*<tp1,pp1>", "<tp1,pp2>", "<tp2,pp1>")


@dataclass(frozen=True)
class LossCase:
    """The parts of one loss, and the strategy that trains with it."""

    seed: int
    start: str
    steps: tuple[str, ...]
    end: str
    number: float
    strategy: str = ONE_RANK

    def build(self) -> Loss:
        """Build it, with fresh state."""
        return Loss(
            self.start, self.steps, self.end, self.number, itertools.count() if "counter" in self.steps else None
        )


def draw(seed: int) -> LossCase:
    """Draw a case: at most two steps, and often an end that is right."""
    random_ = Random(seed)
    steps = tuple(random_.sample(sorted(STEPS), random_.choice([0, 1, 1, 2])))
    ends = ["sum", "picked", "sum of sequences"] if random_.random() < 0.6 else sorted(ENDS)
    start = random_.choice(sorted(STARTS))
    end = random_.choice(ends)
    number = random_.choice([0.5, 2.0, 3.0, 4.5])
    strategy = random_.choice(TWO_RANKS) if random_.random() < 0.2 else ONE_RANK
    return LossCase(seed, start, steps, end, number, strategy)


@cache
def _model() -> Model:
    torch.manual_seed(5)
    model = Model(((), ()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    return model


def _data(seed: int, count: int, longest: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    ids = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
    return [{"input_ids": each, "weights": torch.rand(len(each), generator=generator)} for each in ids]


def _given(case: LossCase, batch: Batch) -> Batch:
    """Return a sequence with the fields that the loss reads."""
    return {name: values for name, values in batch.items() if name == "input_ids" or name in case.steps}


def _one_by_one(case: LossCase, data: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of plain PyTorch, the sum over sequences divided by the number of targets, and its gradients."""
    model, loss, total = _model(), case.build(), torch.zeros(())
    model.zero_grad()
    targets = sum(len(each["input_ids"]) - 1 for each in data)
    for each in data:
        ids = each["input_ids"]
        batch = {
            "labels": torch.cat([ids[1:], ids.new_full((1,), -100)])[None],
            "position_ids": torch.arange(len(ids))[None],
            "cu_seqlens": torch.tensor([0, len(ids)], dtype=torch.int32),
            "weights": each["weights"][None],
        }
        logits = model(ids[None], batch["position_ids"], batch["cu_seqlens"])
        total = total + loss(logits, batch) / targets
    total.backward()
    return total.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _trained(case: LossCase, batches: list[list[Batch]]) -> list[tuple[float, dict[str, Tensor]]]:
    """Return the loss and the gradients of each mini-batch, on every rank."""
    exe = hg.compile(
        _model(), case.strategy, lambda named: torch.optim.SGD(named, lr=0.0), loss=case.build(),
        example=_given(case, {"weights": torch.ones(1, 2)}), device="cpu",
    )  # fmt: skip
    steps = []
    for batch in batches:
        fields = [_given(case, sequence) for sequence in batch]
        steps.append((exe.step(fields).loss, exe.gradients(fields)))
    exe.close()
    return steps


def outcome(case: LossCase) -> str:
    """Return "right", "refused: ..." or "WRONG: ..."; any other error is wrong too."""
    batches = [_data(case.seed, 3, 9), _data(case.seed + 1, 11, 40)]
    try:
        found = _trained(case, batches) if case.strategy == ONE_RANK else hg.launch(_trained, 2, case, batches)[0]
    except hg.Unsupported as refused:
        return f"refused: {refused}"
    except Exception as error:
        return f"WRONG: {case}: {type(error).__name__}: {error}"
    for (loss, gradients), batch in zip(found, batches, strict=True):
        expected_loss, expected = _one_by_one(case, batch)
        if abs(loss - expected_loss) > 1e-5 * max(abs(expected_loss), 1e-3):
            return f"WRONG: {case}: loss {loss} for {expected_loss}"
        name, ratio = reference.worst(gradients, expected)
        if ratio > 1:
            return f"WRONG: {case}: the gradient of {name} by {ratio:.1f} times the tolerance"
    return "right"
