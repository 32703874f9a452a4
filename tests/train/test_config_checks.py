"""Impossible requests in a config are refused before any data is read, in a sentence that says what to write."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hydragraph
from hydragraph.cluster.launch import join
from hydragraph.data import tokenizer
from hydragraph.data.mini_batches import MiniBatches, Mixture
from hydragraph.data.token_file import TokenFile
from hydragraph.spec.record import from_record
from hydragraph.train.config import MixedConfig, TrainConfig
from hydragraph.train.config_checks import _size, check_settings, read_strategies, remarks
from hydragraph.train.data import prepare
from hydragraph.train.model import adapted, dropout_rates, skeleton
from tests.data.written import write_tokens
from tests.thorough import first

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
INLINE = {"pipelines": [{"stages": [{"devices": [0], "layers": 2}]}]}


def config(**changed: Any) -> TrainConfig:
    """Return a config of a tiny model with fields changed, such as data__max_length."""
    data: dict[str, Any] = {
        "model": {"architecture": "LlamaForCausalLM", "config": SIZES},
        "data": {"paths": ["there-is-none.txt"], "vocab_size": 300, "tokens_per_step": 256, "max_length": 32},
        "strategies": ["<tp1,pp1>"],
        "steps": 1,
        "device": "cpu",
    }
    for path, value in changed.items():
        *parents, name = path.split("__")
        place = data
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    found = from_record(TrainConfig, data)
    assert isinstance(found, TrainConfig)
    return found


def test_nothing_is_said_of_what_can_be() -> None:
    check_settings(config(), 1)
    check_settings(config(strategies=[INLINE]), 1)
    check_settings(config(strategies="<tp1,pp2>"), 2)


def test_heads_of_keys_that_nothing_projects_need_not_divide() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
    check_settings(config(model={"architecture": "DeepseekV3ForCausalLM", "config": sizes}), 1)


def test_sizes_that_differ_by_layer_are_none() -> None:
    class Layers:
        @property
        def num_attention_heads(self) -> int:
            raise RuntimeError("a per-layer attribute")

    assert _size(Layers(), "num_attention_heads") is None
    assert _size(object(), "num_attention_heads") is None
    assert _size(torch.Size, "count") is None


@pytest.mark.parametrize(
    ("changed", "ranks", "sentence"),
    [
        ({"data__max_length": 128}, 1, r"data.max_length is 128, .* 64 positions \(max_position_embeddings\): lower"),
        ({"model__architecture": "LlamaForCausallM"}, 1, "did you mean LlamaForCausalLM"),
        ({"model__config": {"hidden_sizes": 3}}, 1, "no field 'hidden_sizes': did you mean 'hidden_size'"),
        ({"model": {"path": "Qwen/Qwen2.5-0.5B"}}, 1, "hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B"),
        ({"model": {"path": "/nowhere/at/all"}}, 1, "model.path /nowhere/at/all is not a directory: name a directory"),
        ({"optimizer": {"name": "adamw"}}, 1, "optimizer.name: .*'adamw': did you mean AdamW"),
        ({"optimizer": {"name": "Muon"}}, 1, "Muon.*use one of torch.optim's SGD"),
        ({"optimizer": {"name": "LBFGS"}}, 1, "LBFGS"),
        ({"optimizer": {"name": "AdamW", "momentum": 0.9}}, 1, "optimizer.momentum: AdamW has no such setting"),
        ({"strategies": ["<tp1,pp3>"]}, 1, r"strategies\[0\].*3 stages for 2 layers"),
        ({"strategies": ["<tp8,pp1>"]}, 8, r"strategies\[0\].*does not divide 4 attention heads"),
        ({"strategies": ["<tp1,pp1>", "none.yaml"]}, 1, r"strategies\[1\]: the file none.yaml does not exist: correct"),
        ({"device": "mps"}, 1, "device 'mps': use 'cpu', or 'cuda'"),
        (
            {"data__vocab_size": 10**30},
            1,
            "LlamaForCausalLM cannot be built .* a vocabulary of 10{30}:",
        ),
        (
            {"strategies": "<tp1,pp2> zb-h1", "backend": "inductor"},
            2,
            "Inductor under schedule zb-h1, which splits each backward in two",
        ),
        (
            {"strategies": ["<tp2,pp1>", "2*<tp1,pp1>"], "deterministic": True},
            2,
            "a stage has tensor-parallel degree 1, but others have tensor-parallel degree 2",
        ),
        ({"elastic": {"copies": 2}}, 1, "two copies on 1 rank: start more ranks, or set copies to 1"),
        ({"home": "3,1"}, 3, "'shares' has 2 numbers, but the run has 3 ranks"),
        ({"compiled": "nowhere"}, 1, "compiled folder nowhere: its manifest.json"),
        ({"callbacks": ["nowhere:x"]}, 1, "callbacks: 'nowhere:x' cannot be loaded"),
        ({"strategies": [{"pipelines": [{"stage": []}]}]}, 1, r"strategies\[0\].*stage"),
    ],
)
def test_what_cannot_be_is_told(changed: dict[str, Any], ranks: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_settings(config(**changed), ranks)


def test_of_three_betas_the_config_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'betas' is .*: give two numbers"):
        config(optimizer={"name": "AdamW", "betas": [0.9, 0.95, 0.99]})


@pytest.mark.parametrize("device", ["tpu", "mps", "gpu"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"device '{device}': use 'cpu', or 'cuda'"):
        join(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told() -> None:
    with pytest.raises(ValueError, match="finds no GPU here: use cpu"):
        join("cuda:1")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", "", "the corpus holds no text: check data.paths"),
        (
            "chat.jsonl",
            '{"messages": [{"role": "user", "content": "hi"}]}',
            r"chat.jsonl:1: no assistant message",
        ),
        ("numbers.jsonl", '{"ids": [1, 2]}', "'ids' is a list, not text"),
    ],
)
def test_data_that_is_no_text_is_told(name: str, content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        prepare(config(data__paths=[str(tmp_path / name)], output=str(tmp_path / "run")))


def test_what_may_not_be_meant_is_remarked(tmp_path: Path) -> None:
    texts = ["some words " * 20] * 4
    encoder = tokenizer.train_bpe(iter(texts), 300)
    write_tokens(tmp_path / "tokens.bin", iter(texts), encoder)
    settings = config(
        model={"architecture": "GPT2LMHeadModel", "config": {"n_embd": 32, "n_layer": 2, "n_head": 2}},
        data__tokens_per_step=10**4,
        strategies=["<tp1,pp1>", "<[0]x1,[1]x1>", "<tp1,pp1>"],
    )
    model: nn.Module = skeleton(settings.model, 300).eval()
    file = TokenFile.open(tmp_path / "tokens.bin")
    batches = MiniBatches(file, settings.data.tokens_per_step, settings.data.max_length)
    strategies = read_strategies(settings.strategies, model, 2)
    said = list(remarks(settings, model, strategies, 2, batches, settings.steps))
    without = replace(settings, model=replace(settings.model, dropout=False))
    assert re.search(r"each step reads the data \d+\.\d times", said[0])
    small = replace(settings, steps=30, data=replace(settings.data, tokens_per_step=16, max_length=16))
    budget = next(remarks(small, model, strategies, 2, batches, 30))
    assert re.fullmatch(r"30 steps of .*, and the data has .*: the run reads the data about [23]\.\d times", budget)
    warm = replace(small, schedule=replace(small.schedule, warmup=40))
    assert next(remarks(warm, model, strategies, 2, batches, 30)).endswith(
        "the learning rate is still rising when the run ends"
    )
    epochs = next(remarks(replace(small, steps=0, epochs=3), model, strategies, 2, batches, 33))
    assert re.fullmatch(r"3 epochs of [\d,]+ tokens: 33 steps", epochs)
    assert next(remarks(replace(small, steps=0, epochs=1), model, strategies, 2, batches, 11)).startswith("1 epoch of ")
    sources = tuple(MixedConfig(paths=("a",), weight=weight) for weight in (3.0, 1.0))
    mixed = replace(small, steps=0, epochs=3, data=replace(small.data, paths=(), mixture=sources))
    mixture = Mixture([batches, batches], mixed.data.weights, 16)
    assert next(remarks(mixed, model, strategies, 2, mixture, 33)).endswith(
        "which read the corpora about 4.5 and 1.5 times"
    )
    rates = "resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.1"
    assert said[1] == f"the run trains with the dropout of the model's config: {rates}"
    plain = next(s for s in remarks(without, model, strategies, 2, batches, settings.steps) if "dropout" in s)
    assert plain == f"model.dropout is false, so the run disables the dropout of the model's config: {rates}"
    assert said[2:] == [
        "strategies[0]: rank 1 would be idle",
        "strategies[2] is the same as strategies[0]",
        "strategies[2]: rank 1 would be idle",
    ]


@pytest.mark.parametrize(("changed", "told"), [({"dropout": 0.1}, True), ({}, False)])
def test_an_objective_with_dropout_is_remarked(changed: dict[str, float], told: bool) -> None:
    settings = config(objective="dpo", adapter={"lora": changed})
    batches: Any = SimpleNamespace(tokens=1000, members=[SimpleNamespace(tokens=1000)])
    said = remarks(settings, skeleton(settings.model, 300), (), 1, batches, 1)
    assert any("scored without dropout" in sentence for sentence in said) == told


@pytest.mark.parametrize("dropout", first([False], [True, False]))
def test_dropout_of_adapters_is_active_and_is_not_taken_for_that_of_the_models_config(dropout: bool) -> None:
    settings = config(adapter={"lora": {"dropout": 0.05, "targets": ["q_proj"]}}, model__dropout=dropout)
    model = adapted(skeleton(settings.model, 300), settings.adapter, 0)
    assert dropout_rates(model) == {}
    assert hydragraph.capture(model, check="off").drops
