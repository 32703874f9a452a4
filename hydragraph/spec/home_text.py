"""Text that names the owners of state: `layers 0-3 on ranks 0,1; layers 4-7 on rank 2`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from hydragraph.spec.home import Home

_LAYER = re.compile(r"layer\.(\d+)(/\w+)?")


def owners_text(home: Home, buckets: Sequence[str], ranks: int) -> str:
    if home.rule is not None:
        return f"chosen for the strategies ({home.rule})"
    of = {name: _owners(home.shares_of(name), ranks) for name in buckets}
    copies = " twice" if home.copies > 1 else ""
    if len(set(of.values())) == 1:
        return f"all{copies} {next(iter(of.values()))}"
    parts = [f"{_names(list(names))} {owners}" for owners, names in groupby(buckets, key=of.__getitem__)]
    return "; ".join(parts) + (", two copies of each" if copies else "")


def consecutive(numbers: Iterable[int]) -> list[list[int]]:
    # The difference is constant within a run
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return [[number for _, number in run] for _, run in runs]


def _owners(shares: Sequence[float] | None, ranks: int) -> str:
    owning = [rank for rank in range(ranks) if shares is None or shares[rank]]
    parts = [1.0 if shares is None else shares[rank] for rank in owning]
    runs = consecutive(owning)
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
    uneven = "" if len(set(parts)) == 1 else " (" + ":".join(f"{part:.3g}" for part in parts) + ")"
    return f"on {'rank' if len(owning) == 1 else 'ranks'} {text}{uneven}"


def _names(names: Sequence[str]) -> str:
    phrases: list[str] = []
    for is_layer, group in groupby(names, key=lambda name: _LAYER.fullmatch(name) is not None):
        if is_layer:
            layers = consecutive(dict.fromkeys(int(_LAYER.sub(r"\1", name)) for name in group))
            phrases += [f"layers {run[0]}-{run[-1]}" if len(run) > 1 else f"layer {run[0]}" for run in layers]
        else:
            phrases += group
    return ", ".join(phrases)
