"""Gated delta rule: linear attention with a state per head, within packed sequences (Qwen3-Next, Qwen3.5, OLMo hybrid).

With keys and queries of unit norm, a head's state S [K, V] starts at zero in every sequence and follows

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T,      o_t = S_t^T q_t / sqrt(K)

(Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024). Chunks of 64 tokens use matrix products. With e_i = exp(g_1
+ ... + g_i), D_ij = e_i / e_j if j <= i, else 0, S the state before n tokens, and W the values written,

    (1 + strictly_lower(beta K K^T * D)) W = beta (V - e K S)
    O = e Q S + (Q K^T * D) W,      next S = e_n S + (e_n / e K)^T W

The backward recomputes the states before each chunk, and visits chunks in reverse order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydragraph.kernels import fla_delta_rule
from hydragraph.kernels.new_tensors import contiguous_like, widened

CHUNK = 64  # tokens
# Added to squared lengths
EPSILON = 1e-6


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


@dataclass(frozen=True)
class _Heads:
    """Arguments per value head, [H, T, size] or [H, T], in fp32 or fp64; keys have norm 1, queries 1 / sqrt(K)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Heads:
        q, k = (unit(widened(x)).repeat_interleave(v.shape[1] // x.shape[1], dim=1).transpose(0, 1) for x in (q, k))
        return cls(q * q.shape[-1] ** -0.5, k, widened(v).transpose(0, 1), widened(g).T, widened(beta).T)

    def chunk(self, rows: slice) -> _Chunk:
        return _Chunk.of(self.q[:, rows], self.k[:, rows], self.v[:, rows], self.g[:, rows], self.beta[:, rows])

    def start(self) -> Tensor:
        return self.v.new_zeros(self.v.shape[0], self.k.shape[-1], self.v.shape[-1])


@dataclass(frozen=True)
class _Chunk:
    """Quantities of a chunk that do not depend on the state.

    Attributes:
        q, k, v: rows [H, n, size].
        rate: beta [H, n, 1].
        since: e [H, n, 1].
        left: e_n / e [H, n, 1].
        decays: D [H, n, n].
        system: strictly_lower(beta K K^T * D) [H, n, n].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rate: Tensor
    since: Tensor
    left: Tensor
    decays: Tensor
    system: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Chunk:
        logs = g.cumsum(-1)
        rate = beta.unsqueeze(-1)
        later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
        # A quotient of exponentials could be 0 / 0 after strong decay.
        decays = (logs.unsqueeze(-1) - logs.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
        system = (rate * (k @ k.mT) * decays).tril(-1)
        left = (logs[:, -1:] - logs).exp().unsqueeze(-1)
        return cls(q, k, v, rate, logs.exp().unsqueeze(-1), left, decays, system)

    def written(self, state: Tensor) -> Tensor:
        """Return W [H, n, V]."""
        right_side = self.rate * (self.v - self.since * (self.k @ state))
        written: Tensor = torch.linalg.solve_triangular(self.system, right_side, upper=False, unitriangular=True)
        return written

    def out(self, state: Tensor, written: Tensor) -> Tensor:
        return self.since * (self.q @ state) + (self.q @ self.k.mT * self.decays) @ written

    def next(self, state: Tensor, written: Tensor) -> Tensor:
        return self.since[:, -1:] * state + (self.left * self.k).mT @ written

    def gradients(self, state: Tensor, dout: Tensor, dnext: Tensor) -> tuple[Tensor, ...]:
        """Return gradients of q, k, v, g, beta and the state."""
        written = self.written(state)
        pairs = self.q @ self.k.mT
        keys = self.k @ self.k.mT
        read, recalled = self.q @ state, self.k @ state
        # Through O and the next state to W, then through the system A W = R: dR = A^-T dW, and
        # dA = -dR W^T. Only the strictly lower part of A depends on inputs.
        dwritten = (pairs * self.decays).mT @ dout + self.left * (self.k @ dnext)
        dright_side = torch.linalg.solve_triangular(self.system.mT, dwritten, upper=True, unitriangular=True)
        dsystem = -(dright_side @ written.mT).tril(-1)
        dpairs = (dout @ written.mT).tril()
        dkeys = self.rate * self.decays * dsystem
        dkeys = dkeys + dkeys.mT
        # The system's right side is R = beta (V - e K S).
        dv = self.rate * dright_side
        dread, drecalled = self.since * dout, -self.since * dv
        dleft = (written @ dnext.mT) * self.k
        dq = (dpairs * self.decays) @ self.k + dread @ state.mT
        dk = (dpairs * self.decays).mT @ self.q + dkeys @ self.k + drecalled @ state.mT
        dk = dk + self.left * (written @ dnext.mT)
        dstate = self.since[:, -1:] * dnext + self.q.mT @ dread + self.k.mT @ drecalled
        # D_ij = exp(l_i - l_j): l_i gets the sum of row i of dD * D, minus that of column i.
        ddecays = (dpairs * pairs + self.rate * keys * dsystem) * self.decays
        dlogs = ddecays.sum(-1) - ddecays.sum(-2) + (dread * read + drecalled * recalled).sum(-1)
        moved = (self.left * dleft).sum(-1)
        # left_i = exp(l_n - l_i), and the last l also scales the state.
        dlogs = dlogs - moved
        dlogs[:, -1] += moved.sum(-1) + (self.since[:, -1] * (dnext * state).sum((-2, -1)).unsqueeze(-1))[:, 0]
        dbeta = (dright_side * (self.v - self.since * recalled)).sum(-1) + (dsystem * keys * self.decays).sum(-1)
        # l is the cumulative sum of g, so g_i gets the sum of dl_i, dl_{i + 1}, ...
        return dq, dk, dv, dlogs.flip(-1).cumsum(-1).flip(-1), dbeta, dstate


def _chunks(cu_seqlens: Tensor) -> Iterator[list[slice]]:
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        yield [slice(first, min(first + CHUNK, end)) for first in range(start, end, CHUNK)]


def forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    heads = _Heads.of(q, k, v, g, beta)
    for rows_of in _chunks(cu_seqlens):
        state = heads.start()
        for rows in rows_of:
            chunk = heads.chunk(rows)
            written = chunk.written(state)
            out[rows] = chunk.out(state, written).transpose(0, 1).to(v.dtype)
            state = chunk.next(state, written)
    return out


@torch.library.custom_op("hydragraph::gated_delta_rule", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute the gated delta rule; return [T, H, V], in the dtype of v.

    Args:
        q, k: [T, Hk, K]; the operator normalizes them.
        v: [T, H, V]; a key head serves H / Hk consecutive value heads.
        cu_seqlens: [N + 1].
        g: logarithms of the decays [T, H], at most 0.
        beta: rates of the updates [T, H].
    """
    compute = fla_delta_rule.forward if fla_delta_rule.usable(k) else forward
    return compute(q, k, v, cu_seqlens, g, beta)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads = _Heads.of(q, k, v, g, beta)
    dout = widened(grad).transpose(0, 1)
    head_gradients = [torch.zeros_like(x) for x in (heads.q, heads.k, heads.v, heads.g, heads.beta)]
    for rows_of in _chunks(cu_seqlens):
        # states: before each chunk. after: gradient of the state after a chunk.
        states = [heads.start()]
        for rows in rows_of[:-1]:
            chunk = heads.chunk(rows)
            states.append(chunk.next(states[-1], chunk.written(states[-1])))
        after = heads.start()
        for rows, state in zip(reversed(rows_of), reversed(states), strict=False):
            *parts, after = heads.chunk(rows).gradients(state, dout[:, rows], after)
            for whole, part in zip(head_gradients, parts, strict=True):
                whole[:, rows] = part
    dq, dk, dv, dg, dbeta = (x.transpose(0, 1) for x in head_gradients)
    others = ((v, dv), (g, dg), (beta, dbeta))
    dv, dg, dbeta = (dx.to(x.dtype, memory_format=torch.contiguous_format) for x, dx in others)
    return _to_length(q, dq * q.shape[-1] ** -0.5), _to_length(k, dk), dv, dg, dbeta


def _to_length(x: Tensor, dunit: Tensor) -> Tensor:
    wide = widened(x)
    dunit = dunit.unflatten(1, (x.shape[1], -1)).sum(2)
    inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)
    dx = inverse * dunit - wide * inverse**3 * (wide * dunit).sum(-1, keepdim=True)
    return dx.to(x.dtype, memory_format=torch.contiguous_format)


@torch.library.custom_op("hydragraph::gated_delta_rule_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    compute = fla_delta_rule.backward if fla_delta_rule.usable(k) else backward
    return compute(grad, q, k, v, cu_seqlens, g, beta)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dq, dk, dv, dg, dbeta = torch.ops.hydragraph.gated_delta_rule_backward(grad, *ctx.saved_tensors)
    return dq, dk, dv, None, dg, dbeta


_forward.register_fake(lambda q, k, v, *_: contiguous_like(v)[0])
_backward.register_fake(lambda grad, q, k, v, cu_seqlens, g, beta: contiguous_like(q, k, v, g, beta))
_forward.register_autograd(_differentiate, setup_context=_save)
