"""The names that forward and a loss can read."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor, nn

from hydragraph.frontend.state_readers import UserFunctions, globals_of, mentions, rates_of, variables_of

GAIN = 2.0


class Model(nn.Module):
    """One whose forward reads an attribute in a method, and a text; `fit` is not a part of it."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        return self.helped(x) + getattr(self, "shift", 0)

    def helped(self, x: Tensor) -> Tensor:
        return x * self.scale * GAIN

    def fit(self) -> None:
        self.steps = 0


def beside(module: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, module.p_drop if module.training else 0.0)  # pyrefly: ignore[bad-argument-type]


def switched(module: nn.Module, x: Tensor) -> Tensor:
    return x if module.training else x * 2


def test_names_are_those_that_forward_leads_to() -> None:
    names = UserFunctions(Model(), None).names
    assert {"scale", "helped", "shift", "GAIN"} <= names
    assert not names & {"fit", "steps"}
    assert not UserFunctions(Model(), None).reads("steps")
    model = Model()
    model.forward = lambda x: x * getattr(model, f"scale{len(x)}")  # pyrefly: ignore[method-assign]
    assert UserFunctions(model, None).reads("steps")  # as this `getattr` may be given any name
    assert mentions(Model, "steps")
    assert not mentions(Model, "speed")


def test_functions_of_a_loss_are_followed_through_partials_and_cells() -> None:
    alpha = 1.0

    def inner(x: Tensor) -> Tensor:
        return x * alpha * GAIN

    def loss(x: Tensor, power: int) -> Tensor:
        return inner(x) ** power

    readers = UserFunctions(nn.Linear(1, 1), functools.partial(loss, power=2))
    assert [f.__name__ for f in readers.functions.values()] == ["loss", "inner"]
    function = next(f for f in readers.functions.values() if f.__name__ == "inner")
    assert globals_of(function) == {"GAIN": 2.0}
    assert variables_of(function)["alpha"] == 1.0


def test_a_flag_beside_a_rate_of_0_decides_nothing() -> None:
    module = nn.Module()
    module.p_drop = 0.0  # pyrefly: ignore[bad-argument-type]
    assert rates_of(module) == {"p_drop": 0.0}
    assert not UserFunctions(nn.Module(), beside).depends_on_training([module])
    assert UserFunctions(nn.Module(), switched).depends_on_training([module])
    module.p_drop = 0.1  # pyrefly: ignore[bad-argument-type]
    assert UserFunctions(nn.Module(), beside).depends_on_training([module])
