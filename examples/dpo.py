"""Learn from preferences by DPO (Rafailov et al., 2023), on pairs of answers that may be in different micro-batches.

The loss of a pair, -log sigmoid(beta * margin), needs the log-probabilities of both answers at once, but the function
`loss=` sees only one micro-batch. The gradient of the loss is a sum over the tokens of both answers,

    -beta * sigmoid(-beta * margin) * (grad log p(chosen) - grad log p(rejected)),

in which each answer has a weight that depends only on the margin: log p(chosen) - log p(rejected), minus the same
difference under the model before training. A step therefore first scores the answers of all pairs without gradients,
and then trains on their tokens with the resulting weights, in any packing. The result is exact, and costs one
additional forward pass.

python examples/dpo.py, or under torchrun.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg

RANKS, VOCABULARY, BETA = 2, 64, 0.5


@dataclass(frozen=True, eq=False)
class Pair:
    """A prompt, [P] ids, and two answers, [A] ids, of which people preferred one."""

    prompt: Tensor
    chosen: Tensor
    rejected: Tensor


def weighted(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum over tokens of the negative log-probability times the weight of the token's answer."""
    return -(hg.token_logprobs(outputs, batch) * batch["weights"][0]).sum()


def sequence(prompt: Tensor, answer: Tensor) -> dict[str, Tensor]:
    """Return a sequence of a prompt and an answer; only the answer's tokens are targets."""
    return {"input_ids": torch.cat([prompt, answer]), "labels": torch.cat([torch.full_like(prompt, -100), answer])}


def log_ratios(exe: hg.Executable, pairs: Sequence[Pair]) -> Tensor:
    """Return each pair's log p(chosen) - log p(rejected) under the current weights."""
    answers = [sequence(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    chosen, rejected = exe.score(answers).view(-1, 2).T
    return chosen - rejected


def preferred(exe: hg.Executable, pairs: Sequence[Pair], reference: Tensor) -> float:
    """Run one step of DPO, and return the mean loss of the pairs before the step.

    Args:
        exe: compiled with the loss `weighted`.
        pairs: the mini-batch; every rank passes the same pairs.
        reference: `log_ratios` of the pairs under the model before training.
    """
    margins = BETA * (log_ratios(exe, pairs) - reference)
    weights = (BETA * torch.sigmoid(-margins)).tolist()
    exe.step(
        [
            {**sequence(pair.prompt, answer), "weights": sign * weight}
            for pair, weight in zip(pairs, weights, strict=True)
            for answer, sign in ((pair.chosen, 1.0), (pair.rejected, -1.0))
        ],
        divide_by=len(pairs),
    )
    return float(-F.logsigmoid(margins).mean())


def tiny() -> LlamaForCausalLM:
    """Return a model whose weights come from a seed, so that they are the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    return LlamaForCausalLM(config)


def drawn(count: int) -> list[Pair]:
    """Draw pairs whose preferred answer consists of small ids."""
    half = VOCABULARY // 2
    draw = torch.Generator().manual_seed(1)

    def ids(low: int, high: int) -> Tensor:
        length = int(torch.randint(3, 12, (), generator=draw))
        return torch.randint(low, high, (length,), generator=draw)

    return [Pair(ids(0, VOCABULARY), ids(0, half), ids(half, VOCABULARY)) for _ in range(count)]


def train(steps: int) -> list[float]:
    """Train and return the loss of every step."""
    exe = hg.compile(
        tiny(),
        "<[0]x1,[1]x1>",
        lambda named: torch.optim.AdamW(named, lr=3e-3),
        loss=weighted,
        example={"weights": torch.ones(1, 8)},
    )
    pairs = drawn(4)
    reference = log_ratios(exe, pairs)
    losses = []
    for step in range(1, steps + 1):
        losses.append(preferred(exe, pairs, reference))
        if exe.rank == 0:
            print(f"step {step}  loss {losses[-1]:.4f}", flush=True)
    exe.close()
    return losses


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    if "WORLD_SIZE" in os.environ:
        train(count)
    else:
        hg.launch(train, RANKS, count)
