"""Sides that are timed, refused cases, and how targets are judged; one real run on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hydragraph.commands.bench.kernel_bench import COLUMNS, KernelRow, bench_kernels, checked, kernel_targets
from hydragraph.commands.bench.kernel_cases import CASES, KernelCase, KernelSweep
from hydragraph.errors import Unsupported

SMALL = KernelSweep(torch.device("cpu"), torch.float32, full=False, compiled=False)


def refuse() -> Tensor:
    raise Unsupported("no kernel", where="here", remedy="go elsewhere")


def broken() -> Tensor:
    raise RuntimeError("no compiler\nat all")


def test_a_side_that_refuses_is_left_out_with_a_sentence() -> None:
    sides = {"eager": lambda: torch.ones(3), "flash": refuse, "compiled": broken, "ours": lambda: torch.ones(3)}
    found, notes = checked(KernelCase("k", "3", 1.0, "memory", sides))
    assert list(found) == ["eager", "ours"]
    assert notes == [
        "k: flash was not measured: here: no kernel; go elsewhere.",
        "k: compiled was not measured: no compiler.",
    ]


def test_a_side_that_is_wrong_ends_the_run() -> None:
    sides = {"eager": lambda: torch.ones(3), "ours": lambda: torch.tensor([1.0, 1.0, 1.1])}
    with pytest.raises(ValueError, match=r"k, 3: ours has a relative error of 5.8e-02 against eager"):
        checked(KernelCase("k", "3", 1.0, "memory", sides))
    with pytest.raises(RuntimeError, match="no compiler"):
        checked(KernelCase("k", "3", 1.0, "memory", {"eager": lambda: torch.ones(3), "ours": broken}))


@pytest.mark.parametrize("name", CASES)
def test_all_sides_of_every_case_compute_the_same(name: str) -> None:
    for case in CASES[name](SMALL):
        found, notes = checked(case)
        assert found.keys() == case.sides.keys()
        assert notes == []
        assert case.work > 0


def test_a_run() -> None:
    told: list[str] = []
    report = bench_kernels(["linear_cross_entropy"], SMALL, told.append)
    assert report.columns == COLUMNS
    assert [row[2] for row in report.rows] == ["eager", "hydragraph"] * 2
    assert len(told) == 2
    assert len(report.bars) == 4
    assert {target.verdict for target in report.targets} == {"not measured"}
    with pytest.raises(ValueError, match="unknown kernel 'adam'"):
        bench_kernels(["adam"], SMALL)


def rows(kernel: str, size: str, **milliseconds: float) -> list[KernelRow]:
    return [
        KernelRow(kernel, size, side.replace("_", " "), ms, 0.0, 100 / ms, 10 * ms) for side, ms in milliseconds.items()
    ]


def verdicts(found: Sequence[KernelRow]) -> dict[str, tuple[str, str]]:
    return {t.name: (t.found, t.verdict) for t in kernel_targets(found) if t.met is not None}


def test_targets_of_attention() -> None:
    size = "T 16384, 32/8 heads of 128"
    times = {"torch": 1.0, "triton": 1.25, "dispatch": 1.01}
    found = [KernelRow("varlen_attention", size, side, ms, 0, 0, 0) for side, ms in times.items()]
    found += [
        KernelRow("varlen_attention", "T 1", side, ms, 0, 0, 0) for side, ms in {"triton": 1, "dispatch": 1.1}.items()
    ]
    assert verdicts(found) == {
        "attention, 16K tokens, 32/8 heads of 128: Triton against varlen_attn": ("0.80x", "MISSED"),
        "attention: dispatch against the fastest backend, at every size": ("0.91x", "MISSED"),
    }
    assert list(verdicts(found[:3]).values()) == [("0.80x", "MISSED"), ("0.99x", "met")]


def test_targets_of_memory_count_large_sizes_only() -> None:
    found = rows("adamw + bf16 copy", "64 MB", hydragraph=2.0) + rows("adamw + bf16 copy", "256 MB", hydragraph=1.05)
    found += rows("slice_copy fp32->bf16", "256 MB, 9 ranges", hydragraph=1.0, eager=9.0)
    found += rows("slice_copy fp32->fp32 add", "1024 MB, 9 ranges", hydragraph=1.2)
    assert list(verdicts(found).values()) == [("83.3 %", "MISSED"), ("95.2 %", "met")]


def test_targets_of_the_loss() -> None:
    size = "T 16384, E 4096, V 32000"
    found = rows("linear_cross_entropy", size, eager=4.0, compiled=0.97, hydragraph=1.0)
    assert list(verdicts(found).values()) == [("0.25x", "met"), ("1.03x", "met"), ("0.25x", "met")]
    slow = rows("linear_cross_entropy", size, eager=1.0, compiled=1.0, hydragraph=1.1)
    assert [v for _, v in verdicts(slow).values()] == ["MISSED"] * 3
