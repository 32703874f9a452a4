"""Weights as boxes (rectangular parts of tensors) for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hydragraph.ir.boxes import boxes
from hydragraph.runtime.home_state import HomeState, OwnedPart


@dataclass(frozen=True, eq=False)
class OwnedBoxes:
    """This rank's boxes of one tensor: views of elements in natural order, by the boxes' offsets."""

    shape: torch.Size
    dtype: torch.dtype
    boxes: Mapping[torch.Size, Tensor]

    def copied(self) -> OwnedBoxes:
        copies = {offsets: box.to("cpu", copy=True).contiguous() for offsets, box in self.boxes.items()}
        return OwnedBoxes(self.shape, self.dtype, copies)


def sharded(piece: OwnedPart, flat: Tensor, once: bool = False) -> OwnedBoxes:
    """View a parameter's 1-D part in canonical order as boxes in its shape.

    Args:
        once: skip elements that another owner writes.
    """
    shape = piece.parameter.shape
    rule = piece.parameter.rule
    dim = rule.dim if rule is not None else 0
    # Boxes are found in canonical order (sharded dimension first), then moved to the parameter's
    # dimensions.
    canonical = (*shape[dim : dim + 1], *shape[:dim], *shape[dim + 1 :])
    views = {}
    for ((lo, hi), part), counted in zip(piece.cut(flat.detach()), piece.counted, strict=True):
        if once and not counted:
            continue
        for box in boxes(lo, hi, canonical):
            view = part[box.at : box.at + box.size].view(box.sizes)
            offsets = box.moved(dim).offsets if shape else ()
            views[torch.Size(offsets)] = view.movedim(0, dim) if shape else view
    return OwnedBoxes(torch.Size(shape), flat.dtype, views)


def sharded_weights(home: HomeState, once: bool = False) -> dict[str, OwnedBoxes]:
    """Return this rank's part of all master weights, by name; `once` is as for `sharded`."""
    return {name: sharded(piece, home.parameters[name], once) for name, piece in home.pieces.items()}
