"""The errors that predictions state, and the table of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.published_errors import FLAT, PUBLISHED, published_error
from hydragraph.spec.cluster import Cluster, Interconnect, Node, type_of_sheet
from hydragraph.spec.known_devices import KNOWN
from hydragraph.spec.strategy import Strategy
from tests.cost import priced
from tests.models import captured

LINK = Interconnect(1e9, 1e-5)
APART, TOGETHER = "<[0]x2> + <[1]x2>", "<[0]x1,[1]x1>"


def cluster(*names: str) -> Cluster:
    types = {name: type_of_sheet(KNOWN[name]) for name in names}
    nodes = names if len(names) > 1 else names * 2
    return Cluster.of(types, tuple(Node(name, 1, LINK, LINK) for name in nodes))


@pytest.mark.parametrize(
    ("names", "strategy", "kind", "others"),
    [
        (("a100-80gb",), APART, "on A100s without pipelines", ""),
        (("a100-40gb", "a100-80gb"), TOGETHER, "on A100s with pipelines", ""),
        (("h100-sxm",), APART, "on H100s without pipelines", ""),
        (("h100-sxm",), TOGETHER, "on H100s", ""),
        (("t4",), TOGETHER, "on T4s", ""),
        (("h800",), APART, "without pipelines", "h800"),
        (("v100-32gb",), TOGETHER, "with pipelines", "v100-32gb"),
        (("v100-16gb", "t4"), APART, "on V100s mixed with T4s", ""),
        (("v100-16gb", "l4"), TOGETHER, "on V100s mixed with T4s", "l4"),
        (("h100-sxm", "l4"), APART, "on V100s mixed with T4s", "h100-sxm or l4"),
        (("rtx-4090", "l4"), APART, "on V100s mixed with T4s", "rtx-4090 or l4"),
        (("h100-sxm", "l4"), "<[0]x2>", "on H100s without pipelines", ""),
    ],
)
def test_the_error_is_that_of_the_most_similar_published_runs(
    names: tuple[str, ...], strategy: str, kind: str, others: str
) -> None:
    runs, error = PUBLISHED[kind]
    stated = f"{error:.0%} on {runs} published runs {kind}" + f", none of them on {others}" * bool(others)
    assert published_error(cluster(*names), Strategy.parse(strategy, 2)) == stated


def test_each_kind_of_strategy_states_its_error_once(tmp_path: Path) -> None:
    devices = cluster("a100-80gb")
    both = [Strategy.parse(text, 2) for text in (APART, TOGETHER, "<[0]x2>")]
    program = captured("llama")[0]
    datasheet(program, devices, degrees=[1]).save(tmp_path / "profile.json")
    costs = Costs(Profile.load(tmp_path / "profile.json"), devices)
    errors = [published_error(devices, strategy) for strategy in both[:2]]
    assert costs.source_of(*both).endswith(f"; the mean error of such predictions is {errors[0]} and {errors[1]}")
    assert "published runs" not in costs.source_of()
    flat = Costs(datasheet(program, devices, 0.4, degrees=[1]), devices)
    assert flat.error_of(*both) == FLAT
    assert priced.costs(2, priced.cluster(2)).error_of(*both) == ""


def test_the_documentation_lists_the_same_errors() -> None:
    page = (Path(__file__).parents[2] / "docs/costs.md").read_text()
    for kind, (runs, error) in PUBLISHED.items():
        assert f"| {kind} | {runs} | {100 * error:.1f} % |" in page
