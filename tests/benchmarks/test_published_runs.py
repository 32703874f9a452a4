"""Published runs: the kinds they are counted with, the runs that constants were fitted on, and the latest record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published_runs import DATA, FITTED_RANKS, Run, kinds_of, priced, third_of
from hydragraph.cost.published_errors import MEMORY, PUBLISHED
from tests.thorough import thorough

LATEST = max((Path(__file__).parents[2] / "benchmarks" / "results").glob("*-published_runs.md")).read_text()
ROWS = {cells[0]: cells[1:] for line in LATEST.splitlines() if (cells := re.split(r" *│ *", line)[1:-1])}


def run(name: str = "N21", **fields: Any) -> Run:
    degrees = {"gpu": "a100", "gpus": 8, "tp": 1, "pp": 1, "dp": 8, "micro_batch": 1, "global_batch": 8}
    plain = {"recompute": False, "sequence_parallel": False, "split": None, "cannot": "", "published_mem_gb": None}
    return Run.of({"id": name, "model": "m", "seq": 8, "published_s": 1.0, **degrees, **plain, **fields})


def test_constants_are_fitted_on_every_third_run_that_is_not_too_large() -> None:
    sizes = (8, 8, FITTED_RANKS + 1, 8, 8, 8)
    assert third_of(run(str(i), gpus=gpus) for i, gpus in enumerate(sizes)) == {"5"}


def test_runs_are_counted_by_gpu_pipelines_and_size() -> None:
    kinds = ("all", "with pipelines", "on A100s", "on A100s with pipelines", "on 1 to 8 GPUs")
    assert kinds_of(run(gpu="a100_jz", pp=4)) == kinds
    mixed = run("AMP_MIXED", gpu="amp_mixed", gpus=16)
    assert kinds_of(mixed)[2::2] == ("on V100s mixed with T4s", "on more GPUs")
    assert not mixed.otherwise.measured  # errors are those of predictions without measurements


def test_stated_errors_are_those_of_the_latest_record() -> None:
    for kind, (runs, error) in PUBLISHED.items():
        assert ROWS[kind][:2] == [str(runs), f"{error:.1%}"]
        assert runs >= 4 or "pipelines" not in kind
    mean, runs, most = re.findall(r"memory: mean \|error\| (\S+)% of (\d+) runs, at most (\d+)%", LATEST)[0]
    assert f"(mean error {float(mean):.0f}% on {runs} published runs, at most {most}%)" in MEMORY


@thorough
@pytest.mark.skipif(not DATA.exists(), reason="the published runs are not part of the project")
def test_two_runs_are_predicted_as_in_the_latest_record() -> None:
    data = json.loads(DATA.read_text())
    for record in data["runs"]:
        if record["id"] in ("AMP_MIXED tp1 pp2 dp8 mbs1", "AMP_T4 tp1 pp1 dp16 mbs1"):
            found = priced(Run.of(record), data)
            assert ROWS[record["id"]][1:3] == [f"{record['published_s']:.3g}", f"{found.seconds:.3g}"]
