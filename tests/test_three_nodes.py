"""Three nodes of which two lose the link between them, while the third reaches both: one of the two is dropped.

`tests/cluster/supervision/test_broken_links.py` shows the decision for every pair; this is the whole run.
"""

from __future__ import annotations

import time
from itertools import combinations
from pathlib import Path

import pytest

from hydragraph.train.stragglers.run_events import RunEvent, read_events
from tests.faults import END_S, patience
from tests.nodes import ThreeNodes, refusal
from tests.test_elastic_run import ranks
from tests.test_two_nodes import BEYOND, LIMIT_S, Job, configured
from tests.thorough import thorough

CUT_S = 60.0


def until(run: Path, kind: str, limit_s: float) -> RunEvent:
    """Return the first event of a kind as soon as it is written."""
    end = time.monotonic() + limit_s
    while True:
        events = read_events(run / "events.jsonl") if (run / "events.jsonl").is_file() else []
        if (found := next((event for event in events if event.event == kind), None)) is not None:
            return found
        assert time.monotonic() < end, f"no {kind} after {limit_s:g} s: {events}"
        time.sleep(0.05)


@thorough
@pytest.mark.parametrize("pair", combinations(range(3), 2), ids=["first-second", "first-third", "second-third"])
def test_a_cut_between_two_of_three_nodes_costs_the_later_one_and_no_state(
    pair: tuple[int, int], tmp_path: Path
) -> None:
    if (why := refusal()) is not None:
        pytest.skip(why)
    kept, dropped = pair
    with ThreeNodes(tmp_path / "nodes") as nodes:
        config = configured(tmp_path, ["3*<tp1,pp1>"], BEYOND, ranks=3, elastic={"copies": 2})
        job = Job.start(nodes, config, per_node=1)
        job.until_step(5)
        before = ranks(tmp_path / "run")
        began = time.monotonic()
        nodes.cut(kept, dropped)
        lost = until(tmp_path / "run", "fault", END_S * patience())
        seconds = time.monotonic() - began
        resumed = until(tmp_path / "run", "resumed", END_S * patience())
        print(f"node {dropped} was dropped after {seconds:.1f} s, the run continued {resumed.seconds:.1f} s after it")
        print(lost, resumed, sep="\n")
        assert lost.ranks == (dropped,), lost
        if kept:
            assert f"machine {dropped} is dropped: it and machine {kept} cannot reach each other" in lost.why
        assert "all state was kept" in resumed.why
        done = len(job.curve())
        job.until_step(done + 20)
        time.sleep(max(0.0, began + CUT_S - time.monotonic()))
        assert [event.event for event in read_events(tmp_path / "run" / "events.jsonl")].count("fault") == 1
        others = [pid for rank, pid in enumerate(before) if rank != dropped]
        assert ranks(tmp_path / "run") == others, "the same processes"
        nodes.heal(kept, dropped)
        assert until(tmp_path / "run", "join", LIMIT_S).ranks == (2,)
        job.until_step(len(job.curve()) + 5)
        steps = [entry["step"] for entry in job.curve()]
        assert steps == list(range(1, len(steps) + 1)), "no step was repeated"
