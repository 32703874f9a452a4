"""One rank's shards of fp32 master weights and gradients, gradient clipping, and optimizer creation.

Shards do not depend on the strategy, so a new strategy does not move them (Hydraulis, section 5.2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.ir.layout import Layout
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.ir.program import Program
from hydragraph.runtime.supported_optimizers import OptimizerFactory, call_factory, check_elementwise


@dataclass(frozen=True)
class OwnedPart:
    """Part of one parameter that a rank owns, contiguous in its shard of the bucket.

    Attributes:
        intervals: ascending, disjoint, non-empty [lo, hi) in canonical order (cut dimension first).
        counted: for each interval, whether this rank is the first owner, which counts it in norms and writes it to
            files.
        at: offset in the bucket's shard.
    """

    parameter: Parameter
    bucket: str
    intervals: tuple[tuple[int, int], ...]
    counted: tuple[bool, ...]
    at: int

    @property
    def size(self) -> int:
        return sum(hi - lo for lo, hi in self.intervals)

    def of(self, shards: Mapping[str, Tensor]) -> Tensor:
        return shards[self.bucket][self.at : self.at + self.size]

    def cut(self, flat: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
        at = 0
        for lo, hi in self.intervals:
            yield (lo, hi), flat[at : at + hi - lo]
            at += hi - lo


_OF_GROUPS = ("params", "param_names")
# As in PyTorch
_CLIP_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class HomeState:
    """One rank's master weights and gradients.

    Attributes:
        weights: 1-D fp32 tensor of this rank's shard, by bucket name.
        gradients: as `weights`, for trained buckets only.
        counted: views of gradients that this rank counts in norms as first owner.
        pieces: owned part of each parameter, possibly empty, in model order.
        parameters: 1-D fp32 views into `weights`; they have a `.grad` only during updates.
    """

    rank: int
    layouts: Mapping[str, Layout]
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    counted: Sequence[Tensor]
    pieces: Mapping[str, OwnedPart]
    parameters: Mapping[str, nn.Parameter]

    @staticmethod
    def allocate(
        program: Program,
        layouts: Mapping[str, Layout],
        rank: int,
        device: torch.device | None = None,
        old: HomeState | None = None,
    ) -> HomeState:
        """Return one rank's uninitialized state.

        Args:
            old: state whose tensors are reused for buckets with the same layout object.
        """
        shared = {name for name, layout in layouts.items() if old is not None and old.layouts.get(name) is layout}
        sizes = {name: layout.local_size(rank) for name, layout in layouts.items() if name not in shared}
        weights = {n: torch.empty(s, dtype=torch.float32, device=device) for n, s in sizes.items()}
        learning = {b.name for b in program.buckets if b.learns}
        gradients = {n: torch.zeros(s, dtype=torch.float32, device=device) for n, s in sizes.items() if n in learning}
        if old is not None:
            weights |= {name: shard for name, shard in old.weights.items() if name in shared}
            gradients |= {name: shard for name, shard in old.gradients.items() if name in shared}
        owned = {b.name: _owned(b, layouts[b.name], rank) for b in program.buckets}
        by_name = {p.parameter.name: p for pieces in owned.values() for p in pieces}
        pieces = {name: by_name[name] for name in program.parameters}
        parameters = {n: nn.Parameter(piece.of(weights), piece.parameter.trainable) for n, piece in pieces.items()}
        counted = [part for name, shard in gradients.items() for part in _counted(layouts[name], rank, shard)]
        return HomeState(rank, layouts, weights, gradients, counted, pieces, parameters)

    @contextmanager
    def attached_gradients(self) -> Iterator[None]:
        for name, piece in self.pieces.items():
            self.parameters[name].grad = piece.of(self.gradients) if piece.bucket in self.gradients else None
        try:
            yield
        finally:
            for parameter in self.parameters.values():
                parameter.grad = None

    def check_parameters(self) -> None:
        starts = {name: (shard.data_ptr(), shard.element_size()) for name, shard in self.weights.items()}
        for name, piece in self.pieces.items():
            start, size = starts[piece.bucket]
            if piece.size and self.parameters[name].data_ptr() != start + piece.at * size and start:
                raise Unsupported(
                    "its `data` was replaced, so it would not be trained",
                    where=f"parameter {name!r} of the optimizer",
                    remedy="change values in place: with torch.no_grad(): parameter.copy_(values)",
                )

    def clip_gradients(self, norm: float, limit: float) -> None:
        """Scale gradients down to norm `limit`; `norm` is over all ranks."""
        factor = limit / (norm + _CLIP_EPS)
        if factor < 1:
            for gradient in self.gradients.values():
                gradient.mul_(factor)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            piece = self.pieces[name]
            canonical = piece.parameter.canonical(tensor.detach())
            for (lo, hi), owned in piece.cut(self.parameters[name]):
                owned.copy_(canonical[lo:hi])

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, 1-D fp32 tensor, possibly empty) of every trainable parameter in model order."""
        return [(name, parameter) for name, parameter in self.parameters.items() if parameter.requires_grad]


def parameters_within(bucket: Bucket, lo: int, hi: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, low, high, start) of each parameter in [lo, hi): its overlap [low, high), and its own start."""
    for parameter, start in zip(bucket.parameters, bucket.offsets().values(), strict=True):
        low = max(lo, start)
        high = min(hi, start + parameter.size)
        if low < high:
            yield parameter.name, low, high, start


@contextmanager
def zeroed(parameters: Sequence[Tensor]) -> Iterator[None]:
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def _counted(layout: Layout, rank: int, shard: Tensor) -> Iterator[Tensor]:
    mine = layout.first.of(rank)
    for at, size in zip(mine.at.tolist(), (mine.hi - mine.lo).tolist(), strict=True):
        yield shard[at : at + size]


def _owned(bucket: Bucket, layout: Layout, rank: int) -> Sequence[OwnedPart]:
    mine = layout.of(rank)
    rows = list(zip(mine.lo.tolist(), mine.hi.tolist(), mine.copy.tolist(), strict=True))
    pieces = []
    at = 0
    for parameter, start in zip(bucket.parameters, bucket.offsets().values(), strict=True):
        # parts: (lo, hi, whether counted) of each interval, relative to the parameter.
        parts = [(max(lo - start, 0), min(hi - start, parameter.size), copy == 0) for lo, hi, copy in rows]
        parts = [part for part in parts if part[0] < part[1]]
        intervals = tuple((lo, hi) for lo, hi, _ in parts)
        counted = tuple(first for *_, first in parts)
        # Home rows are ordered by element, so parameters are consecutive.
        pieces.append(OwnedPart(parameter, bucket.name, intervals, counted, at))
        at += pieces[-1].size
    return pieces


def check_factory(given: OptimizerFactory | None) -> None:
    if isinstance(given, torch.optim.Optimizer):
        name = type(given).__name__
        raise Unsupported(
            "it updates the whole model's parameters, but every rank must update only its own shards",
            where=f"optimizer {name}",
            remedy="pass a function that makes an optimizer for the parameters that it receives, such as "
            f"lambda parameters: torch.optim.{name}(parameters, lr={given.defaults.get('lr')}), and build a scheduler "
            "on executable.optimizer",
        )
    if given is not None and not callable(given):
        raise Unsupported(
            f"{given!r} is not a function",
            where="optimizer",
            remedy="pass a function, such as lambda parameters: torch.optim.AdamW(parameters, lr=0.001)",
        )


def make_optimizer(factory: OptimizerFactory, state: HomeState) -> torch.optim.Optimizer:
    """Create an optimizer with the user's factory, and check it.

    Raises:
        Unsupported: no parameter is trained, or the optimizer needs whole tensors or has tensors that it was not given.
    """
    named = state.named()
    if not state.gradients:
        raise Unsupported(
            "no parameter gets a gradient: all are frozen (requires_grad=False), or the loss uses none",
            where="optimizer",
            remedy="set requires_grad on the parameters to train before compiling, or pass optimizer=None to evaluate",
        )
    # First, because the user's function may store its last optimizer.
    whole = _whole_options(factory, state)
    try:
        optimizer = call_factory(factory, named)
    except Unsupported:
        raise
    except Exception as error:
        if isinstance(whole, Exception):
            raise
        raise Unsupported(
            "the function accepts tensors of the model's own shapes, but not 1-D shards "
            f"({type(error).__name__}: {error})",
            where="optimizer",
            remedy=_BY_SHAPE,
        ) from error
    check_elementwise(optimizer)
    optimized: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = {id(p) for p in optimized} - {id(p) for _, p in named}
    if strangers:
        raise Unsupported(
            f"the optimizer has {len(strangers)} tensors that its factory did not receive",
            where=f"optimizer {type(optimizer).__name__}",
            remedy="build the optimizer from the (name, tensor) pairs that the factory receives",
        )
    _refuse_other_groups(whole, state, optimizer)
    return optimizer


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def settings_of(optimizer: torch.optim.Optimizer | None, names: Mapping[int, str] | None = None) -> str:
    """Return an optimizer's class and hyperparameters as rank-independent text.

    Args:
        names: parameters' names by id; if given, the text includes each group's parameters.
    """
    if optimizer is None:
        return "none"
    options = [name for name in optimizer.defaults if name not in _IMPLEMENTATION]
    groups = [{name: _value(group.get(name)) for name in options} for group in optimizer.param_groups]
    members = "" if names is None else f" of {[_members(group['params'], names) for group in optimizer.param_groups]}"
    return f"{type(optimizer).__name__} {groups}{members}"


def left_out(optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]) -> list[str]:
    had = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
    return [name for identity, name in names.items() if identity not in had]


def _members(parameters: Sequence[Tensor], names: Mapping[int, str]) -> str:
    listed = "\n".join(sorted(names.get(id(p), "") for p in parameters))
    return f"{len(parameters)} parameters ({hashlib.blake2b(listed.encode(), digest_size=4).hexdigest()})"


def _value(option: object) -> object:
    return option.tolist() if isinstance(option, Tensor) else option


_BY_SHAPE = (
    "choose groups by name or by the model's own shapes: {name for name, p in model.named_parameters() if p.dim() >= 2}"
)


def _whole_options(factory: OptimizerFactory, state: HomeState) -> dict[str, dict[str, Any]] | Exception:
    # Expanded tensors have the model's shapes, but one element of memory.
    shapes = ((name, p, state.pieces[name].parameter.shape) for name, p in state.named())
    named = [(name, nn.Parameter(p.new_zeros(()).expand(shape))) for name, p, shape in shapes]
    try:
        return _options(factory(named), named)
    except Exception as error:
        return error


def _refuse_other_groups(
    of_whole: dict[str, dict[str, Any]] | Exception, state: HomeState, optimizer: torch.optim.Optimizer
) -> None:
    if isinstance(of_whole, Exception):
        raise Unsupported(
            f"its function fails if called with the model's own shapes ({type(of_whole).__name__}: {of_whole})",
            where=f"optimizer {type(optimizer).__name__}",
            remedy="pass a function that depends only on the (name, tensor) pairs and can be called repeatedly",
        ) from of_whole
    named = state.named()
    of_shards = _options(optimizer, named)
    for name, shard in named:
        if shard.numel() and of_shards.get(name) != of_whole.get(name):
            raise Unsupported(
                f"its options for {name!r} differ between the whole parameter "
                f"{list(state.pieces[name].parameter.shape)} and this rank's shard {list(shard.shape)}",
                where=f"optimizer {type(optimizer).__name__}",
                remedy=_BY_SHAPE,
            )


def _options(optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, Tensor]]) -> dict[str, dict[str, Any]]:
    names = {id(p): name for name, p in named}
    kinds = [({k: v for k, v in group.items() if k not in _OF_GROUPS}, group) for group in optimizer.param_groups]
    return {names[id(p)]: options for options, group in kinds for p in group["params"] if id(p) in names}
