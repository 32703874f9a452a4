"""Fields of a packed batch, and the default loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hydragraph.errors import Unsupported, type_text
from hydragraph.ir.graph_data import placeholders_of, value_of
from hydragraph.ir.placeholders import DROPOUT_BLOCK, DROPOUT_KEYS
from hydragraph.ir.program import Program
from hydragraph.passes.find_field_ranges import field_ranges_of
from hydragraph.private.tracing import TensorSpec
from hydragraph.spec.workload import IGNORED, Field

# Fields of a packed batch of T tokens in N sequences.
FIELDS = {
    "input_ids": TensorSpec((1, "T"), torch.int64),
    "position_ids": TensorSpec((1, "T"), torch.int64),
    "labels": TensorSpec((1, "T"), torch.int64),
    "cu_seqlens": TensorSpec(("N+1",), torch.int32),
    "max_length": TensorSpec((), torch.int64),
}

RESERVED = ("hidden", "vocabulary_start", "collectives", "tangent", DROPOUT_KEYS, DROPOUT_BLOCK)

Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def fields_of(example: Mapping[str, Tensor] | None, tensor_names: set[str], where: str) -> dict[str, TensorSpec]:
    """Return the standard fields and an example's custom fields, [1, T, ...].

    Raises:
        Unsupported: a field of the example has a wrong name, dtype or shape.
    """
    example = dict(example or {})
    fields = dict(FIELDS)
    tokens = {int(t.shape[1]) for t in example.values() if isinstance(t, Tensor) and t.dim() > 1}
    for name, tensor in example.items():
        is_tensor = isinstance(tensor, Tensor)
        field = (FIELDS.get(name) or _own_field(name, tensor, tensor_names)) if is_tensor else None
        if field is None or not _fits(tensor, field) or len(tokens) > 1:
            form = f"{tensor.dtype} {list(tensor.shape)}" if is_tensor else type_text(tensor)
            what = f"the example's field {name!r} ({form}) does not fit a packed batch"
            shapes = {n: ", ".join(map(str, f.shape)) for n, f in FIELDS.items()}
            described = [f"{n} {f.dtype} [{shapes[n]}]".replace("torch.", "") for n, f in FIELDS.items()]
            remedy = (
                f"pass the standard fields ({', '.join(described)}), or a custom field [1, T, ...] under an unused name"
            )
            raise Unsupported(what, where=where, remedy=remedy)
        fields[name] = field
    return fields


def _own_field(name: str, tensor: Tensor, tensor_names: set[str]) -> TensorSpec | None:
    free = name.isidentifier() and name not in tensor_names and name not in RESERVED and not name.startswith("other")
    if tensor.dim() < 2 or not free:
        return None
    return TensorSpec((1, "T", *map(int, tensor.shape[2:])), tensor.dtype)


def _fits(tensor: Tensor, field: TensorSpec) -> bool:
    sizes = zip(field.shape, tensor.shape, strict=False)
    same = tensor.dtype == field.dtype and tensor.dim() == len(field.shape)
    return same and all(a == b for a, b in sizes if isinstance(a, int))


def own_fields(program: Program) -> dict[str, Field]:
    own = {}
    for template in program.templates.values():
        for node, name in zip(placeholders_of(template.graph)[::-1], template.inputs[::-1], strict=False):
            if not name.startswith("other.") and name not in (*FIELDS, *RESERVED):
                value = value_of(node)
                own[name] = Field(value.dtype, tuple(map(int, value.shape[2:])))
    # Pad fields of targets with the ignored index.
    limits = field_ranges_of(program) if own else ()
    looked_up = {limit.field for limit in limits if limit.ignored is None}
    ignored = {limit.field: limit.ignored for limit in limits if limit.field not in looked_up}
    return {name: replace(own[name], padding=ignored.get(name) or 0) for name in sorted(own)}


def token_cross_entropy(outputs: Any, batch: dict[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
    """Sum the cross-entropy of logits [1, T, V], in fp32, over labels [1, T] other than -100.

    The logits are `outputs.logits`, `outputs["logits"]`, or `outputs` if it is a tensor.

    Raises:
        Unsupported: the outputs have no logits.
    """
    return _cross_entropy(outputs, batch["labels"], "sum", label_smoothing)


def token_logprobs(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the log-probability of each position's label, [T] in fp32; 0 where the label is -100.

    Use it in losses that weight tokens, e.g. by `batch["advantages"][0]`. Where the label is -100, a ratio of
    probabilities is exp(0 - 0) = 1, not 0: mask the ratio with `batch["labels"][0] != -100`.

    Raises:
        Unsupported: the outputs have no logits.
    """
    return -_cross_entropy(outputs, batch["labels"], "none")


def _cross_entropy(outputs: Any, labels: Tensor, reduction: str, smoothing: float = 0.0) -> Tensor:
    logits = _logits(outputs).float()
    options: dict[str, Any] = {"ignore_index": IGNORED, "reduction": reduction, "label_smoothing": smoothing}
    try:
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)
    except ValueError as error:
        what = f"the model returns logits {list(logits.shape)}, which do not match the labels {list(labels.shape)}"
        remedy = "return logits of shape [1, T, V], or pass loss="
        raise Unsupported(what, where="the loss", remedy=remedy) from error


def _logits(outputs: Any) -> Tensor:
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if isinstance(logits, Tensor) and not logits.dim():
        what = "the model returns a single number instead of logits"
        remedy = "return the logits [1, T, V], or pass loss= with a function that returns the sum over all targets"
        raise Unsupported(what, where="the loss", remedy=remedy)
    if not isinstance(logits, Tensor):
        what = f"the model returns {type_text(outputs)} without logits"
        remedy = 'return logits [1, T, V], or an object or dict with the logits as "logits", or pass loss='
        raise Unsupported(what, where="the loss", remedy=remedy)
    return logits


def shift(ids: Tensor) -> Tensor:
    """Return next-token labels, [L]: ids shifted by one, with -100 at the end."""
    return torch.cat([ids[1:], ids.new_full((1,), IGNORED)])
