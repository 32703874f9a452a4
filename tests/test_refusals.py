"""What a call refuses breaks nothing: after any number of refusals, on all ranks or on one, steps are exact as ever."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from tests import reference
from tests.models import sequences
from tests.ready import Ready, small_llama

RANKS = 3
STRATEGY = "<[0,1]x1s,[2]x1>"
OTHER = "<[2]x1,[1,0]x1>"
LIMIT = timedelta(seconds=200)  # against a hang

ids = torch.tensor([1, 2, 3])


def broken() -> Iterator[Tensor]:
    """Yield one sequence, and fail as somebody's own data may."""
    yield ids
    raise OSError("no such shard")


# Invalid mini-batches, and their errors.
DATA: dict[str, tuple[Callable[[], Any], str]] = {
    "an id too large": (lambda: [ids, ids * 1000], "sequence 1: input_ids is 1000 at position 0"),
    "a negative id": (lambda: [-ids], "sequence 0: input_ids is -1 at position 0"),
    "a label too large": (lambda: [{"input_ids": ids, "labels": ids + 99}], "labels is 101 at position 1, outside"),
    "labels of another length": (lambda: [{"input_ids": ids, "labels": ids[:2]}], r"labels is torch.int64 \[2\]; pass"),
    "labels twice": (
        lambda: [{"input_ids": ids, "labels": ids, "shift_labels": ids}],
        "both labels and shift_labels; pass",
    ),
    "fractions": (lambda: [ids.float()], r"input_ids is torch.float32 \[3\]; pass"),
    "truths": (lambda: [ids > 1], "input_ids is torch.bool"),
    "one number": (lambda: [ids[0]], "input_ids is one number, 1; pass"),
    "no values": (lambda: [ids.to("meta")], "input_ids is a tensor on the meta device"),
    "a sparse tensor": (lambda: [ids.to_sparse()], "input_ids is a tensor of layout torch.sparse_coo"),
    "fractions of NumPy": (lambda: [np.ones(3)], r"input_ids is torch.float64 \[3\]; pass"),
    "a number beyond 64 bits": (lambda: [[1, 2**70]], "which does not fit into 64 bits"),
    "an unknown field": (lambda: [{"input_ids": ids, "weight": ids}], r"unknown fields \['weight'\]; pass"),
    "no ids": (lambda: [{"labels": ids}], "no input_ids; pass"),
    "padding on the left": (lambda: [{"input_ids": ids, "attention_mask": ids - 1}], "ones followed by zeros; pad"),
    "unequal rows": (lambda: {"input_ids": [[1], [2]], "attention_mask": [[1]]}, "attention_mask has 1 rows"),
    "no target": (lambda: [ids[:1], ids[:0]], "no target token"),
    "too long": (lambda: [torch.zeros(9000, dtype=torch.int64)], "sequence 0 has 9000 tokens, but .* 8192 positions"),
    "nothing": (list, "no target token"),
    "None": (lambda: None, "the mini-batch is None"),
    "text": (lambda: "text", r"input_ids is str \('t'\)"),
    "data that fail": (broken, "no such shard"),
}
# The same of strategies.
STRATEGIES: dict[str, tuple[Any, str]] = {
    "no strategy": ("<tp1,pq>", "expected 'pp'"),
    "too many ranks": ("<[0,1,2,3]x2>", "no rank 3, only ranks 0 to 2"),
    "too many layers": ("<tp1,pp3>", "3 stages for 2 layers"),
    "another model's": (hg.Strategy.parse("<tp1,pp2>", layers=5), "= 5 layers, but the model has 2"),
    "a degree that divides no heads": ("<[0,1,2]x2>", "degree 3 .* does not divide 4 attention heads"),
    "a number": (5, "'strategy' is 5; pass a Strategy"),
    "a list": ([], r"'strategy' is \[\]; pass a Strategy"),
}
# Calls that are wrong in other ways; all ranks make them.
CALLS: dict[str, tuple[Callable[[Any, Path], object], str]] = {
    "an unknown option": (lambda exe, _: exe.step([ids], strategi=OTHER), "step: got an unexpected .*strategi"),
    "no mini-batch": (lambda exe, _: exe.step(), "step: missing a required argument: 'sequences'"),
    "no checkpoint": (lambda exe, folder: exe.load(folder / "none"), "has no complete.json"),
    "a path that is none": (lambda exe, _: exe.save(5), "save: 'path' is 5; give a path"),
    "extra data without names": (
        lambda exe, folder: exe.save(folder / "c", extra=[1]),
        r"'extra' is \[1\]; give a dict",
    ),
    "a place that is taken": (lambda exe, folder: exe.save(folder), "so it is not a checkpoint"),
    "no weights": (lambda exe, folder: exe.load_pretrained(folder), "has neither model.safetensors"),
    "weights in a file": (lambda exe, folder: exe.save_pretrained(folder / "other.txt"), "is a file: name a directory"),
    "nothing to merge": (lambda exe, folder: exe.save_pretrained(folder, merged=True), "merged=True without adapters"),
    "labels of an evaluation": (lambda exe, _: exe.evaluate([-ids]), "input_ids is -1"),
    "gradients of nothing": (lambda exe, _: exe.gradients([]), "no target token"),
}


def refusals() -> list[tuple[str, int | None]]:
    """Return what is tried, shuffled, each with the one rank that does so; None: all of them."""
    everywhere = [(name, None) for name in (*DATA, *STRATEGIES, *CALLS)]
    alone = [(name, i % RANKS) for i, name in enumerate((*DATA, *STRATEGIES)) if i % 4 < 2]
    return random.Random(0).sample([*everywhere, *alone], len(everywhere) + len(alone))


def batch(step: int) -> list[Tensor]:
    return sequences([9, 14, 5, 11], seed=step)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def refused(exe: hg.Executable, name: str, only: int | None, folder: Path) -> None:
    if name in CALLS:
        call, said = CALLS[name]
        with pytest.raises((ValueError, TypeError), match=said):
            call(exe, folder)
        return
    given, said = DATA.get(name) or (lambda: batch(0), STRATEGIES[name][1])
    strategy = STRATEGIES[name][0] if name in STRATEGIES else None
    if only is None:
        with pytest.raises((ValueError, OSError), match=said):
            exe.step(given(), strategy)
    else:  # all learn which rank has refused what
        with pytest.raises(ValueError, match=rf"(?s)ranks differ in .*: .*refused: .*on ranks \[{only}\]"):
            exe.step(*((given(), strategy) if exe.rank == only else (batch(0), OTHER)))


def train(ready: Ready, steps: int, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    exe = ready.executable(STRATEGY, adamw)
    tried = refusals()
    losses = []
    for step in range(steps):
        for name, only in tried[step::steps]:
            refused(exe, name, only, folder)
        losses.append(exe.step(batch(step), OTHER if step % 2 else STRATEGY).loss)
    return losses, exe.full_state_dict()


def test_refusals_between_steps_change_nothing(tmp_path: Path) -> None:
    ready, steps = small_llama(), 4
    model: nn.Module = ready.model
    (tmp_path / "other.txt").write_text("somebody's")
    wanted = reference.train(model, [batch(i) for i in range(steps)], lambda p: torch.optim.AdamW(p, lr=1e-2))
    losses, weights = hg.launch(train, RANKS, ready, steps, tmp_path, timeout=LIMIT)[0]
    assert losses == pytest.approx(wanted.losses, rel=1e-5)
    for name, value in wanted.weights.items():
        assert (weights[name] - value).norm() <= 1e-4 * value.norm() + 1e-6, name
