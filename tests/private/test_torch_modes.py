"""In every mode of PyTorch that a caller may use, results are the same or the call is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

import hydragraph as hg
from tests.models import llama, sequences
from tests.thorough import only, thorough


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def two_steps(mode: Callable[[], AbstractContextManager[Any]]) -> list[float]:
    """Return losses of a model that is evaluated, and so compiled, in a mode before it is trained out of it."""
    model, batch = llama(layers=1), sequences([5, 9])
    with mode():
        exe = hg.compile(model, hg.Strategy.parse("<tp1,pp1>", 1), torch.optim.AdamW, device="cpu")
        losses = [exe.evaluate(batch).loss]
    losses += [exe.step(batch).loss for _ in range(2)]
    with mode():
        losses.append(exe.step(batch).loss)
    losses.append(exe.step(batch).loss)
    exe.close()
    return losses


@functools.cache
def plain_losses() -> list[float]:
    return two_steps(nullcontext)


@only("device")
@pytest.mark.parametrize(
    "mode",
    [pytest.param(torch.no_grad, marks=thorough), torch.inference_mode, lambda: torch.device("meta")],
    ids=["no_grad", "inference", "device"],
)
def test_modes_change_nothing(mode: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain_losses()
    monkeypatch.setattr("hydragraph.passes.variants._shared", {})  # forget earlier compilations
    assert two_steps(mode) == expected
    assert len(set(expected)) == 4  # the evaluation and the first step have the same weights


@only("default dtype")
@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        (autocast, "under torch.autocast for torch.bfloat16; move the call outside of autocast"),
        (
            lambda: default_dtype(torch.bfloat16),
            "torch's default dtype is torch.bfloat16; call torch.set_default_dtype",
        ),
    ],
    ids=["autocast", "default dtype"],
)
def test_modes_that_change_numbers_are_refused(mode: Any, sentence: str) -> None:
    strategy, model = hg.Strategy.parse("<tp1,pp1>", 1), llama(layers=1)
    with mode(), pytest.raises(hg.Unsupported, match=f"capture: .*{sentence}"):
        hg.capture(model)
    with mode(), pytest.raises(hg.Unsupported, match=f"compile: .*{sentence}"):
        hg.compile(model, strategy, device="cpu")
    exe = hg.compile(model, strategy, device="cpu")
    with mode(), pytest.raises(hg.Unsupported, match=f"evaluate: .*{sentence}"):
        exe.evaluate(sequences([5, 9]))
    exe.close()
