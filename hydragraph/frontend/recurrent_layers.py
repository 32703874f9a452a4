"""Kernels for packed sequences, for transformers' linear attention and short convolutions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import hydragraph.kernels.causal_convolution
import hydragraph.kernels.gated_delta_rule  # noqa: F401  these register the operators
from hydragraph.errors import Unsupported
from hydragraph.frontend.block_keywords import sequence_bounds


@contextmanager
def packed_recurrences(model: nn.Module) -> Iterator[None]:
    """Temporarily replace recurrent functions in a model's Python modules with hydragraph's kernels."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    names = sorted({kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")})
    with ExitStack() as replaced:
        for module in map(sys.modules.__getitem__, names):
            for name in _OURS.keys() & vars(module):
                replaced.enter_context(mock.patch.object(module, name, _OURS[name]))
        yield


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    stateful = options.get("initial_state") is not None or options.get("output_final_state", False)
    if stateful or not options.get("use_qk_l2norm_in_kernel", False):
        what = "the gated delta rule uses a state from another call, or keys that are not normalized"
        raise Unsupported(what, where="linear attention", remedy="set use_cache=False, or choose another model")
    bounds = sequence_bounds("linear attention", "it")[0] if cu_seqlens is None else cu_seqlens
    flat = [x.flatten(0, 1) for x in (query, key, value, g, beta)]
    out = torch.ops.hydragraph.gated_delta_rule(*flat[:3], bounds, *flat[3:])
    return out.reshape(value.shape), None


def _convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
) -> Tensor:
    from transformers.activations import ACT2FN

    cu_seqlens = options.get("cu_seq_lens_q")
    bounds = sequence_bounds("short convolution", "it")[0] if cu_seqlens is None else cu_seqlens
    rows = hidden_states.to(weight.dtype).transpose(1, 2).flatten(0, 1)
    out = torch.ops.hydragraph.causal_convolution(rows, weight, bias, bounds)
    out = out if activation is None else ACT2FN[activation](out)
    result: Tensor = out.unsqueeze(0).transpose(1, 2).to(hidden_states.dtype)
    return result


_OURS: Mapping[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "causal_conv1d_fn": _convolution,
}
