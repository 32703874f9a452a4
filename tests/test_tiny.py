"""The whole product on a page: train a tiny Llama on two processes under two strategies, as one device would.

Read it from top to bottom. One process trains the model in plain PyTorch. Then two processes train the same model,
by turns as two copies that share the sequences and as one copy whose matrices are cut in two, with a checkpoint in
between. Losses and weights agree.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg
from tests.thorough import thorough

COPIES = "<tp1,pp1> + <tp1,pp1>"  # two pipelines of one stage on one device each: data parallelism
CUT = "<tp2,pp1>"  # one pipeline of one stage, whose matrices two devices share: tensor parallelism

# A mini-batch is a list of sequences of any lengths, the same on every rank; here each step has its own.
STEPS = [[torch.arange(first, first + length) % 50 for length in (9, 4, 12)] for first in range(4)]


def tiny() -> nn.Module:
    """Return the model: one layer, unmodified, with the same weights wherever it is built."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def on_one_device() -> tuple[list[float], dict[str, Tensor]]:
    """Train as anybody would: every sequence by itself, the loss a mean over all predicted tokens of the step."""
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for sequences in STEPS:
        targets = sum(len(ids) - 1 for ids in sequences)
        scores = [model(input_ids=ids[None]).logits[0, :-1] for ids in sequences]
        loss = sum((F.cross_entropy(s, ids[1:], reduction="sum") for s, ids in zip(scores, sequences, strict=True)))
        mean = torch.as_tensor(loss) / targets
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return losses, model.state_dict()


def on_a_rank(checkpoint: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Train two steps, one under each strategy, save, and continue from the checkpoint; every rank runs this."""
    strategies = [hg.Strategy.parse(text, layers=1) for text in (COPIES, CUT)]
    program = hg.capture(tiny())  # traced once; both executables below run it

    first = hg.compile(tiny(), strategies, optimizer=adamw, device="cpu", program=program)
    losses = [first.step(STEPS[i], strategies[i]).loss for i in range(2)]
    first.save(checkpoint)

    second = hg.compile(tiny(), strategies, optimizer=adamw, device="cpu", program=program)
    second.load(checkpoint)  # any number of ranks could; its steps take the strategies in the other order
    losses += [second.step(STEPS[2 + i], strategies[1 - i]).loss for i in range(2)]
    weights = second.full_state_dict()  # whole on rank 0, nothing elsewhere
    for executable in (first, second):
        executable.close()
    return losses, weights


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the optimizer of a rank's own part of the weights."""
    return torch.optim.AdamW(named, lr=1e-2)


@thorough
def test_two_processes_train_as_one_device_does(tmp_path: Path) -> None:
    expected_losses, expected_weights = on_one_device()
    (losses, weights), (other_losses, _) = hg.launch(on_a_rank, 2, tmp_path / "checkpoint")
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=0)
    assert other_losses == losses, "every rank sees the same loss"
    assert weights.keys() == expected_weights.keys()
    for name, expected in expected_weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)
