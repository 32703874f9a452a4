"""Directories hold what the model computes: merged adapters of tied weights, trained buffers, tensors kept in fp32."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from hydragraph.checkpoint.weights.pretrained_directory import MetaModel, fp32_keys
from hydragraph.errors import Unsupported

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.arange(2, 20)[None]


def tied(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=48, tie_word_embeddings=True, **changes)).eval()


def adapted(target: str, **options: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", target], task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(tied(), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def state_of(model: Any) -> dict[str, Tensor]:
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head", "v_proj"])
def test_merged_adapters_compute_what_was_trained(target: str, tmp_path: Path) -> None:
    model = adapted(target)
    shell = MetaModel.of(model)
    assert shell is not None
    shell.write(state_of(model), tmp_path, merged=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.tie_word_embeddings is (target == "v_proj")
    torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)


def test_what_peft_cannot_merge_is_refused() -> None:
    model = adapted("v_proj", lora_bias=True)
    shell = MetaModel.of(model)
    assert shell is not None
    with pytest.raises(Unsupported, match="peft cannot merge these adapters"):
        shell.write(state_of(model), Path("/nowhere"), merged=True)


def deepseek() -> Any:
    torch.manual_seed(0)
    heads: dict[str, Any] = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    }
    experts: dict[str, Any] = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
    }
    config = DeepseekV3Config(
        **SIZES,
        **heads,
        **experts,
        num_key_value_heads=2,
        moe_intermediate_size=8,
        first_k_dense_replace=1,
        vocab_size=48,
    )
    model = DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if "e_score" in name:
            buffer.copy_(torch.rand_like(buffer) + 4)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [tied, partial(tied, attention_bias=True), deepseek], ids=["tied", "bias", "deepseek"])
def test_every_tensor_is_written_in_the_dtype_that_transformers_loads(
    make: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make()
    shell = MetaModel.of(model)
    assert shell is not None
    state = state_of(model)
    shell.write(state, tmp_path, merged=False, dtype=dtype)
    model.save_pretrained(tmp_path / "whole")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=dtype).state_dict()
    for key, tensor in AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict().items():
        assert tensor.dtype == expected[key].dtype, key
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=0, msg=key)
    kept = {key for key in fp32_keys(model) if key in load_file(tmp_path / "model.safetensors")}
    assert any("e_score_correction_bias" in key for key in kept) is (make is deepseek)
    stored = load_file(tmp_path / "model.safetensors")
    for key, tensor in stored.items():
        if key in state:
            assert tensor.dtype == (torch.float32 if key in kept else dtype), key
