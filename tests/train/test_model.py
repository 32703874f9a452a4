"""Models from configs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers.trainer_pt_utils import LabelSmoother

from hydragraph.frontend.compiled_folder.model_record import differences, model_record
from hydragraph.train.config import AdapterConfig, LoraConfig, ModelConfig, TrainConfig
from hydragraph.train.model import adapted, build_model, captured_loss, skeleton
from tests.train.plain import settings

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(**changes: object) -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", {**TINY, **changes})


def test_the_seed_decides_the_weights_and_nothing_else_changes() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, two, other = (build_model(llama(), 50, 7, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_one_layer_may_be_targeted_by_its_name_alone() -> None:
    alone, listed = (
        adapted(skeleton(llama(), 50), AdapterConfig(LoraConfig(r=2, targets=targets)), 0)
        for targets in ("q_proj", ("q_proj",))
    )
    names = [name for name, parameter in alone.named_parameters() if parameter.requires_grad]
    assert len(names) == 4
    assert names == [name for name, parameter in listed.named_parameters() if parameter.requires_grad]


def test_smoothed_labels_are_those_of_the_trainer(tmp_path: Path) -> None:
    config = settings(tmp_path)
    assert captured_loss(TrainConfig.parse(yaml.safe_dump(config)))["loss"] is None
    smoothed = captured_loss(TrainConfig.parse(yaml.safe_dump(config | {"label_smoothing": 0.2})))["loss"]
    logits, labels = torch.randn(1, 6, 11), torch.tensor([[3, -100, 0, 10, 5, -100]])
    expected = LabelSmoother(0.2)({"logits": logits}, labels)
    assert torch.allclose(smoothed({"logits": logits}, {"labels": labels}) / 4, expected)


def test_special_tokens_and_vocabulary_are_the_tokenizers() -> None:
    config: Any = build_model(llama(), 50, 7, 0).config
    assert (config.vocab_size, config.eos_token_id, config.bos_token_id) == (50, 7, 7)
    assert config.use_cache, "generation with the exported model needs its cache"
    assert build_model(llama(vocab_size=64), 50, 7, 0).config.vocab_size == 64


def test_a_saved_model_comes_back(tmp_path: Path) -> None:
    model: Any = build_model(llama(), 50, 7, 0)
    model.save_pretrained(tmp_path)
    again = build_model(ModelConfig(path=str(tmp_path)), 50, 7, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert {p.device.type for p in skeleton(ModelConfig(path=str(tmp_path)), 50).parameters()} == {"meta"}


def test_settings_of_a_saved_model_are_changed(tmp_path: Path) -> None:
    build_model(llama(attention_dropout=0.1), 50, 7, 0).save_pretrained(tmp_path)
    given = {"attention_dropout": 0.0, "rope_parameters": {"rope_theta": 5e5}}
    config = ModelConfig(path=str(tmp_path), config=given)
    for model in (build_model(config, 50, 7, 0), skeleton(config, 50)):
        settings: Any = model.config
        assert settings.attention_dropout == 0
        assert settings.rope_parameters == {"rope_theta": 5e5, "rope_type": "default"}
        assert settings.hidden_size == 16
    plain = build_model(ModelConfig(path=str(tmp_path)), 50, 7, 0)
    same = zip(build_model(config, 50, 7, 0).parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attn_dropout": 0}, "the LlamaConfig in model.path has no setting 'attn_dropout': did you mean"),
        ({"zzz": 0}, "has no setting 'zzz': leave it out"),
        ({"model_type": "gpt2"}, "model_type identifies the model and cannot be changed: leave it out"),
        ({"hidden_size": "wide"}, "LlamaConfig rejects these settings"),
        ({"num_hidden_layers": 3}, "tensors differ from those in model.path"),
        ({"num_hidden_layers": 1}, "tensors differ from those in model.path"),
        ({"intermediate_size": 32}, "tensors differ from those in model.path"),
    ],
)
def test_settings_that_are_unknown_or_need_other_tensors_are_refused(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    build_model(llama(), 50, 7, 0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"model.config: .*{sentence}"):
        build_model(ModelConfig(path=str(tmp_path), config=changes), 50, 7, 0)


def test_the_skeleton_of_a_saved_model_is_recorded_like_the_model(tmp_path: Path) -> None:
    """Otherwise a run would refuse the folder that `hydragraph compile` wrote for it."""
    build_model(llama(), 300, 0, 0).to(torch.bfloat16).save_pretrained(tmp_path)
    saved = ModelConfig(path=str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert not differences(model_record(skeleton(saved, 300)), model_record(build_model(saved, 300, 0, 0)))


def test_a_skeleton_has_shapes_only() -> None:
    shapes = {name: p.shape for name, p in build_model(llama(), 50, 7, 0).named_parameters()}
    meta = dict(skeleton(llama(), 50).named_parameters())
    assert {p.device.type for p in meta.values()} == {"meta"}
    assert {name: p.shape for name, p in meta.items()} == shapes


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (ModelConfig("LlamaForCasualLM"), "did you mean LlamaForCausalLM?"),
        (ModelConfig("LlamaConfig"), "transformers has no model class 'LlamaConfig'"),
        (llama(hiden_size=8), "model.config: LlamaConfig has no field 'hiden_size': did you mean 'hidden_size'?"),
        (llama(hidden_size="wide"), "model.config: LlamaConfig rejects these settings"),
        (llama(hidden_size=17), "model.config: LlamaConfig rejects these settings"),
        (llama(vocab_size=49), "model.config.vocab_size is 49, but the tokenizer's ids need 50"),
        (ModelConfig(path="/nowhere"), "model.path /nowhere is not a directory"),
    ],
)
def test_errors_name_the_field(config: ModelConfig, sentence: str) -> None:
    with pytest.raises(ValueError, match="model") as caught:
        build_model(config, 50, 7, 0)
    assert sentence in str(caught.value)


def test_a_setting_that_only_the_model_reads_is_taken() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "intermediate_size": 8}
    config = ModelConfig("Qwen3MoeForCausalLM", config={**sizes, **experts, "head_dim": 16})
    shapes = {name: tuple(p.shape) for name, p in skeleton(config, 50).named_parameters()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (32, 16)


@pytest.mark.parametrize("how", [build_model, skeleton])
def test_a_directory_with_code_of_its_own_is_refused(how: Callable[..., object], tmp_path: Path) -> None:
    mapped = {"model_type": "its_own", "auto_map": {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(mapped))
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    arguments = (0, 0) if how is build_model else (0,)
    with pytest.raises(
        ValueError, match=r"model\.path .*its own Python code .* is not run.* 'model\.trust_remote_code: true'"
    ):
        how(ModelConfig(path=str(tmp_path)), 10, *arguments)


@pytest.mark.parametrize("how", [build_model, skeleton])
def test_code_of_its_own_is_run_where_the_config_says_so(
    how: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    mapped = {"model_type": "its_own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(mapped))
    (tmp_path / "own.py").write_text("raise ArithmeticError('it ran')")
    arguments = (0, 0) if how is build_model else (0,)
    with pytest.raises(ArithmeticError, match="it ran"):
        how(ModelConfig(path=str(tmp_path), trust_remote_code=True), 10, *arguments)


@pytest.mark.parametrize("how", [build_model, skeleton])
def test_code_beside_a_model_that_transformers_has_is_not_run(how: Callable[..., object], tmp_path: Path) -> None:
    model = build_model(llama(), 50, 7, 0)
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for name in ("own", "modeling_llama", "generate"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(77)")
    arguments = (7, 0) if how is build_model else (7,)
    found = how(ModelConfig(path=str(tmp_path)), 50, *arguments)
    assert type(found).__module__.startswith("transformers.")


def test_pickled_weights_run_nothing(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    build_model(llama(), 50, 7, 0).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Runs()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"weights_only|WeightsUnpickler|unsafe|load file"):
        build_model(ModelConfig(path=str(tmp_path)), 50, 7, 0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"config.json": "{"}, "not a valid JSON file"),
        ({"config.json": "{}"}, "model_type"),
        ({"model.safetensors": None}, "no file named model.safetensors"),
        ({"model.safetensors": "cut"}, "header"),
    ],
)
def test_a_directory_that_transformers_cannot_read_is_named_with_the_reason(
    files: dict[str, str | None], why: str, tmp_path: Path
) -> None:
    model: Any = build_model(llama(), 50, 7, 0)
    model.save_pretrained(tmp_path)
    for name, content in files.items():
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"model.path {tmp_path}: transformers cannot read it \(.*{why}.*\): name a"):
        build_model(ModelConfig(path=str(tmp_path)), 50, 7, 0)
