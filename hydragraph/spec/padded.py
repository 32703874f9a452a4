"""Conversion of a tokenizer's padded batches into sequences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.spec.workload import IGNORED

MASK = "attention_mask"
_TYPES = "token_type_ids"
_LABELS = ("labels", "shift_labels")
_TOKENS = ("input_ids", MASK, _TYPES, *_LABELS)

Given = Tensor | Sequence[int] | Mapping[str, Any]
Batches = Iterable[Given] | Mapping[str, Any]


def sequences_in(given: Batches, own: Collection[str] = ()) -> list[Tensor | dict[str, Tensor]]:
    """List the sequences of a user's mini-batch.

    Args:
        given: sequences, each a tensor [L], NumPy array or list of token ids, or a mapping of tensors [L, ...]. A
            mapping may also hold a batch [B, L, ...] or lists of token ids, with an `attention_mask` that marks padding
            on the right.
        own: names of user-defined fields; an `attention_mask` or `token_type_ids` among them is not interpreted.

    Raises:
        Unsupported: an `attention_mask` marks padding elsewhere than on the right.
    """
    if not isinstance(given, Iterable):
        raise ValueError(f"the mini-batch is {given!r}; pass a list of sequences, each a tensor or list of token ids")
    sequences: list[Tensor | dict[str, Tensor]] = []
    batches: Iterable[Any] = [given] if isinstance(given, Mapping) else given
    for batch in batches:
        if isinstance(batch, Mapping):
            fields = {n: _without_numpy(v) for n, v in batch.items()}
            rows = [{n: _tensor(n, v) for n, v in row.items()} for row in _rows(fields, len(sequences))]
            sequences += [_unpadded(row, len(sequences) + i, own) for i, row in enumerate(rows)]
        else:
            sequences.append(_tensor("input_ids", _without_numpy(batch)))
    return sequences


def _rows(fields: dict[str, Any], first: int) -> Iterator[dict[str, Any]]:
    ids = fields.get("input_ids")
    lists = isinstance(ids, list) and bool(ids) and all(isinstance(row, (list, Tensor)) for row in ids)
    # A mapping without a batch dimension is one sequence.
    if not lists and not (isinstance(ids, Tensor) and ids.dim() == 2):
        yield fields
        return
    assert ids is not None
    for name, value in fields.items():
        rows = len(value) if isinstance(value, list) or (isinstance(value, Tensor) and value.dim()) else -1
        if rows != len(ids):
            raise ValueError(
                f"sequence {first}: {name} has {max(rows, 0)} rows, but input_ids has {len(ids)}; pass one row per "
                "sequence"
            )
    for i in range(len(ids)):
        yield {name: value[i] for name, value in fields.items()}


def _without_numpy(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, np.ndarray) for part in value):
        return [_without_numpy(part) for part in value]
    return torch.tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value


def _tensor(name: str, value: Any) -> Any:
    whole = name in _TOKENS and isinstance(value, (list, tuple)) and all(type(n) is int for n in value)
    try:
        return torch.tensor(value, dtype=torch.int64) if whole else value
    except (ValueError, OverflowError, RuntimeError):
        raise ValueError(
            f"{name} holds {max(value, key=abs)}, which does not fit into 64 bits: correct the data"
        ) from None


def _unpadded(row: dict[str, Any], index: int, own: Collection[str]) -> dict[str, Any]:
    row = dict(row)
    types = row.get(_TYPES)
    if _TYPES not in own and isinstance(types, Tensor) and not types.any():
        # Models use zeros if this is missing
        del row[_TYPES]
    mask = row.pop(MASK, None) if MASK not in own else None
    if mask is None:
        return row
    ids = row.get("input_ids")
    if not isinstance(mask, Tensor) or not isinstance(ids, Tensor) or mask.dim() != 1 or mask.shape != ids.shape:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise _refused(f"an attention_mask of {shape}", index)
    # Right padding: all ones precede all zeros.
    length = int((mask != 0).sum())
    if not torch.equal(mask, (torch.arange(len(mask), device=mask.device) < length).to(mask.dtype)):
        raise _refused("an attention_mask other than ones followed by zeros", index)
    for name in _LABELS:
        labels = row.get(name)
        if isinstance(labels, Tensor) and labels.dim() and bool((labels[length:] != IGNORED).any()):
            at = length + int((labels[length:] != IGNORED).nonzero()[0])
            raise ValueError(
                f"sequence {index}: {name} is {int(labels[at])} at position {at}, which attention_mask marks as "
                f"padding; set it to {IGNORED} there"
            )
    return {n: v[:length] if isinstance(v, Tensor) and v.dim() else v for n, v in row.items()}


def _refused(what: str, index: int) -> Unsupported:
    return Unsupported(
        what,
        where=f"sequence {index}",
        remedy="pad on the right only (a mask [L] of ones, then zeros), or pass each sequence without padding",
    )
