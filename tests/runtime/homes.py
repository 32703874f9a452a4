"""Home states with an optimizer that tests of checkpoints train, save and load: tied, fused, 3-D, scalar, tiny."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, nn

from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import World
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.parameter import Bucket, Parameter, ShardRule
from hydragraph.ir.program import Program
from hydragraph.runtime.home_state import HomeState, make_optimizer
from hydragraph.spec.home import EQUAL, Home

ALONE = World(0, 1, 0, torch.device("cpu"), "gloo")
Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Model:
    """As much of a Program as a home state needs."""

    buckets: tuple[Bucket, ...]

    @property
    def parameters(self) -> dict[str, Parameter]:
        return {p.name: p for bucket in self.buckets for p in bucket.parameters}


TIED = Parameter("embed.weight", (11, 6), ("head.weight",), ShardRule(0, (11,)))
FUSED = Parameter("layer.0.qkv", (5, 18), (), ShardRule(1, (2, 2, 2), unit=3, heads=True))  # transposed, as in GPT-2
CUBE = Parameter("layer.0.cube", (3, 4, 5), (), ShardRule(1, (4,)))
NORM, SCALE, TINY = Parameter("layer.0.norm", (7,)), Parameter("layer.0.scale", ()), Parameter("tiny", (2,))
MODEL = Model(
    (
        Bucket("embed.weight", (TIED,), ("embed", "head")),
        Bucket("layer.0", (FUSED, NORM, CUBE, SCALE), ("layer.0",)),
        Bucket("tiny", (TINY,), ("head",)),  # shards are multiples of 8 elements: one rank owns it all
    )
)


def adamw(named: Named) -> torch.optim.Optimizer:
    decayed, plain = [p for p in named if "norm" not in p[0]], [p for p in named if "norm" in p[0]]
    return torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=0.1, amsgrad=True)


def unstepped(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adam(named)


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([tensor for _, tensor in named], lr=0.1, momentum=0.9)


KINDS = {f.__name__: f for f in (adamw, unstepped, sgd)}


def tensors(seed: int, model: Model = MODEL) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.parameters.items()}


def make(
    world: World,
    factory: Callable[[Named], torch.optim.Optimizer] = adamw,
    model: Model = MODEL,
    seed: int = 0,
    owners: Home = EQUAL,
) -> tuple[HomeState, torch.optim.Optimizer]:
    layouts = HomeLayouts(owners, world.ranks).by_name(model.buckets)
    home = HomeState.allocate(cast(Program, model), layouts, world.rank)
    home.fill(tensors(seed, model))
    return home, make_optimizer(factory, home)


def step(home: HomeState, optimizer: torch.optim.Optimizer, seed: int) -> None:
    gradients = tensors(seed)
    for name, piece in home.pieces.items():
        whole = piece.parameter.canonical(gradients[name])
        # A rank without elements has no gradient either, so the optimizer has no state there.
        owned = [whole[lo:hi] for lo, hi in piece.intervals]
        home.parameters[name].grad = torch.cat(owned) if owned else None
    optimizer.step()


def trained(world: World, kind: str, owners: Home = EQUAL) -> tuple[HomeState, torch.optim.Optimizer]:
    home, optimizer = make(world, KINDS[kind], owners=owners)
    for seed in () if kind == "unstepped" else (1, 2):
        step(home, optimizer, seed)
    optimizer.param_groups[0]["lr"] = 0.05  # as a scheduler would
    return home, optimizer


@dataclass(frozen=True)
class Snapshot:
    """What one rank holds: key -> (intervals in canonical order, their elements), and what is not sharded."""

    shards: dict[str, tuple[tuple[tuple[int, int], ...], Tensor]]
    scalars: dict[str, Any]
    groups: list[dict[str, Any]]

    @staticmethod
    def of(home: HomeState, optimizer: torch.optim.Optimizer) -> Snapshot:
        shards, scalars = {}, {}
        for name, parameter in home.parameters.items():
            shards[name] = (home.pieces[name].intervals, parameter.detach().clone())
            for state, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    shards[f"optimizer.{state}.{name}"] = (home.pieces[name].intervals, value.clone())
                else:
                    scalars[f"{state}.{name}"] = float(value)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return Snapshot(shards, scalars, groups)


def whole(snapshots: list[Snapshot]) -> dict[str, Tensor]:
    """Put the ranks' shards together, as natural tensors; owners of the same element must have the same bits."""
    found = {}
    for key in sorted({key for s in snapshots for key in s.shards}):
        name = next(name for name in MODEL.parameters if key == name or key.endswith(f".{name}"))
        canonical = torch.full((MODEL.parameters[name].size,), torch.nan)
        for intervals, flat in (s.shards[key] for s in snapshots if key in s.shards):
            parts = flat.split([hi - lo for lo, hi in intervals]) if intervals else ()
            for (lo, hi), part in zip(intervals, parts, strict=True):
                there = canonical[lo:hi]
                assert ((there == part) | there.isnan()).all(), f"{key}: its owners differ"
                there.copy_(part)
        assert not canonical.isnan().any(), f"{key}: elements without an owner"
        found[key] = MODEL.parameters[name].natural(canonical)
    return found


def groups_of(world: World) -> Groups:
    return Groups(world, timedelta(seconds=60))


def outcome(work: Callable[[], object]) -> tuple[str, str]:
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
