"""A custom module and custom losses, each with a plain PyTorch twin."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg


class Attention(nn.Module):
    """Attention over packed tokens [T, H], with fewer key/value heads than query heads.

    If limited it has a window, a cap and sinks.
    """

    def __init__(self, width: int, heads: int, kv: int, causal: bool, limited: bool = False) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(heads)) if limited else None
        self.limits: dict[str, Any] = {"window": 5, "cap": 1.5} if limited else {}
        self.size, self.causal = width // heads, causal
        self.q, self.k, self.v = nn.Linear(width, width), *(nn.Linear(width, kv * self.size) for _ in range(2))
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)) for layer in (self.q, self.k, self.v))
        out = hg.varlen_attention(q, k, v, cu_seqlens, causal=self.causal, sink=self.sinks, **self.limits)
        return self.o(out.flatten(1))


class Layer(nn.Module):
    """A pre-norm block of attention and a gated MLP, all with biases."""

    def __init__(self, width: int, heads: int, kv: int, causal: bool, limited: bool = False) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, kv, causal, limited)
        self.gate, self.up, self.down = nn.Linear(width, 51), nn.Linear(width, 51), nn.Linear(51, width)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        x = x + self.attention(self.before(x), cu_seqlens)
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Own(nn.Module):
    """A custom language model or token classifier; its blocks pass the hidden state as [T, H]."""

    def __init__(
        self,
        layers: int = 2,
        heads: int = 4,
        kv: int = 2,
        outputs: int = 101,
        causal: bool = True,
        limited: Collection[int] = (),
    ) -> None:
        super().__init__()
        width = 8 * heads
        self.tokens, self.places = nn.Embedding(101, width), nn.Embedding(128, width)
        self.stack = nn.ModuleList([Layer(width, heads, kv, causal, i in limited) for i in range(layers)])
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return logits [1, T, outputs]."""
        x = (self.tokens(input_ids) + self.places(position_ids))[0]
        for block in self.stack:
            x = block(x, cu_seqlens)
        return self.out(self.norm(x))[None]


class Small(nn.Module):
    """A block of two products that looks at each token alone, for tests of what surrounds it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 51), nn.Linear(51, width)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return x + self.down(self.up(x))


def small(layers: int = 1) -> Own:
    """Return the custom language model with `Small` blocks: it is captured in half the time."""
    model = Own(layers=0)
    model.stack = nn.ModuleList([Small() for _ in range(layers)])
    return model


class Headed(Own):
    """The same with a head that is fused with its loss."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(layers=0)
        self.stack, self.out = small().stack, nn.Linear(32, 101, bias=False)
        if tied:
            self.out.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return logits [1, T, 101]."""
        x = self.stack[0]((self.tokens(input_ids) + self.places(position_ids))[0], cu_seqlens)
        return self.out(self.norm(x)[None])


def alone(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits [L, outputs] of one sequence by itself."""
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
    return model(ids[None], torch.arange(len(ids))[None], bounds)[0]


def weighted(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Sum the cross-entropies, each times its token's weight."""
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    each = F.cross_entropy(logits[0], batch["labels"][0], ignore_index=-100, reduction="none")
    return (each * batch["weight"][0]).sum()


def distilled(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Sum the cross-entropies against a teacher's distribution over the targets."""
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    each = -(F.log_softmax(logits[0], -1) * batch["teacher"][0]).sum(-1)
    return (each * (batch["labels"][0] != -100)).sum()


def classified(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Sum the cross-entropies of whole sequences: the mean of a sequence's outputs against its last token's label."""
    logits, bounds = outputs[0], batch["cu_seqlens"].long()
    sums = torch.cat([logits.new_zeros(1, logits.shape[1]), logits.cumsum(0)])
    means = (sums[bounds[1:]] - sums[bounds[:-1]]) / (bounds[1:] - bounds[:-1])[:, None]
    return F.cross_entropy(means, batch["labels"][0][bounds[1:] - 1], ignore_index=-100, reduction="sum")
