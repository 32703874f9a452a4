"""Directories in a family's original format, as the hub has them: their tensors stream in, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hydragraph.checkpoint.weights.pretrained import TensorNames
from hydragraph.checkpoint.weights.safetensors_files import contents
from hydragraph.engine.compiled_model import tensor_names
from hydragraph.errors import Unsupported
from tests.checkpoint.weights.test_split_tensors import read
from tests.frontend.families import build
from tests.thorough import first, thorough

# Causal language models whose tensors transformers makes of others while it loads, with transformers 5.23: experts that
# are stacked and joined, and products that are cut into theirs.
STREAMED = (
    *("afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    *("deepseek_v4", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    *("hrm_text", "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_linear", "kolibri1", "laguna", "mellum", "mimo_v2_flash"),
    *("minimax", "minimax_m2", "mixtral", "nemotron_h", "olmo_hybrid", "olmoe", "phimoe", "qwen2_moe"),
    *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "sarvam_mla", "solar_open"),
)
REFUSED = {
    "inkling2_loop_text": "Inkling2LoopDequantizeExperts, Interleave",
    "inkling2_text": "Interleave",
    "lara_mini": "Split",
    "sarvam_moe": "Split",
}
# Families whose tiny configuration has no experts, which alone are converted.
DENSE = ("beam", "flint")
SHOWN = ("mixtral", "qwen2_moe", "hrm_text", "inkling2_text")


def computed(model: nn.Module) -> bool:
    conversions = get_model_conversion_mapping(model)  # pyrefly: ignore[bad-argument-type]
    return any(isinstance(c, WeightConverter) and c.operations for c in conversions)


@pytest.mark.parametrize("family", first(SHOWN, (*STREAMED, *REFUSED)))
def test_an_original_directory_gives_the_models_tensors_or_is_refused(family: str, tmp_path: Path) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    model = build(family)[0]
    model.save_pretrained(tmp_path)  # in the original format, which transformers' own loading converts
    held, names = load_file(tmp_path / "model.safetensors"), tensor_names(model)
    if family in REFUSED:
        with pytest.raises(
            Unsupported,
            match=rf"\({REFUSED[family]}\) that is not supported; load the model with transformers",
        ):
            TensorNames.of(model, names).placed(contents(tmp_path))
        return
    placed = {names.get(name, name): whole for name, whole in TensorNames.of(model, names).placed(contents(tmp_path))}
    own = dict(model.named_parameters())
    assert computed(model)
    assert (len(held) == len(own)) == (family in DENSE)
    assert own.keys() <= placed.keys()
    for name, value in own.items():
        box = torch.full(placed[name].shape, torch.nan)
        read(placed[name], held, [0] * box.dim(), box)
        assert box.equal(value.detach()), name


@thorough
def test_all_families_that_transformers_converts_are_listed() -> None:
    for family in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)):
        try:
            model = build(family)[0]
        except Exception:  # no tiny configuration could be made of it
            continue
        assert computed(model) == (family in STREAMED or family in REFUSED), family
