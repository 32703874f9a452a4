"""Checks of a config before the data is prepared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydragraph.data.mini_batches import Mixture
from hydragraph.engine.compiled_model import check_modes
from hydragraph.errors import Unsupported
from hydragraph.frontend.compiled_folder.manifest import read_manifest
from hydragraph.frontend.huggingface import positions as positions_of
from hydragraph.passes.compile_with_inductor import choose_backend
from hydragraph.runtime.deterministic_sums import Deterministic
from hydragraph.runtime.supported_optimizers import call_factory, check_elementwise
from hydragraph.spec.strategy import Strategy, strategies_of
from hydragraph.train.callbacks import load_callback
from hydragraph.train.config import TrainConfig
from hydragraph.train.model import adapted, directory_of, dropout_rates, skeleton
from hydragraph.train.optimizer import optimizer_factory
from hydragraph.train.plan_input import read_costs

# Smallest vocabulary of a new tokenizer: 256 bytes and the end-of-text token
_BYTES_AND_END = 257
_PASSES = 1000


def check_settings(config: TrainConfig, ranks: int) -> None:
    """Check the settings that do not depend on the data; raise ValueError, or OSError if a file cannot be read."""
    _check_optimizer(config)
    read_costs(config.plan, ranks)
    config.home.check(ranks)
    if config.compiled is not None:
        read_manifest(Path(config.compiled))
    if config.model.directory is not None:
        directory_of(config.model)
    if config.trust and config.compiled is None:
        raise ValueError("'trust' has no effect without 'compiled': set 'compiled' to a folder, or omit 'trust'")
    model = skeleton(config.model, config.data.vocab_size)
    check_model(config, model)
    model = adapted(model, config.adapter, config.seed)
    for name in config.callbacks:
        load_callback(name)
    if not config.automatic:
        strategies = read_strategies(config.strategies, model, ranks)
        device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        sums = Deterministic("") if config.deterministic else None
        check_modes(strategies, choose_backend(config.backend, device), sums)
    positions = positions_of(model)
    if positions is not None and positions[0] < config.data.max_length:
        raise ValueError(
            f"data.max_length is {config.data.max_length}, but the model has {positions[0]} positions "
            f"({positions[1]}): lower data.max_length, or use a model with more positions"
        )


def check_model(config: TrainConfig, model: nn.Module) -> None:
    """Raise ValueError unless the model is a language model with valid sizes."""
    settings = model.config
    head: Any = getattr(model, "get_output_embeddings", None)
    if not callable(head) or head() is None:
        name = type(model).__name__
        raise ValueError(f"model.architecture: {name} has no language model head: use a class such as LlamaForCausalLM")
    heads, groups = (_size(settings, name) for name in ("num_attention_heads", "num_key_value_heads"))
    # Keys from a smaller projection (DeepSeek) make num_key_value_heads meaningless.
    projected = any(name.endswith(".k_proj") for name, _ in model.named_modules())
    if projected and heads and groups and heads % groups:
        raise ValueError(
            f"model.config: num_attention_heads is {heads}, and num_key_value_heads is {groups}: set "
            "num_key_value_heads to a divisor of num_attention_heads"
        )
    vocabulary = (config.model.config or {}).get("vocab_size")
    if config.data.tokenizer is None and isinstance(vocabulary, int) and vocabulary < _BYTES_AND_END:
        raise ValueError(
            f"model.config.vocab_size is {vocabulary}, but a new tokenizer has at least {_BYTES_AND_END} tokens: leave "
            "model.config.vocab_size out, or set it to at least data.vocab_size"
        )


def _size(config: object, name: str) -> int | None:
    try:
        size = getattr(config, name, None)
    except RuntimeError:
        return None
    return size if isinstance(size, int) else None


def _check_optimizer(config: TrainConfig) -> None:
    if not config.optimizer.lr:
        raise ValueError("optimizer.lr is 0, so weights would not change: give a learning rate above 0")
    model = nn.Module()
    weight = nn.Parameter(torch.ones(2, 2))
    model.register_parameter("weight", weight)
    factory = optimizer_factory(config.optimizer, model)
    try:
        check_elementwise(call_factory(factory, [("weight", weight)]))
    except Unsupported:
        raise
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer {config.optimizer.name}: {error}") from error


def read_strategies(texts: Sequence[str], model: nn.Module, ranks: int) -> tuple[Strategy, ...]:
    config: Any = model.config
    heads = _size(config, "num_attention_heads")
    return strategies_of(texts, config.num_hidden_layers, ranks, () if heads is None else (heads,))


def check_budget(config: TrainConfig, tokens: int) -> None:
    if config.data.tokens_per_step > _PASSES * tokens:
        raise ValueError(
            f"data.tokens_per_step is {config.data.tokens_per_step:,}, but the data has only {tokens:,} tokens, so "
            f"each step would read it {config.data.tokens_per_step / tokens:,.0f} times: lower data.tokens_per_step"
        )


def remarks(
    config: TrainConfig, model: nn.Module, strategies: Sequence[Strategy], ranks: int, batches: Mixture, steps: int
) -> Iterator[str]:
    """Yield a remark on each setting that may be unintended."""
    tokens = batches.tokens
    read = config.epochs * tokens if config.epochs else config.steps * config.data.tokens_per_step
    shares = [read * weight / sum(config.data.weights) for weight in config.data.weights]
    corpora = [share / member.tokens for share, member in zip(shares, batches.members, strict=True)]
    times = " and ".join(f"{count:.1f}" for count in corpora)
    if config.schedule.warmup >= steps:
        warmup = f"schedule.warmup is {config.schedule.warmup}, but the run has only {steps} steps"
        yield f"{warmup}: the learning rate is still rising when the run ends"
    if config.data.tokens_per_step > tokens:
        passes = config.data.tokens_per_step / tokens
        yield (
            f"data.tokens_per_step is {config.data.tokens_per_step:,}, but the data has only {tokens:,} tokens: "
            f"each step reads the data {passes:.1f} times"
        )
    elif config.epochs:
        mixed = f", which read the corpora about {times} times" if len(corpora) > 1 else ""
        epochs = "1 epoch" if config.epochs == 1 else f"{config.epochs:g} epochs"
        yield f"{epochs} of {tokens:,} tokens: {steps:,} steps{mixed}"
    elif max(corpora) > 1:
        what = "the data" if len(corpora) == 1 else "the corpora"
        yield (
            f"{config.steps:,} steps of {config.data.tokens_per_step:,} tokens read {read:,} tokens, and the data "
            f"has {tokens:,}: the run reads {what} about {times} times"
        )
    if rates := dropout_rates(model):
        said = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
        how = "the run trains with" if config.model.dropout else "model.dropout is false, so the run disables"
        yield f"{how} the dropout of the model's config: {said}"
    lora = config.adapter is not None and config.adapter.lora.dropout
    if config.objective is not None and (lora or (rates and config.model.dropout)):
        yield "the objective's gradients are approximate, because answers are scored without dropout"
    for i, strategy in enumerate(strategies):
        same = strategies.index(strategy)
        if same < i:
            yield f"strategies[{i}] is the same as strategies[{same}]"
        idle = sorted(set(range(ranks)) - set(strategy.devices))
        if idle:
            yield f"strategies[{i}]: {'rank' if len(idle) == 1 else 'ranks'} {', '.join(map(str, idle))} would be idle"
