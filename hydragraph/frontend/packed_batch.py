"""Packed micro-batches: the inputs of captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hydragraph.ir.placeholders import DROPOUT_KEYS
from hydragraph.kernels.philox import keys_of
from hydragraph.spec import workload


@dataclass(frozen=True)
class DropoutNumbers:
    """Numbers that determine sequences' dropout masks.

    Attributes:
        key: key of the step (`kernels.philox.key_of`).
        numbers: index of each sequence in its mini-batch; -1: no dropout.
    """

    key: int
    numbers: Sequence[int]

    def of(self, chosen: Sequence[int]) -> DropoutNumbers:
        return DropoutNumbers(self.key, [self.numbers[i] for i in chosen])


# Minimum tokens: graphs are traced for sizes of at least 2
MINIMUM = 2


def padding(lengths: Sequence[int], multiple: int = 1, several: bool = False) -> int:
    # One sequence of 5 tokens with `several` needs 6; with multiple 4, it gets 8 - 5 = 3 padding
    # tokens.
    tokens = sum(lengths)
    least = tokens + 1 if several and len(lengths) == 1 else tokens
    return -(-max(least, MINIMUM) // multiple) * multiple - tokens


def pack(
    sequences: Sequence[workload.Sequence],
    multiple: int = 1,
    device: torch.device | None = None,
    several: bool = False,
    unplaced: int | None = None,
    draws: DropoutNumbers | None = None,
) -> dict[str, Tensor]:
    """Concatenate sequences into one packed batch.

    Args:
        multiple: a padding sequence without targets fills up the token count to a multiple of this, at least 2.
        several: whether to add a padding sequence to a single sequence.
        unplaced: token id that gets position -1 and does not advance positions.

    Returns:
        input_ids, position_ids, labels [1, T] int64; cu_seqlens [N + 1] int32; max_length, 0-d int64 on the CPU; custom
        fields [1, T, ...], padded with `Sequence.padding` or 0; and, with `draws`, dropout_keys [1, T, 2] int64.
    """
    lengths = [len(s) for s in sequences]
    blanks = padding(lengths, multiple, several)
    parts = [(s.ids, s.labels) for s in sequences]
    if blanks:
        lengths.append(blanks)
        blank = torch.zeros(blanks, dtype=torch.int64)
        parts.append((blank, torch.full_like(blank, workload.IGNORED)))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    batch = {
        "input_ids": torch.cat([ids for ids, _ in parts])[None],
        "position_ids": torch.cat([_positions(ids, unplaced) for ids, _ in parts])[None],
        "labels": torch.cat([labels for _, labels in parts])[None],
        "cu_seqlens": bounds.to(torch.int32),
    }
    for name, value in sequences[0].extra.items() if sequences else ():
        blank = value.new_full((blanks, *value.shape[1:]), sequences[0].padding.get(name, 0))
        batch[name] = torch.cat([*(s.extra[name] for s in sequences), blank])[None]
    if draws is not None:
        batch[DROPOUT_KEYS] = keys_of(draws.key, lengths, [*draws.numbers, *[-1] * bool(blanks)])
    # Copies from pinned memory are asynchronous
    if device is not None:
        pinned = {n: v.pin_memory() if device.type == "cuda" else v for n, v in batch.items()}
        batch = {name: value.to(device, non_blocking=True) for name, value in pinned.items()}
    return batch | {"max_length": torch.tensor(max(lengths))}


def _positions(ids: Tensor, unplaced: int | None) -> Tensor:
    if unplaced is None:
        return torch.arange(len(ids))
    # ids 1 0 5, padding id 0: placed 1 0 1, positions 0 -1 1.
    placed = (ids != unplaced).long()
    return placed.cumsum(0) * placed - 1
