"""What bf16 costs in loss: one model trained in fp32 and in bf16 on the same mini-batches, both sides in turn.

    python benchmarks/precision.py                     # the demo's corpus; its model where there is a GPU, a small one
                                                       # where there is none, because CPUs compute bf16 slowly
    python benchmarks/precision.py --steps 400 --hidden 288 --layers 8 --tokens 2048

Both start from the same seed and keep fp32 master weights and optimizer states; what differs is what the blocks
compute in. Losses of single steps scatter with their mini-batches, so means over 20 steps are compared. The exit code
is 1 where these means are ever further apart than the bound.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import hydragraph as hg
from hydragraph.data.mini_batches import Drawn
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import PreparedCorpus, mini_batches, open_tokens, prepare
from hydragraph.train.model import build_model
from hydragraph.train.optimizer import learning_rate, optimizer_factory

DEMO = Path(__file__).parents[1] / "examples" / "demo.yaml"
# Rounding to bf16 is a noise of 2^-9 = 0.2 % on every product, which averages out over thousands of them; a tensor
# that should have stayed in fp32 (a loss, a norm's statistics, a gradient's sum) shifts the curve by several per cent.
BOUND = 0.01
WINDOW = 20


@dataclass(frozen=True)
class Sizes:
    """What is trained: the hidden size (a multiple of 16), the layers, and the tokens of a step."""

    hidden: int
    layers: int
    tokens: int


DEVICE_SIZES = {"cpu": Sizes(144, 4, 512), "cuda": Sizes(288, 8, 2048)}  # on a GPU the demo's own


@dataclass(frozen=True)
class Curve:
    """The losses of one side, step by step, and the CPU seconds that its steps took together."""

    losses: tuple[float, ...]
    seconds: float


def configured(sizes: Sizes, steps: int, device: str) -> TrainConfig:
    """Return the demo's run in another size, on one rank."""
    changes = {
        "model.config.hidden_size": sizes.hidden,
        "model.config.intermediate_size": sizes.hidden * 8 // 3,  # as the demo's
        "model.config.num_hidden_layers": sizes.layers,
        "data.tokens_per_step": sizes.tokens,
        "strategies": ["<tp1,pp1>"],
        "ranks": 1,
        "steps": steps,
        "device": device,
    }
    return TrainConfig.load(DEMO, [f"{name}={value}" for name, value in changes.items()])


def train_both(config: TrainConfig, tokens: PreparedCorpus, progress: Callable[[int], None]) -> tuple[Curve, Curve]:
    """Train in fp32 and in bf16, a step of each in turn, on the run's own mini-batches and learning rates."""
    sides = [_compiled(config, tokens, dtype) for dtype in (torch.float32, torch.bfloat16)]
    losses: tuple[list[float], ...] = ([], [])
    seconds = [0.0, 0.0]
    for number, batch in enumerate(islice(mini_batches(config, tokens), config.steps), start=1):
        for side, exe in enumerate(sides):
            began = time.process_time()
            losses[side].append(
                _step(exe, batch, learning_rate(number, config.steps, config.optimizer.lr, config.schedule))
            )
            seconds[side] += time.process_time() - began
        progress(number)
    for exe in sides:
        exe.close()
    plain, rounded = (Curve(tuple(each), spent) for each, spent in zip(losses, seconds, strict=True))
    return plain, rounded


def _compiled(config: TrainConfig, tokens: PreparedCorpus, dtype: torch.dtype) -> hg.Executable:
    model = build_model(config.model, tokens.vocabulary, tokens.end_of_text, config.seed)
    strategy = hg.Strategy.parse(config.strategies[0], model.config.num_hidden_layers)
    factory = optimizer_factory(config.optimizer, model)
    return hg.compile(model, strategy, factory, config.max_grad_norm, dtype, config.device, check="off")


def _step(exe: hg.Executable, batch: Sequence[Drawn], lr: float) -> float:
    assert exe.optimizer is not None
    for group in exe.optimizer.param_groups:
        group["lr"] = lr
    return float(exe.step(batch).loss)


def smoothed(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return the mean of every `window` steps in a row, fewer where the whole curve is shorter."""
    width = min(window, len(losses))
    return [sum(losses[end - width : end]) / width for end in range(width, len(losses) + 1)]


def differences(plain: Curve, rounded: Curve) -> list[float]:
    """Return how far bf16's smoothed curve lies above fp32's, as a part of it."""
    return [b / a - 1 for a, b in zip(smoothed(plain.losses), smoothed(rounded.losses), strict=True)]


def table(title: str, plain: Curve, rounded: Curve) -> Table:
    """Return the smoothed curves at every 20th step."""
    shown = Table(title=title, title_justify="left")
    for heading in ("mean of steps", "fp32", "bf16", "difference"):
        shown.add_column(heading, justify="right")
    one, two, apart = smoothed(plain.losses), smoothed(rounded.losses), differences(plain, rounded)
    width = len(plain.losses) - len(one) + 1
    for i in range(0, len(one), WINDOW):
        shown.add_row(f"{i + 1}-{i + width}", f"{one[i]:.4f}", f"{two[i]:.4f}", f"{apart[i]:+.3%}")
    return shown


def main() -> None:
    """Print the curves and hold them to the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--device", choices=sorted(DEVICE_SIZES), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--bound", type=float, default=BOUND, help="largest relative difference of the smoothed losses")
    for name in ("hidden", "layers", "tokens"):
        parser.add_argument(f"--{name}", type=int)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # the products are small, and on a busy machine threads wait for one another
    console, usual = Console(width=120), DEVICE_SIZES[chosen.device]
    sizes = Sizes(chosen.hidden or usual.hidden, chosen.layers or usual.layers, chosen.tokens or usual.tokens)
    config = configured(sizes, chosen.steps, chosen.device)
    tokens = open_tokens(config, prepare(config))
    with console.status("training") as status:
        plain, rounded = train_both(config, tokens, lambda step: status.update(f"step {step} of {config.steps}"))
    where = f"hidden {sizes.hidden}, {sizes.layers} layers, {sizes.tokens} tokens, {config.device}"
    console.print(table(where, plain, rounded))
    largest = max(differences(plain, rounded), key=abs)
    console.print(f"CPU seconds of all steps: fp32 {plain.seconds:.1f}, bf16 {rounded.seconds:.1f}")
    verdict = "within" if abs(largest) <= chosen.bound else "BEYOND"
    console.print(
        f"largest difference of the smoothed losses: {largest:+.3%}, {verdict} the bound of {chosen.bound:.2%}"
    )
    sys.exit(abs(largest) > chosen.bound)


if __name__ == "__main__":
    main()
