"""Architectures by name."""

from __future__ import annotations

import pytest
import torch

from hydragraph.kernels.gpu_arch import ARCHS, arch_of
from hydragraph.train.model_flops import peak_flops_per_s


def test_capabilities_follow_names() -> None:
    assert {name: arch.capability for name, arch in ARCHS.items()} == {
        "sm_80": (8, 0),
        "sm_90": (9, 0),
        "sm_100": (10, 0),
    }


def test_an_unknown_architecture_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="--arch sm_70: use sm_80, sm_90, sm_100"):
        arch_of("sm_70")


def test_peaks_are_those_that_mfu_is_computed_with() -> None:
    for arch in ARCHS.values():
        assert peak_flops_per_s(arch.gpu, torch.bfloat16) == arch.flops_per_s
