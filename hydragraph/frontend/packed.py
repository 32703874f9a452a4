"""What a captured model is called with: one packed batch of T tokens, and the loss that is taken of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hydragraph.frontend.private import TensorSpec

IGNORED = -100  # PyTorch's default ignore_index: a token with this label is no target

# name -> shape (T tokens, N sequences) and dtype of every field of a packed batch
FIELDS = {
    "input_ids": TensorSpec((1, "T"), torch.int64),
    "position_ids": TensorSpec((1, "T"), torch.int64),
    "labels": TensorSpec((1, "T"), torch.int64),
    "cu_seqlens": TensorSpec(("N+1",), torch.int32),
    "max_length": TensorSpec((), torch.int64),
}

Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def token_cross_entropy(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Sum the cross-entropy of `outputs.logits` [1, T, V] over all tokens whose label [1, T] is not -100, in fp32."""
    logits = outputs.logits.float()
    return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


def shift(ids: Tensor) -> Tensor:
    """Return next-token labels of one sequence, [L]: the ids moved by one, -100 at the end."""
    return torch.cat([ids[1:], ids.new_full((1,), IGNORED)])
