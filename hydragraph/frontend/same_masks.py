"""Dropout in eager models, with the masks of captured programs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hydragraph.frontend.repeated_blocks import block_list, entries
from hydragraph.ir.program import Program
from hydragraph.kernels.attention_dropout import kept_of
from hydragraph.kernels.philox import call_word
from hydragraph.passes.graph_node import attention_dropout, dropout, operands

_DROPOUTS = (F.dropout, torch.dropout, torch.dropout_)


@contextmanager
def same_masks(model: nn.Module, program: Program, keys: Tensor, blocks: str | None = None) -> Iterator[None]:
    """Make a model use its program's dropout masks while it computes one sequence.

    Args:
        keys: dropout keys of the tokens, [1, L, 2] (`kernels.philox.keys_of`).
    """
    if not program.drops:
        yield
        return
    _, layers = block_list(model, blocks)
    # A repeated block has one number per call
    numbers: dict[int, deque[int]] = {}
    for number, block in enumerate(entries(layers), start=1):
        numbers.setdefault(id(block), deque()).append(number)
    mode = _Masks(_calls(program), keys)

    def enter(module: nn.Module, _arguments: Any) -> None:
        if id(module) in numbers:
            # The next call of a repeated block gets its next number.
            mode.block = numbers[id(module)][0]
            numbers[id(module)].rotate(-1)

    def leave(module: nn.Module, _arguments: Any, _output: Any) -> None:
        if id(module) in numbers:
            mode.block = 0

    before = nn.modules.module.register_module_forward_pre_hook(enter)
    with before, nn.modules.module.register_module_forward_hook(leave), mode:
        yield


def _calls(program: Program) -> dict[tuple[int, int], int | None]:
    """Map each dropout's (block, call) numbers to its token dimension, or to None inside attention."""
    calls: dict[tuple[int, int], int | None] = {}
    for block in program.blocks:
        for node in program.templates[block.template].graph.graph.nodes:
            if node.target is dropout:
                calls[program.number_of(block), operands(node)[5]] = operands(node)[6]
            elif node.target is attention_dropout:
                calls[program.number_of(block), operands(node)[11]] = None
    return calls


class _Masks(TorchFunctionMode):
    """Mode that replaces dropout; `block` is the running block's number, or 0 outside blocks."""

    def __init__(self, calls: Mapping[tuple[int, int], int | None], keys: Tensor) -> None:
        super().__init__()
        self.block = 0
        self._calls = calls
        self._keys = keys
        self._counted = Counter[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            x, p, trains, writes = _dropout_arguments(*args, **kwargs)
            if trains and p > 0:
                dropped = self._dropout(x, p)
                return x.copy_(dropped) if writes or func is torch.dropout_ else dropped
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _next(self) -> tuple[int, int]:
        number = self._counted[self.block]
        self._counted[self.block] += 1
        return self.block, number

    def _dropout(self, x: Tensor, p: float) -> Tensor:
        place = self._next()
        if place not in self._calls:
            return x
        token_dim = self._calls[place]
        if token_dim is None:
            return x * self._factor(place, x.shape[1], p).to(x.dtype)
        block = torch.tensor(place[0])
        result: Tensor = torch.ops.hydragraph.dropout(x, self._keys, block, None, p, place[1], token_dim, 0, 0, 1)
        return result

    def _factor(self, place: tuple[int, int], heads: int, p: float) -> Tensor:
        return kept_of(self._keys[0], torch.arange(heads), self._keys.shape[1], call_word(*place), p)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
        place = self._next() if dropout_p > 0 else None
        if place is None or place not in self._calls:
            return F.scaled_dot_product_attention(query, key, value, **options, enable_gqa=enable_gqa)
        # With an identity matrix as values, attention returns its probabilities.
        keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        length = key.shape[2]
        identity = torch.eye(length, dtype=query.dtype).expand(1, query.shape[1], length, length)
        probabilities = F.scaled_dot_product_attention(query, keys, identity, **options)
        return (probabilities * self._factor(place, query.shape[1], dropout_p).to(query.dtype)) @ values


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training and train, inplace
