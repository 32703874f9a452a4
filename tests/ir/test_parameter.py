"""Parameters: shards and the canonical order against plain slicing of the natural tensor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.ir.parameter import Bucket, Parameter, ShardRule

DEGREES = (1, 2, 3, 4, 6)


@st.composite
def parameters(draw: st.DrawFn, name: str = "p") -> Parameter:
    """Draw a replicated parameter, or one cut along any dimension; head counts suit every degree of DEGREES."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    if draw(st.booleans()):
        return Parameter(name, tuple(shape))
    heads, dim, unit = draw(st.booleans()), draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
    segments = draw(st.lists(st.sampled_from((1, 12)) if heads else st.integers(1, 9), min_size=1, max_size=3))
    shape[dim] = sum(segments) * unit
    return Parameter(name, tuple(shape), rule=ShardRule(dim, tuple(segments), unit, heads))


def holders(rule: ShardRule, n: int, unit: int, tp: int) -> list[int]:
    """Return the ranks that hold a unit of a segment of `n`, by counting: groups of ranks per head, or floors."""
    if rule.heads and n < tp:
        return [j for j in range(tp) if j // (tp // n) == unit]
    return [j for j in range(tp) if math.floor(j * n / tp) <= unit < math.floor((j + 1) * n / tp)]


def shard(parameter: Parameter, full: Tensor, tp: int, index: int) -> Tensor:
    """Slice one rank's natural shard out of a full natural tensor, unit by unit."""
    rule = parameter.rule
    if rule is None:
        return full
    pieces, start = [full.narrow(rule.dim, 0, 0)], 0
    for n in rule.segments:
        for unit in range(n):
            if index in holders(rule, n, unit, tp):
                pieces.append(full.narrow(rule.dim, start, rule.unit))
            start += rule.unit
    return torch.cat(pieces, rule.dim)


def full_tensor(parameter: Parameter) -> Tensor:
    return torch.arange(parameter.size).reshape(parameter.shape)


@given(parameters(), st.sampled_from(DEGREES))
def test_shards_are_intervals_of_the_canonical_order(parameter: Parameter, tp: int) -> None:
    full = full_tensor(parameter)
    canonical = parameter.canonical(full)
    assert canonical.shape == (parameter.size,)
    for index in range(tp):
        expected = shard(parameter, full, tp, index)
        local = torch.cat([canonical[lo:hi] for lo, hi in parameter.intervals(tp, index)])
        assert parameter.local_shape(tp, index) == tuple(expected.shape)
        assert torch.equal(parameter.canonical(expected), local)
        assert torch.equal(parameter.natural(local, tp, index), expected)


@given(parameters(), st.sampled_from(DEGREES))
def test_natural_is_a_view_of_the_canonical_elements(parameter: Parameter, tp: int) -> None:
    flat = torch.zeros(sum(hi - lo for lo, hi in parameter.intervals(tp, tp - 1)))
    parameter.natural(flat, tp, tp - 1).fill_(1.0)
    assert bool((flat == 1.0).all())


@given(parameters(), st.sampled_from(DEGREES))
def test_shards_cover_the_parameter_and_overlap_only_where_shared(parameter: Parameter, tp: int) -> None:
    held = torch.zeros(parameter.size, dtype=torch.int64)
    for index in range(tp):
        for lo, hi in parameter.intervals(tp, index):
            held[lo:hi] += 1
    rule = parameter.rule
    if rule is None:
        assert bool((held == tp).all())
    else:
        assert int(held.min()) >= 1
        assert (rule.heads and min(rule.segments) < tp) == (int(held.max()) > 1)


def test_uneven_units_follow_the_floors() -> None:
    rule = ShardRule(0, (7,))
    assert [rule.units(0, 3, j) for j in range(3)] == [(0, 2), (2, 4), (4, 7)]
    assert [ShardRule(0, (2,)).units(0, 4, j) for j in range(4)] == [(0, 0), (0, 1), (1, 1), (1, 2)]
    assert [ShardRule(0, (2,), heads=True).units(0, 4, j) for j in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_fused_query_key_value_with_shared_heads() -> None:
    fused = Parameter("qkv", (2 * (4 + 2 + 2), 3), rule=ShardRule(0, (4, 2, 2), unit=2, heads=True))
    assert fused.intervals(4, 0) == ((0, 6), (24, 30), (36, 42))
    assert fused.intervals(4, 3) == ((18, 24), (30, 36), (42, 48))
    assert fused.local_shape(4, 3) == (6, 3)


@pytest.mark.parametrize(("heads", "tp"), [(2, 3), (4, 6), (4, 3), (12, 8)])
def test_heads_that_cannot_be_shared_evenly_are_refused(heads: int, tp: int) -> None:
    with pytest.raises(Unsupported, match=f"{heads} .*heads .*degree {tp}; use a degree that divides the head count"):
        ShardRule(0, (heads,), heads=True).units(0, tp, 0)


def test_a_refused_degree_names_the_parameter() -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    parameter = Parameter(name, (4, 8), rule=ShardRule(0, (4,), heads=True))
    for ask in (parameter.intervals, parameter.local_shape):
        with pytest.raises(Unsupported, match=f"^{name}: 4 heads are not divisible") as caught:
            ask(3, 0)
        assert caught.value.where == name


@pytest.mark.parametrize(
    ("dim", "segments", "unit", "message"),
    [
        (-1, (4,), 1, "'dim' is -1: use a dimension of at least 0"),
        (0, (), 1, r"'segments' is \(\), 'unit' is 1"),
        (0, (4, 0), 1, r"'segments' is \(4, 0\)"),
        (0, (4,), 0, "'unit' is 0"),
    ],
)
def test_rules_are_checked(dim: int, segments: tuple[int, ...], unit: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardRule(dim, segments, unit)


@pytest.mark.parametrize(
    ("shape", "rule", "message"),
    [
        ((4, 0), None, r"parameter p has no elements: shape \(4, 0\)"),
        ((4, 2), ShardRule(2, (4,)), r"parameter p: the rule shards dimension 2, but the shape is \(4, 2\)"),
        (
            (8, 2),
            ShardRule(0, (2, 1), unit=2),
            r"parameter p: segments \(2, 1\) with units of 2 have 6 elements, .* has 8",
        ),
        ((), ShardRule(0, (1,)), "the rule shards dimension 0"),
    ],
)
def test_parameters_are_checked(shape: tuple[int, ...], rule: ShardRule | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parameter("p", shape, rule=rule)


def test_a_scalar_is_a_parameter_of_one_element() -> None:
    assert Parameter("p", ()).intervals(2, 1) == ((0, 1),)


def test_a_bucket_lists_each_parameter_once() -> None:
    with pytest.raises(ValueError, match="bucket b: p occurs more than once"):
        Bucket("b", (Parameter("p", (1,)), Parameter("q", (1,)), Parameter("p", (2,))), ("b",))


@given(st.data())
def test_a_flat_vector_is_parameter_major(data: st.DataObject) -> None:
    members = tuple(data.draw(parameters(f"p{i}")) for i in range(data.draw(st.integers(1, 4))))
    bucket = Bucket("layer.0", members, ("layer.0",))
    tensors = {p.name: full_tensor(p) + 1000 * i for i, p in enumerate(members)}
    vector = torch.cat([p.canonical(tensors[p.name]) for p in members])
    offsets = bucket.offsets()
    assert vector.shape == (bucket.size,)
    for p in members:
        part = vector[offsets[p.name] : offsets[p.name] + p.size]
        assert torch.equal(p.natural(part), tensors[p.name])


def test_the_example_of_the_module() -> None:
    w = Parameter("w", (3, 4), rule=ShardRule(1, (2, 2)))
    assert w.intervals(2, 0) == ((0, 3), (6, 9))
    assert w.intervals(2, 1) == ((3, 6), (9, 12))
    full = torch.arange(12).view(3, 4)
    flat = torch.cat([w.canonical(full)[lo:hi] for lo, hi in w.intervals(2, 1)])
    assert torch.equal(w.natural(flat, 2, 1), full[:, [1, 3]])
