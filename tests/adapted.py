"""Models of which only a part is trained: frozen parts, adapters, and parameters that no loss reaches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.models import llama

LAYERS = 3


class Lora(nn.Module):
    """A frozen linear layer plus a trained product of two thin linear layers."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return self.base(x) + 2.0 * self.b(self.a(x))


class Detached(nn.Module):
    """A projection whose weights never learn, because its output is detached; one of its parameters is never used."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base, self.silent = base, nn.Linear(width, width)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., outputs]."""
        return self.base(x + 0.1 * self.silent(x).detach())


def frozen(learns: Callable[[str], bool], tied: bool = False) -> nn.Module:
    """Return a small Llama that trains only the parameters whose names `learns` accepts."""
    model = llama(layers=LAYERS, tied=tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns(name))
    return model


def hand_written_lora() -> nn.Module:
    """Return a frozen Llama with adapters on queries (cut by columns) and down projections (cut by rows)."""
    torch.manual_seed(1)
    model = frozen(lambda name: False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.down_proj = Lora(layer.self_attn.q_proj), Lora(layer.mlp.down_proj)
    return model


def unreached() -> nn.Module:
    """Return a Llama with parameters that its loss does not reach, and with unused ones."""
    torch.manual_seed(1)
    model = llama(layers=LAYERS)
    model.extra = nn.Linear(4, 4)
    for layer in model.model.layers[1:]:
        layer.self_attn.q_proj = Detached(layer.self_attn.q_proj, layer.self_attn.q_proj.in_features)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "frozen embedding": lambda: frozen(lambda name: "embed" not in name),
    "frozen tied embedding": lambda: frozen(lambda name: "embed" not in name, tied=True),
    "frozen lower layers": lambda: frozen(lambda name: "layers.2" in name or "norm" in name.split(".")[1]),
    "norms alone": lambda: frozen(lambda name: "norm" in name),
    "hand-written LoRA": hand_written_lora,
    "unreached and unused": unreached,
}
