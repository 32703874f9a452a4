"""RoBERTa counts positions past its padding id, which may stand inside a sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import RobertaConfig, RobertaForMaskedLM

from hydragraph.frontend.huggingface import unplaced_id
from hydragraph.frontend.packed_batch import pack
from hydragraph.spec.workload import Sequence
from tests import reference
from tests.models import llama, randomised, tiny

PADDING = 7
IDS = ([3, 9, PADDING, 12, PADDING, PADDING, 40], [PADDING, 5, 6], [8, 9, 10, 11])


def roberta() -> RobertaForMaskedLM:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return randomised(RobertaForMaskedLM(RobertaConfig(**tiny(num_hidden_layers=1, pad_token_id=PADDING, **dropout))))  # pyrefly: ignore[bad-return]


def test_positions_are_the_models_own() -> None:
    sequences = [Sequence(torch.tensor(ids), torch.tensor(ids), {}) for ids in IDS]
    counted = pack(sequences, unplaced=PADDING)["position_ids"][0].split([len(ids) for ids in IDS])
    for ids, positions in zip(IDS, counted, strict=True):
        embeddings = roberta().roberta.embeddings
        own = embeddings.create_position_ids_from_input_ids(torch.tensor(ids)[None], PADDING)
        assert torch.equal(positions + PADDING + 1, own[0])


def test_padding_ids_inside_sequences_are_right() -> None:
    model = roberta()
    batch = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in IDS]
    sums = [F.cross_entropy(model(s["input_ids"][None]).logits[0], s["labels"], reduction="sum") for s in batch]
    (torch.stack(sums).sum() / sum(map(len, IDS))).backward()
    reference.refuse_difference(model, batch, layers=1)


def test_other_models_place_every_token() -> None:
    assert unplaced_id(llama(layers=1)) is None
