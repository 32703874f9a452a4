"""Operations of a step against sums by hand, and peaks by the names that GPUs have."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import hydragraph as hg
from hydragraph.commands.bench.bench_models import LlamaShape
from hydragraph.train.model_flops import peak_flops_per_s, step_flops
from tests.adapted import LAYERS, hand_written_lora
from tests.cost.test_datasheet import HEAD, LAYER, frozen, llama


def test_a_steps_operations_are_those_of_its_products_and_of_causal_attention() -> None:
    """Layers are 64 wide: 6 P T for the products; 2 L^2 H D for causal attention forward, and twice that backward."""
    program = llama()
    layers = program.layers
    lengths = [3, 10]
    products = 6 * (layers * LAYER + HEAD) * sum(lengths)
    attention = 3 * 2 * layers * 64 * sum(n * n for n in lengths)
    assert step_flops(program, lengths) == pytest.approx(products + attention)


@pytest.mark.parametrize("length", [8, 33])
def test_operations_are_those_that_pytorch_counts(length: int) -> None:
    """PyTorch counts the whole square of attention; in some versions also positions times frequencies, one product."""
    shape = LlamaShape(hidden=32, intermediate=80, layers=3, heads=4, kv_heads=2, vocabulary=50)
    model = shape.build("cpu")
    flops = step_flops(hg.capture(model, check="off"), [length])
    model.set_attn_implementation("eager")
    ids = torch.randint(0, 50, (1, length))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    masked = 6 * shape.layers * shape.hidden * length**2
    rotations = 2 * (shape.hidden // shape.heads // 2) * length
    assert counted.get_total_flops() - flops - masked in (0, rotations)


def test_gradients_of_frozen_weights_do_not_count() -> None:
    """Adapters of rank 4 on queries and down projections: weights take 2 P T forward, 2 P T backward, and 2 P T more
    only if they are trained.
    """
    lengths = [3, 10]
    attention = 2 * 64 * sum(n * n for n in lengths)
    adapters = 4 * (64 + 64) + 4 * (102 + 64)
    weights = LAYERS * (4 * LAYER + 6 * adapters) + 4 * HEAD
    program = hg.capture(hand_written_lora(), check="off")
    assert step_flops(program, lengths) == pytest.approx(weights * sum(lengths) + LAYERS * 3 * attention)
    weights = LAYERS * (6 * LAYER + 8 * adapters) + 6 * HEAD
    scored = pytest.approx(weights * sum(lengths) + LAYERS * 4 * attention)
    assert step_flops(program, lengths, scored=True) == scored
    last = frozen(llama(), lambda name: "layers.1" in name)
    weights = 2 * LAYER + 6 * LAYER + 4 * HEAD
    assert step_flops(last, lengths) == pytest.approx(weights * sum(lengths) + (1 + 3) * attention)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4080", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA L40", None),
        ("Tesla V100-SXM2-32GB", None),  # has no bfloat16
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA RTX A6000", 155e12),
        ("NVIDIA H20-3e", 148e12),
        ("NVIDIA GH200 480GB", None),
        ("", None),
    ],
)
def test_peaks_go_by_the_words_of_a_name(name: str, peak: float | None) -> None:
    assert peak_flops_per_s(name, torch.bfloat16) == peak
    assert peak_flops_per_s(name, torch.float32) is None
