"""Optimizers that may update shards are accepted; those that look at whole tensors, by class or by hook, are not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hydragraph as hg
from hydragraph.errors import Unsupported
from hydragraph.runtime.supported_optimizers import (
    ELEMENTWISE,
    call_factory,
    check_elementwise,
    check_settings,
    state_bytes,
)
from tests.own_models import small

Named = list[tuple[str, nn.Parameter]]


class OwnStep(torch.optim.SGD):
    """Divides by a norm, as LARS does."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnGroup(torch.optim.AdamW):
    """Centralises gradients before the update."""

    def _init_group(self, *args: Any, **options: Any) -> Any:
        return super()._init_group(*args, **options)


class OwnDefaults(torch.optim.AdamW):
    def __init__(self, named: Named) -> None:
        super().__init__(named, lr=1e-3)


def named() -> Named:
    return [("weight", nn.Parameter(torch.ones(4)))]


@pytest.mark.parametrize("kind", [*ELEMENTWISE, hg.AdamW], ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_elementwise_classes_are_accepted_also_with_a_scheduler(kind: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = kind(named(), lr=0.1)
    check_elementwise(optimizer)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps the optimizer's step
    check_elementwise(optimizer)


@pytest.mark.parametrize(("kind", "size"), [(torch.optim.SGD, 4), (torch.optim.AdamW, 12), (hg.AdamW, 14)])
def test_state_counts_the_rounded_weights_that_an_optimizer_keeps(kind: Any, size: int) -> None:
    assert state_bytes(functools.partial(kind, lr=0.1), ["a", "b"], torch.bfloat16) == size
    assert state_bytes(functools.partial(kind, lr=0.1), ["a"], torch.float32) == min(size, 12)


def test_a_subclass_that_only_chooses_defaults_is_accepted() -> None:
    check_elementwise(OwnDefaults(named()))


@pytest.mark.parametrize(("kind", "method"), [(OwnStep, "step"), (OwnGroup, "_init_group")])
def test_a_subclass_that_changes_the_update_is_refused(kind: type[torch.optim.Optimizer], method: str) -> None:
    with pytest.raises(Unsupported, match=rf"{kind.__name__}: it defines its own '{method}'.*use torch.optim"):
        check_elementwise(kind(named(), lr=0.1))  # pyrefly: ignore[missing-argument, unexpected-keyword]


@pytest.mark.parametrize("kind", [*ELEMENTWISE, hg.AdamW], ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_settings_that_are_not_numbers_are_refused(kind: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = kind(named(), lr=0.1)
    (group,) = optimizer.param_groups
    for right in (0.1, 1, torch.tensor(0.1), np.float32(0.1)):
        group["lr"] = right
        check_settings(optimizer)
    for wrong in ("0.1", None, (0.1,)):
        group["lr"] = wrong
        with pytest.raises(Unsupported, match=r"a parameter group has lr=.*; use numbers"):
            check_settings(optimizer)
    group["lr"] = 0.1
    if "betas" in group:
        group["betas"] = (0.9, "0.95")
        with pytest.raises(Unsupported, match=r"a parameter group has betas=\(0.9, '0.95'\)"):
            check_settings(optimizer)


@pytest.mark.parametrize("decorated", [False, True])
def test_a_step_that_was_replaced_is_refused(decorated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD(named(), lr=0.1)

    def step(closure: Any = None) -> None:
        """Update no parameter."""

    monkeypatch.setattr(optimizer, "step", functools.wraps(optimizer.step)(step) if decorated else step)
    with pytest.raises(Unsupported, match="defines its own 'step'"):
        check_elementwise(optimizer)


def test_a_step_that_is_replaced_after_compilation_is_refused() -> None:
    exe = hg.compile(small(), "<tp1,pp1>", functools.partial(torch.optim.SGD, lr=0.1), device="cpu", check="off")
    exe.optimizer.step = lambda closure=None: None  # pyrefly: ignore[bad-assignment, method-assign]
    with pytest.raises(Unsupported, match="defines its own 'step'"):
        exe.step([torch.arange(5)])
    exe.close()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Muon, torch.optim.Adafactor, torch.optim.SparseAdam])
def test_optimizers_of_whole_tensors_are_refused_by_name(kind: Callable[[Named], torch.optim.Optimizer]) -> None:
    with pytest.raises(
        Unsupported, match=f"optimizer {kind.__name__}: it does not treat every element in the same way"
    ):
        check_elementwise(call_factory(kind, named()))


def test_an_error_of_the_users_own_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        call_factory(lambda pairs: torch.optim.SGD(pairs, lr=-1.0), named())
    with pytest.raises(KeyError, match="absent"):
        call_factory(lambda pairs: {}["absent"], named())


def test_hooks_are_refused_until_they_are_removed() -> None:
    ((_, weight),) = pairs = named()
    optimizer = torch.optim.SGD(pairs, lr=0.1)
    for register in (
        lambda: optimizer.register_step_pre_hook(lambda *args: None),
        lambda: optimizer.register_step_post_hook(lambda *args: None),
        lambda: weight.register_hook(lambda gradient: gradient),
        lambda: weight.register_post_accumulate_grad_hook(lambda tensor: None),
    ):
        hook: Any = register()
        with pytest.raises(Unsupported, match=r"optimizer SGD: it has a .*hook.*remove the hook"):
            check_elementwise(optimizer)
        hook.remove()
        check_elementwise(optimizer)
