"""A narrow copy stands for its model only where both graphs differ in widths alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hydragraph as hg
from hydragraph.frontend import huggingface
from hydragraph.frontend.capture import capture
from hydragraph.frontend.check import narrow_model, numeric_check
from hydragraph.frontend.check.narrow_model import CheckedModel, LibraryModel, NarrowModel, Widths, program_text
from hydragraph.frontend.check.numeric_check import check
from hydragraph.kernels import varlen_attention as kernels
from tests.models import MODELS, captured
from tests.thorough import first, thorough

pytestmark = pytest.mark.usefixtures("shared_graphs")


@pytest.fixture
def small_models_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numeric_check, "LARGE", 0)
    monkeypatch.setattr(narrow_model, "FACTORS", (2,))


def seven_billion(**settings: Any) -> nn.Module:
    """Return a Llama 7B on the meta device, with other settings where they are given."""
    config = LlamaConfig(bos_token_id=31998, eos_token_id=31999, pad_token_id=31999, **settings)
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def described(model: nn.Module) -> LibraryModel:
    found = LibraryModel.of(CheckedModel(model, captured("llama")[0]))  # of which only the dtype is read
    assert found is not None
    return found


def at(model: nn.Module, factor: int) -> tuple[nn.Module, Widths]:
    copied = described(model).at(factor)
    assert copied is not None
    return copied


def test_a_large_model_is_checked_at_a_sixteenth_of_its_widths() -> None:
    model = seven_billion(num_hidden_layers=3)
    found = check(CheckedModel(model, capture(model)))
    assert (found.factor, found.blocks, found.layers, found.problem) == (16, 2, 3, "")
    assert "at 1/16 of its widths: embed, head and 2 of 3 blocks" in str(found)


@thorough
@pytest.mark.usefixtures("small_models_count_as_large")
@pytest.mark.parametrize("name", [*MODELS])
def test_families_have_narrow_copies(name: str) -> None:
    model = MODELS[name]()
    found = check(CheckedModel(model, capture(model)))
    assert found.factor == (2 if huggingface.is_huggingface(model) else 1)
    assert found.worst < 1e-4


@pytest.mark.parametrize(
    "settings",
    first(
        [{"rms_norm_eps": 1e-5}],
        [
            {"rms_norm_eps": 1e-5},
            {"hidden_act": "gelu"},
            {"tie_word_embeddings": True},
            {"num_hidden_layers": 3},
            {"num_key_value_heads": 4},
        ],
    ),
)
def test_other_constants_operators_and_parameters_are_not_the_same(settings: dict[str, Any]) -> None:
    program, model = captured("llama")
    config: Any = copy.deepcopy(model.config)
    vars(config).update(settings)
    narrow, widths = at(LlamaForCausalLM(config), 2)
    assert not widths.equal(program_text(program), program_text(capture(narrow)))


def test_numbers_differ_by_powers_of_the_factor_or_as_tokens() -> None:
    widths = Widths(16, frozenset({(31999, 1999)}))
    equal = [("3", "3"), ("4096", "256"), ("65536", "256"), ("31999", "1999"), ("0.25", "1.0"), ("64.0", "16.0")]
    other = [("3", "4"), ("4", "1"), ("1999", "31999"), ("0.3", "0.25"), ("-16", "1"), ("0", "1"), ("1e-5", "1e-6")]
    assert [widths.equal(*(f"view {n}" for n in pair)) for pair in equal] == [True] * len(equal)
    assert [widths.equal(*(f"view {n}" for n in pair)) for pair in other] == [False] * len(other)


def test_sizes_that_do_not_divide_or_become_too_small_stay() -> None:
    narrow, _ = at(seven_billion(num_hidden_layers=1, vocab_size=50257, num_attention_heads=128), 16)
    shapes = [narrow.get_submodule(n).weight.shape for n in ("lm_head", "model.layers.0.self_attn.q_proj")]
    assert shapes == [(50257, 256), (128 * 32, 256)]
    with torch.device("meta"):
        wide = described(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=48)))  # heads of 16 features
    assert wide.at(8) is None


@pytest.mark.usefixtures("small_models_count_as_large")
def test_a_model_that_runs_other_code_than_its_library_is_checked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(LibraryModel, "at", copied)
    program, model = captured("llama")
    model = copy.deepcopy(model)
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _given, output: output * 1.01)
    with pytest.raises(hg.Unsupported, match=r"layer\.0"):
        check(CheckedModel(model, program))


def test_a_copy_that_cannot_be_captured_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    program, model = captured("llama")
    monkeypatch.setattr(narrow_model, "capture", lambda *_: 1 // 0)
    assert described(model).narrowed(program) is None


@pytest.mark.usefixtures("small_models_count_as_large")
def test_a_copy_that_fails_leaves_the_verdict_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    program, model = captured("llama")
    narrow, ratio = at(model, 2)
    widths = []

    def refused(subject: CheckedModel, *_: Any) -> None:
        widths.append(subject.model.config.hidden_size)
        raise hg.Unsupported("differs", where="here", remedy="none")

    monkeypatch.setattr(LibraryModel, "narrowed", lambda *_: NarrowModel(narrow, program, ratio))
    monkeypatch.setattr(numeric_check, "_checked", refused)
    with pytest.raises(hg.Unsupported, match="differs"):
        check(CheckedModel(model, program))
    assert widths == [32, 64]


@thorough
@pytest.mark.usefixtures("small_models_count_as_large")
def test_what_both_captures_get_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = kernels.varlen_attention
    monkeypatch.setattr(huggingface, "varlen_attention", lambda *a, **k: usual(*a, **{**k, "scale": 1.01 * k["scale"]}))
    model = MODELS["llama"]()
    with pytest.raises(hg.Unsupported, match=r"layer\.0"):
        check(CheckedModel(model, capture(model)))
