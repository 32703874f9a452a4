"""Hugging Face models: packed attention, and rejection of unsupported features."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend import mask_patterns
from hydragraph.frontend.block_keywords import sequence_bounds
from hydragraph.frontend.length_dependent_rotary import hold_frequencies, refuse_other_frequencies, short_positions
from hydragraph.frontend.mask_patterns import MaskPlaceholder, mask
from hydragraph.frontend.peft_adapters import base_model
from hydragraph.ir.program import Template
from hydragraph.kernels.varlen_attention import varlen_attention
from hydragraph.passes.graph_node import ALONG_SEQUENCES, ATTENDING, operands

ATTENTION = "hydragraph"

# Arguments of attention that cu_seqlens replaces.
_IGNORED = frozenset({"position_ids", "cu_seq_lens_k", "max_length_k", "cache_position"})
# Settings that add terms to the model's own loss.
_ADDITIONAL_LOSSES = {"output_router_logits": "the auxiliary router loss", "z_loss_coefficient": "the z-loss"}
# Suffixes of model classes with unshifted labels
_ALIGNED = ("ForMaskedLM", "ForTokenClassification")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskPlaceholder | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute packed attention for transformers, from [B, H, T, D] to [B, T, H, D].

    Raises:
        Unsupported: packed attention cannot apply the mask, a tensor option, or dropout with a window, chunks, capped
            scores or sinks.
    """
    where = type(module).__name__
    # Some layers do not pass keyword arguments on, but their block has the bounds.
    if cu_seq_lens_q is None:
        cu_seq_lens_q, max_length_q = sequence_bounds(where)
    causal = mask_patterns.is_causal(module) if is_causal is None else is_causal
    if isinstance(attention_mask, Tensor):
        remedy = "pack sequences instead of padding them"
        raise Unsupported("the model passes an attention mask", where=where, remedy=remedy)
    limits = {"sink": options.pop("s_aux", None), "cap": options.pop("softcap", None)}
    for name, option in options.items():
        if isinstance(option, Tensor) and name not in _IGNORED:
            what = f"the attention takes a tensor {name!r}, which packed attention does not support"
            raise Unsupported(what, where=where, remedy=f"switch {name} off in the config, or choose another model")
    if attention_mask is not None and not attention_mask.supported(bool(causal)):
        attention_mask.refuse(_layer(module))
    # Pad heads of values or queries with zeros if sizes differ (DeepSeek).
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    widest = max(query.shape[-1], value.shape[-1])
    size = value.shape[-1]
    q, k, v = (_packed(x, widest) for x in (query, key, value))
    # `sliding_window` only repeats the mask's window
    if attention_mask is not None:
        limits |= {"window": attention_mask.window, "chunk": attention_mask.chunk}
    if dropout:
        if any(limit is not None for limit in limits.values()):
            what = f"packed attention does not support dropout ({dropout}) with windows, chunks, capped scores or sinks"
            raise Unsupported(what, where=where, remedy="set the config's attention dropout to 0")
        longest_of = torch.zeros((), dtype=torch.int64) if max_length_q is None else max_length_q
        bounds = (cu_seq_lens_q, longest_of, bool(causal), scale)
        out = torch.ops.hydragraph.attention_dropout(q, k, v, *bounds, None, None, None, float(dropout), 0, 1)
    else:
        options = {"causal": bool(causal), "scale": scale, "max_length": max_length_q, **limits}
        out = varlen_attention(q, k, v, cu_seq_lens_q, **options)
    out = out if size == widest else out[..., :size]
    return out.reshape(query.shape[0], -1, *out.shape[1:]), None


def _layer(module: nn.Module) -> str:
    index = vars(module).get("layer_idx")
    return type(module).__name__ if index is None else f"{type(module).__name__} of layer {index}"


def _packed(x: Tensor, size: int) -> Tensor:
    # x.shape[1::2] is (H, D) of [B, H, T, D]; the result is [B * T, H, D].
    x = x.transpose(1, 2).reshape(-1, *x.shape[1::2])
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _refuse_own_attention(model: nn.Module) -> None:
    from transformers import AttentionInterface

    attentions = AttentionInterface()
    configs = (getattr(module, "config", None) for module in model.modules())
    for chosen in dict.fromkeys(getattr(config, "_attn_implementation", None) for config in configs):
        # Hub kernels ("owner/name") compute standard attention.
        if not isinstance(chosen, str) or "/" in chosen or chosen not in attentions:
            continue
        module = getattr(attentions[chosen], "__module__", "")
        if module.partition(".")[0] not in ("transformers", "hydragraph"):
            what = f"the attention is {chosen!r}{module and f' of {module}'}, which hydragraph would replace"
            remedy = "train with standard attention: model.set_attn_implementation('sdpa')"
            raise Unsupported(what, where=type(model).__name__, remedy=remedy)


def _refuse_linear_biases(model: nn.Module) -> None:
    for module in model.modules():
        builds = any("alibi" in name for name in vars(type(module)))
        if builds or any("alibi" in name and value is True for name, value in vars(module).items()):
            what = "attention scores have distance biases (ALiBi), which packed attention does not support"
            remedy = "choose a model with rotary or learned positions, such as a Falcon whose config has alibi=False"
            raise Unsupported(what, where=type(module).__name__, remedy=remedy)


def _refuse_shared_values(model: nn.Module) -> None:
    settings = {"num_kv_shared_layers": "keys and values of earlier layers", "hidden_size_per_layer_input": "a table"}
    for module in model.modules():
        for name, read in settings.items():
            value = getattr(getattr(module, "config", None), name, None)
            if type(value) is int and value > 0:
                what = f"{name}={value}: layers read {read}, but only the hidden state is passed from layer to layer"
                remedy = f"choose a model whose config has {name}=0"
                raise Unsupported(what, where=type(module).__name__, remedy=remedy)


def is_huggingface(model: nn.Module) -> bool:
    classes = type(base_model(model)).__mro__
    return any(c.__module__.startswith("transformers.") for c in classes) and hasattr(model, "config")


def is_library_class(model: nn.Module) -> bool:
    from_library = type(model).__module__.partition(".")[0] in ("transformers", "peft")
    return from_library and not any("forward" in vars(module) for module in model.modules())


def use_packed_attention(model: nn.Module) -> None:
    """Make a meta copy's layers call `attention` and use constant rotary frequencies."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, mask)
    hold_frequencies(model)
    name = _OrPyTorchs(ATTENTION) if any(map(_calls_pytorchs, model.modules())) else ATTENTION
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name
        # transformers lets only its own classes use grouped products; the loop over experts is untraceable.
        if getattr(config, "_experts_implementation", None) == "eager" and hasattr(module, "is_transposed"):
            config._experts_implementation = "grouped_mm"


class _OrPyTorchs(str):
    """Name of hydragraph's attention that also equals "sdpa", for layers that call PyTorch's attention."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "sdpa" or str.__eq__(self, other)


def _calls_pytorchs(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "scaled_dot_product_attention" in code.co_names


def caller(model: nn.Module) -> Callable[[nn.Module, dict[str, Tensor]], Any]:
    # RoBERTa's first position is padding_idx + 1.
    padding = unplaced_id(model)
    first = 0 if padding is None else padding + 1

    def call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        outputs = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"] + first if first else batch["position_ids"],
            cu_seq_lens_q=batch["cu_seqlens"],
            cu_seq_lens_k=batch["cu_seqlens"],
            max_length_q=batch["max_length"],
            max_length_k=batch["max_length"],
            use_cache=False,
        )
        _refuse_pooled(outputs, batch, type(model).__name__)
        return outputs

    return call


def unplaced_id(model: nn.Module) -> int | None:
    """Return the padding id after which a RoBERTa-like model's positions start; None for other models."""
    counting = (m for m in model.modules() if hasattr(type(m), "create_position_ids_from_input_ids"))
    ids: Iterator[Any] = (getattr(m, "padding_idx", None) for m in counting)
    return max((int(i) for i in ids if i is not None), default=None)


def positions(model: nn.Module) -> tuple[int, str] | None:
    """Return the maximum number of positions per sequence and its config setting, or None."""
    config = base_model(model).config
    said = [(getattr(config, name, None), name) for name in ("max_position_embeddings", "n_positions")]
    named = next(((most, name) for most, name in said if type(most) is int and most > 0), None)
    return short_positions(model) or named


def _refuse_pooled(outputs: Any, batch: dict[str, Tensor], where: str) -> None:
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor) and logits.shape[:2] != batch["input_ids"].shape:
        what = f"the logits of shape {list(logits.shape)} are pooled over a row of several packed sequences"
        remedy = "use the ForTokenClassification class, and label only the token that classifies the sequence"
        raise Unsupported(what, where=where, remedy=remedy)


def is_causal(model: nn.Module) -> bool:
    """Return whether a model predicts the next token, so that labels are shifted."""
    return not type(base_model(model)).__name__.endswith(_ALIGNED)


def refuse_own_mixing(model: nn.Module, layers: Mapping[str, Template]) -> None:
    causal = {way for module in model.modules() for way in mask_patterns.directions(module)} == {"causal"}
    where = type(model).__name__
    for name, template in layers.items():
        nodes = template.graph.graph.nodes
        if causal and any(n.target in ATTENDING and not operands(n)[5] for n in nodes):
            what = "the layer attends in both directions, but the model makes only causal masks"
            raise Unsupported(what, where=f"{where}, {name}", remedy=mask_patterns.DIRECTION)
        if not any(n.target in ALONG_SEQUENCES for n in nodes):
            what = "the layer does not use transformers' attention interface: it has its own attention or a recurrence"
            remedy = "choose a model whose attention goes through ALL_ATTENTION_FUNCTIONS in every layer"
            raise Unsupported(what, where=f"{where}, {name}", remedy=remedy)


def refuse_own_positions(model: str, fields: Collection[str]) -> None:
    if "position_ids" not in fields:
        what = "forward takes no position_ids, so positions would continue across packed sequences"
        raise Unsupported(what, where=model, remedy="choose a model that computes positions from position_ids")


def refuse_unsupported(model: nn.Module, loss: object = None) -> None:
    where = type(model).__name__
    if is_huggingface(model):
        _refuse_other_architectures(base_model(model))
        _refuse_additional_losses(base_model(model))
        if loss is None and hasattr(base_model(model), "_loss_function"):
            what = "the model's loss_function was replaced, but training uses cross-entropy unless loss= is passed"
            raise Unsupported(what, where=where, remedy="pass the loss to hydragraph as loss=")
        _refuse_own_attention(model)
        _refuse_linear_biases(model)
        _refuse_shared_values(model)
        refuse_other_frequencies(model)
    if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        remedy = "call model.gradient_checkpointing_disable(); hydragraph already recomputes cheap operators"
        raise Unsupported("the model enables its own gradient checkpointing", where=where, remedy=remedy)


def _refuse_other_architectures(model: Any) -> None:
    where = type(model).__name__
    remedy = "choose a model with one stack of attention layers over token ids, such as LlamaForCausalLM"
    if getattr(model.config, "is_encoder_decoder", False):
        raise Unsupported("encoder-decoder models are not supported", where=where, remedy=remedy)
    if (needed := getattr(model, "main_input_name", "input_ids")) != "input_ids":
        raise Unsupported(f"it reads {needed}, but the data are token ids (input_ids)", where=where, remedy=remedy)
    for module in model.modules():
        if "Mamba" in type(module).__name__ and not isinstance(module, type(model)):
            what = f"state-space layers ({type(module).__name__}) are not supported, because they mix packed sequences"
            raise Unsupported(what, where=where, remedy=remedy)


def _refuse_additional_losses(model: Any) -> None:
    configs = {"config": model.config, "config.get_text_config()": model.config.get_text_config()}
    for (path, config), (name, what) in product(configs.items(), _ADDITIONAL_LOSSES.items()):
        if value := getattr(config, name, None):
            remedy = f"set {name}={type(value)(0)} to train only on the token loss"
            raise Unsupported(f"{what} is not supported", where=f"{type(model).__name__}.{path}.{name}", remedy=remedy)
