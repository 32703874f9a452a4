"""Options of NCCL's communicators; groups themselves are tested in tests/cluster/test_communicators.py."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hydragraph.private.process_groups import nccl_options, nvlink_peers


@pytest.mark.skipif(dist.is_nccl_available(), reason="this build of PyTorch has NCCL")
def test_without_nccl_there_are_no_options() -> None:
    assert nccl_options(timedelta(seconds=7), True) is None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of PyTorch has no NCCL; needs no GPU")
def test_traffic_that_computation_waits_for_has_priority_and_the_rest_few_blocks() -> None:
    urgent, background = (nccl_options(timedelta(seconds=7), each) for each in (True, False))
    assert (urgent.is_high_priority_stream, background.is_high_priority_stream) == (True, False)
    assert background.config.max_ctas == 16 != urgent.config.max_ctas
    assert {urgent._timeout, background._timeout} == {timedelta(seconds=7)}


@pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")
def test_links_between_gpus_are_read_from_pytorchs_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert nvlink_peers(0) == set()
    found = SimpleNamespace(matrix=[[0, 18, 0], [18, 0, 4], [0, 4, 0]])
    monkeypatch.setattr(torch._C._distributed_c10d, "_detect_dma_connectivity", lambda device, link: found)
    assert (nvlink_peers(0), nvlink_peers(1)) == ({1}, {0, 2})
