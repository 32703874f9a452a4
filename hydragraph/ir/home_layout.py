"""Home layouts: a `Home` as one layout per bucket, which state, pull, push, checkpoints, memory and traffic go by."""

from __future__ import annotations

from collections.abc import Sequence

from hydragraph.ir.layout import Layout
from hydragraph.ir.layout import home as home_layout
from hydragraph.ir.parameter import Bucket
from hydragraph.spec.home import Home


class HomeLayouts:
    """Where each bucket's state lives; buckets of equal size and shares have one layout, made when it is asked for.

    Args:
        home: chosen, without a rule; on its nodes, if it has copies (`Home.on`); without, each rank counts as a node.
        ranks: how many there are.

    Raises:
        ValueError: it is for another number of ranks.
    """

    def __init__(self, home: Home, ranks: int) -> None:
        assert home.rule is None, f"home {home}: its owners are chosen before layouts are made"
        home.check(ranks)
        self.home = home
        self.ranks = ranks
        self._known: dict[object, Layout] = {}

    def of(self, bucket: Bucket) -> Layout:
        """Return a bucket's home layout."""
        shares = self.home.shares_of(bucket.name)
        key = (bucket.size, shares)
        if key not in self._known:
            self._known[key] = home_layout(
                bucket.size, range(self.ranks), shares, self.home.copies, nodes=self.home.nodes
            )
        return self._known[key]

    def by_name(self, buckets: Sequence[Bucket]) -> dict[str, Layout]:
        """Return the home layouts of buckets by their names."""
        return {bucket.name: self.of(bucket) for bucket in buckets}
