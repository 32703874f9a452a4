"""Losses that are means are refused by name; sums, however they are written, are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from tests.own_models import small
from tests.thorough import first, only

Batch = dict[str, Tensor]


def each(logits: Tensor, batch: Batch) -> Tensor:
    """The loss of every token, 0 where it does not count."""
    return F.cross_entropy(logits[0], batch["labels"][0], ignore_index=-100, reduction="none")


def counted(batch: Batch) -> Tensor:
    return batch["labels"] != -100


MEANS = {
    "PyTorch's default": lambda x, b: F.cross_entropy(x[0], b["labels"][0], ignore_index=-100),
    "mean()": lambda x, b: each(x, b).mean(),
    "mean of [1, T]": lambda x, b: each(x, b)[None].mean(dim=(0, 1)) * 3,
    "by targets": lambda x, b: each(x, b).sum() / counted(b).sum(),
    "by targets, clamped": lambda x, b: each(x, b).sum() / counted(b).sum().clamp(min=1).float(),
    "by tokens": lambda x, b: each(x, b).sum() / x.shape[1],
    "times 1 / tokens": lambda x, b: (1.0 / x.shape[1]) * each(x, b).sum(),
    "times the reciprocal": lambda x, b: each(x, b).sum() * counted(b).sum().reciprocal(),
    "to the power of -1": lambda x, b: each(x, b).sum() * counted(b).sum().float() ** -1,
    "by sequences": lambda x, b: each(x, b).sum() / (b["cu_seqlens"].shape[0] - 1),
    "every token by tokens": lambda x, b: (each(x, b) / x.shape[1]).sum(),
    "mean squared error": lambda x, b: F.mse_loss(x[0].sum(-1), b["labels"][0].float()),
    "with another term": lambda x, b: each(x, b).sum() + 0.1 * x.logsumexp(-1).pow(2).mean(),
    "smoothed": lambda x, b: F.cross_entropy(x[0], b["labels"][0], label_smoothing=0.1).reshape(1),
}
SUMS = {
    "sum": lambda x, b: each(x, b).sum(),
    "reduction='sum'": lambda x, b: F.cross_entropy(x[0], b["labels"][0], ignore_index=-100, reduction="sum"),
    "scaled": lambda x, b: each(x, b).sum() / 2.5 * 0.3,
    "weighted by token": lambda x, b: (each(x, b) / (b["position_ids"][0] + 1)).sum(),
    "mean over classes": lambda x, b: (x[0].pow(2).mean(-1) * counted(b)[0]).sum(),
    "mean over classes at last": lambda x, b: (x[0].pow(2) * counted(b)[0][:, None]).sum(0).mean(),
    "label smoothing, a penalty and a start": lambda x, b: (
        torch.zeros(())
        + F.cross_entropy(x[0], b["labels"][0], ignore_index=-100, reduction="sum", label_smoothing=0.1)
        + 1e-4 * (x.logsumexp(-1).pow(2) * counted(b)).sum()
    ),
    "a teacher's distribution": lambda x, b: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="sum"),
    "a divergence of each": lambda x, b: (
        F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="none").sum(-1) * counted(b)
    ).sum(),
    "focal": lambda x, b: ((1 - (-each(x, b)).exp()) ** 2 * each(x, b)).sum(),
    "classes second": lambda x, b: F.cross_entropy(x.transpose(1, 2), b["labels"], reduction="sum"),
    "a regression": lambda x, b: F.mse_loss(x[0].sum(-1), b["labels"][0].float(), reduction="sum"),
    "chosen": lambda x, b: -x.log_softmax(-1).gather(-1, b["labels"].clamp(min=0)[..., None]).sum(),
    "by a mask": lambda x, b: F.cross_entropy(x[0][counted(b)[0]], b["labels"][0][counted(b)[0]], reduction="sum"),
    "a softmax over classes, by a mask": lambda x, b: (x[counted(b)].softmax(-1).amax(-1) * 2).sum(),
    "by the mean of a constant": lambda x, b: each(x, b).sum() / torch.ones(3).mean(),
    "of flattened logits": lambda x, b: F.cross_entropy(x.flatten(0, -2), b["labels"].view(-1), reduction="sum"),
}


MIXED = {
    "weighted by a softmax over tokens": lambda x, b: (each(x, b) * each(x, b).softmax(0)).sum(),
    "a softmax over tokens, of [1, T, V]": lambda x, b: (x.softmax(1) * x).sum(),
    "classes are tokens": lambda x, b: F.cross_entropy(x[..., 0], b["labels"][:, 0] * 0, reduction="sum"),
    "the largest": lambda x, b: each(x, b).max(),
    "the largest at last": lambda x, b: each(x, b).topk(2).values.sum(),
    "a root of a sum": lambda x, b: each(x, b).sum().sqrt(),
    "a product of sums": lambda x, b: each(x, b).sum() * x.sum(),
    "divided by a sum": lambda x, b: 1.0 / (1.0 + each(x, b).sum()),
    "a constant besides": lambda x, b: each(x, b).sum() + 0.5,
    "less a constant": lambda x, b: each(x, b).sum() - 0.5,
    "less its mean": lambda x, b: (each(x, b) - each(x, b).mean()).pow(2).sum(),
    "a running sum": lambda x, b: each(x, b).cumsum(0).sum(),
    "a softmax over what a mask picks": lambda x, b: (
        each(x, b)[counted(b)[0]] * each(x, b)[counted(b)[0]].softmax(0)
    ).sum(),
    "a softmax over tokens, then a mask": lambda x, b: (x.softmax(1) * x)[counted(b)].sum(),
    "the largest that a mask picks": lambda x, b: x[counted(b)].amax(0).sum(),
    "the norm of what a mask picks": lambda x, b: each(x, b)[counted(b)[0]].norm(),
    "each by the sum of all": lambda x, b: (x * x.sum(1, keepdim=True)).sum(),
    "filled with the number of tokens": lambda x, b: (each(x, b) * x.new_full((x.shape[1],), x.shape[1])).sum(),
    "rows by their place": lambda x, b: (each(x, b) * each(x, b)[torch.arange(x.shape[1], device=x.device) // 2]).sum(),
}


@only("each by the sum of all", "less a constant")
@pytest.mark.parametrize(
    "name",
    first(
        [
            "weighted by a softmax over tokens",
            "classes are tokens",
            "the largest at last",
            "a root of a sum",
            "a product of sums",
            "a constant besides",
            "less a constant",
            "a running sum",
            "a softmax over what a mask picks",
            "each by the sum of all",
            "filled with the number of tokens",
            "rows by their place",
        ],
        MIXED,
    ),
)
def test_tokens_that_meet_in_a_loss_are_refused_by_its_graph(name: str) -> None:
    with pytest.raises(Unsupported, match=r"Own after its last block: the loss is not a sum"):
        capture(small(), loss=MIXED[name])


def test_a_loss_without_the_model_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"Own: the loss does not depend on the blocks"):
        capture(small(), loss=lambda x, b: torch.ones(3, device=x.device).sum())


@only("PyTorch's default", "by targets, clamped", "by sequences")
@pytest.mark.parametrize(
    "name",
    first(
        ["PyTorch's default", "by targets, clamped", "to the power of -1", "by sequences", "with another term"], MEANS
    ),
)
def test_a_mean_is_refused(name: str) -> None:
    with pytest.raises(
        Unsupported, match=r"Own after its last block: the loss is not a sum: it is .*; return the sum over all"
    ):
        capture(small(), loss=MEANS[name])


@only("label smoothing, a penalty and a start")
@pytest.mark.parametrize(
    "name",
    first(
        [
            "scaled",
            "weighted by token",
            "mean over classes at last",
            "label smoothing, a penalty and a start",
            "a teacher's distribution",
            "chosen",
            "a softmax over classes, by a mask",
            "by the mean of a constant",
            "of flattened logits",
        ],
        SUMS,
    ),
)
def test_a_sum_is_not(name: str) -> None:
    loss: Any = SUMS[name]
    assert capture(small(), loss=loss).layers == 1


def test_a_loss_of_each_token_has_its_shape() -> None:
    """PyTorch's own shape for it is that of a sum, on the meta device."""

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        found = each(logits, batch)
        assert found.dim() == 1
        return found[:, None].sum()

    capture(small(), loss=loss)
