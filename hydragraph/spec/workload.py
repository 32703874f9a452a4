"""Validated sequences with aligned labels."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hydragraph.errors import Unsupported

# PyTorch's default ignore_index
IGNORED = -100
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Sequence:
    """One validated sequence.

    Attributes:
        ids, labels: token ids and labels, [L] (-100: no target).
        extra: user-defined fields, [L, ...].
        moved: shift of the labels, in positions.
        padding: padding values of user-defined fields, except 0.
    """

    ids: Tensor
    labels: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    moved: int = 0
    padding: Mapping[str, int] = field(default_factory=dict)

    @property
    def targets(self) -> int:
        return int((self.labels != IGNORED).sum())

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Field:
    """A user-defined field with a value for each token.

    Attributes:
        sizes: sizes of the dimensions after the token dimension.
        padding: value at padding positions; for targets, one that the loss ignores.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...] = ()
    padding: int = 0


def sequence_of(
    given: Tensor | Mapping[str, Tensor], index: int, causal: bool, fields: Mapping[str, Field] | None = None
) -> Sequence:
    """Check a user's sequence and align its labels.

    Args:
        given: 1-D integer ids, or a mapping with input_ids, labels or shift_labels (-100: no target), and user-defined
            fields [L, ...]. A field [L] may be one number for all tokens. position_ids that count 0, 1, 2, ... are
            ignored.
        causal: if True, shift labels by one position, except `shift_labels`, and use input_ids if labels are missing;
            if False, labels are required.

    Returns:
        The sequence as contiguous CPU tensors, with int64 ids and labels.
    """
    own = fields or {}
    brought = dict(given) if isinstance(given, Mapping) else {"input_ids": given}
    if "position_ids" in brought and "position_ids" not in own:
        _check_positions(brought.pop("position_ids"), brought.get("input_ids"), index)
    _check_names(brought, own, index)
    for name, value in brought.items():
        form = _form(value)
        if form:
            raise ValueError(f"sequence {index}: {name} is {form}; pass a plain tensor on the CPU or a GPU")
    ids_given = brought["input_ids"]
    if isinstance(ids_given, Tensor) and not ids_given.dim():
        raise ValueError(f"sequence {index}: input_ids is one number, {ids_given}; pass {_wanted('input_ids', own)}")
    size = ids_given.shape[:1] if isinstance(ids_given, Tensor) else ()
    # One number for all tokens becomes a tensor, so that all fields are checked alike.
    for name in own:
        brought[name] = _per_token(brought[name], own[name], sum(size))
    for name, value in brought.items():
        kind = own.get(name, Field(torch.int64))
        dtypes = _INTEGERS if kind.dtype is torch.int64 else (kind.dtype,)
        if not isinstance(value, Tensor) or value.dtype not in dtypes or value.shape != (*size, *kind.sizes):
            raise ValueError(f"sequence {index}: {name} is {_described(value)}; pass {_wanted(name, own)}")
        brought[name] = value.detach().to("cpu", kind.dtype).contiguous()
    if not causal and not {"labels", "shift_labels"} & set(brought):
        raise ValueError(f"sequence {index} has no labels; masked models need them (-100 where a token does not count)")
    # The label at position t is the target of token t; in causal models, token t + 1.
    ids = brought["input_ids"]
    labels = brought.get("labels", ids)
    moves = causal and "shift_labels" not in brought
    if "shift_labels" in brought:
        labels = brought["shift_labels"]
    elif moves:
        labels = torch.cat([labels[1:], labels.new_full((min(1, len(ids)),), IGNORED)])
    padding = {name: kind.padding for name, kind in own.items() if kind.padding}
    return Sequence(ids, labels, {name: brought[name] for name in own}, int(moves), padding)


def _check_positions(given: Any, ids: Any, index: int) -> None:
    plain = isinstance(given, Tensor) and not _form(given) and isinstance(ids, Tensor) and given.shape == ids.shape
    if not plain or not torch.equal(given.detach().cpu().long(), torch.arange(given.numel())):
        raise Unsupported(
            f"position_ids are {reprlib.repr(given)}, but the tokens of a sequence are at positions 0, 1, 2, ...",
            where=f"sequence {index}",
            remedy="leave position_ids out; pass sequences that are packed together as separate sequences",
        )


def _per_token(value: Any, kind: Field, length: int) -> Any:
    if isinstance(value, int | float) and (isinstance(value, int) or kind.dtype.is_floating_point):
        value = torch.tensor(value, dtype=kind.dtype)
    is_number = isinstance(value, Tensor) and not value.dim() and not kind.sizes
    return value.expand(length) if is_number else value


def _form(value: object) -> str:
    if not isinstance(value, Tensor):
        return ""
    if value.is_nested:
        return "a nested tensor"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}"
    return "a tensor on the meta device, which has no values" if value.is_meta else ""


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} ({reprlib.repr(value)})"


def _wanted(name: str, own: Mapping[str, Field]) -> str:
    if name not in own:
        return "1-D int64 tensors of equal length; a mini-batch is a list of sequences"
    number = "" if own[name].sizes else ", or one number for all tokens"
    return f"{own[name].dtype} [tokens{''.join(f', {n}' for n in own[name].sizes)}] tensors of equal length{number}"


def _check_names(brought: Mapping[str, Tensor], own: Mapping[str, Field], index: int) -> None:
    unknown = sorted(set(brought) - {"input_ids", "labels", "shift_labels", *own})
    missing = sorted({"input_ids", *own} - set(brought))
    if unknown or missing or {"labels", "shift_labels"} <= set(brought):
        what = (
            f"unknown fields {unknown}"
            if unknown
            else f"no {', '.join(missing)}"
            if missing
            else "both labels and shift_labels"
        )
        raise Unsupported(
            what,
            where=f"sequence {index}",
            remedy="pass input_ids, at most one of labels and shift_labels (labels at the positions that predict "
            f"them), and exactly the fields that forward or loss reads ({', '.join(own) or 'none'}; compile's example= "
            "names them); sequences are packed, so a padding mask is not needed",
        )
