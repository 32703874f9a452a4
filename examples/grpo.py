"""Learn from rewards by GRPO (Shao et al., 2024): transformers generates answers, and hydragraph trains on them.

Each round draws a group of answers to every prompt, rewards them, and makes two updates on the same answers. Before the
second update, the weights already differ from those that drew the answers, so the loss divides each token's
probability by its probability when it was drawn, and clips this ratio. Then `exe.weights` passes the new weights to the
generating model. A server such as vLLM accepts the same names and tensors.

The task is to write answers in which each token is larger than the one before. Answers have 1 to 8 tokens, and the
result does not depend on how a strategy packs and splits them.

python examples/grpo.py [ROUNDS [targets or sequences]], or under torchrun. With "targets", the default, all tokens
of a mini-batch have the same weight (as in DAPO, Yu et al., 2025); with "sequences", all answers do (as in GRPO).
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
    """A prompt, [P] ids, a drawn answer, [A] ids, and the log-probabilities of its tokens when drawn, fp32 [A]."""

    prompt: Tensor
    answer: Tensor
    log_probabilities: Tensor

    def reward(self) -> float:
        """Return the number of tokens that are larger than the token before, divided by the maximum length."""
        before = torch.cat([self.prompt[-1:], self.answer[:-1]])
        return float((self.answer > before).sum()) / LONGEST

    def sequence(self, advantage: float) -> dict[str, Any]:
        """Return a sequence for `step`; `old` is shifted to the positions that predict the answer's tokens."""
        old = torch.zeros(len(self.prompt) + len(self.answer))
        old[len(self.prompt) - 1 : -1] = self.log_probabilities
        return {
            "input_ids": torch.cat([self.prompt, self.answer]),
            "labels": torch.cat([torch.full_like(self.prompt, -100), self.answer]),
            "old": old,
            "advantages": advantage,
        }


def clipped(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return GRPO's clipped surrogate, summed over the answers' tokens and negated."""
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
    """Return each answer's reward minus the mean of its group, in standard deviations."""
    rewards = torch.tensor([rollout.reward() for rollout in group])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def mini_batch(groups: list[list[Rollout]], divide_by: str) -> list[dict[str, Any]]:
    """Return the sequences for a step with this `divide_by`.

    With "sequences", the loss is the mean over answers of the mean over an answer's tokens: the clipped surrogate is
    proportional to the advantage, so each advantage is divided by the answer's length.
    """
    pairs = [pair for group in groups for pair in zip(group, advantages(group).tolist(), strict=True)]
    lengths = [len(rollout.answer) if divide_by == "sequences" else 1 for rollout, _ in pairs]
    return [rollout.sequence(each / length) for (rollout, each), length in zip(pairs, lengths, strict=True)]


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
