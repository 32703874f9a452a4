"""Export of weights and buffers by the model's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hydragraph.checkpoint.weights.pretrained_directory import published_keys, published_names
from hydragraph.engine.compiled_model import CompiledModel
from hydragraph.engine.session import Session


def state_dict(compiled: CompiledModel, session: Session, keys: frozenset[str] | None = None) -> dict[str, Tensor]:
    """Return the model's state dict, or some keys, as full CPU tensors on rank 0 ({} elsewhere)."""
    sources = {key: source for key, source in compiled.tensors.items() if keys is None or key in keys}
    parameters = session.gather(session.home.weights, frozenset(sources.values()))
    state: dict[str, Tensor] = {}
    if session.world.rank == 0:
        tensors = {name: buffer.detach().cpu().clone() for name, buffer in session.buffers.items()} | parameters
        state = {key: tensors[source] for key, source in sources.items()}
    compiled.state.hand_out(session.groups.gather(compiled.state.digests(state))[0])
    return state


def persistent_buffers(compiled: CompiledModel, session: Session) -> dict[str, Tensor]:
    stored = set(compiled.tensors.values())
    return {name: b.detach().cpu().clone() for name, b in session.buffers.items() if name in stored}


class PublishedWeights:
    """Weights by bucket, with the names and shapes of `save_pretrained`.

    Raises:
        Unsupported: a peft model has several adapters.
    """

    def __init__(self, compiled: CompiledModel, session: Session, dtype: torch.dtype) -> None:
        self._shell = compiled.shell
        self._session = session
        self._dtype = dtype
        keys = None if self._shell is None else published_keys(self._shell)
        self._exact = frozenset[str]() if self._shell is None or dtype == torch.float32 else self._shell.fp32_keys
        # a tied weight is published once, under its first key
        self._first: dict[str, str] = {}
        for key, source in compiled.tensors.items():
            if keys is None or key in keys:
                self._first.setdefault(source, key)

    def buckets(self, to: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """Yield tensors by bucket on the ranks `to` ({} elsewhere); all ranks must exhaust the iterator."""
        return self._session.gather_by_bucket(self._session.home.weights, frozenset(self._first), to, self._dtype_of)

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {name: b.detach().clone() for name, b in self._session.buffers.items() if name in self._first}

    def published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state = {self._first[n]: t.to(self._dtype_of([n])) if t.is_floating_point() else t for n, t in tensors.items()}
        return published_names(self._shell, state)

    def _dtype_of(self, names: Iterable[str]) -> torch.dtype:
        return torch.float32 if any(self._first[name] in self._exact for name in names) else self._dtype
