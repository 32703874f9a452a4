"""Structures of modules and values: equal only where they are built alike."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hydragraph.frontend import module_digest
from hydragraph.frontend.module_digest import outline, read_by, structure
from tests.models import llama
from tests.thorough import thorough


class Layer(nn.Module):
    def __init__(self, size: int = 4, options: object = None) -> None:
        super().__init__()
        self.linear, self._options = nn.Linear(size, size), options


class Setting:
    """Prints alike whatever it holds."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Setting"

    def scaled(self, x: float) -> float:
        return x * self.value


def times(n: float) -> Callable[[float], float]:
    return lambda x: x * n


class Options(dict[str, int]):
    """Entries, and attributes."""

    def __init__(self, scale: float) -> None:
        super().__init__(a=1)
        self.scale = scale


class Listed(list[int]):
    """Elements, and attributes."""

    def __init__(self, scale: float) -> None:
        super().__init__([1])
        self.scale = scale


def named(n: float) -> type:
    """Return a class of the name of another."""
    return type("Layer", (Layer,), {"__module__": __name__, "scale": n, "scaled": property(lambda layer: layer.scale)})


def kind(n: float) -> type:
    class Made(nn.Module):
        def forward(self, x: float) -> float:
            return x * n

    return Made


def itself() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (lambda: Layer(4, "a"), lambda: Layer(4, "b"), False),
        (lambda: Layer(4, "a"), lambda: Layer(4, "a"), True),
        (lambda: Layer(4, [1, 2.0]), lambda: Layer(4, (1, 2.0)), False),
        (lambda: Layer(4, {"a": 1.0}), lambda: Layer(4, {"a": 2.0}), False),
        (lambda: Layer(4, {"a": 1}), lambda: Layer(4, {"a": 1.0}), False),
        (lambda: Layer(4, torch.relu), lambda: Layer(4, torch.relu), True),
        (lambda: Layer(4, torch.relu), lambda: Layer(4, torch.tanh), False),
        (lambda: Layer(4, object()), lambda: Layer(4, object()), False),
        (lambda: Layer(4, Setting(1.0)), lambda: Layer(4, Setting(1.0)), True),
        (lambda: Layer(4, Setting(1.0)), lambda: Layer(4, Setting(2.0)), False),
        (lambda: Layer(4, Setting([Setting(1)])), lambda: Layer(4, Setting([Setting(2)])), False),
        (lambda: times(2), lambda: times(2), True),
        (lambda: times(2), lambda: times(3), False),
        (lambda: functools.partial(max, 1), lambda: functools.partial(max, 2), False),
        (lambda: Setting(2).scaled, lambda: Setting(2).scaled, True),
        (lambda: Setting(2).scaled, lambda: Setting(3).scaled, False),
        (lambda: kind(2)(), lambda: kind(2)(), True),
        (lambda: kind(2)(), lambda: kind(3)(), False),
        (lambda: Layer(4, Options(2.0)), lambda: Layer(4, Options(2.0)), True),
        (lambda: Layer(4, Options(2.0)), lambda: Layer(4, Options(3.0)), False),
        (lambda: Layer(4, Listed(2.0)), lambda: Layer(4, Listed(3.0)), False),
        (lambda: named(2.0)(), lambda: named(2.0)(), True),
        (lambda: named(2.0)(), lambda: named(3.0)(), False),
        (itself, itself, True),
        (lambda: Layer(4), lambda: Layer(5), False),
        (lambda: Layer(4), lambda: Layer(4).double(), False),
        (lambda: Layer(4), lambda: Layer(4).requires_grad_(False), False),
        (lambda: Layer(4), lambda: Layer(4).eval(), False),
        (lambda: Layer(4), lambda: nn.Sequential(Layer(4)), False),
        (lambda: types.SimpleNamespace(a=1), lambda: types.SimpleNamespace(a=2), False),
        (lambda: frozenset("ab"), lambda: frozenset("ba"), True),
    ],
)  # fmt: skip
def test_what_is_built_differently_has_another_structure(
    one: Callable[[], object], other: Callable[[], object], same: bool
) -> None:
    made = one(), other()  # both live, so that no address is used twice
    assert (structure(made[0]) == structure(made[1])) == same


def test_constant_tensors_differ_by_their_elements() -> None:
    digests = [
        {structure(Layer(4, [torch.tensor(n)]), constants=constants) for n in (1.0, 2.0)} for constants in (False, True)
    ]
    assert [len(different) for different in digests] == [1, 2]


def test_which_tensors_are_one_counts() -> None:
    tied, untied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    assert structure(tied) == structure(untied)
    tied[1].weight = tied[0].weight
    assert structure(tied) != structure(untied)


def test_an_outline_leaves_out_the_index_of_a_layer() -> None:
    layers = llama(layers=2).model.layers
    assert structure(layers[0]) != structure(layers[1])
    assert outline(layers[0]) == outline(layers[1])
    assert outline(layers[0]) != outline(layers[1].eval().train(False))


def test_weights_that_are_there_already_do_not_count() -> None:
    """A process that joins later builds the model without them, and asks for what the others have captured."""
    with torch.device("meta"):
        without = llama(2)
    one = llama(2)
    one.model._is_hf_initialized = True  # pyrefly: ignore[bad-argument-type]
    assert structure(one) == structure(without)


def test_a_function_that_indexes_by_dots_is_the_same_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_this_process(value: object) -> str:
        raise AssertionError(f"{value} is described by its address")

    monkeypatch.setattr(module_digest, "_identity", of_this_process)
    structure(lambda x: x[..., 0])


@thorough
def test_a_structure_is_the_same_in_another_process() -> None:
    """Ranks compare theirs with that of the process that captured; Python seeds hashes of texts anew in each."""
    script = (
        "from hydragraph.frontend.module_digest import structure as s; from tests.models import llama; "
        "print(s(llama(2)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == structure(llama(2))


SHARE = 1.0


class SharedByClass:
    share = 1.0


def reads_a_global(x: float) -> float:
    return x * SHARE


@pytest.mark.parametrize("make", [times, lambda n: functools.partial(pow, n), lambda n: Setting(n).scaled])
def test_whatever_a_loss_reads_is_in_its_digest(make: Callable[[float], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    assert read_by(model, make(2.0)) == read_by(model, make(2.0)) != read_by(model, make(3.0))
    by_one = read_by(model, lambda x: reads_a_global(x))
    monkeypatch.setattr(sys.modules[__name__], "SHARE", 2.0)
    assert read_by(model, lambda x: reads_a_global(x)) != by_one


def test_class_attributes_are_in_a_digest_and_unread_attributes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, setting = nn.Linear(2, 2), Setting(2.0)
    digest = read_by(model, lambda x: x * SharedByClass.share * setting.scaled(x))
    setting.calls = 1
    assert read_by(model, lambda x: x * SharedByClass.share * setting.scaled(x)) == digest
    monkeypatch.setattr(SharedByClass, "share", 2.0)
    assert read_by(model, lambda x: x * SharedByClass.share * setting.scaled(x)) != digest
