"""Names of heads: those of other classes of the model's family that use its config, and no others."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import BertForMaskedLM

from hydragraph.checkpoint.weights.other_heads import ModelFamily
from tests.models import MODELS, bert

POOLER, PAIRS = "bert.pooler.dense.weight", "cls.seq_relationship.bias"


def test_heads_are_those_of_the_classes_beside_the_models() -> None:
    family = ModelFamily.of(bert())
    assert {"BertForMaskedLM", "BertForPreTraining", "BertModel"} <= {kind.__name__ for kind in family.kinds}
    names = frozenset({POOLER, PAIRS, "pooler.dense.bias", "qa_outputs.weight"})
    assert family.heads(names) == names
    others = frozenset({"bert.encoder.layer.1.output.dense.weight", "score.weight", "transformer.h.0.ln_1.weight"})
    assert family.heads(names | others) == names, "deeper layers and other models are not heads"
    assert not family.heads(frozenset())


def test_a_class_of_ones_own_has_the_family_of_what_it_is_made_from() -> None:
    class Own(BertForMaskedLM):
        pass

    own = Own(bert().config)  # pyrefly: ignore[bad-argument-type]
    assert ModelFamily.of(own).heads(frozenset({POOLER})) == {POOLER}
    assert ModelFamily.of(MODELS["llama"]()).heads(frozenset({"score.weight", POOLER})) == {"score.weight"}


def test_a_class_that_cannot_be_built_is_passed_over() -> None:
    class Never(nn.Module):
        def __init__(self, config: object) -> None:
            raise ValueError("not with this config")

    family = ModelFamily.of(bert())
    assert ModelFamily((Never, *family.kinds), family.config).heads(frozenset({PAIRS})) == {PAIRS}


def test_nothing_is_a_head_without_a_family() -> None:
    assert not ModelFamily().heads(frozenset({POOLER}))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_building_the_family_leaves_the_models_config_alone(kind: str) -> None:
    model = MODELS[kind]()
    before = model.config.to_dict()
    ModelFamily.of(model).heads(frozenset({"none"}))
    assert model.config.to_dict() == before
