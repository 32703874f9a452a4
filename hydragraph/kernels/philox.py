"""Random words that are a function of a counter and a key: Philox4x32-10 in plain PyTorch.

A counter of four 32-bit words and a key of two words yield four random words (Salmon et al., "Parallel Random Numbers:
As Easy as 1, 2, 3", 2011).

    counter   feature // 4, position of the token in its sequence, number of the sequence in the mini-batch, call
    key       64 bits from the seed and the step (`key_of`)
    result    the words of features 4 i to 4 i + 3, where i = feature // 4

`keys` [1, T, 2] int64 has two numbers per token: the key, and the sequence's number times 2**32 plus the position. A
negative second number switches dropout off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_WORD = 0xFFFFFFFF
# Bits for the number of a call
_BLOCK = 16
_TOGETHER = 1 << 16


def key_of(seed: int, step: int) -> int:
    """Return a signed 64-bit key; a seed's steps below 2**32 have different keys."""
    key = (seed ^ (step << 32)) & (2**64 - 1)
    return key - 2**64 if key >= 2**63 else key


def keys_of(key: int, lengths: Sequence[int], numbers: Sequence[int]) -> Tensor:
    """Return the keys of packed sequences, [1, T, 2] int64; sequences with number -1 have no dropout."""
    tokens = torch.cat(
        [torch.arange(n) + (i << 32) if i >= 0 else torch.full((n,), -1) for n, i in zip(lengths, numbers, strict=True)]
    )
    return torch.stack([torch.full_like(tokens, key), tokens], -1)[None]


def call_word(block: int, call: int) -> int:
    """Return the counter's fourth word, which identifies a call by block and number in the block.

    Raises:
        ValueError: a number is out of range.
    """
    if not (0 <= call < 1 << _BLOCK and 0 <= block < 1 << 32 - _BLOCK):
        raise ValueError(
            f"call {call} of block {block}: dropout supports at most {1 << 32 - _BLOCK} blocks of {1 << _BLOCK} calls"
        )
    return block << _BLOCK | call


def threshold(p: float) -> int:
    return round(p * 2**32)


def words(keys: Tensor, features: Tensor, call: int) -> Tensor:
    """Return the random words of tokens and features, [T, F] int64, below 2**32.

    Args:
        keys: [T, 2] int64.
        features: [F] int64, increasing, below 2**34.
    """
    # Four consecutive features share an evaluation. columns: each feature's word in all
    # evaluations' result, [T, 4 * groups].
    groups, column = torch.unique_consecutive(features >> 2, return_inverse=True)
    columns = column * 4 + (features & 3)
    result = torch.empty(len(keys), len(features), dtype=torch.int64, device=keys.device)
    rows = max(1, _TOGETHER // max(1, len(groups)))
    for first in range(0, len(keys), rows):
        drawn = _evaluate(keys[first : first + rows], groups, call)
        torch.index_select(drawn, 1, columns, out=result[first : first + rows])
    return result


def _evaluate(keys: Tensor, groups: Tensor, call: int) -> Tensor:
    # int64 products wrap like unsigned ones.
    k0, k1 = (keys[:, :1] & _WORD), (keys[:, :1] >> 32 & _WORD)
    position, sequence = (keys[:, 1:] & _WORD), (keys[:, 1:] >> 32 & _WORD)
    c0, c1, c2 = groups[None, :], position, sequence
    c3: Any = call
    for _ in range(ROUNDS):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32 & _WORD) ^ c1 ^ k0, b & _WORD, (a >> 32 & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return torch.stack([c0, c1, c2, c3], -1).flatten(1)
