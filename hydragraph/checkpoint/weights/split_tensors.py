"""Model tensors that are split or merged in files, as on the Hugging Face Hub.

gate_up_proj [8 experts, 2 x 14336, 4096]  =  cat(stack(w1 of each expert), stack(w3 of each expert), dim 1)
the piece experts.5.w3 [14336, 4096] begins at (5, 14336, 0) and has no dimension 0

k_proj [768, 768]  =  the second of three chunks of qkv_proj [2304, 768]
the piece qkv_proj begins at (-768, 0) in k_proj
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydragraph.checkpoint.weights.safetensors_files import StoredTensor


@dataclass(frozen=True)
class StoredPiece:
    """A stored tensor that is part of a model tensor.

    Attributes:
        at: the piece's start in the model tensor; negative if the model tensor starts inside the piece.
        lacks: dimensions of the model tensor that `stored` does not have.
    """

    stored: StoredTensor
    at: tuple[int, ...]
    lacks: frozenset[int] = frozenset()

    @property
    def sizes(self) -> tuple[int, ...]:
        own = iter(self.stored.shape)
        return tuple(1 if d in self.lacks else next(own) for d in range(len(self.at)))

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> StoredOverlap | None:
        # spans: the overlap in each dimension, in the model tensor's
        #   coordinates; `kept` is in the piece's
        # piece qkv at (-2, 0) of size (6, 2), box (0, 0) of size (2, 2): spans (0, 2), (0, 2), kept
        #   (2, 2), (0, 2), each as (first, size)
        spans = [
            (max(a, at), min(a + n, at + own))
            for a, n, at, own in zip(offsets, sizes, self.at, self.sizes, strict=True)
        ]
        if any(lo >= hi for lo, hi in spans):
            return None
        kept = [(lo - at, hi - lo) for (lo, hi), at in zip(spans, self.at, strict=True)]
        kept = [span for dim, span in enumerate(kept) if dim not in self.lacks]
        return StoredOverlap(
            ([first for first, _ in kept], [size for _, size in kept]),
            tuple(slice(lo - a, hi - a) for (lo, hi), a in zip(spans, offsets, strict=True)),
            [hi - lo for lo, hi in spans],
        )


@dataclass(frozen=True)
class StoredOverlap:
    """Overlap of a piece with a box of the model tensor; `source` has its offsets and sizes in the stored tensor."""

    source: tuple[list[int], list[int]]
    target: tuple[slice, ...]
    sizes: list[int]


@dataclass(frozen=True)
class JoinedTensor:
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @staticmethod
    def of(stored: StoredTensor) -> JoinedTensor:
        return JoinedTensor(stored.shape, (StoredPiece(stored, (0,) * len(stored.shape)),))

    @property
    def key(self) -> str:
        return self.pieces[0].stored.key

    @property
    def file(self) -> Path:
        return self.pieces[0].stored.file

    def __iter__(self) -> Iterator[StoredTensor]:
        return (piece.stored for piece in self.pieces)


def assemble(converter: Any, stored: Mapping[str, Sequence[StoredTensor]], name: str) -> dict[str, JoinedTensor] | None:
    """Return the model tensors that a converter builds, or None if it computes values.

    Args:
        stored: the converter's source pattern -> stored tensors, sorted by name.
    """
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist

    targets = list(converter.target_patterns)
    # groups: tensors by source pattern; operations map them until one
    #   tensor per target is left
    groups = [[JoinedTensor.of(s) for s in stored[p]] for p in converter.source_patterns if stored.get(p)]
    for operation in converter.operations:
        if type(operation) is MergeModulelist:
            groups = [[_stacked(group, operation.dim)] for group in groups]
        elif type(operation) is Concatenate:
            groups = [[_concatenated([whole for group in groups for whole in group], operation.dim)]]
        elif type(operation) is Chunk and not operation.num_shards_attribute and [len(g) for g in groups] == [1]:
            groups = [[chunk] for chunk in _chunks(groups[0][0], operation.dim, len(targets))]
        else:
            return None
    if len(groups) != len(targets) or any(len(group) != 1 for group in groups):
        return None
    if len(targets) == 1:
        return {name: groups[0][0]}
    before, separator, after = name.partition(targets[0])
    renamed = {before + target + after: whole for target, (whole,) in zip(targets, groups, strict=True)}
    return renamed if separator else None


def _chunks(whole: JoinedTensor, dim: int, count: int) -> list[JoinedTensor]:
    dim %= len(whole.shape)
    size = whole.shape[dim] // count
    shape = (*whole.shape[:dim], size, *whole.shape[dim + 1 :])
    if size * count != whole.shape[dim]:
        return []
    # chunks of qkv [6, 2]: the piece begins at rows 0, -2 and -4 of q, k and v, each [2, 2]
    return [
        JoinedTensor(
            shape, tuple(replace(p, at=(*p.at[:dim], p.at[dim] - i * size, *p.at[dim + 1 :])) for p in whole.pieces)
        )
        for i in range(count)
    ]


def _stacked(wholes: Sequence[JoinedTensor], dim: int) -> JoinedTensor:
    dim %= len(wholes[0].shape) + 1
    shape = (*wholes[0].shape[:dim], len(wholes), *wholes[0].shape[dim:])
    return JoinedTensor(
        shape,
        # A new dimension moves the earlier missing dimensions up.
        tuple(
            replace(p, at=(*p.at[:dim], index, *p.at[dim:]), lacks=frozenset({dim, *(d + (d >= dim) for d in p.lacks)}))
            for index, whole in enumerate(wholes)
            for p in whole.pieces
        ),
    )


def _concatenated(wholes: Sequence[JoinedTensor], dim: int) -> JoinedTensor:
    first = wholes[0]
    start = 0
    pieces = list[StoredPiece]()
    dim %= len(first.shape)
    for whole in wholes:
        pieces += [replace(p, at=(*p.at[:dim], p.at[dim] + start, *p.at[dim + 1 :])) for p in whole.pieces]
        start += whole.shape[dim]
    return JoinedTensor((*first.shape[:dim], start, *first.shape[dim + 1 :]), tuple(pieces))
