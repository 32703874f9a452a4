"""Patches of libraries are found in everything that a library model runs."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hydragraph.frontend.library_code import LibraryCode
from tests.models import MODELS, llama
from tests.thorough import first

LLAMA = "transformers.models.llama.modeling_llama"


def own(*arguments: Any, **_: Any) -> Any:
    return arguments[0]


class Callable:
    def __call__(self, x: Tensor) -> Tensor:
        return x


def wrapped(function: Any) -> Any:
    """Return a function that has the name and the module of the one it replaces."""

    @functools.wraps(function)
    def inner(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return inner


@pytest.mark.parametrize("name", first(["llama", "mixtral"], MODELS))
def test_models_as_their_libraries_have_them_run_nothing_else(name: str) -> None:
    assert LibraryCode(MODELS[name]()).patches == []


@pytest.mark.parametrize(
    ("place", "patch"),
    [
        (f"{LLAMA}.rotate_half", own),
        (f"{LLAMA}.rotate_half", Callable()),
        (f"{LLAMA}.rotate_half", functools.partial(own)),
        (f"{LLAMA}.rotate_half", torch.compile(own)),
        (f"{LLAMA}.apply_rotary_pos_emb", wrapped(own)),
        (f"{LLAMA}.create_causal_mask", own),
        (f"{LLAMA}.LlamaAttention.forward", own),
        ("transformers.masking_utils.causal_mask_function", own),
        ("torch.nn.functional.linear", own),
        ("torch.nn.Linear.forward", own),
        ("torch.rsqrt", own),
    ],
)
def test_a_patch_is_found_and_named(place: str, patch: Any) -> None:
    with mock.patch(place, patch):
        model = llama(layers=1)
        found = LibraryCode(model).patches
    assert found, place
    assert __name__ in repr(found[0]) or "own" in repr(found[0])


def test_plain_values_that_a_library_reads_tell_two_states_of_it_apart() -> None:
    before = LibraryCode(llama(layers=1)).values
    assert before == LibraryCode(llama(layers=1)).values
    with mock.patch("torch.pi", 3.0):
        assert LibraryCode(llama(layers=1)).values != before
