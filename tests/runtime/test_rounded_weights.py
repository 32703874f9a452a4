"""16-bit copies of the weights follow whatever changes these, and training with them is training without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import hydragraph as hg
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.runtime.home_state import HomeState, make_optimizer
from hydragraph.runtime.rounded_weights import rounded
from hydragraph.spec.home import EQUAL
from tests.models import llama, sequences
from tests.thorough import thorough

LAYERS = 2


def compiled(kind: type[torch.optim.AdamW]) -> hg.Executable:
    strategy = hg.Strategy.parse("<tp1,pp1>", layers=LAYERS)
    return hg.compile(llama(LAYERS), strategy, lambda named: kind(named, lr=1e-2), dtype=torch.bfloat16)


def batch(seed: int) -> list[Tensor]:
    return sequences([9, 14, 5], seed=seed)


@thorough
def test_losses_are_those_of_rounding_at_every_pull(tmp_path: Path) -> None:
    with_copies, without = compiled(hg.AdamW), compiled(torch.optim.AdamW)
    assert with_copies._session.executor._rounded is not None
    assert without._session.executor._rounded is None
    for seed in range(3):
        found, wanted = with_copies.step(batch(seed)).loss, without.step(batch(seed)).loss
        assert found == pytest.approx(wanted, rel=2e-3)  # the two optimizers round differently in fp32
    with_copies.save(tmp_path / "saved")
    without.load(tmp_path / "saved")
    assert with_copies.evaluate(batch(3)).loss == without.evaluate(batch(3)).loss
    with torch.no_grad():
        for exe in (with_copies, without):  # as a user may: without telling the optimizer
            exe.home.parameters["lm_head.weight"].mul_(0.5)
    assert with_copies.evaluate(batch(3)).loss == without.evaluate(batch(3)).loss


def allocated(program: hg.Program, ranks: int, rank: int) -> HomeState:
    return HomeState.allocate(program, HomeLayouts(EQUAL, ranks).by_name(program.buckets), rank)


def test_every_copy_is_its_weight_rounded_also_after_a_step() -> None:
    home = allocated(hg.capture(llama(LAYERS), dtype=torch.bfloat16), 3, 1)
    optimizer = make_optimizer(lambda named: hg.AdamW(named, lr=0.1), home)
    for weights in home.weights.values():
        weights.normal_(generator=torch.Generator().manual_seed(0))
    kept = rounded(home, torch.bfloat16, optimizer)
    assert kept is not None
    for _ in range(2):
        for name, weights in home.weights.items():
            assert torch.equal(kept.of(name), weights.bfloat16())
            home.gradients[name].fill_(0.3)
        with home.attached_gradients():
            optimizer.step()
        for parameter, copy in kept.by_parameter().items():  # written by the optimizer itself
            assert torch.equal(copy, parameter.detach().bfloat16())


def test_models_that_compute_in_fp32_need_none() -> None:
    home = allocated(hg.capture(llama(LAYERS)), 1, 0)
    optimizer = make_optimizer(lambda named: hg.AdamW(named), home)
    assert rounded(home, torch.float32, optimizer) is None
    assert rounded(home, torch.bfloat16, torch.optim.SGD(home.named())) is None
