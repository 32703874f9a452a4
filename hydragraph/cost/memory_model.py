"""What fits into a device by published constants: a model of memory for whole schemes (Hydraulis, section 6)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hydragraph.cost.pieces import Scheme

FUSED_EMBEDDING_BYTES = 32  # per element of an embedding, where one stage holds the embedding and the head
EMBEDDING_BYTES = 16  # where it holds one of them: fp32 weight and moments, 16-bit weight and gradient


@dataclass(frozen=True)
class MemoryModel:
    """Published constants of memory: bytes on a device of the first stage, the fullest one.

    Attributes:
        hidden, layers, vocab: sizes of the model.
        activation: bytes that backward keeps per element of a layer's hidden state [l, hidden], by tensor-parallel
            degree.
        states: bytes per element of a layer's hidden^2, over master weights, optimizer state, weights and gradients.
        sharded: the part of them that is sharded over all devices (alpha), 0 to 1.
        gap: bytes that the allocator and the communicators lose, by number of devices up to which it holds.
        margin: bytes to leave free.
        device: capacity in bytes.
    """

    hidden: int
    layers: int
    vocab: int
    activation: Mapping[int, float]
    states: float
    sharded: float
    gap: tuple[tuple[int, float], ...]
    margin: float
    device: float

    def states_bytes(self, scheme: Scheme, devices: int) -> float:
        """Return the bytes of weights, gradients and optimizer state on one device of the first stage."""
        tp, pp = scheme
        layer = self.layers * self.hidden**2 * self.states
        alpha = self.sharded
        embedding = self.hidden * self.vocab * (FUSED_EMBEDDING_BYTES if pp == 1 else EMBEDDING_BYTES)
        return layer * (alpha / devices + (1 - alpha) / (pp * tp)) + embedding * (alpha / devices + (1 - alpha) / tp)

    def token_bytes(self, scheme: Scheme) -> float:
        """Return the activation bytes per token of a micro-batch; PP of them are in flight on the first stage."""
        tp, _ = scheme
        return self.layers * self.hidden / tp * self.activation[tp]

    def gap_bytes(self, scheme: Scheme) -> float:
        """Return what the allocator and the communicators of a pipeline take."""
        used = scheme[0] * scheme[1]
        return next((lost for upto, lost in self.gap if used <= upto), self.gap[-1][1])

    def max_len(self, scheme: Scheme, devices: int) -> int:
        """Return how many tokens a micro-batch may have, 0 where none fits; `devices` share the state."""
        free = self.device - self.margin - self.gap_bytes(scheme) - self.states_bytes(scheme, devices)
        return max(0, math.floor(free / self.token_bytes(scheme)))
