"""Memory limits of whole schemes from published constants (Hydraulis, Appendix B.1).

    H, V     hidden size, vocabulary size
    N        number of devices that share the sharded state
    TP, PP   tensor-parallel degree, number of stages
    A        activation bytes per element of a layer's hidden state, by tensor-parallel degree
    B        bytes of states per layer, divided by H^2
    alpha    fraction of states sharded over all devices

Hydraulis's formulas -> functions, for the first stage, which needs the most memory:

    layers H^2 B (alpha / N + (1 - alpha) / (PP TP)), and the same for the embedding    `MemoryModel.states_bytes`
    (layers / PP) (l H / TP) A for each of PP micro-batches in flight, divided by l   `MemoryModel.token_bytes`
    MaxLen(P), the length l that fills the device's memory minus a margin             `MemoryModel.max_len`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hydragraph.cost.block_pieces import Scheme

# Per element: fp32 weight and moments, 16-bit weight and gradient.
EMBEDDING_BYTES = 16
# A single stage stores both embedding and head.
FUSED_EMBEDDING_BYTES = 32


@dataclass(frozen=True)
class MemoryModel:
    """Published constants of memory, in bytes.

    Attributes:
        hidden, vocab, activation, states, sharded: H, V, A, B and alpha.
        gap: pairs (maximum number of devices, bytes), ascending; see `gap_bytes`.
        margin: bytes left free.
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
        tp, pp = scheme
        # Pipeline parallelism does not divide the embedding.
        layer = self.layers * self.hidden**2 * self.states
        alpha = self.sharded
        embedding = self.hidden * self.vocab * (FUSED_EMBEDDING_BYTES if pp == 1 else EMBEDDING_BYTES)
        return layer * (alpha / devices + (1 - alpha) / (pp * tp)) + embedding * (alpha / devices + (1 - alpha) / tp)

    def token_bytes(self, scheme: Scheme) -> float:
        tp, _ = scheme
        return self.layers * self.hidden / tp * self.activation[tp]

    def gap_bytes(self, scheme: Scheme) -> float:
        """Return the bytes that the allocator and communicators use."""
        used = scheme[0] * scheme[1]
        return next((lost for upto, lost in self.gap if used <= upto), self.gap[-1][1])

    def max_len(self, scheme: Scheme, devices: int) -> int:
        """Return the most tokens of a micro-batch if `devices` devices share the state; 0 if none fits."""
        free = self.device - self.margin - self.gap_bytes(scheme) - self.states_bytes(scheme, devices)
        return max(0, math.floor(free / self.token_bytes(scheme)))
