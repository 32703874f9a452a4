"""Predicted training steps of 1B, 7B and 70B Llamas on H100s, from the datasheet: python benchmarks/predictions.py

One sequence per micro-batch and eight micro-batches, on as many GPUs as a layer is cut into. Where a GPU is at hand,
`hydragraph bench step` prints such a prediction beside the measured time. "starting kernels" is the part of the
computation that does not depend on the tokens; where it is large, short micro-batches are bound by launches.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg
from hydragraph.commands.bench.bench_models import SHAPES
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.report.simulation_price import price
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, Device, Interconnect
from hydragraph.spec.known_devices import KNOWN
from hydragraph.spec.strategy import Strategy
from hydragraph.train.model_flops import step_flops

H100 = KNOWN["h100-sxm"]
NVLINK = Interconnect(450e9, 5e-6)
DEGREES, TOKENS, MICRO_BATCHES = (1, 2, 8), (2048, 8192, 32768), 8


def llama_70b() -> torch.nn.Module:
    """Return Llama 3 70B without weights."""
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=8192,
                intermediate_size=28672,
                num_hidden_layers=80,
                num_attention_heads=64,
                num_key_value_heads=8,
                vocab_size=128256,
                max_position_embeddings=32768,
            )
        )


def main() -> None:
    """Print the table."""
    table = Table(
        "model", "GPUs", "tokens", "seconds", "tokens/s per GPU", "MFU", "starting kernels", title="8 micro-batches"
    )
    device = Device(H100.flops_per_s, int(H100.memory_bytes), H100.memory_bytes_per_s)
    models = {"1b": lambda: SHAPES["1b"].build("meta"), "7b": lambda: SHAPES["7b"].build("meta"), "70b": llama_70b}
    for name, build in models.items():
        program = hg.capture(build(), dtype=torch.bfloat16, check="off")
        for tp in DEGREES:
            cluster = Cluster((device,) * tp, NVLINK, NVLINK)
            costs = Costs(datasheet(program, cluster, degrees=(tp,)), cluster, home=hg.Home.parse("auto"))
            strategy = Strategy.parse(f"<tp{tp},pp1>", program.layers)
            (stage,) = costs.pipelines(strategy)[0].parts
            for tokens in TOKENS:
                found = price(costs, strategy, Assignment.even([MICRO_BATCHES], tokens))
                flops = step_flops(program, [tokens] * MICRO_BATCHES)
                rate = found.tokens / found.seconds / tp
                table.add_row(
                    *(name, str(tp), f"{tokens:,}", f"{found.seconds:.3g}", f"{rate:,.0f}"),
                    f"{flops / found.seconds / tp / H100.flops_per_s:.1%}",
                    f"{sum(stage.seconds([0])) / sum(stage.seconds([tokens])):.1%}",
                )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
