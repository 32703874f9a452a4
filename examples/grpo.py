"""Learn from rewards by GRPO (Shao et al., 2024): transformers generates answers, and hydragraph trains on them.

Each round draws a group of answers to every prompt, rewards them, and makes two updates on the same answers. The second
update's policy is no longer the one that drew them, so the loss compares each token's log-probability with the one
stored when it was drawn, and clips their ratio. Then `exe.weights` hands the new weights to the generating model. A
server such as vLLM takes the same names and tensors.

The task can be checked: each token of an answer is larger than the one before. Answers have 1 to 8 tokens, and any
strategy packs and splits them without changing the result.

python examples/grpo.py [ROUNDS [targets or sequences]], or under torchrun. With "targets", the default, all tokens
of a mini-batch count the same (as in DAPO, Yu et al., 2025); with "sequences", all answers do (as in GRPO's paper).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg

RANKS, VOCABULARY, END, LONGEST = 2, 16, 0, 8
PROMPTS, GROUP, UPDATES, CLIP = 6, 8, 2, 0.2


@dataclass(frozen=True, eq=False)
class Rollout:
    """A prompt, [P] ids, an answer drawn for it, [A] ids, and the answer's log-probabilities then, fp32 [A]."""

    prompt: Tensor
    answer: Tensor
    log_probabilities: Tensor

    def reward(self) -> float:
        """Return how many tokens rise above the one before, out of the most that are possible."""
        before = torch.cat([self.prompt[-1:], self.answer[:-1]])
        return float((self.answer > before).sum()) / LONGEST

    def sequence(self, advantage: float) -> dict[str, Any]:
        """Return what a step takes; the answer's tokens are the targets, and `old` is aligned with the predictions."""
        old = torch.zeros(len(self.prompt) + len(self.answer))
        old[len(self.prompt) - 1 : -1] = self.log_probabilities
        return {
            "input_ids": torch.cat([self.prompt, self.answer]),
            "labels": torch.cat([torch.full_like(self.prompt, -100), self.answer]),
            "old": old,
            "advantages": advantage,
        }


def clipped(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum over the answers' tokens of GRPO's clipped surrogate, negated."""
    ratios = (hg.token_logprobs(outputs, batch) - batch["old"][0]).exp()
    advantages = batch["advantages"][0]
    gains = torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gains.masked_fill(batch["labels"][0] == -100, 0.0).sum()


def drawn(model: LlamaForCausalLM) -> list[list[Rollout]]:
    """Draw a group of answers to each of several prompts."""
    groups = []
    for prompt in torch.randint(1, VOCABULARY // 2, (PROMPTS, 3)):
        done = model.generate(
            prompt.expand(GROUP, -1),
            attention_mask=torch.ones(GROUP, len(prompt), dtype=torch.int64),
            do_sample=True,
            top_k=0,
            max_new_tokens=LONGEST,
            eos_token_id=END,
            pad_token_id=END,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answers = done.sequences[:, len(prompt) :]
        log_p = torch.stack(done.logits, dim=1).float().log_softmax(-1).gather(-1, answers[..., None])[..., 0]
        ends = (answers == END).int().argmax(1)
        lengths = torch.where((answers == END).any(1), ends + 1, answers.shape[1])
        groups.append([Rollout(prompt, a[:n], p[:n]) for a, p, n in zip(answers, log_p, lengths, strict=True)])
    return groups


def advantages(group: list[Rollout]) -> Tensor:
    """Return each answer's reward relative to its group, in standard deviations."""
    rewards = torch.tensor([rollout.reward() for rollout in group])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def mini_batch(groups: list[list[Rollout]], divide_by: str) -> list[dict[str, Any]]:
    """Return the sequences of a step that divides the sum of the losses by all targets or by the sequences.

    For the mean over answers of each one's mean over its tokens, an answer's advantage is divided by its length: the
    clipped surrogate is proportional to it.
    """
    pairs = [pair for group in groups for pair in zip(group, advantages(group).tolist(), strict=True)]
    lengths = [len(rollout.answer) if divide_by == "sequences" else 1 for rollout, _ in pairs]
    return [rollout.sequence(each / length) for (rollout, each), length in zip(pairs, lengths, strict=True)]


def tiny() -> LlamaForCausalLM:
    """Return a model from a seed, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(rounds: int, divide_by: str = "targets") -> list[float]:
    """Train and return the mean reward of every round."""
    actor = tiny().eval()
    exe = hg.compile(
        tiny(),
        "<[0]x1,[1]x1>",
        lambda named: torch.optim.AdamW(named, lr=1e-2),
        loss=clipped,
        example={"old": torch.zeros(1, 8), "advantages": torch.ones(1, 8)},
        max_grad_norm=1.0,
    )
    rewards = []
    for number in range(1, rounds + 1):
        torch.manual_seed(number)  # every rank draws the same answers
        groups = drawn(actor)
        rewards.append(sum(r.reward() for group in groups for r in group) / (PROMPTS * GROUP))
        sequences = mini_batch(groups, divide_by)
        for _ in range(UPDATES):
            exe.step(sequences, divide_by=divide_by)
        actor.load_state_dict(dict(exe.weights(to=range(exe.ranks))))
        if exe.rank == 0:
            print(f"round {number}  mean reward {rewards[-1]:.3f}", flush=True)
    exe.close()
    return rewards


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    if "WORLD_SIZE" in os.environ:
        train(count, *sys.argv[2:])
    else:
        hg.launch(train, RANKS, count, *sys.argv[2:])
