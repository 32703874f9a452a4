"""Home: each rank's share of the model's state, and the number of copies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, TypeVar, get_args

from hydragraph.spec.cluster import MOST_DEVICES

T = TypeVar("T")

Shares = tuple[float, ...]

Rule = Literal["auto", "stages"]

_EQUAL_TEXT = "equal"


@dataclass(frozen=True)
class Home:
    """Ranks that own the state (fp32 weights and optimizer state), update it, and send weights to stages.

    Attributes:
        shares: each rank's relative share of every bucket (0: the rank owns no state); None means equal shares.
        copies: 1 or 2. With 2, a second owner on another node also updates each element. `shares` divide both copies.
        buckets: shares by rank of the named buckets, instead of `shares`. A bucket is the trainable or the frozen part
            of a block, or a tied parameter.
        nodes: node of each rank, to place second owners. None: one node per host or, on a single host, per rank.
        rule: how to choose owners of buckets that are not in `buckets`. "stages" chooses the ranks of the stages that
            use the bucket; "auto" chooses the ranks that exchange the bucket fastest and have enough memory. With a
            rule, `shares` are relative weights of the chosen ranks.
    """

    shares: Sequence[float] | None = None
    copies: int = 1
    buckets: Mapping[str, Sequence[float]] = field(default_factory=dict)
    nodes: Sequence[int] | None = None
    rule: Rule | None = None

    def __post_init__(self) -> None:
        if self.rule is not None and self.rule not in get_args(Rule):
            raise ValueError(f"'rule' is {self.rule!r}: use 'auto' or 'stages', or omit it")
        if self.shares is not None:
            object.__setattr__(self, "shares", _shares("shares", self.shares))
        if not isinstance(self.buckets, Mapping):
            raise ValueError(f"'buckets' is {self.buckets!r}: give a mapping of bucket names to shares by rank")
        buckets = {str(name): _shares(f"buckets.{name}", shares) for name, shares in sorted(self.buckets.items())}
        object.__setattr__(self, "buckets", buckets)
        if isinstance(self.copies, bool) or self.copies not in (1, 2):
            raise ValueError(f"'copies' is {self.copies!r}: use 1, or 2 for a second owner of every element")
        if self.nodes is not None:
            object.__setattr__(self, "nodes", _nodes(self.nodes))
        counts = {len(numbers) for _, numbers in self._lists()}
        if len(counts) > 1:
            lengths = ", ".join(f"{name!r} is for {len(numbers)} ranks" for name, numbers in self._lists())
            raise ValueError(f"{lengths}: give every list one number per rank")

    def __hash__(self) -> int:
        return hash((self.shares, self.copies, tuple(self.buckets.items()), self.nodes, self.rule))

    def _lists(self) -> list[tuple[str, Sequence[float]]]:
        own = [("shares", self.shares), ("nodes", self.nodes)]
        return [
            *((name, numbers) for name, numbers in own if numbers is not None),
            *((f"buckets.{name}", shares) for name, shares in self.buckets.items()),
        ]

    def shares_of(self, bucket: str) -> Sequence[float] | None:
        return self.buckets.get(bucket, self.shares)

    def reordered(self, ranks: Sequence[int]) -> Home:
        def of(each: Sequence[T] | None) -> tuple[T, ...] | None:
            return None if each is None else tuple(each[rank] for rank in ranks)

        buckets = {name: tuple(shares[rank] for rank in ranks) for name, shares in self.buckets.items()}
        return replace(self, shares=of(self.shares), buckets=buckets, nodes=of(self.nodes))

    @property
    def without_rule(self) -> Home:
        return replace(self, rule=None)

    def check(self, ranks: int, buckets: Sequence[str] | None = None) -> None:
        """Raise a ValueError unless the home fits these ranks and buckets."""
        for name, numbers in self._lists():
            if len(numbers) != ranks:
                raise ValueError(
                    f"home '{self}': {name!r} has {len(numbers)} numbers, but the run has {ranks} "
                    f"rank{'s' * (ranks > 1)}: give one number for each rank (0: the rank owns no state)"
                )
        unknown: list[str] = [] if buckets is None else [name for name in self.buckets if name not in buckets]
        if unknown:
            assert buckets is not None
            shown = ", ".join(buckets[:4]) + (f" and {len(buckets) - 4} more" if len(buckets) > 4 else "")
            raise ValueError(f"home '{self}': the model has no parameter bucket {unknown[0]!r}: use one of {shown}")
        if self.copies > ranks:
            raise ValueError(f"home '{self}': two copies on {ranks} rank: start more ranks, or set copies to 1")

    def on(self, nodes: Sequence[int]) -> Home:
        """Return this home with a node for each rank: the home's own `nodes` or, if None, the argument.

        If all given nodes are equal, each rank counts as a node. A home that has one copy, or that
        only states a rule, is returned unchanged.
        """
        self.check(len(nodes))
        # A rule chooses owners on several nodes
        if self.copies == 1 or self.rule is not None:
            return self
        # On a single node, second owners can only be other ranks.
        alone = len(set(nodes)) == 1
        placed = replace(self, nodes=self.nodes or tuple(range(len(nodes)) if alone else _nodes(nodes)))
        assert placed.nodes is not None
        for name, shares in (("shares", placed.shares or (1.0,) * len(nodes)), *placed.buckets.items()):
            owning = {node for node, share in zip(placed.nodes, shares, strict=True) if share}
            if len(owning) < placed.copies:
                raise ValueError(
                    f"home '{self}', {name}: all owners are on node {owning.pop()}, but the second copy needs another"
                    " node: give ranks of another node a share, or set copies to 1"
                )
        return placed

    def __str__(self) -> str:
        shares = None if self.shares is None else _text(self.shares)
        parts = [self.rule or shares or _EQUAL_TEXT]
        if self.rule and shares:
            parts.append(f"shares={shares}")
        if self.copies != 1:
            parts.append(f"copies={self.copies}")
        if self.nodes is not None:
            parts.append(f"nodes={_text(self.nodes)}")
        return " ".join([*parts, *(f"{name}={_text(bucket_shares)}" for name, bucket_shares in self.buckets.items())])

    @classmethod
    def parse(cls, text: str) -> Home:
        """Parse text such as "3,3,1,0 copies=2 embed=1,1,0,0", "8*1,8*0.5", "equal" or "auto"."""
        first, *others = text.split() or [""]
        values: dict[str, Any] = {}
        if first in get_args(Rule):
            values["rule"] = first
        elif first != _EQUAL_TEXT:
            values["shares"] = _numbers(text, first)
        buckets: dict[str, Shares] = {}
        for part in others:
            name, equals, value = part.partition("=")
            if not equals or not name or not value or name in values or name in buckets:
                raise ValueError(
                    f"home {text!r}: {part!r} is unknown or repeated: write copies=2, nodes=0,0,1, or a bucket's "
                    "shares, such as embed=1,0"
                )
            if name == "copies":
                values[name] = int(value) if value.isdecimal() else value
            elif name == "nodes" or (name == "shares" and "rule" in values):
                values[name] = _numbers(text, value)
            else:
                buckets[name] = _numbers(text, value)
        try:
            return cls(**values, buckets=buckets)
        except ValueError as error:
            raise ValueError(f"home {text!r}: {error}") from None


EQUAL = Home()
AUTO = Home(rule="auto")


def home_of(given: Home | str | None) -> Home | None:
    if isinstance(given, str):
        return Home.parse(given)
    if given is None or isinstance(given, Home):
        return given
    raise ValueError(
        f"'home' is {given!r}: give hg.Home(shares=[3, 1], copies=2), its text '3,1 copies=2', 'auto', 'equal', or None"
    )


def _shares(name: str, given: object) -> Shares:
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence) or not given:
        raise ValueError(f"{name!r} is {given!r}: give a list of one share per rank, such as [3, 3, 1, 0]")
    for rank, share in enumerate(given):
        if isinstance(share, bool) or not isinstance(share, int | float) or not math.isfinite(share) or share < 0:
            raise ValueError(
                f"{name}: rank {rank} has {share!r}: give a finite number of at least 0 (0: the rank owns no state)"
            )
    total = sum(given)
    if not 0 < total < math.inf:
        raise ValueError(f"{name!r} is {list(given)}, whose sum is {total:g}: give at least one rank a share above 0")
    return tuple(map(float, given))


def _nodes(given: object) -> tuple[int, ...]:
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        raise ValueError(f"'nodes' is {given!r}: give a list with each rank's node, such as [0, 0, 1]")
    for rank, node in enumerate(given):
        if isinstance(node, bool) or not isinstance(node, int | float) or node < 0 or node != int(node):
            raise ValueError(f"nodes: rank {rank} is on node {node!r}: nodes are whole numbers from 0")
    return tuple(map(int, given))


def _text(values: Sequence[float]) -> str:
    parts: list[str] = []
    for value, run in groupby(values):
        # More than three equal numbers are written with their count: 1,1,1,1 is 4*1.
        count = len(list(run))
        number = repr(int(value)) if value == int(value) else repr(value)
        parts += [f"{count}*{number}"] if count > 3 else [number] * count
    return ",".join(parts)


def _numbers(text: str, part: str) -> tuple[float, ...]:
    values: list[float] = []
    for run in part.split(","):
        count, times, number = run.rpartition("*")
        try:
            share = float(number)
            repeated = int(count) if times else 1
        except ValueError:
            raise ValueError(
                f"home {text!r}: {run!r} is not a share: write one number per rank, as in 3,3,1,0; N*SHARE "
                "repeats a share for N ranks"
            ) from None
        if len(values) + repeated > MOST_DEVICES:
            raise ValueError(f"home {text!r}: more than {MOST_DEVICES:,} ranks: use fewer")
        values += [share] * repeated
    return tuple(values)
