"""Right models that the check must not refuse: python -m tests.right --count 1000 --seed 7

Custom modules with right habits, mixtures of experts whose routers nearly tie, and tiny models of transformers,
in fp32 and bf16: each is captured and compared with itself, every block. A case is a function of its seed alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.frontend.capture import capture
from hydragraph.frontend.check.narrow_model import CheckedModel
from hydragraph.frontend.check.numeric_check import REMEDY, check
from tests.frontend.families import build
from tests.module_cases import CHANGES, HABITS, WIDTH, Model, ModuleCase

RIGHT_HABITS = (
    *("scaled_by_a_buffer", "scaled_by_a_private_attribute", "scaled_by_its_index", "detached", "no_grad"),
    *("normalised_features", "second_use_of_a_weight", "second_use_of_a_bias", "weight_used_twice", "in_place"),
    *(
        "through_double",
        "masked_fill",
        "sorted_features",
        "in_place_beside_no_grad",
        "view_written",
        "straight_through",
    ),
)
RIGHT_CHANGES = (
    *("frozen_embedding", "frozen_block", "tied", "parametrised", "weight_norm", "unused_parameter"),
    "other_attribute",
)
FAMILIES = ("llama", "gpt2", "qwen3", "gemma", "phi3", "mixtral", "qwen2_moe", "olmoe", "granitemoe", "bert", "cohere")
EXPERTS = 4


class Routed(nn.Module):
    """Custom experts: every token gets those with the best scores of its router, and many routers score all alike."""

    def __init__(self, spread: float, k: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH)
        nn.init.normal_(self.router.weight, std=spread)
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, W] -> [1, T, W]."""
        weights, ids = self.router(x).softmax(-1).topk(self.k, -1)
        gates = torch.zeros_like(x[..., :EXPERTS]).scatter(-1, ids, weights / weights.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("btw,ewh->bteh", x, self.up))
        return torch.einsum("bteh,ehw,bte->btw", hidden, self.down, gates)


@dataclass(frozen=True)
class RightCase:
    """A model that is right.

    Attributes:
        family: of transformers; "": a custom module.
        spread: deviation of its routers' weights; 0: no experts.
    """

    seed: int
    family: str
    module: ModuleCase
    spread: float
    dtype: torch.dtype

    def build(self) -> nn.Module:
        """Build it."""
        if self.family:
            model = build(self.family)[0]
            for name, parameter in model.named_parameters():
                if self.spread and ("router" in name or ".gate.weight" in name):
                    nn.init.normal_(parameter, std=self.spread)
            return model
        own = self.module.build()
        return self._with_experts(own) if self.spread else own

    def _with_experts(self, model: Model) -> Model:
        for block in model.layers:  # no habit asks for what is in this norm
            block.second = nn.Sequential(block.second, Routed(self.spread, 1 + self.seed % 2))  # pyrefly: ignore[bad-argument-type]
        return model


def draw(seed: int) -> RightCase:
    """Draw a case."""
    random_ = random.Random(seed)
    first, second = (tuple(random_.sample(RIGHT_HABITS, random_.choice([0, 1, 2, 3]))) for _ in range(2))
    habits = (first, first if random_.random() < 0.5 else second)
    spread = random_.choice([0.0, 1e-8, 1e-4, 1.0])
    module = ModuleCase(seed, habits, tuple(random_.sample(RIGHT_CHANGES, random_.choice([0, 0, 1, 2]))))
    family = random_.choice(FAMILIES) if random_.random() < 0.2 else ""
    return RightCase(seed, family, module, spread, random_.choice([torch.float32, torch.bfloat16]))


def outcome(case: RightCase) -> str:
    """Return "accepted", "refused by name: ..." (before any numbers) or "REFUSED: ..."; any other error is one too."""
    try:
        model = case.build()
        found = check(CheckedModel(model, capture(model, case.dtype)), "full")
    except hg.Unsupported as error:
        return f"REFUSED: {case}: {error}" if REMEDY in str(error) else f"refused by name: {error}"
    except Exception as error:
        return f"REFUSED: {case}: {type(error).__name__}: {error}"
    return f"REFUSED: {case}: {found}" if found.problem else "accepted"


def main() -> None:
    """Run cases and print those that are refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each of one thread with OMP_NUM_THREADS=1")
    chosen = parser.parse_args()
    cases = [draw(chosen.seed + i) for i in range(chosen.count)]
    found: Counter[str] = Counter()
    with multiprocessing.get_context("spawn").Pool(chosen.jobs) as pool:
        for i, each in enumerate(pool.imap(outcome, cases), 1):
            found[each] += 1
            if each.startswith("REFUSED"):
                print(each, flush=True)
            if i % 50 == 0 or i == len(cases):
                print(f"{i} models: {found['accepted']} accepted", flush=True)
    named = Counter({each: count for each, count in found.items() if each.startswith("refused")})
    print(*(f"{count} {why}" for why, count in named.most_common()), sep="\n")
    print(f"{found['accepted']} accepted, {named.total()} refused by name")
    raise SystemExit(any(each.startswith("REFUSED") for each in found))


assert set(RIGHT_HABITS) <= HABITS.keys()
assert set(RIGHT_CHANGES) <= CHANGES.keys()

if __name__ == "__main__":
    main()
