"""Home layouts: the ranks that own each element of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from hydragraph.ir.layout import Layout
from hydragraph.ir.layout import home as home_layout
from hydragraph.ir.parameter import Bucket
from hydragraph.spec.home import Home


class HomeLayouts:
    """Home layouts of buckets.

    Args:
        home: home without a `rule`; with two copies, `nodes` must be set (`Home.on`).

    Raises:
        ValueError: the home is for another number of ranks.
    """

    def __init__(self, home: Home, ranks: int) -> None:
        assert home.rule is None, f"home {home}: choose owners (`Home.on`) before making layouts"
        home.check(ranks)
        self.home = home
        self.ranks = ranks
        self._known: dict[object, Layout] = {}

    def of(self, bucket: Bucket) -> Layout:
        # Buckets of equal size and shares (such as all layers') share a layout object.
        shares = self.home.shares_of(bucket.name)
        key = (bucket.size, shares)
        if key not in self._known:
            self._known[key] = home_layout(
                bucket.size, range(self.ranks), shares, self.home.copies, nodes=self.home.nodes
            )
        return self._known[key]

    def by_name(self, buckets: Sequence[Bucket]) -> dict[str, Layout]:
        return {bucket.name: self.of(bucket) for bucket in buckets}
