"""Table 1 of Improved Intra-Operator Parallelism for Distributed LLM Training, repeated: part `metis` of plans.py.

Metis's search and the memory-aware one, by steps, time and cost, next to the exact optimum. Metis walks types
of devices in the order of a Python set, which differs from run to run: each row is searched in both orders, and the row
names the order whose cost is the published one. The published cost sometimes prices only the first stage of a plan, so
the full cost of the best plan is printed next to it. The second table solves the corrected problem: no replica of
several types, degrees up to 4 as profiled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as Printed

from hydragraph.planner import metis

# How our names of the two searches stand in the file, and how many times as fast they must be.
SEARCHES: tuple[tuple[Literal["naive", "memory"], str, str], ...] = (
    ("naive", "Metis", "metis"),
    ("memory", "memory-aware", "ours"),
)
# Seconds that the exact optimum may take, row by row.
LIMITS = (1, 1, 5, 20)


class MetisData:
    """Table 1 with its profiles and clusters.

    Args:
        folder: of table1.json and profile_*_gpt_synthetic.json.
    """

    def __init__(self, folder: Path) -> None:
        record = json.loads((folder / "table1.json").read_text(encoding="utf-8"))
        self._folder = folder
        self._arguments = record["arguments"]
        self.rows: list[dict[str, Any]] = record["rows"]
        self._types = {
            kind: metis.DeviceType(each["intra_bandwidth"], each["memory_gb"])
            for kind, each in record["clusterfile"].items()
        }

    def profile(self, layers: int) -> metis.Profile:
        """Return the profile of both types; the A100's is the first."""
        files = [self._folder / f"profile_{kind}_gpt_synthetic.json" for kind in ("A100", "V100")]
        given = self._arguments
        return metis.Profile.load(
            files,
            layers=layers,
            hidden=given["hidden_size"],
            sequence=given["sequence_length"],
            vocabulary=given["vocab_size"],
        )

    def cluster(self, row: dict[str, Any], first: str) -> metis.Cluster:
        """Return a row's cluster of nodes of four, one type's before the other's."""
        kinds = sorted(("A100", "V100"), key=lambda kind: kind != first)
        return metis.Cluster(self._types, tuple((kind, 4) for kind in kinds for _ in range(row[kind.lower()] // 4)))


@dataclass(frozen=True)
class Timed:
    """A search's plan with the seconds it took, by the wall clock and of this process."""

    found: metis.Found
    wall: float
    cpu: float


def timed(search: Callable[[], metis.Found], enough: float = 1.0) -> Timed:
    """Search up to three times, until the sum of times reaches `enough` seconds; return the fastest."""
    every: list[Timed] = []
    while not every or (len(every) < 3 and sum(each.wall for each in every) < enough):
        began = time.perf_counter()
        cpu = time.process_time()
        found = search()
        every.append(Timed(found, time.perf_counter() - began, time.process_time() - cpu))
    return min(every, key=lambda each: each.wall)


def print_metis(folder: Path, rows: int) -> None:
    """Print Table 1 beside what is found here."""
    data = MetisData(folder)
    first = data.rows[0]
    for order in ("naive", "memory", "exact"):  # what is imported and compiled first is not counted
        metis.search(data.profile(first["layers"]), data.cluster(first, "V100"), first["layers"], first["gbs"], order)
    searches = Printed(title="Table 1 of the improved Metis, and the same searches here", title_justify="left")
    headings = "row, search, steps published, here, equal, cost published, here, first type, in full, ms published"
    for heading in (*headings.split(", "), "wall ms", "CPU ms", "times as fast (wall)"):
        searches.add_column(heading, justify="right")
    exact = Printed(title="the sound problem: no mixed replica, degrees up to 4", title_justify="left")
    headings = (
        "row, devices, layers, Metis's search, exact, Metis's groups, known optimum, wall s, CPU s, limit s, labels"
    )
    for heading in (*headings.split(", "), "plan"):
        exact.add_column(heading, justify="right")
    for row, limit in list(zip(data.rows, LIMITS, strict=True))[:rows]:
        for order, name, key in SEARCHES:
            searches.add_row(*_searched(data, row, order, name, row["paper"][key]))
        exact.add_row(*_exact(data, row, limit))
    Console(width=200).print(searches, exact)


def _searched(
    data: MetisData, row: dict[str, Any], order: Literal["naive", "memory"], name: str, published: dict[str, Any]
) -> list[str]:
    profile = data.profile(row["layers"])
    found = {
        first: timed(lambda: metis.search(profile, data.cluster(row, first), row["layers"], row["gbs"], order))  # noqa: B023
        for first in ("A100", "V100")
    }
    first = min(found, key=lambda kind: abs((found[kind].found.claimed or 0.0) - published["cost"]))
    best = found[first]
    return [
        str(row["row"]),
        name,
        f"{published['steps']:,}",
        f"{best.found.steps:,}",
        "yes" if all(each.found.steps == published["steps"] for each in found.values()) else "no",
        f"{published['cost']:.2f}",
        f"{best.found.claimed:.2f}",
        first,
        f"{best.found.cost:.2f}",
        f"{published['wall_ms']:,.0f}",
        f"{1e3 * best.wall:,.1f}",
        f"{1e3 * best.cpu:,.1f}",
        f"{published['wall_ms'] / (1e3 * best.wall):.0f}",
    ]


def _exact(data: MetisData, row: dict[str, Any], limit: float) -> list[str]:
    arguments = (data.profile(row["layers"]), data.cluster(row, "V100"), row["layers"], row["gbs"])
    walked = metis.search(*arguments, "naive", max_tp=4, mixed_tp=False)
    best = timed(lambda: metis.search(*arguments, "exact"))
    own = metis.search(*arguments, "exact", groups="metis")
    known = row.get("exact_optimum", {}).get("no_mixed_tp_group_tp<=4", {}).get("cost")
    found = best.found
    stages = zip(found.groups, found.degrees, found.layers, strict=True)
    plan = ", ".join(f"{g} ranks dp{dp} tp{tp} {n} layers" for g, (dp, tp), n in stages)
    return [
        str(row["row"]),
        str(sum(found.groups)),
        str(row["layers"]),
        f"{walked.cost:.2f}",
        f"{found.cost:.2f}",
        f"{own.cost:.2f}",
        "-" if known is None else f"{known:.2f}",
        f"{best.wall:.3f}",
        f"{best.cpu:.3f}",
        f"{limit:g}",
        str(found.steps),
        f"{' '.join(found.types)}, B {found.batches}: {plan}",
    ]


def print_part(folder: Path, rows: int) -> None:
    """Print the part, or why it is left out."""
    if (folder / "table1.json").exists():
        print_metis(folder, rows)
    else:
        print(f"metis skipped: {folder} has no table1.json; give the folder above it with --data")
