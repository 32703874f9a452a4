"""Log-probabilities of sequences equal those of the unmodified model, under every kind of strategy, on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from tests.models import gpt2, llama, sequences
from tests.ready import Ready
from tests.thorough import first, thorough

LAYERS = 2
LENGTHS = [20, 7, 33, 1, 12, 5]  # one of them has no target
MODELS = {
    "llama": partial(llama, layers=LAYERS),
    "tied gpt2": partial(gpt2, layers=4, heads=12),
}
TRIED = {
    "llama": [
        "<[2]x1,[1,0]x1s> zb-h1",  # odd order, sequence parallelism to the end, a vocabulary that 2 does not divide
        "<[0]x2> + <[1]x2>",  # two pipelines, an idle rank
    ],
    "tied gpt2": [
        "<[0,1]x3,[2]x1> + <[3]x4>",  # different degrees and depths
        "<[3]x1,[0]x1,[2]x1,[1]x1>",
        "<[1]x4>",
        "<[2,0]x2sr,[1,3]x2s>",
        "<[0]x2,[1,2]x2s> + <[3]x2,[1,2]x2s>",  # a shared stage
        "<[3]x1,[0,1]x2s,[2]x1r> zb-h1",
    ],
}
RANKS = {"llama": 3, "tied gpt2": 4}


def batch() -> list[Tensor | dict[str, Tensor]]:
    """Draw sequences; the first token of the answer in the last one is its tenth."""
    plain = sequences(LENGTHS)
    ids = sequences([16], seed=1)[0]
    return [*plain, {"input_ids": ids, "labels": torch.where(torch.arange(16) < 9, -100, ids)}]


def ready(model: str) -> Ready:
    return Ready.of(MODELS[model](), TRIED[model]).with_scores(False, True)


def scores(prepared: Ready, strategies: list[str]) -> tuple[list[tuple[Tensor, Tensor, Tensor]], list[float]]:
    """Return the scores, alone and with entropies, under each strategy, and two losses.

    The losses are those of an evaluation before the scores and of a step after them.
    """
    exe = prepared.executable(strategies[0], lambda named: torch.optim.SGD(named, lr=0.0))
    before = exe.evaluate(batch()).loss
    found = [(exe.score(batch(), strategy=s), *exe.score(batch(), entropy=True, strategy=s)) for s in strategies]
    after = exe.step(batch()).loss
    exe.close()
    return found, [before, after]


def expected(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return each sequence's log-probability and entropy by the model alone."""
    result = []
    for given in batch():
        ids, labels = (given["input_ids"], given["labels"]) if isinstance(given, dict) else (given, given)
        with torch.no_grad():
            log_p = model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        counts = labels[1:] != -100
        entropies = -(log_p.exp() * log_p).sum(-1)
        result.append((log_p[:-1].gather(1, ids[1:, None])[counts].sum(), entropies[:-1][counts].sum()))
    log_probabilities, entropies = (torch.stack(each).float() for each in zip(*result, strict=True))
    return log_probabilities, entropies


@pytest.mark.parametrize("model", first(["llama"], MODELS))
def test_scores_are_those_of_the_model(model: str) -> None:
    strategies = TRIED[model]
    runs = hg.launch(scores, RANKS[model], ready(model), strategies)
    exact, entropies = expected(MODELS[model]())
    for found, losses in runs:
        assert losses[0] == pytest.approx(losses[1])
        for strategy, each in zip(strategies, found, strict=True):
            for values, wanted in zip(each, (exact, exact, entropies), strict=True):
                torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6, msg=f"{strategy}: {values} {wanted}")
                assert values[3] == 0
            assert all(map(torch.equal, each, runs[0][0][strategies.index(strategy)]))


def weighted(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    costs = F.cross_entropy(outputs.logits[0].float(), batch["labels"][0], ignore_index=-100, reduction="none")
    return (costs * batch["weights"][0]).sum()


def test_scores_need_no_field_of_the_loss_and_equal_bits_if_deterministic() -> None:
    model = llama(layers=1)
    example = {"weights": torch.ones(1, 8)}
    exe = hg.compile(model, "<tp1,pp1>", loss=weighted, example=example, deterministic=True, check="auto")
    together = exe.score(batch())
    assert torch.equal(together, torch.cat([exe.score([one]) for one in batch()]))
    torch.testing.assert_close(together, expected(model)[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(hg.Unsupported, match=r"unknown fields \['weights'\]"):
        exe.score([{"input_ids": torch.arange(4), "weights": torch.ones(4)}])
    exe.close()


@thorough
def test_a_loss_without_log_probabilities_refuses_to_score_and_still_trains() -> None:
    def squares(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return (outputs.logits.float().pow(2) * (batch["labels"] != -100)[..., None]).sum()

    exe = hg.compile(llama(layers=1), "<tp1,pp1>", lambda named: torch.optim.SGD(named, lr=1e-3), loss=squares)
    with pytest.raises(hg.Unsupported, match="no log-probability per token"):
        exe.score(batch())
    losses = [exe.step(batch()).loss for _ in range(2)]
    assert losses[1] < losses[0]
    exe.close()
