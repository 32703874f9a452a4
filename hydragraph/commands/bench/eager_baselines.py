"""Hugging Face models that `bench step` compares with hydragraph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.frontend import huggingface
from hydragraph.frontend.packed_batch import pack
from hydragraph.frontend.packed_inputs import shift, token_cross_entropy
from hydragraph.kernels.varlen_attention import attention_backend
from hydragraph.planner.quick_plan import MICRO_BATCH_TOKENS, assign
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.workload import IGNORED, sequence_of

ATTENTION = "hydragraph_bench"

Batch = dict[str, Tensor]
Loss = Callable[[Batch], Tensor]
"""Function that takes a micro-batch and returns its summed loss."""


def packed_batches(sequences: Sequence[Tensor], strategy: Strategy, device: torch.device) -> list[Batch]:
    checked = [sequence_of(s, i, causal=True) for i, s in enumerate(sequences)]
    (micro_batches,) = assign(strategy, [len(s) for s in sequences]).micro_batches
    return [pack([checked[i] for i in m], device=device) for m in micro_batches]


def padded_batches(sequences: Sequence[Tensor], device: torch.device, most: int = MICRO_BATCH_TOKENS) -> list[Batch]:
    """Pad sequences and group them into micro-batches of at most `most` tokens; longer ones stay single."""
    groups: list[list[Tensor]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        # Sorted by length: a group's first sequence determines its width.
        if not groups or len(groups[-1][0]) * (len(groups[-1]) + 1) > most:
            groups.append([])
        groups[-1].append(sequence)
    return [_padded(group, device) for group in groups]


def _padded(group: Sequence[Tensor], device: torch.device) -> Batch:
    rows = len(group)
    longest = max(map(len, group))
    batch = {
        "input_ids": torch.zeros(rows, longest, dtype=torch.int64),
        "attention_mask": torch.zeros(rows, longest, dtype=torch.int64),
        "labels": torch.full((rows, longest), IGNORED),
    }
    for row, sequence in enumerate(group):
        batch["input_ids"][row, : len(sequence)] = sequence
        batch["attention_mask"][row, : len(sequence)] = 1
        batch["labels"][row, : len(sequence)] = shift(sequence)
    return {name: value.to(device) for name, value in batch.items()}


@dataclass(frozen=True, eq=False)
class Baseline:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Callable[[Sequence[Tensor]], list[Batch]]
    loss: Loss
    context: Callable[[], AbstractContextManager[None]]

    def step(self, sequences: Sequence[Tensor]) -> float:
        loss = self.backward(sequences)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def backward(self, sequences: Sequence[Tensor]) -> float:
        targets = sum(len(s) - 1 for s in sequences)
        losses = []
        for batch in self.batches(sequences):
            with self.context():
                loss = self.loss(batch) / targets
                loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    def checked(self, sequences: Sequence[Tensor]) -> tuple[float, float]:
        """Return loss and gradient norm, without an update."""
        loss = self.backward(sequences)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.stack([g.double().norm() for g in gradients]).norm())
        self.optimizer.zero_grad()
        return loss, norm


def baselines(
    first: nn.Module,
    build: Callable[[], nn.Module],
    strategy: Strategy,
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool,
) -> dict[str, Baseline]:
    """Return the baselines by name, which share one optimizer and `first`'s fp32 weights.

    Args:
        build: builds another model for these weights.
        dtype: dtype of the computation; bf16 means autocast.
    """
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-4, fused=True)

    def autocast() -> AbstractContextManager[None]:
        return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)

    def packed(sequences: Sequence[Tensor]) -> list[Batch]:
        return packed_batches(sequences, strategy, device)

    @contextmanager
    def forced() -> Iterator[None]:
        with autocast(), attention_backend("torch" if device.type == "cuda" else "loop"):
            yield

    def with_packed_attention() -> nn.Module:
        model = build()
        # Share the weights
        model.load_state_dict(first.state_dict(keep_vars=True), assign=True)
        _use_attention(model)
        return model

    sides = {
        "eager, padded": Baseline(first, optimizer, lambda s: padded_batches(s, device), _padded_loss(first), autocast)
    }
    model = with_packed_attention()
    sides["eager, packed"] = Baseline(model, optimizer, packed, _packed_loss(model), forced)
    if compiled:
        model = with_packed_attention()
        sides["compiled, packed"] = Baseline(model, optimizer, packed, _compiled_loss(model), forced)
    return sides


def _use_attention(model: Any) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Cast queries and keys, which Llama's rotary embeddings return in fp32, to `value`'s dtype, and attend."""
    return huggingface.attention(module, query.to(value.dtype), key.to(value.dtype), value, mask, **options)


def _padded_loss(model: nn.Module) -> Loss:
    inputs = ("input_ids", "attention_mask")
    return lambda batch: token_cross_entropy(model(**{n: batch[n] for n in inputs}, use_cache=False), batch)


def _packed_loss(model: nn.Module) -> Loss:
    call = huggingface.caller(model)
    return lambda batch: token_cross_entropy(call(model, batch), batch)


def _compiled_loss(model: nn.Module) -> Loss:
    """Compile the loss and layers separately, because one graph of 16 layers would take two minutes."""
    call = huggingface.caller(model)
    for layers in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        for layer in layers:
            layer.compile(dynamic=True)
    measure: Any = torch.compile(token_cross_entropy, dynamic=True)
    return lambda batch: measure(call(model, batch), batch)
