"""Published runs: the kinds they are counted with, and the runs that constants were fitted on."""

from __future__ import annotations

from typing import Any

from benchmarks.published_runs import FITTED_RANKS, Run, kinds_of, third_of


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
