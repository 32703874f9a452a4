"""Differences between models are named, and models that cannot be compared are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

import hydragraph as hg
from hydragraph.frontend.compiled_folder.model_record import differences, model_record
from tests.models import llama, randomised
from tests.own_models import Own, weighted


def changed_config() -> nn.Module:
    model = llama(layers=2)
    model.config.rms_norm_eps = 1e-3  # pyrefly: ignore[bad-argument-type]
    return model


def frozen() -> nn.Module:
    model = llama(layers=2)
    model.model.norm.weight.requires_grad_(False)
    return model


def another_attribute() -> nn.Module:
    model = llama(layers=2)
    model.model.layers[1].mlp.factor = 2.0
    return model


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: llama(layers=3), "num_hidden_layers is 3, but was 2"),
        (lambda: llama(layers=2, width=104), "intermediate_size is 104, but was 102"),
        (lambda: llama(layers=2, tied=True), "tie_word_embeddings is true, but was false"),
        (lambda: llama(layers=2).eval(), "its mode is eval, but was train"),
        (changed_config, "rms_norm_eps is 0.001, but was 1e-06"),
        (frozen, "the names, shapes or requires_grad of its tensors"),
        (another_attribute, "the settings of LlamaMLP modules"),
        (Own, "its class is tests.own_models.Own"),
    ],
)
def test_what_differs_is_named(other: Any, named: str) -> None:
    found = differences(model_record(llama(layers=2)), model_record(other()))
    assert any(named in each for each in found), found


def test_weights_and_what_only_generation_reads_do_not_differ() -> None:
    model = llama(layers=2)
    record = model_record(model)
    randomised(model, seed=5)
    model.config.eos_token_id = 7  # pyrefly: ignore[bad-argument-type]
    assert differences(record, model_record(model)) == []
    with torch.device("meta"):
        assert differences(record, model_record(type(model)(model.config))) == []


def doubled(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return 2 * q, k


def tripled(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return 3 * q, k


def test_a_function_that_was_replaced_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "transformers.models.llama.modeling_llama.apply_rotary_pos_emb"
    records = [model_record(llama(layers=1))]
    for function in (doubled, tripled):
        monkeypatch.setattr(place, function)
        records.append(model_record(llama(layers=1)))
    assert differences(records[0], records[1]) == differences(records[1], records[2]) == [f"the code of {place}"]
    monkeypatch.setattr(place, lambda q, k, *_: (q * records, k))
    with pytest.raises(hg.Unsupported, match=rf"{place} is <function.*so a compiled folder cannot"):
        model_record(llama(layers=1))


def test_a_method_that_was_replaced_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    record = model_record(llama(layers=2))

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    assert differences(record, model_record(llama(layers=2))) == [
        "the code of transformers.models.llama.modeling_llama"
    ]


def test_a_loss_and_its_fields_count() -> None:
    record = model_record(Own())
    example = {"weight": torch.zeros(1, 4)}
    found = differences(record, model_record(Own(), weighted, example))
    assert len(found) == 2
    assert all(any(name in each for each in found) for name in ("its loss is", "its fields is"))
    longer = model_record(Own(), weighted, {"weight": torch.zeros(1, 9)})
    assert differences(model_record(Own(), weighted, example), longer) == []


def test_what_cannot_be_told_is_refused() -> None:
    scale = torch.ones(())
    with pytest.raises(hg.Unsupported, match="closes over values"):
        model_record(Own(), lambda outputs, batch: outputs.sum() * scale)
    model = Own()
    model.stack[0].register_forward_hook(lambda *_: None)
    with pytest.raises(hg.Unsupported, match=r"stack\.0 has hooks"):
        model_record(model)
    model = Own()
    model.thing = object()  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(hg.Unsupported, match=r"Own\.thing: an object"):
        model_record(model)


@pytest.mark.thorough
def test_other_processes_find_the_same() -> None:
    program = "from tests.frontend.compiled_folder.test_model_record import *; print(model_record(llama(layers=2)))"
    seeds = ("1", "2")
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout
        for seed in seeds
    }
    assert len(texts) == 1
