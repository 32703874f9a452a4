"""Memory that a check writes once: zeros of large tensors, and what the allocator keeps meanwhile."""

from __future__ import annotations

import multiprocessing
import resource

import pytest
import torch

from hydragraph.frontend.check import scratch_pages

LARGE = 64 << 20
PAGE = resource.getpagesize()


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize("rows", [3, 4096])
def test_zeros_are_zeros_that_can_be_written(rows: int) -> None:
    value = scratch_pages.zeros(torch.Size([rows, 2048]), torch.float32)
    assert value.shape == (rows, 2048)
    assert value.is_contiguous()
    assert not value.any()
    assert value.add_(1).sum() == value.numel()


@pytest.mark.skipif(scratch_pages._glibc() is None, reason="no glibc")
def test_freed_memory_is_used_again_within_and_given_back_afterwards() -> None:
    # In a process of its own, whose heap other tests have not fragmented.
    process = multiprocessing.get_context("forkserver").Process(target=use_twice)
    process.start()
    process.join()
    assert process.exitcode == 0


def use_twice() -> None:
    before = _faults()
    with scratch_pages.reused():
        torch.ones(2 * LARGE, dtype=torch.uint8)
        first = _faults() - before
        torch.ones(LARGE, dtype=torch.uint8)
        again = _faults() - before - first
        kept = _resident()
    assert again < first // 8  # what was freed needs no new pages
    assert kept - _resident() > LARGE


@pytest.mark.skipif(scratch_pages._glibc() is None, reason="no glibc")
def test_an_error_within_ends_the_keeping_as_well() -> None:
    kept = 0

    def fail() -> None:
        nonlocal kept
        with scratch_pages.reused():
            torch.ones(LARGE, dtype=torch.uint8)
            kept = _resident()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert kept - _resident() > LARGE // 2


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE
