"""Packed micro-batches as tensors: what the captured graphs take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hydragraph.spec import workload

MINIMUM = 2  # tokens: graphs are traced for sizes from 2 on


def pack(
    sequences: Sequence[workload.Sequence], multiple: int = 1, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Concatenate sequences into one packed batch.

    Args:
        multiple: the token count is padded to a multiple of this, and to at least 2, by one sequence of its own whose
            tokens are no targets.

    Returns:
        input_ids, position_ids, labels [1, T] int64; cu_seqlens [N + 1] int32; max_length, 0-d int64 on the CPU.
    """
    lengths = [len(s) for s in sequences]
    tokens = sum(lengths)
    padding = max(MINIMUM - tokens, -tokens % multiple)
    padding += -(tokens + padding) % multiple
    parts = [(s.ids, s.labels) for s in sequences]
    if padding:
        lengths.append(padding)
        blank = torch.zeros(padding, dtype=torch.int64)
        parts.append((blank, torch.full_like(blank, workload.IGNORED)))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    batch = {
        "input_ids": torch.cat([ids for ids, _ in parts])[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "labels": torch.cat([labels for _, labels in parts])[None],
        "cu_seqlens": bounds.to(torch.int32),
    }
    moved = {name: value.to(device) if device else value for name, value in batch.items()}
    return moved | {"max_length": torch.tensor(max(lengths))}
