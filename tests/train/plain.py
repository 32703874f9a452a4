"""A run's executor in plain PyTorch, on one device: what the loop is tested with, apart from compiling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.checkpoint.manifest import Damaged
from hydragraph.cost.trace_file import TraceEvent
from hydragraph.engine.candidate_strategies import Planning
from hydragraph.errors import Stopped
from hydragraph.runtime.instruction_trace import ExposedSeconds
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.strategy import Strategy
from hydragraph.train.step_metrics import Metrics


@dataclass(frozen=True)
class PlainReport:
    """As the loop reads it."""

    loss: float
    tokens: int
    grad_norm: float
    strategy: str
    sequences: int
    seconds: float = 0.5
    micro_batches: tuple[int, ...] = (1,)
    padding: int = 0
    planning_s: float = 0.001
    planning_hidden_s: float = 0.0
    preparing_s: float = 0.0
    expected_s: float = 0.0
    exposed: ExposedSeconds = field(default_factory=ExposedSeconds)
    step: int = 0
    assignment: Assignment = field(default_factory=lambda: Assignment(()))


class PlainExecutor:
    """Trains the model itself; `fail_at` makes the loss of that step infinite."""

    def __init__(self, model: Any, optimizer: Callable[..., Any], fail_at: int | None = None) -> None:
        self.model = model
        self.spans: list[TraceEvent] | None = None
        self.decision = ""
        self.planning = Planning()
        self.announced: list[list[Tensor]] = []
        self.optimizer: torch.optim.Optimizer = optimizer(list(model.named_parameters()))
        self.steps, self.fail_at = 0, fail_at
        self.stopping = 0
        self.listens: Callable[[], int] | None = None
        self.promised: Sequence[Tensor] = ()

    def step(self, sequences: Sequence[Tensor], strategy: Strategy | None = None) -> PlainReport:
        if self.stopping:
            raise Stopped(self.stopping)
        self.steps += 1
        if self.steps == self.fail_at:
            raise FloatingPointError("the loss is inf")
        self.optimizer.zero_grad()
        loss, tokens = self._loss(sequences)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.step()
        assignment = Assignment((), tuple(map(len, sequences)))
        return PlainReport(loss.item(), tokens, norm.item(), str(strategy), len(sequences), assignment=assignment)

    def promise(self, sequences: Sequence[Tensor], strategy: Strategy | None = None) -> None:
        self.promised = sequences

    def announce(self, sequences: Sequence[Tensor]) -> None:
        self.announced.append(list(sequences))

    @torch.no_grad()
    def evaluate(self, sequences: Sequence[Tensor], strategy: Strategy | None = None) -> PlainReport:
        loss, tokens = self._loss(sequences)
        return PlainReport(loss.item(), tokens, 0.0, str(strategy), len(sequences))

    def gradients(self, sequences: Sequence[Tensor], strategy: Strategy | None = None) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        self._loss(sequences)[0].backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def full_state_dict(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def save(self, path: Path, extra: dict[str, Any] | None = None) -> None:
        path.mkdir(parents=True)
        torch.save((self.model.state_dict(), self.optimizer.state_dict(), extra), path / "state.pt")
        (path / "complete.json").write_text("{}")  # what `runtime.checkpoint` knows a checkpoint by

    def load(self, path: Path) -> dict[str, Any]:
        if (path / "damaged").exists():
            raise Damaged(f"checkpoint {path}: state.pt is corrupt")
        model, optimizer, extra = torch.load(path / "state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        return dict(extra)

    def close(self) -> None:
        pass

    def _loss(self, sequences: Sequence[Tensor]) -> tuple[Tensor, int]:
        losses = [
            nn.functional.cross_entropy(self.model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum")
            for ids in sequences
        ]
        tokens = sum(len(ids) - 1 for ids in sequences)
        return torch.stack(losses).sum() / tokens, tokens


def compile_plain(model: nn.Module, strategy: Strategy, *, optimizer: Callable[..., Any], **_: object) -> PlainExecutor:
    """Stand in for `hydragraph.compile`."""
    return PlainExecutor(model, optimizer)


class Watched:
    """A watcher that records its messages."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[Metrics] = []
        self.prepared: set[str] = set()
        self.done = -1

    def preparing(self, what: str, documents: int, part: float) -> None:
        self.prepared.add(what)

    def started(self, done: int, steps: int) -> None:
        self.done = done

    def stepped(self, metrics: Metrics) -> None:
        self.steps.append(metrics)

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def settings(folder: Path) -> dict[str, Any]:
    """Return the YAML of a tiny run on a corpus that is written to the folder."""
    texts = folder / "texts"
    if not texts.exists():  # rewriting would change the modification times, which the cache uses
        texts.mkdir()
        for i in range(12):
            (texts / f"{i}.txt").write_text(" ".join(f"{'abc'[j % 3]}{(i * j) % 7}" for j in range(40)))
    return {
        "model": {
            "architecture": "LlamaForCausalLM",
            "config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
            },
        },
        "data": {
            "paths": [str(texts)],
            "vocab_size": 300,
            "tokens_per_step": 96,
            "max_length": 32,
            "heldout": 0.2,
        },
        "strategies": ["<tp1,pp1>", "<tp1,pp1> gpipe"],
        "steps": 6,
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup": 2},
        "device": "cpu",
        "evaluate_every": 3,
        "checkpoint_every": 2,
        "output": str(folder / "run"),
    }
