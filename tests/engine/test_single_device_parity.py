"""The comparison with one device: what it passes, and that it finds what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hydragraph.engine.single_device_parity import Reference, compare, reference, verify
from hydragraph.spec.strategy import Strategy
from tests.models import gpt2, llama, sequences
from tests.train.plain import PlainExecutor, PlainReport

LENGTHS = [9, 1, 14, 2]
STRATEGIES = [Strategy.parse(text, 2) for text in ("<tp1,pp1>", "<tp1,pp2>")]


class Wrong(PlainExecutor):
    """Computes one parameter's gradient, or the loss, wrongly by a relative error."""

    parameter, error, loss_error = "model.norm.weight", 0.0, 0.0

    def gradients(self, sequences: Any, strategy: Strategy | None = None) -> dict[str, Tensor]:
        found = super().gradients(sequences, strategy)
        return {**found, self.parameter: found[self.parameter] * (1 + self.error)}

    def evaluate(self, sequences: Any, strategy: Strategy | None = None) -> PlainReport:
        report = super().evaluate(sequences, strategy)
        return replace(report, loss=report.loss * (1 + self.loss_error))


def executor(model: nn.Module, **errors: float) -> Wrong:
    made = Wrong(model, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    for name, value in errors.items():
        setattr(made, name, value)
    return made


def batch() -> list[Tensor]:
    return sequences(LENGTHS)


def test_the_reference_is_the_token_mean_and_its_gradient() -> None:
    model: Any = llama(layers=2)
    found = reference(model, batch())
    losses = [model(input_ids=s[None], labels=s[None]).loss * (len(s) - 1) for s in batch() if len(s) > 1]
    mean = torch.stack(losses).sum() / sum(n - 1 for n in LENGTHS)
    mean.backward()
    assert found.loss == pytest.approx(mean.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)


def test_the_reference_takes_labels_and_leaves_gradients_alone() -> None:
    model: Any = gpt2(layers=1)
    ids = sequences([8])[0]
    labels = ids.clone()
    labels[:4] = -100
    found = reference(model, [{"input_ids": ids, "labels": labels}])
    assert found.loss == pytest.approx(model(input_ids=ids[None], labels=labels[None]).loss.item(), rel=1e-6)
    assert all(p.grad is None for p in model.parameters())


def test_refuses_sequences_without_targets() -> None:
    with pytest.raises(ValueError, match="no sequence has a target"):
        reference(llama(layers=1), sequences([1, 1]))


def test_passes_what_is_right() -> None:
    model = llama(layers=2)
    rows = verify(executor(model), STRATEGIES, batch(), reference(model, batch()))
    assert [row.strategy for row in rows] == [str(s) for s in STRATEGIES]
    assert all(row.passed for row in rows)
    assert verify(executor(model), STRATEGIES, batch(), None) == []


def test_finds_a_wrong_gradient_and_names_it() -> None:
    model = llama(layers=2)
    row = verify(executor(model, error=1e-3), STRATEGIES[:1], batch(), reference(model, batch()))[0]
    assert row.parameter == "model.norm.weight"
    assert row.error == pytest.approx(1e-3 * row.norm, rel=1e-2)
    assert row.loss_error <= 1e-5
    assert not row.passed


@pytest.mark.parametrize(("error", "passed"), [(1e-6, True), (1e-4, False), (math.nan, False)])
def test_holds_the_loss_to_its_tolerance(error: float, passed: bool) -> None:
    model = llama(layers=2)
    row = verify(executor(model, loss_error=error), STRATEGIES[:1], batch(), reference(model, batch()))[0]
    assert row.passed is passed


def test_a_gradient_that_is_not_a_number_does_not_pass() -> None:
    expected = Reference(1.0, {"a": torch.ones(2), "b": torch.ones(2)})
    row = compare(expected, {"a": torch.tensor([1.0, math.nan]), "b": torch.ones(2)}, 1.0, "s")
    assert (row.parameter, row.passed) == ("a", False)


def test_a_missing_gradient_is_an_error() -> None:
    with pytest.raises(ValueError, match="gradients of different parameters: \\['b'\\]"):
        compare(Reference(1.0, {"a": torch.ones(1), "b": torch.ones(1)}), {"a": torch.ones(1)}, 1.0, "s")


@given(
    own=st.floats(0, 10).filter(lambda x: x == 0 or x > 1e-6),
    other=st.floats(1e-3, 10),
    error=st.floats(0, 1e-3).filter(lambda x: x == 0 or x > 1e-12),
)
def test_the_tolerance_is_the_stated_one(own: float, other: float, error: float) -> None:
    def vector(value: float) -> Tensor:
        return torch.tensor([value, 0.0], dtype=torch.float64)

    expected = Reference(1.0, {"own": vector(own), "other": vector(other)})
    wrong = {"own": torch.tensor([own, error], dtype=torch.float64), "other": vector(other)}
    tolerance = 1e-5 * own + 1e-7 * math.hypot(own, other)
    row = compare(expected, wrong, 1.0, "s")
    if abs(error - tolerance) > 1e-6 * tolerance:
        assert row.passed == (error <= tolerance)
