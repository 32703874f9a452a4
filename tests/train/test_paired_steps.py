"""Runs with an objective train as plain PyTorch does on whole pairs, and resume where they stopped."""

from __future__ import annotations

import json
import random
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import hydragraph as hg
from hydragraph.spec.record import from_record
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import mini_batches, open_tokens, prepare
from hydragraph.train.loop import train
from hydragraph.train.model import build_model
from hydragraph.train.step_metrics import Metrics, read_metrics
from tests.thorough import only, thorough
from tests.train.plain import Watched

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
OBJECTIVES: dict[str, Any] = {
    "dpo": {"dpo": {"beta": 0.4}},
    "swapped": {"dpo": {"beta": 0.4, "label_smoothing": 0.2}},
    "simpo": {"simpo": {}},
    "orpo": {"orpo": {"weight": 0.7}},
}


def config(folder: Path, **changes: Any) -> TrainConfig:
    """A run on 24 drawn pairs, whose answers are 1 to 12 words long."""
    draw = random.Random(0)

    def words(of: str) -> str:
        return " ".join(draw.choices(of.split(), k=draw.randint(1, 12)))

    records = [
        {"prompt": words("a b c ?") + " ", "chosen": words("yes d e"), "rejected": words("no f g")} for _ in range(24)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings: dict[str, Any] = {
        "model": {"architecture": "LlamaForCausalLM", "config": {**SIZES, "max_position_embeddings": 64}},
        "data": {
            "paths": [str(folder / "pairs.jsonl")],
            "vocab_size": 270,
            "tokens_per_step": 200,
            "max_length": 64,
            "heldout": 0.2,
        },
        "objective": {"dpo": {"beta": 0.4}},
        "strategies": ["<tp1,pp1>"],
        "steps": 4,
        "schedule": {"decay": "constant"},
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "max_grad_norm": None,
        "device": "cpu",
        "check": "off",
        "output": str(folder / "run"),
    }
    return from_record(TrainConfig, {**settings, **changes, "data": {**settings["data"], **changes.get("data", {})}})


def score(model: Any, answer: dict[str, Tensor]) -> Tensor:
    """The log-probability of an answer's targets."""
    logits = model(input_ids=answer["input_ids"][None]).logits[0, :-1]
    return -F.cross_entropy(logits, answer["labels"][1:], ignore_index=-100, reduction="sum")


def pair_loss(name: str, better: Tensor, worse: Tensor, n: int, m: int, before: tuple[float, float]) -> Tensor:
    """The loss of one pair, written down a second time."""
    if name in ("dpo", "swapped"):
        margin = 0.4 * (better - worse - (before[0] - before[1]))
        swapped = 0.2 if name == "swapped" else 0.0
        return -(1 - swapped) * F.logsigmoid(margin) - swapped * F.logsigmoid(-margin)
    if name == "simpo":
        return -F.logsigmoid(2.0 * better / n - 2.0 * worse / m - 1.0)
    p, q = torch.exp(better / n), torch.exp(worse / m)
    return -better / n - 0.7 * F.logsigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q)))


def plainly(config: TrainConfig, name: str) -> tuple[list[float], Any]:
    """Train in plain PyTorch; return the losses and the model."""
    tokens = open_tokens(config, prepare(config))
    model: Any = build_model(config.model, tokens.vocabulary, tokens.end_of_text, config.seed)
    reference: Any = build_model(config.model, tokens.vocabulary, tokens.end_of_text, config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, weight_decay=0.0)
    losses = []
    batches = mini_batches(config, tokens)
    for _ in range(config.steps):
        answers: list[Any] = next(batches)
        each = []
        for chosen, rejected in zip(answers[::2], answers[1::2], strict=True):
            with torch.no_grad():
                before = (float(score(reference, chosen)), float(score(reference, rejected)))
            n, m = (int((answer["labels"][1:] != -100).sum()) for answer in (chosen, rejected))
            each.append(pair_loss(name, score(model, chosen), score(model, rejected), n, m, before))
        loss = torch.stack(each).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def compare(folder: Path, history: list[Metrics], losses: list[float], model: Any) -> None:
    assert [m.loss for m in history] == pytest.approx(losses, rel=1e-5)
    trained = load_file(folder / "run" / "model" / "model.safetensors")
    for name, weight in model.state_dict().items():
        if name in trained:
            torch.testing.assert_close(trained[name], weight, rtol=1e-4, atol=2e-5)


@only("swapped", "simpo")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_run_trains_as_plain_pytorch_does_on_whole_pairs(name: str, tmp_path: Path) -> None:
    run = config(tmp_path, objective=OBJECTIVES[name], evaluate_every=2)
    watched = Watched()
    history = list(train(run, "new", hg.compile, watched).history)
    compare(tmp_path, history, *plainly(run, name))
    last = history[-1]
    assert last.pairs["margin"] == pytest.approx(last.pairs["chosen_reward"] - last.pairs["rejected_reward"])
    assert last.seconds > last.pairs["scoring_s"] > 0
    assert last.pairs["accuracy"] > 0.9 > history[0].pairs["accuracy"]
    assert last.eval_losses["heldout"] < history[1].eval_losses["heldout"]
    assert last.eval_pairs["heldout"].keys() == last.pairs.keys() - {"scoring_s"}
    assert last.perplexities == {}
    assert {"pairs/margin", "eval/heldout", "eval_heldout/accuracy"} <= last.by_set.keys()
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == history
    scored = "scoring answers under the model before training"
    assert (scored in watched.prepared) == (name in ("dpo", "swapped"))
    assert (tmp_path / "run" / "reference.npz").exists() == (name in ("dpo", "swapped"))


def test_a_resumed_run_scores_what_is_missing_with_the_model_before_training(tmp_path: Path) -> None:
    """Also when it is longer than planned, reads another set, and its file of scores is gone."""
    run = config(tmp_path, steps=4, data={"tokens_per_step": 130})
    losses, model = plainly(run, "dpo")
    short = config(tmp_path, steps=2, data={"tokens_per_step": 130})
    train(short, "new", hg.compile, Watched())
    stored = (tmp_path / "run" / "reference.npz").read_bytes()
    (tmp_path / "run" / "reference.npz").unlink()
    again = Path(copy(run.data.paths[0], tmp_path / "again.jsonl"))
    other = {"tokens_per_step": 130, "evaluation": {"again": {"paths": [str(again)]}}, "heldout": 0.2}
    history = train(config(tmp_path, steps=4, evaluate_every=2, data=other), "resume", hg.compile, Watched()).history
    compare(tmp_path, list(history), losses, model)
    assert set(history[-1].eval_losses) == {"heldout", "again"}
    assert stored != (tmp_path / "run" / "reference.npz").read_bytes()


def test_a_resume_that_is_refused_keeps_the_scores(tmp_path: Path) -> None:
    train(config(tmp_path, steps=1), "new", hg.compile, Watched())
    stored = (tmp_path / "run" / "reference.npz").read_bytes()
    changed = config(tmp_path, steps=2, data={"max_length": 60})
    with pytest.raises(ValueError, match=r"resume with the same data\.max_length"):
        train(changed, "resume", hg.compile, Watched())
    assert stored == (tmp_path / "run" / "reference.npz").read_bytes()


@thorough
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("strategies", [["<tp2,pp1>"], ["<tp1,pp2>", "<[0]x2> + <[1]x2>"], ["auto"]])
def test_pairs_that_are_split_over_ranks_train_alike(strategies: list[str], name: str, tmp_path: Path) -> None:
    run = config(tmp_path, objective=OBJECTIVES[name], strategies=strategies, ranks=2)
    hg.launch(ranked, 2, run)
    compare(tmp_path, read_metrics(tmp_path / "run" / "metrics.jsonl"), *plainly(run, name))


def ranked(run: TrainConfig) -> None:
    train(run, "new", hg.compile, Watched())
