"""Modules drawn from a grammar of code that people write in their models, and that a trace may lose.

A case is a function of its seed alone. Each is a small model of two blocks whose blocks, ends and parameters are drawn
from lists of habits: right ones, and ones that hydragraph must refuse. The result must be either the gradients of one
device, or `Unsupported`; `outcome` returns which, and any other result is a finding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import hydragraph as hg
from tests import reference
from tests.models import sequences

WIDTH, HEADS, VOCAB = 16, 2, 29


class Reversed(torch.autograd.Function):
    """Turn a gradient round."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return -gradient


class _Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)


# Operations of a block on its hidden state [1, T, W] besides attention and MLP.
HABITS: dict[str, Callable[[Block, Tensor], Tensor]] = {}


def _habit(function: Callable[[Block, Tensor], Tensor]) -> Callable[[Block, Tensor], Tensor]:
    HABITS[function.__name__.lstrip("_")] = function
    return function


class Block(nn.Module):
    """A pre-norm block of the user's own."""

    def __init__(self, index: int, habits: Sequence[str]) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.9))
        self.register_buffer("seen", torch.zeros(()))
        self.index, self._depth, self.habits = index, 1.0 + index, tuple(habits)
        self.calls = 0

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[1, T, W] -> [1, T, W]."""
        q, k, v = (x.reshape(-1, HEADS, WIDTH // HEADS) for x in self.qkv(self.norm(hidden)).chunk(3, -1))
        hidden = hidden + self.out(hg.varlen_attention(q, k, v, cu_seqlens).reshape(1, -1, WIDTH))
        x = F.gelu(self.up(self.second(hidden)))
        for name in self.habits:
            hidden = HABITS[name](self, hidden)
        return hidden + self.down(x)


@_habit
def _scaled_by_a_buffer(block: Block, x: Tensor) -> Tensor:
    return x * block.scale.to(x.dtype)


@_habit
def _scaled_by_a_private_attribute(block: Block, x: Tensor) -> Tensor:
    return x * block._depth


@_habit
def _scaled_by_its_index(block: Block, x: Tensor) -> Tensor:
    return x * (0.5 + 0.25 * block.index)


@_habit
def _detached(block: Block, x: Tensor) -> Tensor:
    return x + 0.1 * F.silu(x).detach()


@_habit
def _no_grad(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = x.norm(dim=-1, keepdim=True)
    return x / (1 + size)


@_habit
def _normalised_features(block: Block, x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) + x.std(-1, keepdim=True)


@_habit
def _second_use_of_a_weight(block: Block, x: Tensor) -> Tensor:
    return x * (1 + block.up.weight.mean()) + block.down.weight.norm() * 0.01


@_habit
def _second_use_of_a_bias(block: Block, x: Tensor) -> Tensor:
    return x * (1 + block.up.bias.sum())


@_habit
def _weight_used_twice(block: Block, x: Tensor) -> Tensor:
    return x + block.out(F.relu(block.out(x)))


@_habit
def _in_place(block: Block, x: Tensor) -> Tensor:
    return x.clone().mul_(block.gain).add_(0.1)


@_habit
def _in_place_beside_no_grad(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = x.norm(dim=-1, keepdim=True).add_(1)
    return x.clone().mul_(block.gain).add_(0.1) / size


@_habit
def _view_written(block: Block, x: Tensor) -> Tensor:
    y = x.clone()
    y[..., : WIDTH // 2] *= block.gain[: WIDTH // 2]
    return y


@_habit
def _straight_through(block: Block, x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


@_habit
def _through_double(block: Block, x: Tensor) -> Tensor:
    return (x.double() * 1.1).to(x.dtype)


@_habit
def _masked_fill(block: Block, x: Tensor) -> Tensor:
    return x.masked_fill(x > 3, 0.5)


@_habit
def _sorted_features(block: Block, x: Tensor) -> Tensor:
    return x + 0.1 * x.sort(dim=-1).values


@_habit
def _mean_over_tokens(block: Block, x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


@_habit
def _norm_over_everything(block: Block, x: Tensor) -> Tensor:
    return x / x.norm()


@_habit
def _sorted_tokens(block: Block, x: Tensor) -> Tensor:
    return x + x.sort(dim=1).values


@_habit
def _divided_by_the_tokens(block: Block, x: Tensor) -> Tensor:
    return x * (1 / x.shape[1])


@_habit
def _first_token(block: Block, x: Tensor) -> Tensor:
    return x + x[:, :1]


@_habit
def _shifted(block: Block, x: Tensor) -> Tensor:
    return x + torch.cat([x[:, 1:], x[:, :1]], 1)


@_habit
def _running_sum(block: Block, x: Tensor) -> Tensor:
    return x + x.cumsum(1)


@_habit
def _products_of_tokens(block: Block, x: Tensor) -> Tensor:
    return x + torch.einsum("bti,bsi->bts", x, x) @ x


@_habit
def _reversed_gradient(block: Block, x: Tensor) -> Tensor:
    return Reversed.apply(x)


@_habit
def _written_through_detach(block: Block, x: Tensor) -> Tensor:
    y = x * block.gain
    y.detach().mul_(1.5)
    return y * y


@_habit
def _written_without_gradient(block: Block, x: Tensor) -> Tensor:
    y = x * block.gain
    with torch.no_grad():
        y.clamp_(-1, 1)
    return y * y


@_habit
def _autocast_switched_on(block: Block, x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", True)
    x = x + block.down(block.up(x))
    torch.set_autocast_enabled("cpu", False)
    return x


@_habit
def _buffer_written(block: Block, x: Tensor) -> Tensor:
    block.seen += 1
    return x * block.seen


@_habit
def _buffer_assigned(block: Block, x: Tensor) -> Tensor:
    block.seen = block.seen + 1
    return x * block.seen


@_habit
def _python_state(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return x * block.calls


@_habit
def _noise(block: Block, x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x)


@_habit
def _gradient_hook(block: Block, x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda gradient: 2 * gradient)
    return x


# Changes to a model after it is built.
def _frozen_embedding(model: Model) -> None:
    model.embed.weight.requires_grad_(False)


def _frozen_block(model: Model) -> None:
    model.layers[0].requires_grad_(False)


def _tied(model: Model) -> None:
    model.head.weight = model.embed.weight


def _parametrised(model: Model) -> None:
    parametrize.register_parametrization(model.layers[1].down, "weight", _Positive())  # pyrefly: ignore[bad-argument-type]


def _weight_norm(model: Model) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.layers[0].up)  # pyrefly: ignore[bad-argument-type]


def _forward_hook(model: Model) -> None:
    model.layers[1].up.register_forward_hook(lambda module, args, out: out * 2)


def _instance_forward(model: Model) -> None:
    block = model.layers[1]
    block.forward = lambda hidden, cu: Block.forward(block, hidden * 1.5, cu)  # pyrefly: ignore[bad-argument-type]


def _unused_parameter(model: Model) -> None:
    model.extra = nn.Parameter(torch.ones(3))


def _other_attribute(model: Model) -> None:
    model.layers[1]._depth = 3.0  # pyrefly: ignore[bad-argument-type]


CHANGES: dict[str, Callable[[Model], None]] = {
    change.__name__.lstrip("_"): change
    for change in (
        *(_frozen_embedding, _frozen_block, _tied, _parametrised, _weight_norm, _forward_hook, _instance_forward),
        *(_unused_parameter, _other_attribute),
    )
}


class Model(nn.Module):
    """Embedding, positions, two blocks and a head."""

    def __init__(self, habits: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([Block(i, each) for i, each in enumerate(habits)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[1, T] -> logits [1, T, V]."""
        hidden = self.embed(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, cu_seqlens)
        return self.head(hidden)


def alone(model: Model, data: Sequence[Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of plain PyTorch, one sequence at a time.

    This runs the model itself, not a copy: a function that holds one of its blocks would still use the original.
    """
    loss = torch.zeros(())
    targets = sum(len(ids) - 1 for ids in data)
    for ids in data:
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
        logits = model(ids[None], torch.arange(len(ids))[None], bounds)[0]
        loss = loss + F.cross_entropy(logits[:-1], ids[1:], reduction="sum") / targets
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class ModuleCase:
    """Habits and changes of one model."""

    seed: int
    habits: tuple[tuple[str, ...], ...]
    changes: tuple[str, ...]

    def build(self) -> Model:
        """Build it; weights depend on the seed alone."""
        torch.manual_seed(self.seed)
        model = Model(self.habits)
        for name in self.changes:
            CHANGES[name](model)
        return model


def draw(seed: int) -> ModuleCase:
    """Draw a case: often the same habits in both blocks, seldom more than two, and at most two changes."""
    random_ = random.Random(seed)
    first = tuple(random_.sample(sorted(HABITS), random_.choice([0, 1, 1, 2])))
    second = first if random_.random() < 0.6 else tuple(random_.sample(sorted(HABITS), random_.choice([0, 1])))
    return ModuleCase(seed, (first, second), tuple(random_.sample(sorted(CHANGES), random_.choice([0, 0, 1, 1, 2]))))


def outcome(case: ModuleCase) -> str:
    """Return "right", "refused: ..." or "WRONG: ..."; any other error is wrong too."""
    data = sequences([7, 12, 3, 9], vocab=VOCAB, seed=case.seed)
    try:
        model = case.build()
        strategy = hg.Strategy.parse("<tp1,pp1>", layers=2)
        exe = hg.compile(model, strategy, lambda named: torch.optim.SGD(named, lr=0.0), device="cpu")
        loss, gradients = exe.step(data).loss, exe.gradients(data)
        exe.close()
    except hg.Unsupported as refused:
        return f"refused: {refused}"
    except Exception as error:
        return f"WRONG: {case}: {type(error).__name__}: {error}"
    expected_loss, expected = alone(case.build(), data)
    if abs(loss / expected_loss - 1) > 1e-5:
        return f"WRONG: {case}: loss {loss} for {expected_loss}"
    if gradients.keys() != expected.keys():
        return f"WRONG: {case}: gradients of {sorted(gradients.keys() ^ expected.keys())}"
    name, ratio = reference.worst(gradients, expected)
    return "right" if ratio <= 1 else f"WRONG: {case}: the gradient of {name} by {ratio:.1f} times the tolerance"
