"""Rotary frequencies that depend on the sequence length: dynamic NTK and longrope.

Capture uses the frequencies of short sequences; longer sequences are rejected (`huggingface.positions`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported

_LONG = "longrope"


def hold_frequencies(model: nn.Module) -> None:
    for module in model.modules():
        kinds = _kinds(module)
        if any(map(_changes, kinds.values())):
            steady = {layer: "default" if _changes(kind) else kind for layer, kind in kinds.items()}
            rotary: Any = module
            rotary.rope_type = steady if isinstance(rotary.rope_type, dict) else steady[""]


def short_positions(model: nn.Module) -> tuple[int, str] | None:
    """Return the maximum length for longrope's short frequencies, and its setting; None without longrope."""
    name = "original_max_position_embeddings"
    original_lengths = [
        int(most)
        for module in model.modules()
        for layer, kind in _kinds(module).items()
        if kind == _LONG and (most := _parameters(module, layer).get(name)) is not None
    ]
    if not original_lengths:
        return None
    return min(original_lengths), f"{name}: {_LONG} uses different frequencies for longer sequences"


def refuse_other_frequencies(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for layer, kind in _kinds(module).items():
            pair = [getattr(module, f"{layer}_{n}" if layer else n, None) for n in ("inv_freq", "original_inv_freq")]
            if _changes(kind) and _differ(*pair):
                what = f"a long sequence has changed the rotary frequencies ({kind})"
                raise Unsupported(what, where=name, remedy="run the model once on a short sequence, or build it again")


def _differ(now: Any, built: Any) -> bool:
    both = isinstance(now, Tensor) and isinstance(built, Tensor) and not now.is_meta and not built.is_meta
    return both and not torch.equal(now.cpu(), built.cpu())


def _changes(kind: str) -> bool:
    return "dynamic" in kind or kind == _LONG


def _kinds(module: nn.Module) -> dict[str, str]:
    rope_type = vars(module).get("rope_type")
    kinds = {"": rope_type} if isinstance(rope_type, str) else rope_type if isinstance(rope_type, dict) else {}
    return {str(layer): kind for layer, kind in kinds.items() if isinstance(kind, str)}


def _parameters(module: nn.Module, layer: str) -> dict[str, Any]:
    parameters: Any = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    return dict(parameters.get(layer) or {}) if layer else dict(parameters)
