"""Train a tiny Llama under two lopsided strategies in turn: python examples/train_llama.py, or under torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg

RANKS, LAYERS, VOCABULARY = 4, 8, 64


def strategies() -> list[hg.Strategy]:
    """Return two strategies: one from a file, and a pipeline of three stages with a tensor-parallel middle stage."""
    stages = [hg.Stage(devices=(3,), layers=1), hg.Stage(devices=(0, 1), layers=4), hg.Stage(devices=(2,), layers=3)]
    here = hg.Strategy(pipelines=(hg.Pipeline(stages=tuple(stages)),), schedule="1f1b")
    return [hg.Strategy.load(str(Path(__file__).with_name("lopsided.yaml"))), here]


def prepare() -> tuple[LlamaForCausalLM, hg.Program, object]:
    """Build a model from a seed, capture it and compile its graphs, once for all ranks that `launch` starts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    model = LlamaForCausalLM(config)
    program = hg.capture(model)
    return model, program, hg.precompile(program, strategies())


def train(prepared: tuple[LlamaForCausalLM, hg.Program, object], steps: int) -> list[float]:
    """Train on random sequences of very different lengths, which every rank draws from the same seed."""
    model, program, _ = prepared
    choices = strategies()
    exe = hg.compile(model, choices[0], lambda named: torch.optim.AdamW(named, lr=1e-3), program=program)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        data = [torch.randint(0, VOCABULARY, (n,)) for n in (70, 9, 31, 120, 4)]
        report = exe.step(data, strategy=choices[step % len(choices)])
        losses.append(report.loss)
        if exe.rank == 0:
            print(f"step {report.step}  loss {report.loss:.4f}  {report.strategy}", flush=True)
    exe.close()
    return losses


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    if "WORLD_SIZE" in os.environ:
        train(prepare(), count)
    else:
        hg.launch(train, RANKS, count, prepare=prepare)
