"""A device's ceilings, and which device is meant."""

from __future__ import annotations

import pytest
import torch

from hydragraph.commands.bench.device_ceiling import DeviceCeilings, choose_device, measure_ceilings


def test_ceilings_of_this_machine() -> None:
    found = measure_ceilings(torch.device("cpu"), torch.float32)
    assert found.copy_bytes_per_s > 0
    assert found.peak_flops_per_s == found.product_flops_per_s > 0
    assert found.peak_name.startswith("measured ")


def test_a_known_device_is_measured_by_its_makers_number() -> None:
    found = DeviceCeilings("NVIDIA H200", torch.bfloat16, 4e12, 700e12, 989e12)
    assert (found.peak_flops_per_s, found.peak_name) == (989e12, "nominal 989 TFLOP/s")
    assert str(found) == "NVIDIA H200: copy 4000 GB/s, bfloat16 products 700 TFLOP/s"


@pytest.mark.parametrize("name", ["mps:0", "warp", "meta"])
def test_another_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"--device {name}"):
        choose_device(name)
    assert choose_device("cpu") == torch.device("cpu")
