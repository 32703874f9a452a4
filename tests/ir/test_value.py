"""Values: their texts say all that they are."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.ir.value import (
    Value,
    ValueKind,
    activation,
    activation_gradient,
    aux,
    copying,
    fetched,
    gradients,
    loss,
    message,
    offloaded,
    parse_value,
    postponed,
    saved,
    weights,
)

names = st.from_regex(r"[\w.\-/:]+", fullmatch=True, alphabet=st.characters(exclude_categories=["Cs"]))
numbers = st.integers(0, 10**6)
moved = st.builds(activation, numbers, numbers) | st.builds(activation_gradient, numbers, numbers)
values = (
    moved
    | st.builds(saved, names, numbers)
    | st.builds(offloaded, names, numbers)
    | st.builds(copying, names, numbers)
    | st.builds(fetched, names, numbers)
    | st.builds(postponed, names, numbers)
    | st.builds(aux, numbers)
    | st.builds(loss, numbers)
    | st.builds(weights, names)
    | st.builds(gradients, names)
    | st.builds(message, moved, numbers)
)


def fields(value: Value) -> tuple[object, ...]:
    return value.kind, value.position, value.block, value.bucket, value.micro_batch, value.peer


@given(values)
def test_a_text_gives_the_value_back(value: Value) -> None:
    again = parse_value(str(value))
    assert (again, fields(again)) == (value, fields(value))
    assert type(again) is Value


@given(values)
def test_a_value_travels(value: Value) -> None:
    assert fields(pickle.loads(pickle.dumps(value))) == fields(value)


def test_what_a_text_says() -> None:
    assert fields(parse_value("h2.0")) == (ValueKind.ACTIVATION, 2, "", "", 0, -1)
    assert fields(parse_value("d2.11")) == (ValueKind.ACTIVATION_GRADIENT, 2, "", "", 11, -1)
    assert fields(parse_value("s.layer.0.3")) == (ValueKind.SAVED, -1, "layer.0", "", 3, -1)
    assert fields(parse_value("t.layer.0.3")) == (ValueKind.POSTPONED, -1, "layer.0", "", 3, -1)
    assert fields(parse_value("W.layer.0")) == (ValueKind.WEIGHTS, -1, "", "layer.0", -1, -1)
    assert fields(parse_value("h2.0>3")) == (ValueKind.MESSAGE, 2, "", "", 0, 3)


def test_a_value_is_its_text() -> None:
    assert activation(2, 0) == "h2.0"
    assert {activation(2, 0): 1}["h2.0"] == 1
    assert activation(2, 0) is activation(2, 0)


@pytest.mark.parametrize("text", ["", "h2", "h02.0", "x.0", "loss.", "W.", "W.a b", "a.0>3", "h2.0>", "s.0"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a value: write"):
        parse_value(text)
