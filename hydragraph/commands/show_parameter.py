"""`hydragraph show DIR --parameter NAME`: print a parameter's owners and users."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from hydragraph.commands.show_folder import ShownFolder, ShownStrategy, ranks_text, shortened, unknown
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.passes.place import PlacedStage, place
from hydragraph.report.number_text import bytes_text


def parameter_lines(
    folder: ShownFolder, strategies: Sequence[ShownStrategy], name: str, rank: int | None
) -> Iterator[str]:
    bucket, parameter = _find(folder, name)
    yield f"{parameter.name} {list(parameter.shape)}: {parameter.size:,} elements of bucket {bucket.name}"
    yield f"  {_cut(parameter)}{'' if bucket.learns else '; frozen'}"
    yield f"home ({folder.summary.home}; fp32 weights and optimizer state; elements ordered by the sharded dimension)"
    yield from shortened(list(_owners(folder, bucket, parameter, rank)), more=": --rank N shows one")
    for strategy in strategies:
        yield f"under {strategy.name}"
        yield from shortened(list(_users(strategy, bucket, parameter, rank)), more=": --rank N shows one")


def _find(folder: ShownFolder, name: str) -> tuple[Bucket, Parameter]:
    by_name = {p.name: (bucket, p) for bucket in folder.program.buckets for p in bucket.parameters}
    if name not in by_name:
        raise ValueError(unknown("parameter", name, list(by_name), "the model has"))
    return by_name[name]


def _cut(parameter: Parameter) -> str:
    rule = parameter.rule
    if rule is None:
        return "replicated on every rank of a stage"
    units = " + ".join(map(str, rule.segments))
    what = "heads" if rule.heads else "units"
    return f"sharded along dimension {rule.dim}: {units} {what} of {rule.unit}"


def _owners(folder: ShownFolder, bucket: Bucket, parameter: Parameter, rank: int | None) -> Iterator[str]:
    home = folder.homes.of(bucket)
    start = bucket.offsets()[parameter.name]
    # owned: (rank, first, after, copy), in elements of the parameter. A home divides whole buckets,
    # where the parameter is the interval [start, start + size).
    owned: list[tuple[int, int, int, int]] = []
    rows = zip(home.rank.tolist(), home.lo.tolist(), home.hi.tolist(), home.copy.tolist(), strict=True)
    for owner, lo, hi, copy in rows:
        low = max(lo, start)
        high = min(hi, start + parameter.size)
        if low < high and rank in (None, owner):
            owned.append((owner, low - start, high - start, copy))
    if not owned:
        yield "  this rank owns no part of the parameter" if rank is not None else "  no rank owns the parameter"
    for (size, copy), group in groupby(owned, key=lambda row: (row[2] - row[1], row[3])):
        members = list(group)
        ranks = [row[0] for row in members]
        second = " (second copy)" if copy else ""
        size_text = f"{size:,} each, " if len(members) > 1 else ""
        between = f"[{min(row[1] for row in members):,}, {max(row[2] for row in members):,})"
        yield f"  {ranks_text(ranks)}: {size_text}elements {between}, {bytes_text(4 * size)} of weights{second}"


def _users(each: ShownStrategy, bucket: Bucket, parameter: Parameter, rank: int | None) -> Iterator[str]:
    program = each.whole.program
    placement = place(program.outline, each.strategy, [1] * len(each.strategy.pipelines))
    holders = dict(placement.holders).get(bucket.name, ())
    stages = [placement.stage_of[ranks[0]] for ranks in holders if rank is None or rank in ranks]
    if not stages:
        yield "  this rank does not use the parameter" if rank is not None else "  no rank uses the parameter"
    for stage in stages:
        yield from _stage(stage, parameter, program.dtype.itemsize, rank)


def _stage(stage: PlacedStage, parameter: Parameter, itemsize: int, rank: int | None) -> Iterator[str]:
    where = " + ".join(f"pipeline {role.pipeline}, stage {role.stage}" for role in stage.roles)
    degree = len(stage.ranks)
    shapes = [parameter.local_shape(degree, index) for index in range(degree)]
    if rank is not None:
        index = stage.ranks.index(rank)
        pieces = " and ".join(f"[{lo:,}, {hi:,})" for lo, hi in parameter.intervals(degree, index))
        size = bytes_text(math.prod(shapes[index]) * itemsize)
        yield f"  {where}: rank {rank} has part {index} of {degree}: {list(shapes[index])}, elements {pieces}, {size}"
        return
    members = zip(stage.ranks, shapes, strict=True)
    parts = [(list(shape), [r for r, _ in group]) for shape, group in groupby(members, key=lambda row: row[1])]
    shapes_text = "; ".join(f"{ranks_text(ranks)} {shape}{' each' * (len(ranks) > 1)}" for shape, ranks in parts)
    yield f"  {where}: {shapes_text}"
