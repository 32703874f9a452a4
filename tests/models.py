"""Tiny models and batches for tests: every test builds its own from a seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

if TYPE_CHECKING:
    from hydragraph.ir.program import Program


def llama(
    layers: int = 4, heads: int = 4, kv: int = 2, tied: bool = False, width: int = 102, vocab: int = 101
) -> nn.Module:
    """Return a Llama with grouped key/value heads, an MLP width and a vocabulary that few degrees divide."""
    config = LlamaConfig(
        hidden_size=16 * heads,
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocab,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
    )
    return randomised(LlamaForCausalLM(config))


def dropping_gpt2(layers: int = 4, heads: int = 4) -> nn.Module:
    """Return a GPT-2 with the dropout of its default config: embeddings, attention, and results of both halves."""
    return gpt2(layers, heads, attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1)


def gpt2(layers: int = 4, heads: int = 4, vocab: int = 101, **dropout: float) -> nn.Module:
    """Return a GPT-2: fused qkv, tied embeddings, biases, learned positions; without dropout by default."""
    rates: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, **dropout}
    config = GPT2Config(
        n_embd=16 * heads,
        n_head=heads,
        vocab_size=vocab,
        n_layer=layers,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=0,
        **rates,
    )
    return randomised(GPT2LMHeadModel(config))


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter values that make its gradient visible (initial biases are 0, norms 1)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean, deviation = (1.0, 0.1) if parameter.dim() == 1 else (0.0, 0.06)
            parameter.normal_(mean, deviation, generator=generator)
    return model


def sequences(lengths: list[int], vocab: int = 101, seed: int = 0) -> list[Tensor]:
    """Return random token sequences of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def tiny(**changes: Any) -> dict[str, Any]:
    """Return what most configs call their sizes: two layers of four heads of 16."""
    sizes = {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 102,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    return {**sizes, **changes}


def phi3() -> nn.Module:
    """Return a Phi-3: query, key and value in one product, gate and up in another."""
    return randomised(Phi3ForCausalLM(Phi3Config(**tiny(num_key_value_heads=2, pad_token_id=0, sliding_window=None))))


def gpt_neox() -> nn.Module:
    """Return a GPT-NeoX: query, key and value interleaved head by head; attention and MLP side by side."""
    return randomised(GPTNeoXForCausalLM(GPTNeoXConfig(**tiny(hidden_dropout=0.0, attention_dropout=0.0))))


def qwen3() -> nn.Module:
    """Return a Qwen-3: a norm over each head's queries and keys."""
    return randomised(Qwen3ForCausalLM(Qwen3Config(**tiny(num_key_value_heads=2, head_dim=16))))


def opt() -> nn.Module:
    """Return an OPT: biases everywhere, learned positions with an offset, tied embeddings.

    In training mode some releases of transformers (up to 5.16 at least) draw a number for every layer, and decide by it
    whether the layer is left out.
    """
    sizes = tiny(ffn_dim=102, word_embed_proj_dim=64, dropout=0.0, pad_token_id=1)
    del sizes["intermediate_size"]
    return randomised(OPTForCausalLM(OPTConfig(**sizes)).eval())


def gemma() -> nn.Module:
    """Return a Gemma: one key/value head, tied and scaled embeddings."""
    return randomised(GemmaForCausalLM(GemmaConfig(**tiny(num_key_value_heads=1, head_dim=16))))


def qwen2() -> nn.Module:
    """Return a Qwen-2: biases of query, key and value only."""
    return randomised(Qwen2ForCausalLM(Qwen2Config(**tiny(num_key_value_heads=2))))


def mistral() -> nn.Module:
    """Return a Mistral with a window shorter than most sequences of the tests."""
    return randomised(MistralForCausalLM(MistralConfig(**tiny(num_key_value_heads=2, sliding_window=8))))


def phi() -> nn.Module:
    """Return a Phi: biases everywhere, attention and MLP in parallel after one norm."""
    return randomised(PhiForCausalLM(PhiConfig(**tiny(resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0))))


def granite() -> nn.Module:
    """Return a Granite: multipliers of embeddings, attention, residuals and logits."""
    scales = {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    }
    return randomised(GraniteForCausalLM(GraniteConfig(**tiny(num_key_value_heads=2, **scales))))


def mixtral(width: int = 96, **changes: Any) -> nn.Module:
    """Return a Mixtral: four experts of a width, two for each token."""
    sizes = tiny(num_key_value_heads=2, num_local_experts=4, sliding_window=None, intermediate_size=width)
    return randomised(MixtralForCausalLM(MixtralConfig(**sizes | changes)))


def llama4(layers: int = 4, heads: int = 4, kv: int = 2) -> nn.Module:
    """Return a Llama 4: chunks of 8 tokens, every third layer without RoPE, and experts in every other one."""
    config = Llama4TextConfig(
        hidden_size=16 * heads,
        head_dim=16,
        intermediate_size=48,
        intermediate_size_mlp=96,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        num_local_experts=3,
        interleave_moe_layer_step=2,
        vocab_size=101,
        num_hidden_layers=layers,
        no_rope_layer_interval=3,
        attention_chunk_size=8,
        floor_scale=4,
        pad_token_id=0,
    )
    return randomised(Llama4ForCausalLM(config))


def bert(layers: int = 1) -> nn.Module:
    """Return a BERT for masked language modelling: it sees both ways, and its sequences must bring labels."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return randomised(BertForMaskedLM(BertConfig(**tiny(num_hidden_layers=layers, **dropout))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": functools.partial(llama, layers=2),
    "gpt2": functools.partial(gpt2, layers=2),
    "phi3": phi3,
    "gpt_neox": gpt_neox,
    "qwen3": qwen3,
    "opt": opt,
    "gemma": gemma,
    "qwen2": qwen2,
    "mistral": mistral,
    "phi": phi,
    "granite": granite,
    "mixtral": mixtral,
}


@functools.cache
def captured(name: str) -> tuple[Program, nn.Module]:
    """Return one of MODELS with its program, captured once per test run (a capture takes seconds)."""
    from hydragraph.frontend.capture import capture  # here, because most tests of the models' users need no capture

    model = MODELS[name]()
    return capture(model), model
