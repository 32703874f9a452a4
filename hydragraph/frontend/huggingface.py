"""Hugging Face models: how they are called with packed sequences, and what of theirs is refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.kernels.varlen_attention import varlen_attention

ATTENTION = "hydragraph"  # the name under which transformers finds our attention function


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks, [B, H, T, D] -> [B, T, H, D], within packed sequences only.

    Raises:
        Unsupported: for a padding mask, dropout, a sliding window, capped scores or attention sinks.
    """
    where = type(module).__name__
    if cu_seq_lens_q is None:
        raise Unsupported(
            "attention was called without cu_seq_lens_q, so packed sequences would see each other",
            where=where,
            remedy="use a model that hands its keyword arguments on to its attention layers",
        )
    if attention_mask is not None:
        raise Unsupported("an attention mask", where=where, remedy="pack sequences instead of padding them")
    if dropout:
        raise Unsupported(f"attention dropout {dropout}", where=where, remedy="set the config's attention dropout to 0")
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise Unsupported(f"{name}={options[name]}", where=where, remedy=f"set {name} to None in the config")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    q, k, v = (x.transpose(1, 2).reshape(-1, *x.shape[1::2]) for x in (query, key, value))
    out = varlen_attention(q, k, v, cu_seq_lens_q, causal=bool(causal), scale=scaling, max_length=max_length_q)
    return out.reshape(query.shape[0], -1, *out.shape[1:]), None


def is_huggingface(model: nn.Module) -> bool:
    """Say whether a model is one of transformers', without importing transformers for those that are not."""
    return any(c.__module__.startswith("transformers.") for c in type(model).__mro__) and hasattr(model, "config")


def use_packed_attention(model: nn.Module) -> None:
    """Make a model (our own meta copy of the user's) call `attention` in every layer."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = ATTENTION


def call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Call a model on a packed batch: ids and positions [1, T], sequence bounds as keyword arguments for attention."""
    return model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        cu_seq_lens_q=batch["cu_seqlens"],
        cu_seq_lens_k=batch["cu_seqlens"],
        max_length_q=batch["max_length"],
        max_length_k=batch["max_length"],
        use_cache=False,
    )


def is_causal(model: nn.Module) -> bool:
    """Say whether a model predicts the next token (its labels are shifted here) or masked tokens (labels are given)."""
    return not type(model).__name__.endswith("ForMaskedLM")


def refuse_unsupported(model: nn.Module) -> None:
    """Raise Unsupported for what would be captured wrongly: dropout in training, a padding id that embeddings skip."""
    for name, module in model.named_modules():
        if module.training and isinstance(module, nn.Dropout) and module.p > 0:
            raise Unsupported(
                f"dropout {module.p} in training",
                where=name,
                remedy="set the config's dropout probabilities to 0, or call model.eval() to train without dropout",
            )
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise Unsupported(
            "the auxiliary router loss",
            where=f"{type(model).__name__}.config.output_router_logits",
            remedy="set output_router_logits=False to train on the token loss alone",
        )
    if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise Unsupported(
            "the model's own gradient checkpointing",
            where=type(model).__name__,
            remedy="call model.gradient_checkpointing_disable(); the backward graphs already recompute what is cheap",
        )
