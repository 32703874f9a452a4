"""Every value in the tables of docs/worked_numbers.md equals what the cost model computes."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg
from hydragraph.cost.compiled_blocks import CompiledBlocks
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.layout import GradientKind, propagation
from hydragraph.ir.link import copy
from hydragraph.passes.variants import Variants
from hydragraph.report.memory_fit import fit
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, Device, Interconnect
from hydragraph.spec.known_devices import KNOWN
from hydragraph.train.model_flops import step_flops

PAGE = Path(__file__).parents[1] / "docs" / "worked_numbers.md"
GPU = KNOWN["a100-80gb"]
LINK = Interconnect(300e9, 5e-6)
TOKENS, SEQUENCES = 4096, 32


def llama_7b() -> torch.nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32000,
                hidden_size=4096,
                intermediate_size=11008,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=32,
                max_position_embeddings=4096,
            )
        )


def values_on_the_page() -> dict[str, str]:
    """Return the last column of each table's rows, by the first one."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {row[0].strip(): row[-1].strip() for row in rows if row[0].strip() != "quantity"}


def test_all_values_are_those_of_the_cost_model() -> None:
    program = hg.capture(llama_7b(), dtype=torch.bfloat16, check="off")
    device = Device(GPU.flops_per_s, int(GPU.memory_bytes), GPU.memory_bytes_per_s)
    cluster = Cluster((device,) * 8, LINK, LINK)
    strategy = hg.Strategy.parse("2*<tp2,pp2>", program.layers)
    compiled = CompiledBlocks(program, Variants(program, fused_head=True, added=False).get)
    costs = Costs(datasheet(program, cluster, degrees=(2,)), cluster, home=hg.Home.parse("auto"), blocks=compiled)
    costs = costs.of_strategies(strategy, tokens=TOKENS)
    assignment = Assignment.even([SEQUENCES // 2] * 2, TOKENS)
    timeline, fitting = costs.simulate(strategy, assignment), fit(costs, strategy, assignment)

    flops = step_flops(program, [TOKENS] * SEQUENCES)
    first, last = costs.pipelines(strategy)[0].parts
    forward, backward = first.seconds([TOKENS])
    ((_, _), (_, layer)) = first.forward[0]
    layer_s = layer.a * TOKENS**2 + layer.b * TOKENS + layer.c
    memory = fitting.memory[0]
    hidden_bytes = TOKENS * 4096 * 2
    bucket = next(each for each in costs.buckets if each.name == "layer.0")
    kinds = {parameter.name: GradientKind.PARTIAL for parameter in bucket.parameters}
    used = propagation(bucket, ((0, 1), (4, 5)), kinds)
    slices = copy(HomeLayouts(costs.home, 8).of(bucket), used)
    received = int((slices.hi - slices.lo)[(slices.dst == 0) & (slices.src != 0)].sum())
    elements = [math.prod(parameter.shape) for parameter in program.parameters.values()]

    assert values_on_the_page() == {
        "parameters of a layer": f"{sum(math.prod(each.shape) for each in bucket.parameters) / 1e6:.1f} M",
        "parameters of the model": f"{sum(elements) / 1e6:,.0f} M",
        "operations of a step": f"{flops:.2e}".replace("e+", "e"),
        "weights and moments at home": f"{(memory.home_weights + memory.optimizer_state) / 1e9:.1f} GB",
        "gradients at home": f"{memory.home_gradients / 1e9:.1f} GB",
        "weights of the stage": f"{memory.weights / 1e9:.1f} GB",
        "gradients of the stage": f"{memory.gradients / 1e9:.1f} GB",
        "activations": f"{memory.activations / 1e9:.1f} GB",
        "temporary values of a block": f"{memory.working / 1e9:.1f} GB",
        "peak": f"{memory.total / 1e9:.1f} GB",
        "hidden states of a micro-batch": f"{hidden_bytes / 1e6:.1f} MB",
        "time to send them to the next stage": f"{1e3 * hidden_bytes / LINK.bytes_per_s:.2f} ms",
        "tensor-parallel sums in a forward of stage 0": f"{first.rings[0].times}",
        "time of one such sum over two ranks": f"{1e3 * (forward - 16 * layer_s) / first.rings[0].times:.2f} ms",
        "weights of a layer that rank 0 receives": f"{received * 2 / 1e6:.1f} MB",
        "forward of a layer": f"{1e3 * layer_s:.1f} ms",
        "forward of stage 0": f"{1e3 * forward:.1f} ms",
        "backward of stage 0": f"{1e3 * backward:.1f} ms",
        "forward and backward of stage 1": f"{1e3 * sum(last.seconds([TOKENS])):.1f} ms",
        "stage 1 busy": f"{1e3 * sum(last.seconds([TOKENS])) * SEQUENCES / 2:,.0f} ms",
        "step": f"{1e3 * timeline.seconds:,.0f} ms",
        "stages idle": f"{timeline.bubble:.1%}".replace("%", " %"),
        "tokens per second": f"{TOKENS * SEQUENCES / timeline.seconds:,.0f}",
        "MFU": f"{flops / timeline.seconds / 8 / GPU.flops_per_s:.1%}".replace("%", " %"),
    }
    # Figures within sentences.
    assert f"{fitting.memory[2].activations / 1e9:.1f} GB of activations" in PAGE.read_text()
    assert f"each of the {received / 1e6:.1f} M parameters that it uses but does not own" in PAGE.read_text()
    assert f"(it uses {used.local_size(0) / 1e6:.1f} M)" in PAGE.read_text()
