"""A rank's state under any home layout: what it owns of each parameter, and what of that counts with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.errors import Unsupported
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.layout import Layout, home
from hydragraph.ir.program import Program
from hydragraph.runtime.home_state import HomeState, left_out, make_optimizer, settings_of
from hydragraph.runtime.shard_boxes import sharded_weights
from hydragraph.spec.home import EQUAL
from tests.runtime.homes import MODEL, Named, tensors


def states(layouts: dict[str, Layout], ranks: int) -> list[HomeState]:
    found = [HomeState.allocate(cast(Program, MODEL), layouts, rank) for rank in range(ranks)]
    for state in found:
        state.fill(tensors(0))
    return found


def check(layouts: dict[str, Layout], ranks: int) -> None:
    """Check that shards are the intervals of what was filled in, and that each element counts and is written once."""
    full, found = tensors(0), states(layouts, ranks)
    canonical = {p.name: p.canonical(full[p.name]) for bucket in MODEL.buckets for p in bucket.parameters}
    written = {name: torch.zeros(tensor.shape) for name, tensor in full.items()}
    for state in found:
        for bucket in MODEL.buckets:
            whole = torch.cat([canonical[p.name] for p in bucket.parameters])
            mine = layouts[bucket.name].of(state.rank)
            parts = [whole[lo:hi] for lo, hi in zip(mine.lo.tolist(), mine.hi.tolist(), strict=True)]
            assert torch.equal(state.weights[bucket.name], torch.cat(parts) if parts else torch.zeros(0))
        for name, piece in state.pieces.items():
            assert state.parameters[name].numel() == piece.size
            parts = [canonical[name][lo:hi] for lo, hi in piece.intervals]
            assert torch.equal(state.parameters[name].detach(), torch.cat(parts) if parts else torch.zeros(0))
        for name, value in sharded_weights(state, once=True).items():
            for offsets, box in value.boxes.items():
                at = tuple(slice(o, o + n) for o, n in zip(offsets, box.shape, strict=True))
                assert torch.equal(full[name][at], box)
                written[name][at] += 1
    assert all((count == 1).all() for count in written.values())
    assert sum(part.numel() for state in found for part in state.counted) == sum(b.size for b in MODEL.buckets)


@pytest.mark.parametrize("limit", [0.0, 1.0, 1e6])
def test_gradients_are_clipped_as_pytorch_does(limit: float) -> None:
    (state,) = states(HomeLayouts(EQUAL, 1).by_name(MODEL.buckets), 1)
    expected = [torch.nn.Parameter(gradient.clone()) for gradient in state.gradients.values()]
    for parameter, gradient in zip(expected, state.gradients.values(), strict=True):
        parameter.grad = torch.randn_like(parameter)
        gradient.copy_(parameter.grad)
    norm = torch.nn.utils.clip_grad_norm_(expected, limit)
    state.clip_gradients(norm.item(), limit)
    for parameter, gradient in zip(expected, state.gradients.values(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@given(st.integers(1, 5), st.sampled_from((1, 8)), st.data())
def test_any_home(ranks: int, align: int, data: st.DataObject) -> None:
    copies = data.draw(st.sampled_from((1, 2) if ranks > 1 else (1,)))
    weights = st.lists(st.sampled_from((0.0, 1.0, 3.0)), min_size=ranks, max_size=ranks)
    shares = data.draw(weights.filter(lambda w: sum(map(bool, w)) >= copies))
    check({b.name: home(b.size, range(ranks), shares, copies, align) for b in MODEL.buckets}, ranks)


@given(st.data())
def test_a_part_of_a_bucket_may_have_a_second_owner_while_it_moves(data: st.DataObject) -> None:
    """As when shares move in chunks beside training: each chunk first has two owners."""
    layouts = {}
    for bucket in MODEL.buckets:
        owners = home(bucket.size, range(2), [1, 1], align=1)
        lo, hi = sorted(data.draw(st.lists(st.integers(0, owners.local_size(0)), min_size=2, max_size=2, unique=True)))
        # Rank 1 also owns [lo, hi) of what rank 0 does: before its own, as rows are by element.
        add = lambda column, value: np.insert(column, 1, value)  # noqa: E731
        moved = replace(
            owners,
            rank=add(owners.rank, 1),
            lo=add(owners.lo, lo),
            hi=add(owners.hi, hi),
            at=np.append(add(owners.at, 0)[:-1], hi - lo),
            copy=add(owners.copy, 1),
            partial=add(owners.partial, True),
        )
        layouts[bucket.name] = moved
    check(layouts, 2)


def test_parameters_that_learn_have_their_part_of_the_gradients() -> None:
    layouts = {b.name: home(b.size, range(2), [1, 0]) for b in MODEL.buckets}
    owner, other = states(layouts, 2)
    assert other.counted == []
    owner.gradients["layer.0"].fill_(2.0)
    with owner.attached_gradients(), other.attached_gradients():
        assert {p.grad.numel() if p.grad is not None else None for p in other.parameters.values()} == {0}
        gradient = owner.parameters["layer.0.norm"].grad
        assert gradient is not None
        assert gradient.tolist() == pytest.approx([2.0] * 7)


def test_a_step_of_the_optimizer_outside_an_update_changes_nothing() -> None:
    (state,) = states(HomeLayouts(EQUAL, 1).by_name(MODEL.buckets), 1)
    optimizer = make_optimizer(by_name, state)
    for gradient in state.gradients.values():
        gradient.fill_(1.0)
    before = {name: parameter.clone() for name, parameter in state.parameters.items()}
    optimizer.step()
    with pytest.raises(KeyboardInterrupt), state.attached_gradients():
        raise KeyboardInterrupt
    optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in state.parameters.items())


def by_dimension(named: Named, matrices: float) -> torch.optim.Optimizer:
    decayed: dict[str, Any] = {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": matrices}
    return torch.optim.SGD([decayed, {"params": [p for _, p in named if p.dim() < 2]}], lr=0.1)


def by_name(named: Named) -> torch.optim.Optimizer:
    first: dict[str, Any] = {"params": [named[0][1]], "weight_decay": 0.5}
    return torch.optim.SGD([first, {"params": [p for _, p in named[1:]]}], lr=0.1)


def matrices_alone(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named if p.dim() >= 2] or [named[0][1]], lr=0.1)


def of_those_with_elements(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named if p.numel()], lr=0.1)


def those_without_a_second_dimension(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named if p.ndim < 2], lr=0.1)


def with_a_rate_of_all_elements(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1.0 / (1 + sum(p.numel() for _, p in named)))


def test_a_parameter_whose_data_was_replaced_is_refused() -> None:
    for state in states(HomeLayouts(EQUAL, 2).by_name(MODEL.buckets), 2):
        with torch.no_grad():
            for parameter in state.parameters.values():
                parameter.copy_(parameter.clone())
        state.check_parameters()
        name = next(name for name, piece in state.pieces.items() if piece.size)
        state.parameters[name].data = state.parameters[name].data.clone()
        with pytest.raises(Unsupported, match=rf"{name}.*its `data` was replaced.*change values in place"):
            state.check_parameters()


def fails_for_matrices(named: Named) -> torch.optim.Optimizer:
    if any(p.dim() > 1 for _, p in named):
        raise KeyError("a matrix")
    return by_name(named)


def test_what_goes_by_shapes_is_refused_with_a_single_group_of_all_too() -> None:
    (state,) = states(HomeLayouts(EQUAL, 1).by_name(MODEL.buckets), 1)
    with pytest.raises(Unsupported, match="differ between the whole parameter"):
        make_optimizer(those_without_a_second_dimension, state)
    halves = states(HomeLayouts(EQUAL, 2).by_name(MODEL.buckets), 2)
    with pytest.raises(Unsupported, match="differ between the whole parameter"):
        make_optimizer(with_a_rate_of_all_elements, halves[0])
    for raises in (
        lambda named: torch.optim.SGD([p for _, p in named if p.dim() >= 2], lr=0.1),
        lambda named: torch.optim.SGD([p for _, p in named], lr=1.0 / named[0][1].shape[1]),
    ):
        with pytest.raises(Unsupported, match="accepts tensors of the model's own shapes, but not 1-D shards"):
            make_optimizer(raises, state)
    with pytest.raises(Unsupported, match="its function fails if called with the model's own shapes"):
        make_optimizer(fails_for_matrices, state)


def test_the_optimizer_is_that_of_the_last_call_of_its_function() -> None:
    (state,) = states(HomeLayouts(EQUAL, 1).by_name(MODEL.buckets), 1)
    made: list[torch.optim.Optimizer] = []

    def kept(named: Named) -> torch.optim.Optimizer:
        made.append(by_name(named))
        return made[-1]

    assert make_optimizer(kept, state) is made[-1]


def test_the_settings_of_an_optimizer_are_those_that_change_the_update() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    of = [settings_of(torch.optim.AdamW([weight], lr=lr, foreach=f)) for lr in (0.1, 0.2) for f in (False, True)]
    assert of[0] == of[1] != of[2] == of[3]
    assert settings_of(torch.optim.AdamW([weight], lr=torch.tensor(0.5))).startswith("AdamW [{'lr': 0.5")
    assert settings_of(None) == "none"


def test_the_members_of_groups_are_in_the_settings_if_names_are_given() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    names = {id(weight): "weight"}
    in_first, in_second = (
        torch.optim.SGD([{"params": m} for m in members]) for members in ([[weight], []], [[], [weight]])
    )
    assert settings_of(in_first) == settings_of(in_second)
    assert settings_of(in_first, names) != settings_of(in_second, names)
    assert left_out(in_first, names) == []
    assert left_out(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), names) == ["weight"]


def test_groups_that_go_by_shapes_are_refused_as_shards_are_flat() -> None:
    (state,) = states(HomeLayouts(EQUAL, 1).by_name(MODEL.buckets), 1)
    for factory in (partial(by_dimension, matrices=0.5), matrices_alone):
        with pytest.raises(Unsupported, match=r"optimizer SGD: its options for '\w.*' differ between the whole"):
            make_optimizer(factory, state)
    for right in (by_name, of_those_with_elements, partial(by_dimension, matrices=0.0)):
        assert make_optimizer(right, state).param_groups
