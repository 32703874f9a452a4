"""Random models, strategies, lengths and dtypes against one device: python -m tests.fuzz --count 1000 --seed 7

With --modules: custom modules, drawn from a grammar of right and wrong habits; each must give right gradients or be
refused.
With --losses: losses, in the same way.
With --uses: optimizers, forms of data, and what users do between steps; each must be followed or refused.

A case is a function of its seed alone, so that one that fails can be run by itself. Cases share launches, because
capturing a model takes seconds: each launch draws one model and runs several cases with it.
"""

from __future__ import annotations

import argparse
import copy
import random
from dataclasses import dataclass
from functools import partial

import torch
from rich.progress import track
from torch import Tensor, nn

import hydragraph as hg
from tests import loss_cases, module_cases, reference, use_cases
from tests.models import gpt2, llama, mixtral, sequences
from tests.ready import Ready

PER_LAUNCH = 8
RANKS = 4
# Relative to the norm of all gradients: bfloat16 keeps 8 bits, and a backward pass accumulates rounding errors.
BFLOAT16_GRADIENTS, BFLOAT16_LOSS = 3e-2, 1e-2


@dataclass(frozen=True)
class ModelCase:
    """A model's kind and sizes."""

    kind: str
    layers: int
    heads: int
    kv: int
    tied: bool
    width: int
    vocab: int
    dtype: torch.dtype

    def build(self) -> nn.Module:
        """Build it; its weights depend on the sizes alone."""
        if self.kind == "gpt2":
            return gpt2(layers=self.layers, heads=self.heads, vocab=self.vocab)
        if self.kind == "mixtral":
            sizes = {
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv,
            }
            # PyTorch's grouped products take rows of whole 16 bytes.
            return mixtral(self.width // 4 * 4, hidden_size=16 * self.heads, vocab_size=self.vocab, **sizes)
        return llama(self.layers, self.heads, self.kv, self.tied, self.width, self.vocab)


@dataclass(frozen=True)
class Case:
    """One comparison: a strategy and the lengths of one mini-batch."""

    seed: int
    strategy: str
    lengths: tuple[int, ...]

    def data(self) -> list[Tensor]:
        """Draw the mini-batch."""
        return sequences(list(self.lengths), seed=self.seed)


def draw_model(seed: int) -> ModelCase:
    """Draw a model whose heads every degree from 1 to 4 divides, or that refuses some of them."""
    draw = random.Random(seed)
    heads = draw.choice([4, 6, 12])
    kind = draw.choice(["llama", "llama", "gpt2", "mixtral"])
    return ModelCase(
        kind,
        draw.randint(1, 4),
        heads,
        draw.choice([n for n in (1, 2, 3, 4, 6, 12) if heads % n == 0]),
        draw.random() < 0.4,
        draw.randint(60, 130),
        draw.randint(101, 140),
        # Rounding to 16 bits would choose other experts.
        torch.float32 if kind == "mixtral" else draw.choice([torch.float32, torch.float32, torch.bfloat16]),
    )


def draw_case(seed: int, model: ModelCase) -> Case:
    """Draw a strategy that fits a model, and lengths from one token to many."""
    draw = random.Random(seed)
    while True:
        strategy = (_shared if draw.random() < 0.3 else _strategy)(draw, model.layers)
        degrees = {stage.tp for p in hg.Strategy.parse(strategy, model.layers).pipelines for stage in p.stages}
        if all(model.heads % t == 0 and (model.kv % t == 0 or t % model.kv == 0) for t in degrees):
            break
    count = draw.randint(1, 9)
    lengths = tuple(max(1, int(60 * draw.random() ** 2)) for _ in range(count))
    return Case(seed, strategy, lengths if max(lengths) > 1 else (*lengths, 5))


def _strategy(draw: random.Random, layers: int) -> str:
    """Draw pipelines over shuffled ranks: any degree, depth, split of the layers, flags, idle ranks, schedule.

    A pipeline may return to its ranks.
    """
    left = draw.sample(range(RANKS), draw.randint(1, RANKS))
    pipelines: list[list[list[int]]] = [[]]
    while left:
        tp = draw.randint(1, len(left))
        if len(pipelines[-1]) == layers or (pipelines[-1] and draw.random() < 0.5):
            pipelines.append([])
        pipelines[-1].append(left[:tp])
        left = left[tp:]
    texts = []
    for groups in pipelines:
        of_group = {str(group): draw.choice(["", "s", "r", "sr", "r0.5", "sr0.25", "p", "rp"]) for group in groups}
        stages = list(of_group)
        while len(of_group) > 1 and len(stages) < layers and draw.random() < 0.5:  # interleaved stages
            stages.append(draw.choice([group for group in of_group if group != stages[-1]]))
        cuts = sorted(draw.sample(range(1, layers), len(stages) - 1))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
        parts = (f"{s}x{n}{of_group[s]}".replace(" ", "") for s, n in zip(stages, counts, strict=True))
        texts.append("<" + ",".join(parts) + ">")
    return " + ".join(texts) + draw.choice(["", " gpipe", " zb-h1"])


def _shared(draw: random.Random, layers: int) -> str:
    """Draw pipelines that may share stages: for each run of layers every one takes one of the few groups of ranks."""
    left = draw.sample(range(RANKS), RANKS)
    cuts = sorted(draw.sample(range(1, layers), draw.randint(0, min(layers, 3) - 1)))
    runs = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    choices: list[list[str]] = []
    for at, count in enumerate(runs):
        groups: list[str] = []
        while not groups or (len(groups) < 3 and draw.random() < 0.6):
            spare = len(left) - (len(runs) - 1 - at)  # every run of layers gets a rank
            if not spare:
                break
            tp = draw.randint(1, min(2, spare))
            groups.append(f"{left[:tp]}x{count}{draw.choice(['', 's', 'r', 'sr'])}".replace(" ", ""))
            left = left[tp:]
        choices.append(groups)
    pipelines = dict.fromkeys("<" + ",".join(map(draw.choice, choices)) + ">" for _ in range(4))
    return " + ".join(pipelines) + draw.choice(["", " gpipe"])


Found = tuple[float, dict[str, Tensor]]


def ready(model: ModelCase, cases: list[Case]) -> Ready:
    """Capture a model and compile it for the strategies of its cases."""
    return Ready.of(model.build(), [case.strategy for case in cases], model.dtype)


def compute(prepared: Ready, cases: list[Case]) -> list[Found]:
    """Return every case's loss and gradients; on each rank."""
    layers = prepared.variants.program.layers
    exe = prepared.executable(hg.Strategy.parse(cases[0].strategy, layers))
    found = []
    for case in cases:
        strategy = hg.Strategy.parse(case.strategy, layers)
        found.append((exe.evaluate(case.data(), strategy).loss, exe.gradients(case.data(), strategy)))
    exe.close()
    return found


def differences(model: ModelCase, cases: list[Case], ranks: int = RANKS) -> list[str]:
    """Run cases on gloo processes and describe those that one device contradicts."""
    found = hg.launch(compute, ranks, cases, prepare=partial(ready, model, cases))[0]
    built, wrong = model.build(), []
    for case, (loss, gradients) in zip(cases, found, strict=True):
        wanted = reference.train(copy.deepcopy(built), [case.data()], lambda p: torch.optim.SGD(p, lr=0.0))
        error = abs(loss / wanted.losses[0] - 1)
        if model.dtype == torch.float32:
            name, ratio = reference.worst(gradients, wanted.gradients[0])
            allowed = 1e-5
        else:
            name, ratio = "all gradients", _distance(gradients, wanted.gradients[0]) / BFLOAT16_GRADIENTS
            allowed = BFLOAT16_LOSS
        if error > allowed or not ratio <= 1:
            wrong.append(f"{model} {case}: loss off by {error:.1e}, {name} by {ratio:.2f} times the tolerance")
    return wrong


def _distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    off = torch.stack([(found[n] - g).norm() for n, g in wanted.items()]).norm()
    return float(off / torch.stack([g.norm() for g in wanted.values()]).norm())


def launch_of(seed: int, count: int = PER_LAUNCH) -> tuple[ModelCase, list[Case]]:
    """Return the model and the cases of one launch."""
    model = draw_model(seed)
    return model, [draw_case(seed * 1000 + i, model) for i in range(count)]


def module_outcome(seed: int) -> str:
    """Return the outcome of a drawn module."""
    return module_cases.outcome(module_cases.draw(seed))


def loss_outcome(seed: int) -> str:
    """Return the outcome of a drawn loss."""
    return loss_cases.outcome(loss_cases.draw(seed))


def use_outcome(seed: int) -> str:
    """Return the outcome of drawn uses of an executable."""
    return use_cases.outcome(use_cases.draw(seed))


def main() -> None:
    """Run cases and print those that fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first launch")
    parser.add_argument("--modules", action="store_true", help="custom modules on one rank; see module_cases.py")
    parser.add_argument("--losses", action="store_true", help="losses on one or two ranks; see loss_cases.py")
    parser.add_argument("--uses", action="store_true", help="uses of an executable; see use_cases.py")
    chosen = parser.parse_args()
    wrong: list[str] = []
    grammars = {"modules": module_outcome, "losses": loss_outcome, "uses": use_outcome}
    name = next((name for name in grammars if getattr(chosen, name)), None)
    if name is not None:
        found = [grammars[name](chosen.seed + i) for i in track(range(chosen.count), name)]
        wrong = [each for each in found if each.startswith("WRONG")]
        refused = sum(each.startswith("refused") for each in found)
        print(*wrong, f"{found.count('right')} right, {refused} refused, {len(wrong)} wrong", sep="\n")
        raise SystemExit(bool(wrong))
    for seed in track(range(chosen.seed, chosen.seed - (-chosen.count // PER_LAUNCH)), "launches"):
        wrong += differences(*launch_of(seed))
    print(*wrong, f"{len(wrong)} of {chosen.count} cases differ", sep="\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
