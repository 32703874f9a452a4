"""Entropy of each token's distribution, as an operator that tensor parallelism can shard along the vocabulary.

H = log(sum_v exp(z_v - m)) - sum_v exp(z_v - m) (z_v - m) / sum_v exp(z_v - m) for logits z with maximum m. The
operator has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("hydragraph::token_entropy", mutates_args=())
def token_entropy(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Return the entropy [T] of softmax(logits [T, V]) in nats, 0 for ignored labels."""
    log_p = logits.log_softmax(-1)
    # The product is 0 where p is 0.
    entropy = -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(-1)
    return torch.where(labels == ignored, 0.0, entropy)


token_entropy.register_fake(lambda logits, labels, ignored: logits.new_empty(logits.shape[0]))
