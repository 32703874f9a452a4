"""Grouping of parameters into buckets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.ir.program import Block


def buckets_of(
    blocks: Sequence[Block], parameters: Mapping[str, Parameter], learns: Collection[str]
) -> tuple[Bucket, ...]:
    """Return one bucket for each tied parameter, and one each for a block's other trained and frozen parameters.

    Args:
        learns: names of the trained parameters.
    """
    # users: parameter -> the blocks that read it; the first one places a tied parameter.
    users: dict[str, list[str]] = {}
    for block in blocks:
        for name in dict.fromkeys(block.parameters):
            users.setdefault(name, []).append(block.name)
    buckets: list[Bucket] = []
    for block in blocks:
        names = list(dict.fromkeys(block.parameters))
        tied = [n for n in names if len(users[n]) > 1 and users[n][0] == block.name]
        own = [n for n in names if len(users[n]) == 1]
        buckets += [Bucket(n, (parameters[n],), tuple(users[n]), n in learns) for n in tied]
        buckets += _by_learning(block.name, [parameters[n] for n in own], (block.name,), learns)
    unused = [p for n, p in parameters.items() if n not in users]
    return (*buckets, *_by_learning("unused", unused, (), learns))


def _by_learning(
    name: str, parameters: Sequence[Parameter], blocks: tuple[str, ...], learns: Collection[str]
) -> Iterator[Bucket]:
    for suffix, kind in (("", True), ("/frozen", False)):
        chosen = tuple(p for p in parameters if (p.name in learns) is kind)
        if chosen:
            yield Bucket(name + suffix, chosen, blocks, kind)
