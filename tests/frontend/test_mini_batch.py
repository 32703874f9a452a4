"""Use of the given mini-batch by a step, at every degree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hydragraph as hg
from hydragraph.frontend.mini_batch import MiniBatch, digest
from hydragraph.spec.workload import Field
from tests import reference
from tests.models import randomised, sequences
from tests.own_models import alone, small
from tests.ready import Ready
from tests.thorough import first

STRATEGIES = ["<[0,1]x1>", "2*<tp1,pp1>"]


@pytest.fixture(scope="module")
def prepared() -> Ready:
    return Ready.of(randomised(small()), STRATEGIES)


def refused(exe: hg.Executable, batch: object) -> str:
    with pytest.raises(ValueError, match="sequence") as caught:
        exe.step(batch)  # pyrefly: ignore[bad-argument-type]
    return str(caught.value)


def on_a_rank(prepared: Ready, strategy: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    exe = prepared.executable(hg.Strategy.parse(strategy, layers=1), lambda named: torch.optim.SGD(named, lr=0.1))
    outside = [
        torch.tensor([3, 101]),
        torch.tensor([-1, 3]),
        {"input_ids": torch.tensor([3, 4]), "labels": torch.tensor([-100, 101])},
        torch.ones(129, dtype=torch.int64),
        {"input_ids": torch.tensor([3, 4]), "attention_mask": torch.tensor([0, 1])},
    ]
    messages = [refused(exe, [torch.tensor([1, 2]), each]) for each in outside]
    plain = sequences([5, 3])
    padded = {
        "input_ids": torch.stack([plain[0], torch.nn.functional.pad(plain[1], (0, 2))]).int(),
        "attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]),
    }
    return messages, exe.gradients(padded), exe.gradients([plain[0].repeat(2, 1).t()[:, 0], plain[1].int()])


@pytest.mark.parametrize("strategy", first(STRATEGIES[:1], STRATEGIES))
def test_values_outside_are_refused_at_every_degree_and_padded_batches_are_cut(strategy: str, prepared: Ready) -> None:
    model, plain = prepared.model, sequences([5, 3])
    parts = [F.cross_entropy(alone(model, ids)[:-1], ids[1:], reduction="sum") for ids in plain]
    named = dict(model.named_parameters())
    wanted = dict(zip(named, torch.autograd.grad(torch.stack(parts).sum() / 6, list(named.values())), strict=True))
    runs = hg.launch(on_a_rank, 2, prepared, strategy)
    for messages, _, _ in runs:
        ids, negative, labels, long, left = messages
        assert ids.startswith("sequence 1: input_ids is 101 at position 1, outside the range 0 to 100 of tokens")
        assert negative.startswith("sequence 1: input_ids is -1 at position 0")
        assert labels.startswith("sequence 1: labels is 101 at position 1")
        assert long.startswith("sequence 1 has 129 tokens, but places.weight has 128 positions")
        assert "attention_mask" in left
    for found in runs[0][1:]:
        assert reference.worst(found, wanted)[1] <= 1


def failing(*_: object) -> None:
    raise AssertionError("no graph of this")


def switched(prepared: Ready) -> tuple[str, str, list[float]]:
    """Step under a strategy that one rank cannot prepare, then under others; then under that one, mended."""
    good, bad = (hg.Strategy.parse(s, layers=1) for s in ("2*<tp1,pp1>", "<[0,1]x1>"))
    exe = prepared.executable(good, lambda named: torch.optim.SGD(named, lr=0.0))
    batch, kept = sequences([5, 3]), exe._session.preparer._prepare
    losses = [exe.step(batch).loss]
    if exe.rank == 1:
        exe._session.preparer._prepare = failing  # pyrefly: ignore[bad-assignment, method-assign]
    with pytest.raises(hg.Unsupported) as caught:
        exe.step(batch, strategy=bad)
    exe._session.preparer._prepare = kept  # pyrefly: ignore[method-assign]
    with pytest.raises(ValueError, match="rank") as unknown:
        exe.step(batch, strategy=hg.Strategy.parse("<[0,7]x1>", layers=1))
    losses += [exe.step(batch).loss, exe.step(batch, strategy=bad).loss]
    return str(caught.value), str(unknown.value), losses


def test_a_refused_strategy_breaks_nothing(prepared: Ready) -> None:
    runs = hg.launch(switched, 2, prepared)
    for message, _, losses in runs:
        assert message.startswith("strategy <tp2,pp1>")
        assert "it cannot be compiled (AssertionError: no graph of this); choose another strategy" in message
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def divided(prepared: Ready) -> tuple[list[tuple[float, dict[str, Tensor]]], str, str]:
    """Return loss and gradients of each divisor, and what is said about a wrong one and about ranks that disagree."""
    exe = prepared.executable("<[0]x1> + <[1]x1>", lambda named: torch.optim.SGD(named, lr=0.0))
    batch = sequences([9, 1, 5, 12])
    results = []
    for divide_by in ("targets", "sequences", 7, 0.5):
        loss = exe.step(batch, divide_by=divide_by).loss
        assert loss == exe.evaluate(batch, divide_by=divide_by).loss
        results.append((loss, exe.gradients(batch, divide_by=divide_by)))
    messages = []
    for wrong in ("tokens", ("targets", "sequences")[exe.rank]):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            exe.step(batch, divide_by=wrong)  # pyrefly: ignore[bad-argument-type]
        messages.append(str(caught.value))
    return results, *messages  # pyrefly: ignore[bad-return]


def test_the_sum_of_losses_is_divided_by_counts_of_the_whole_mini_batch(prepared: Ready) -> None:
    results, wrong, differing = hg.launch(divided, 2, prepared)[0]
    (loss, gradients), *others = results
    for (other, scaled), divisor in zip(others, (4, 7, 0.5), strict=True):  # 23 targets in 4 sequences
        assert other == pytest.approx(loss * 23 / divisor, rel=1e-6)
        assert reference.worst(scaled, {n: g * 23 / divisor for n, g in gradients.items()})[1] <= 1
    assert wrong == 'divide_by is \'tokens\': pass "targets", "sequences" or a positive number'
    assert "mini-batch, strategy or call" in differing


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, None, "tokens"])
def test_a_divisor_is_a_count_or_a_positive_number(wrong: Any) -> None:
    batch = MiniBatch.of(sequences([4]), True, {})
    with pytest.raises(ValueError, match="divide_by is"):
        batch.divisor(wrong)


def test_a_divisor_may_be_a_numpy_number() -> None:
    batch: Any = MiniBatch.of(sequences([4]), True, {})
    assert [batch.divisor(kind(3)) for kind in (np.int64, np.float32, np.float64)] == [3.0] * 3


def test_a_field_of_one_token_has_a_digest_whatever_its_stride() -> None:
    fields = {"weight": Field(torch.bfloat16)}
    plain, expanded = (torch.ones(1, dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16).expand(1))
    digests = []
    for weight in (plain, expanded, 2 * plain):
        drawn: list[dict[str, Any]] = [
            {"input_ids": torch.tensor([1]), "weight": weight},
            {"input_ids": torch.arange(3), "weight": 0},
        ]
        digests.append(digest("", MiniBatch.of(drawn, True, fields)))
    assert digests[0] == digests[1] != digests[2]
