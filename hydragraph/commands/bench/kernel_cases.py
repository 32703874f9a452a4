"""Kernels and their alternatives for `bench kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hydragraph.commands.bench.bench_models import mixed_lengths
from hydragraph.kernels import adamw, linear_cross_entropy, slice_copy
from hydragraph.kernels.varlen_attention import varlen_attention

BACKENDS = {"cuda": ("flash_attn", "torch", "triton"), "cpu": ("loop",)}
RANGES = 2000


@dataclass(frozen=True)
class KernelCase:
    """One computation at one size.

    Attributes:
        work: bytes moved, or floating-point operations.
        bound: bottleneck, "memory" or "products" (matrix products).
        sides: functions that compute the result, by name; the first is the reference.
    """

    kernel: str
    size: str
    work: float
    bound: str
    sides: Mapping[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class KernelSweep:
    """Settings of a benchmark; `full` selects the sizes for GPUs."""

    device: torch.device
    dtype: torch.dtype
    full: bool
    compiled: bool


def attention(sweep: KernelSweep) -> Iterator[KernelCase]:
    """Causal attention; FLOPs exclude the masked half, and a backward counts as 2.5 forwards."""
    small = [(256, 4, 2, 32), (512, 4, 2, 64)]
    full = [(4096, 32, 8, 128), (16384, 32, 8, 128), (32768, 32, 8, 128), (16384, 32, 8, 64)]
    for tokens, heads, kv, size in full if sweep.full else small:
        lengths = mixed_lengths(tokens)
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=sweep.device)
        q, k, v = (
            torch.randn(tokens, h, size, device=sweep.device, dtype=sweep.dtype).requires_grad_()
            for h in (heads, kv, kv)
        )
        grad = torch.randn_like(q)
        longest = torch.tensor(max(lengths))
        ours = partial(varlen_attention, q, k, v, starts, max_length=longest)
        forwards: dict[str, Callable[[], Tensor]] = {"eager": partial(_per_sequence, q, k, v, lengths)}
        forwards |= {name: partial(ours, backend=name) for name in BACKENDS[sweep.device.type]}
        forwards["dispatch"] = ours
        work = 3.5 * sum(2.0 * n * n * heads * size for n in lengths)
        sides = {name: partial(_gradient, forward, (q, k, v), grad) for name, forward in forwards.items()}
        yield KernelCase("varlen_attention", f"T {tokens}, {heads}/{kv} heads of {size}", work, "products", sides)


def _per_sequence(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    parts = []
    for a, b in pairwise(accumulate(lengths, initial=0)):
        query, key, value = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _gradient(call: Callable[[], Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> Tensor:
    value = call()
    return torch.autograd.grad(value, inputs, grad.to(value.dtype))[0]


def slice_copies(sweep: KernelSweep) -> Iterator[KernelCase]:
    """Copies of permuted ranges, with a cast (pulls of weights) or a sum (pushes of gradients)."""
    for megabytes in (64, 256, 1024) if sweep.full else (1, 4):
        count = megabytes * 2**18
        table = _table(count, sweep.device)
        size = f"{megabytes} MB, {len(table.ranges[0])} ranges"
        master = torch.randn(count, device=sweep.device)
        kinds = {"fp32->bf16": (torch.bfloat16, False, 6.0), "fp32->fp32 add": (torch.float32, True, 12.0)}
        for kind, (dtype, add, bytes_each) in kinds.items():
            ways: dict[str, Callable[..., None]] = {"eager": slice_copy.reference, "hydragraph": slice_copy.slice_copy}
            targets = {name: torch.zeros(count, dtype=dtype, device=sweep.device) for name in ways}
            calls = {n: partial(way, master, targets[n], table, accumulate=add) for n, way in ways.items()}
            sides = {n: partial(_returning, targets[n], call) for n, call in calls.items()}
            yield KernelCase(f"slice_copy {kind}", size, bytes_each * table.elements, "memory", sides)


def _table(count: int, device: torch.device) -> slice_copy.SliceTable:
    lengths = (torch.rand(RANGES, generator=torch.Generator().manual_seed(0)) * count * 2 / RANGES).long() // 8 * 8
    lengths = lengths[lengths.cumsum(0) <= count]
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1))
    source = lengths.cumsum(0) - lengths
    target = torch.empty_like(lengths)
    target[order] = lengths[order].cumsum(0) - lengths[order]
    return slice_copy.SliceTable.make(source, target, lengths, device=device)


def _returning(value: Tensor, call: Callable[..., object], *arguments: object) -> Tensor:
    call(*arguments)
    return value


def adamw_steps(sweep: KernelSweep) -> Iterator[KernelCase]:
    """AdamW update with a 16-bit copy of the weights: 30 bytes per element."""
    settings = adamw.AdamWSettings(1e-3)
    for megabytes in (64, 256, 1024) if sweep.full else (1, 4):
        count = megabytes * 2**18
        weight, gradient = torch.randn(2, count, device=sweep.device).unbind()
        ways: dict[str, Callable[[adamw.Shard], object]] = {
            "eager": lambda shard: adamw.reference([shard], settings),
            "torch fused": partial(_fused, settings=settings),
            "hydragraph": lambda shard: adamw.update([shard], settings),
        }
        if sweep.compiled:
            ways["compiled"] = torch.compile(partial(_formula, settings=settings), dynamic=False)
        sides = {}
        for name, way in ways.items():
            zeros = torch.zeros(2, count, device=sweep.device)
            copy = torch.empty(count, dtype=torch.bfloat16, device=sweep.device)
            shard = adamw.Shard(weight.clone(), gradient, zeros[0], zeros[1], copy, 1)
            sides[name] = partial(_returning, shard.weight, way, shard)
        yield KernelCase("adamw + bf16 copy", f"{megabytes} MB", 30.0 * count, "memory", sides)


def _fused(shard: adamw.Shard, settings: adamw.AdamWSettings) -> None:
    assert shard.copy is not None
    columns = [[tensor] for tensor in shard.tensors()[:4]]
    steps = [torch.ones((), device=shard.weight.device)]
    torch.ops.aten._fused_adamw_(*columns, [], steps, **settings.torch_options)
    shard.copy.copy_(shard.weight)


def _formula(shard: adamw.Shard, settings: adamw.AdamWSettings) -> None:
    decay, first_rate, keep, second_rate, size, root, eps = settings.numbers(1)
    shard.moment.lerp_(shard.gradient, first_rate)
    shard.square.mul_(keep).add_(second_rate * shard.gradient * shard.gradient)
    shard.weight.mul_(decay).sub_(size * shard.moment / (shard.square.sqrt() / root + eps))
    assert shard.copy is not None
    shard.copy.copy_(shard.weight)


def head_losses(sweep: KernelSweep) -> Iterator[KernelCase]:
    """Forward and backward of the head and loss: three matrix products."""
    full = [(4096, 4096, 32000), (16384, 4096, 32000), (16384, 4096, 131072)]
    for tokens, hidden, vocabulary in full if sweep.full else [(128, 64, 1024), (512, 128, 4096)]:
        options = {"device": sweep.device, "dtype": sweep.dtype}
        x = torch.randn(tokens, hidden, **options).requires_grad_()
        weight = (torch.randn(vocabulary, hidden, **options) / hidden**0.5).requires_grad_()
        labels = torch.randint(vocabulary, (tokens,), device=sweep.device)
        ways: dict[str, Callable[..., Tensor]] = {"eager": _eager_loss}
        if sweep.compiled:
            ways["compiled"] = torch.compile(_eager_loss, dynamic=False)
        ways["hydragraph"] = _fused_loss
        one = torch.ones((), device=sweep.device)
        losses = {name: partial(way, x, weight, labels) for name, way in ways.items()}
        sides = {name: partial(_gradient, loss, (x, weight), one) for name, loss in losses.items()}
        work = 6.0 * tokens * hidden * vocabulary
        yield KernelCase("linear_cross_entropy", f"T {tokens}, E {hidden}, V {vocabulary}", work, "products", sides)


def _fused_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = linear_cross_entropy.head_loss(hidden, weight, labels, -100)[0]
    return loss


def _eager_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, labels, reduction="sum")


CASES: dict[str, Callable[[KernelSweep], Iterator[KernelCase]]] = {
    "varlen_attention": attention,
    "slice_copy": slice_copies,
    "adamw": adamw_steps,
    "linear_cross_entropy": head_losses,
}
