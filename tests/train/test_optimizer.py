"""Optimizers from configs, and learning rates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hydragraph.train.config import DECAYS, OptimizerConfig, ScheduleConfig
from hydragraph.train.optimizer import learning_rate, optimizer_factory


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(2, 3))
        self.bias = nn.Parameter(torch.zeros(3))


def flat(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(p.detach().flatten())) for name, p in model.named_parameters()]


def test_only_matrices_decay_although_all_are_flat() -> None:
    config = OptimizerConfig(lr=0.5, weight_decay=0.1, betas=(0.8, 0.9))
    named = dict(flat(Small()))
    optimizer = optimizer_factory(config, Small())(list(named.items()))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert type(optimizer) is torch.optim.AdamW
    assert decays == {id(named["matrix"]): 0.1, id(named["bias"]): 0.0}
    assert optimizer.defaults["lr"] == 0.5
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["eps"] == torch.optim.AdamW(list(Small().parameters())).defaults["eps"]


def test_biases_and_norm_weights_of_two_dimensions_do_not_decay() -> None:
    class HeadNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3))
            self.projection = nn.Linear(2, 3)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = HeadNorm()
            self.up_bias = nn.Parameter(torch.zeros(2, 3))

    named = dict(Experts().named_parameters())
    optimizer = optimizer_factory(OptimizerConfig(weight_decay=0.1), Experts())(list(named.items()))
    decaying = [p for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]]
    assert [id(p) for p in decaying] == [id(named["norm.projection.weight"])]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (OptimizerConfig(name="Adamw"), "optimizer.name: torch.optim has no optimizer 'Adamw'"),
        (OptimizerConfig(name="lr_scheduler"), "optimizer.name: torch.optim has no optimizer"),
        (OptimizerConfig(name="SGD", betas=(0.9, 0.9)), "optimizer.betas: SGD has no such setting"),
        (OptimizerConfig(name="Rprop", weight_decay=0.5), "optimizer.weight_decay: Rprop has no such setting"),
        (OptimizerConfig(momentum=0.9), "optimizer.momentum: AdamW has no such setting"),
    ],
)
def test_refuses_what_torch_does_not_have(config: OptimizerConfig, sentence: str) -> None:
    with pytest.raises(ValueError, match="optimizer") as caught:
        optimizer_factory(config, Small())
    assert sentence in str(caught.value)


def test_warms_up_and_falls_to_its_end() -> None:
    schedule = ScheduleConfig(warmup=4, decay="cosine", min_lr_ratio=0.1)
    rates = [learning_rate(step, 20, 2.0, schedule) for step in range(1, 21)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[11] == pytest.approx(2.0 * 0.55), "half way between 4 and 20"
    assert rates[-1] == pytest.approx(0.2)
    linear = [learning_rate(step, 20, 2.0, ScheduleConfig(4, "linear", 0.0)) for step in range(4, 21)]
    assert linear == pytest.approx([2.0 * (20 - step) / 16 for step in range(4, 21)])


def test_a_decay_of_an_unknown_shape_does_not_decay_linearly() -> None:
    schedule = ScheduleConfig()
    object.__setattr__(schedule, "decay", "cubic")
    with pytest.raises(KeyError, match="cubic"):
        learning_rate(9, 10, 1.0, schedule)


@given(
    steps=st.integers(1, 60),
    warmup=st.integers(0, 80),
    decay=st.sampled_from(DECAYS),
    ratio=st.floats(0, 1),
)
def test_stays_between_zero_and_its_peak_and_only_falls_after_the_warm_up(
    steps: int, warmup: int, decay: str, ratio: float
) -> None:
    rates = [learning_rate(step, steps, 3.0, ScheduleConfig(warmup, decay, ratio)) for step in range(1, steps + 1)]
    assert all(0 <= rate <= 3.0 for rate in rates)
    top = max(warmup, 1)
    assert rates[: top - 1] == sorted(rates[: top - 1])
    assert all(later <= earlier + 1e-12 for earlier, later in zip(rates[top - 1 :], rates[top:], strict=False))
    assert steps < top or rates[top - 1] == 3.0


def test_a_warm_up_may_be_a_part_of_all_steps() -> None:
    by_ratio, by_steps = ScheduleConfig(warmup_ratio=0.1), ScheduleConfig(warmup=10)
    for step in range(1, 101):
        assert learning_rate(step, 100, 1.0, by_ratio) == learning_rate(step, 100, 1.0, by_steps)
    with pytest.raises(ValueError, match="give one of them"):
        ScheduleConfig(warmup=1, warmup_ratio=0.1)


def test_wsd_stays_at_its_peak_and_falls_at_the_end() -> None:
    schedule = ScheduleConfig(warmup=4, decay="wsd", min_lr_ratio=0.0, decay_ratio=0.25)
    rates = [learning_rate(step, 20, 2.0, schedule) for step in range(1, 21)]
    assert rates == pytest.approx([0.5, 1.0, 1.5, *[2.0] * 12, 1.6, 1.2, 0.8, 0.4, 0.0])
    tenth = ScheduleConfig(decay="wsd")
    assert [learning_rate(step, 20, 1.0, tenth) for step in (18, 19, 20)] == pytest.approx([1.0, 0.55, 0.1])
    late = ScheduleConfig(warmup=18, decay="wsd", decay_ratio=1.0)
    assert [learning_rate(step, 20, 1.0, late) for step in (17, 18, 20)] == pytest.approx([17 / 18, 1.0, 0.1])
    with pytest.raises(ValueError, match=r"decay_ratio is 0\.2: omit it, or set 'decay' to 'wsd', not 'cosine'"):
        ScheduleConfig(decay_ratio=0.2)
