"""Losses that pick tokens or read bounds: sums of separate terms are captured, what meets across them is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from tests.frontend.test_loss_reduction import Batch, counted, each
from tests.own_models import small
from tests.thorough import only


def lengths(b: Batch) -> Tensor:
    return b["cu_seqlens"].diff().long()


def owners(b: Batch) -> Tensor:
    """The index of each token's sequence."""
    places = torch.arange(b["labels"].shape[1], device=b["labels"].device)
    return torch.searchsorted(b["cu_seqlens"][1:].long().contiguous(), places, right=True)


def per_sequence(x: Tensor, b: Batch) -> Tensor:
    """The loss of each sequence [N]."""
    sums = torch.zeros(b["cu_seqlens"].shape[0] - 1, device=x.device)
    return sums.index_add(0, owners(b), each(x, b))


def bounded(x: Tensor, b: Batch, owners: Tensor) -> Tensor:
    sums = torch.zeros(b["cu_seqlens"].shape[0] - 1, device=x.device)
    return sums.index_add(0, owners, each(x, b)).clamp(max=40.0).sum()


def picked(x: Tensor, b: Batch) -> Tensor:
    return each(x, b)[counted(b)[0]]


def far(value: Tensor) -> Tensor:
    """Return 0 for all values that a numeric check would try."""
    return torch.relu(value - 1e4)


SEPARATE = {
    "each sequence clamped": lambda x, b: per_sequence(x, b).clamp(max=40.0).sum(),
    "each sequence by its length": lambda x, b: (per_sequence(x, b) / lengths(b)).sum(),
    "GRPO with advantages as a field": lambda x, b: (picked(x, b).exp() * picked(x, b).clamp(max=2.0)).sum() * 0.5,
    "DPO on sums of sequences": lambda x, b: -torch.nn.functional.logsigmoid(0.1 * per_sequence(x, b)).sum(),
    "each token by its sequence": lambda x, b: (each(x, b) * per_sequence(x, b).detach().sigmoid()[owners(b)]).sum(),
    "the last token of each sequence": lambda x, b: each(x, b)[b["cu_seqlens"][1:].long() - 1].sum(),
}
SEPARATE["differences of running sums at bounds"] = lambda x, b: (
    torch.cat([x.new_zeros(1), each(x, b).cumsum(0)])[b["cu_seqlens"].long()[1:]]
    - torch.cat([x.new_zeros(1), each(x, b).cumsum(0)])[b["cu_seqlens"].long()[:-1]]
).sum()
SEPARATE["running sums within sequences"] = lambda x, b: far(
    torch.cat([x.new_zeros(1), each(x, b).cumsum(0)])[torch.arange(x.shape[1], device=x.device) + 1]
    - torch.cat([x.new_zeros(1), each(x, b).cumsum(0)])[b["cu_seqlens"].long()[:-1][owners(b)]]
).sum()
SEPARATE["dropout of logits"] = lambda x, b: (F.dropout(x[0], 0.1).logsumexp(-1) * counted(b)[0]).sum()
SEPARATE |= {
    "each sequence by a difference": lambda x, b: (
        per_sequence(x, b) / (b["cu_seqlens"].float()[1:] - b["cu_seqlens"].float()[:-1]).clamp(max=5)
    ).sum(),
    "each sequence by a difference of narrow": lambda x, b: (
        per_sequence(x, b) / (b["cu_seqlens"][1:] - b["cu_seqlens"].narrow(0, 0, b["cu_seqlens"].shape[0] - 1))
    ).sum(),
    "each token by its sequence's length": lambda x, b: (
        each(x, b) / torch.repeat_interleave(lengths(b), lengths(b), output_size=x.shape[1])
    ).sum(),
    "long sequences": lambda x, b: (per_sequence(x, b)[lengths(b) > 4] * 2).sum(),
    "weights in a table of lengths": lambda x, b: (
        per_sequence(x, b) * x.new_ones(3)[torch.bucketize(lengths(b), 8 * x.new_ones(2).cumsum(0))]
    ).sum(),
    "margins of classes": lambda x, b: (
        torch.nn.functional.multi_margin_loss(x[0], b["labels"][0].clamp(min=0), reduction="none")
        * (b["labels"][0] != -100)
    ).sum(),
    "the last token but one": lambda x, b: each(x, b)[
        torch.maximum(b["cu_seqlens"][1:] - 2, b["cu_seqlens"][:-1]).clamp(min=0).long()
    ].sum(),
    "the token in the middle": lambda x, b: each(x, b)[b["cu_seqlens"][:-1].long() + lengths(b) // 2].sum(),
    "owners by all bounds": lambda x, b: bounded(
        x, b, torch.searchsorted(b["cu_seqlens"], torch.arange(x.shape[1], device=x.device), right=True) - 1
    ),
    "owners by bucketize": lambda x, b: bounded(
        x, b, torch.bucketize(torch.arange(x.shape[1], device=x.device), b["cu_seqlens"][1:], right=True)
    ),
    "owners by lengths": lambda x, b: bounded(
        x,
        b,
        torch.repeat_interleave(torch.arange(lengths(b).shape[0], device=x.device), lengths(b), output_size=x.shape[1]),
    ),
    "the last token by the length": lambda x, b: each(x, b)[b["cu_seqlens"][:-1] + lengths(b) - 1].sum(),
}
ACROSS = {
    "owners without right": lambda x, b: bounded(
        x, b, torch.searchsorted(b["cu_seqlens"][1:], torch.arange(x.shape[1], device=x.device))
    ),
    "the sequence before": lambda x, b: (each(x, b) * (per_sequence(x, b)[(owners(b) - 1).clamp(min=0)] > 100)).sum(),
    "the last token but two": lambda x, b: each(x, b)[(b["cu_seqlens"][1:] - 3).clamp(min=0)].clamp(max=9).sum(),
    "the fourth token": lambda x, b: each(x, b)[b["cu_seqlens"][:-1] + lengths(b).clamp(max=3)].clamp(max=9).sum(),
    "a running sum": lambda x, b: per_sequence(x, b).cumsum(0).sum(),
    "GRPO's mean in the loss": lambda x, b: (
        (per_sequence(x, b) - per_sequence(x, b).mean()).detach() * per_sequence(x, b)
    ).sum(),
    "GRPO's deviation in the loss": lambda x, b: (per_sequence(x, b) / (per_sequence(x, b).std() + 1e-6)).sum(),
    "the total clamped": lambda x, b: per_sequence(x, b).sum().clamp(max=400.0),
    "the first picked tokens": lambda x, b: picked(x, b)[:64].sum(),
    "picked tokens clamped": lambda x, b: picked(x, b).sum().clamp(max=100.0),
    "a threshold on the mean": lambda x, b: torch.where(
        picked(x, b).mean() > 4.6, picked(x, b) * 0.1, picked(x, b)
    ).sum(),
    "a threshold on the largest sequence": lambda x, b: (per_sequence(x, b) * (per_sequence(x, b).max() > 50)).sum(),
    "weights by the row": lambda x, b: (
        picked(x, b).sum() + (each(x, b) * torch.arange(x.shape[1], device=x.device)).sum()
    ),
    "sequences in pairs": lambda x, b: (per_sequence(x, b)[1:] - per_sequence(x, b)[:-1]).sum(),
    "ends in the row": lambda x, b: (per_sequence(x, b) * (b["cu_seqlens"][1:] <= 64)).sum(),
    "sums of lengths": lambda x, b: (per_sequence(x, b) * lengths(b).cumsum(0)).sum(),
    "twice a place less the place": lambda x, b: (
        per_sequence(x, b) * (b["cu_seqlens"][1:] + b["cu_seqlens"][1:] - b["cu_seqlens"][:-1])
    ).sum(),
    "neighbours' lengths": lambda x, b: (
        per_sequence(x, b) * torch.cat([lengths(b)[1:], lengths(b)[:1]]).clamp(max=64)
    ).sum(),
    "the sequence's number": lambda x, b: (
        each(x, b) * torch.repeat_interleave(lengths(b), output_size=x.shape[1])
    ).sum(),
    "sequences up to an end": lambda x, b: per_sequence(x, b)[b["cu_seqlens"][1:] <= 64].sum(),
    "the first tokens": lambda x, b: each(x, b)[torch.arange(x.shape[1], device=x.device) < 64].sum(),
    "an index with a limit": lambda x, b: each(x, b)[torch.arange(x.shape[1], device=x.device).clamp(max=64)].sum(),
    "an index in a table of ends": lambda x, b: per_sequence(x, b)[
        torch.bucketize(b["cu_seqlens"][1:], 64 * x.new_ones(1))
    ].sum(),
    "places that a mask picks": lambda x, b: (
        picked(x, b) * (torch.arange(x.shape[1], device=x.device)[counted(b)[0]] <= 64)
    ).sum(),
    "tokens as an option": lambda x, b: torch.add(each(x, b), each(x, b), alpha=x.shape[1] // 512 + 2).sum(),
    "tokens as a place": lambda x, b: (x[0, :, :1] * x.new_ones(4096).roll(x.shape[1] // 512)[:1]).sum(),
    "running sums of different terms": lambda x, b: far(each(x, b).cumsum(0) - (x[0, :, 0] * 0).cumsum(0)).sum(),
    "running sums of different terms at bounds": lambda x, b: far(
        each(x, b).cumsum(0)[b["cu_seqlens"][1:].long() - 1]
        - (x[0, :, 0] * 0).cumsum(0)[b["cu_seqlens"][1:].long() - 1]
    ).sum(),
    "running sums by a mask": lambda x, b: far(
        each(x, b).cumsum(0)[counted(b)[0]] - each(x, b).cumsum(0)[counted(b)[0]]
    ).sum(),
    "running sums from the first bound": lambda x, b: far(
        each(x, b).cumsum(0)[b["cu_seqlens"][1:].long() - 1] - each(x, b).cumsum(0)[b["cu_seqlens"][:1].long()]
    ).sum(),
    "dropout of sequences": lambda x, b: F.dropout(per_sequence(x, b)[:, None].expand(-1, 2), 0.1).sum(),
    "a longest length": lambda x, b: (each(x, b) / b["max_length"]).sum(),
}


@only(
    "owners by all bounds", "DPO on sums of sequences", "each sequence by a difference of narrow", "dropout of logits"
)
@pytest.mark.parametrize("name", SEPARATE)
def test_sums_of_separate_terms_are_captured(name: str) -> None:
    loss: Any = SEPARATE[name]
    assert capture(small(), loss=loss).layers == 1


@only("owners without right", "a running sum", "ends in the row", "running sums of different terms at bounds")
@pytest.mark.parametrize("name", ACROSS)
def test_terms_that_meet_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=r"Own.*: (the loss is not a sum|the graph changes with)"):
        capture(small(), loss=ACROSS[name])


def test_repetitions_of_unknown_length_are_refused_with_a_remedy() -> None:
    def loss(x: Tensor, b: Batch) -> Tensor:
        return (each(x, b) / torch.repeat_interleave(lengths(b), lengths(b))).sum()

    with pytest.raises(Unsupported, match=r"without output_size\); pass output_size=, such as the number of tokens"):
        capture(small(), loss=loss)
