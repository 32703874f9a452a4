"""AdamW over flat shards: equal to torch.optim.AdamW, in few launches, and a drop-in optimizer."""

# pyrefly: ignore-errors[bad-argument-count, bad-argument-type]
from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.kernels import adamw
from hydragraph.kernels.adamw import AdamW, AdamWSettings, Shard, runs, update
from tests.kernels.interpreter import interpreted

SETTINGS = [
    AdamWSettings(1e-2),
    AdamWSettings(3e-3, (0.4, 0.95), 1e-6, 0.0),
    AdamWSettings(1.0, (0.9, 0.999), 1e-8, 0.5, maximize=True),
]


def shard(size: int, step: int = 3, seed: int = 0, copy: torch.dtype | None = None) -> Shard:
    weight, gradient, moment, square = torch.randn(4, size, generator=torch.Generator().manual_seed(seed)).unbind()
    to = None if copy is None else torch.zeros(size, dtype=copy)
    return Shard(weight, gradient, moment * 0.1, square.square() * 0.01, to, step)


def double(one: Shard) -> Shard:
    return Shard(*(x.double() for x in one.tensors()[:4]), None, one.step)


def close(found: Shard, expected: Shard) -> None:
    for a, b in zip(found.tensors()[:4], expected.tensors()[:4], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-7)


def neighbours(sizes: Sequence[int], steps: Sequence[int] | None = None) -> list[Shard]:
    whole = torch.randn(4, sum(sizes), generator=torch.Generator().manual_seed(1)).square()
    parts = [row.split(list(sizes)) for row in whole]
    return [Shard(*tensors, None, step) for *tensors, step in zip(*parts, steps or [1] * len(sizes), strict=True)]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("step", [1, 1000])
def test_the_reference_is_the_formula(settings: AdamWSettings, step: int) -> None:
    found, expected = shard(37, step), double(shard(37, step))
    update([found], settings)
    _by_formula(expected, settings)
    close(found, expected)


def _by_formula(x: Shard, settings: AdamWSettings) -> None:
    first, second = settings.betas
    gradient = -x.gradient if settings.maximize else x.gradient
    x.weight.mul_(1 - settings.lr * settings.weight_decay)
    x.moment.mul_(first).add_(gradient, alpha=1 - first)
    x.square.mul_(second).add_(gradient**2, alpha=1 - second)
    mean, spread = x.moment / (1 - first**x.step), (x.square / (1 - second**x.step)).sqrt()
    x.weight.sub_(settings.lr * mean / (spread + settings.eps))


@interpreted
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("size", "step"), [(1, 1), (16, 2), (1039, 1000)])
def test_the_kernel_equals_double_precision(settings: AdamWSettings, size: int, step: int) -> None:
    found, expected = shard(size, step, copy=torch.bfloat16), double(shard(size, step))
    update([found], settings)
    adamw.reference([expected], settings)
    close(found, expected)
    assert found.copy is not None
    assert torch.equal(found.copy, found.weight.bfloat16())


@interpreted
def test_the_optimizer_by_kernel_and_by_torch() -> None:
    ours, theirs = _trained(lambda p: AdamW(p, lr=0.05)), _trained(lambda p: torch.optim.AdamW(p, lr=0.05))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@interpreted
def test_neighbours_and_empty_shards_by_kernel() -> None:
    shards = neighbours([5, 0, 30, 7])
    wide = [double(x) for x in shards]
    update(shards, SETTINGS[0])
    adamw.reference([x for x in wide if x.weight.numel()], SETTINGS[0])
    for found, expected in zip(shards, wide, strict=True):
        close(found, expected)


def _trained(make: object) -> list[Tensor]:
    flat = torch.randn(40, generator=torch.Generator().manual_seed(0))
    gradients = torch.zeros(40)
    parameters = [nn.Parameter(part) for part in flat.split([3, 0, 20, 17])]
    for parameter, part in zip(parameters, gradients.split([3, 0, 20, 17]), strict=True):
        parameter.grad = part
    groups = [{"params": parameters[:2], "weight_decay": 0.3}, {"params": parameters[2:], "weight_decay": 0.0}]
    optimizer = make(groups)
    for step in range(3):
        gradients.copy_(torch.randn(40, generator=torch.Generator().manual_seed(10 + step)))
        optimizer.step()
    return [*(p.detach() for p in parameters), *(optimizer.state[p]["exp_avg_sq"] for p in parameters)]


@pytest.mark.parametrize("fused", [False, True])
def test_on_cpu_the_optimizer_is_torchs_up_to_the_last_bit(fused: bool) -> None:
    ours, theirs = _trained(lambda p: AdamW(p, lr=0.05)), _trained(lambda p: torch.optim.AdamW(p, lr=0.05, fused=fused))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-7, atol=1e-9)


def test_whole_vectors_are_torchs_own_fused_kernel_bit_by_bit() -> None:
    found, expected = shard(64), shard(64)
    update([found], SETTINGS[1])
    adamw._fused([expected], SETTINGS[1])
    for a, b in zip(found.tensors(), expected.tensors(), strict=True):
        assert torch.equal(a, b)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_bits_do_not_depend_on_where_shards_begin_and_end(sizes: list[int], steps: list[int]) -> None:
    shards = neighbours(sizes, steps[: len(sizes)])
    alone = [
        Shard(*(t.clone() for t in one.part(i, i + 1).tensors()), None, one.step)
        for one in shards
        for i in range(len(one.weight))
    ]
    update(shards, SETTINGS[1])
    for one in alone:
        update([one], SETTINGS[1])
    for place in range(4):
        together = torch.cat([one.tensors()[place] for one in shards])
        assert torch.equal(together, torch.cat([one.tensors()[place] for one in alone]))


def test_a_state_dict_goes_to_torchs_class_and_back() -> None:
    def one(kind: type[torch.optim.AdamW], state: dict[str, object] | None) -> tuple[nn.Parameter, torch.optim.AdamW]:
        parameter = nn.Parameter(torch.ones(5))
        optimizer = kind([parameter], lr=0.1)
        if state is not None:
            optimizer.load_state_dict(deepcopy(state))
        for _ in range(2):
            parameter.grad = torch.arange(5.0)
            optimizer.step()
        return parameter, optimizer

    first = one(AdamW, None)[1].state_dict()
    there, back = one(torch.optim.AdamW, first), one(AdamW, first)
    assert torch.equal(there[0], back[0])
    again = one(AdamW, there[1].state_dict())[1].state_dict()["state"][0]
    assert float(again["step"]) == 6
    expected = one(torch.optim.AdamW, there[1].state_dict())[1].state_dict()["state"][0]
    assert torch.equal(again["exp_avg"], expected["exp_avg"])


def test_amsgrad_is_refused() -> None:
    other = torch.optim.AdamW([nn.Parameter(torch.ones(5))], amsgrad=True)
    optimizer = AdamW([nn.Parameter(torch.ones(5))])
    with pytest.raises(Unsupported, match="a parameter group has amsgrad=True; use torch"):
        optimizer.load_state_dict(other.state_dict())
    optimizer.step()
    with pytest.raises(Unsupported, match="amsgrad"):
        AdamW([{"params": [nn.Parameter(torch.ones(5))], "amsgrad": True}])
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.param_groups[0]["params"][0].grad = torch.ones(5)
    with pytest.raises(Unsupported, match="amsgrad"):
        optimizer.step()


def test_copies_follow_the_weights() -> None:
    parameters = [nn.Parameter(torch.randn(n)) for n in (4, 9)]
    copies = {p: torch.zeros(len(p), dtype=torch.bfloat16) for p in parameters[:1]}
    optimizer = AdamW(enumerate_names(parameters))
    optimizer.copy_to(copies)
    for p in parameters:
        p.grad = torch.ones_like(p)
    assert optimizer.step(lambda: 7) == 7
    assert torch.equal(copies[parameters[0]], parameters[0].detach().bfloat16())


def enumerate_names(parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", p) for i, p in enumerate(parameters)]


def test_new_copies_free_the_tensors_of_earlier_steps() -> None:
    weights = torch.ones(5)
    weights.grad = torch.ones(5)
    optimizer = AdamW([weights])
    optimizer.step()
    moment = weakref.ref(optimizer.state[weights]["exp_avg"])
    optimizer.state.clear()
    optimizer.copy_to({})
    assert moment() is None


def test_what_is_joined() -> None:
    assert [len(x.weight) for _, x in runs(neighbours([5, 3, 4]))] == [12]
    assert [len(x.weight) for _, x in runs(neighbours([5, 3, 4], [1, 1, 2]))] == [8, 4]
    apart = neighbours([5, 3, 4])
    del apart[1]
    assert [len(x.weight) for _, x in runs(apart)] == [5, 4]
    elsewhere = neighbours([5, 3])
    moved = Shard(elsewhere[1].weight, elsewhere[1].gradient.clone(), elsewhere[1].moment, elsewhere[1].square, None, 1)
    assert [len(x.weight) for _, x in runs([elsewhere[0], moved])] == [5, 3]
    assert [len(x.weight) for _, x in runs([shard(5), shard(3, copy=torch.bfloat16)])] == [5, 3]


def test_the_states_of_neighbours_are_neighbours() -> None:
    flat, gradients = torch.randn(12), torch.randn(12)
    parameters = [nn.Parameter(part) for part in flat.split([5, 7])]
    for parameter, part in zip(parameters, gradients.split([5, 7]), strict=True):
        parameter.grad = part
    optimizer = AdamW(parameters)
    optimizer.step()
    assert len(runs([optimizer._shard(p, 1) for p in parameters])) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(2, 2)}, r"weight of shape \(2, 2\).*use torch.optim.AdamW"),
        ({"gradient": torch.zeros(4).bfloat16()}, r"gradient of shape \(4,\), strides \(1,\), torch.bfloat16"),
        ({"square": torch.zeros(8)[::2]}, r"square of shape \(4,\), strides \(2,\)"),
        ({"moment": torch.zeros(5)}, "moment has 5 elements, but its weight has 4"),
        ({"copy": torch.zeros(4)}, "copy of shape .* torch.float32"),
    ],
)
def test_tensors_that_are_refused(change: dict[str, Tensor], message: str) -> None:
    fields = {name: torch.zeros(4) for name in ("weight", "gradient", "moment", "square")} | {"copy": None, "step": 1}
    with pytest.raises(Unsupported, match=message):
        update([Shard(**(fields | change))], SETTINGS[0])


def _twins(count: int, size: int) -> Sequence[tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]]:
    found = []
    for kind in (AdamW, torch.optim.AdamW):
        generator = torch.Generator().manual_seed(0)
        parameters = [torch.nn.Parameter(x) for x in torch.randn(count * size, generator=generator).split(size)]
        for p in parameters:
            p.grad = torch.randn(size, generator=generator)
        found.append((kind(parameters, lr=0.1), parameters))
    return found


def _another_gradient(optimizer: Any, parameters: list[torch.nn.Parameter]) -> None:
    for p in parameters:
        p.grad = torch.full_like(p, 0.5)


def _no_gradient(optimizer: Any, parameters: list[torch.nn.Parameter]) -> None:
    parameters[1].grad = None


def _other_memory(optimizer: Any, parameters: list[torch.nn.Parameter]) -> None:
    parameters[0].data = parameters[0].data * 2


def _other_state(optimizer: Any, parameters: list[torch.nn.Parameter]) -> None:
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    optimizer.state[parameters[0]]["exp_avg"] = optimizer.state[parameters[0]]["exp_avg"] * 3


def _other_steps(optimizer: Any, parameters: list[torch.nn.Parameter]) -> None:
    optimizer.state[parameters[2]]["step"].fill_(0)


def _other_numbers(optimizer: Any, parameters: list[torch.nn.Parameter]) -> None:
    optimizer.param_groups[0].update(lr=0.3, weight_decay=0.2)


def _another_parameter(optimizer: Any, parameters: list[torch.nn.Parameter]) -> None:
    added = torch.nn.Parameter(torch.ones(32))
    added.grad = torch.ones(32)
    optimizer.add_param_group({"params": [added]})
    parameters.append(added)


CHANGES = [
    *(_another_gradient, _no_gradient, _other_memory, _other_state, _other_steps, _other_numbers, _another_parameter)
]


@given(st.lists(st.sampled_from(CHANGES), max_size=5))
def test_what_is_kept_from_step_to_step_is_seen_to_change(changes: list[Any]) -> None:
    twins = _twins(4, 32)
    for change in [None, *changes, None]:
        for optimizer, parameters in twins:
            if change is not None:
                change(optimizer, parameters)
            optimizer.step()
    for ours, torchs in zip(*(parameters for _, parameters in twins), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)


def test_a_copy_of_an_optimizer_steps_by_itself() -> None:
    ((optimizer, parameters), _) = _twins(2, 32)
    optimizer.step()
    other_parameters, other = deepcopy((parameters, optimizer))
    before = parameters[0].detach().clone()
    for p, mine in zip(other_parameters, parameters, strict=True):
        p.grad = torch.ones_like(mine)
    other.step()
    assert torch.equal(parameters[0], before)
    assert not torch.equal(other_parameters[0], before)
