"""Optimizer and learning rate of a run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from difflib import get_close_matches

import torch
from torch import nn

from hydragraph.kernels.adamw import AdamW
from hydragraph.runtime import supported_optimizers
from hydragraph.runtime.supported_optimizers import ELEMENTWISE
from hydragraph.train.config import OptimizerConfig, ScheduleConfig

Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def optimizer_factory(config: OptimizerConfig, model: nn.Module, device: torch.device | None = None) -> Factory:
    """Return the optimizer factory; on a GPU, `hydragraph.AdamW` replaces torch's AdamW.

    Raises:
        ValueError: torch.optim has no such class or setting.
    """
    optimizer = getattr(torch.optim, config.name, None)
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        near = {kind.__name__.lower(): kind.__name__ for kind in ELEMENTWISE}
        close = get_close_matches(config.name.lower(), near, n=1)
        hint = f"did you mean {near[close[0]]}?" if close else "use a class such as AdamW"
        raise ValueError(f"optimizer.name: torch.optim has no optimizer {config.name!r}: {hint}")
    kind: Callable[..., torch.optim.Optimizer] = optimizer
    if optimizer is torch.optim.AdamW and device is not None and device.type == "cuda":
        kind = AdamW
    settings = {name: getattr(config, name) for name in ("betas", "eps", "momentum")}
    settings = {name: value for name, value in settings.items() if value is not None}
    accepted = inspect.signature(optimizer.__init__).parameters
    for name in (*settings, *(["weight_decay"] if config.weight_decay else [])):
        if name not in accepted:
            raise ValueError(f"optimizer.{name}: {config.name} has no such setting: leave it out")
    norms = {p for m in model.modules() if "Norm" in type(m).__name__ for p in m.parameters(recurse=False)}
    # Only matrices decay, not biases and norms.
    matrices = {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and not name.endswith("bias") and parameter not in norms
    }

    def build(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for name, p in named if name in matrices], "weight_decay": config.weight_decay},
            {"params": [p for name, p in named if name not in matrices], "weight_decay": 0.0},
        ]
        return kind([group for group in groups if group["params"]], lr=config.lr, **settings)

    return build


def state_bytes(config: OptimizerConfig, dtype: torch.dtype, device: torch.device | None = None) -> int:
    """Return the bytes per element of fp32 weights and optimizer state."""
    return supported_optimizers.state_bytes(optimizer_factory(config, nn.Module(), device), ["weight"], dtype)


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate of `step`, which counts from 1."""
    warmup = schedule.warmup_of(steps)
    if step < warmup:
        return peak * step / warmup
    if schedule.decay == "constant":
        return peak
    stable = schedule.stable_until(steps)
    if step <= stable:
        return peak
    # part: finished fraction of the decay, from step `stable` (0) to the last step (1).
    part = min((step - stable) / max(steps - stable, 1), 1.0)
    heights = {"cosine": 0.5 * (1 + math.cos(math.pi * part)), "linear": 1 - part, "wsd": 1 - part}
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * heights[schedule.decay])
