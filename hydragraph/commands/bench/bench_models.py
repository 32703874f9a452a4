"""Models and sequence lengths of benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    def build(self, device: torch.device | str) -> nn.Module:
        """Build the model in fp32; on the device "meta", it has no weights."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=8192,
            use_cache=False,
        )
        with torch.device(device):
            model: nn.Module = LlamaForCausalLM(config)
        return model.float()


SHAPES = {
    "tiny": LlamaShape(64, 172, 2, 4, 2, 512),
    "small": LlamaShape(256, 688, 4, 4, 2, 4096),
    "1b": LlamaShape(2048, 8192, 16, 32, 8, 32000),  # Llama 3.2 1B with a smaller vocabulary
    "7b": LlamaShape(4096, 11008, 32, 32, 32, 32000),  # Llama 2 7B
}


def meta_model(text: str) -> nn.Module:
    """Return a model without weights: one of SHAPES, or the model of a run's YAML file."""
    if text in SHAPES:
        return SHAPES[text].build("meta")
    if not Path(text).is_file():
        raise ValueError(f"--model {text}: name one of {', '.join(SHAPES)}, or a run's YAML file")
    from hydragraph.train.config import TrainConfig
    from hydragraph.train.model import adapted, skeleton

    config = TrainConfig.load(text)
    return adapted(skeleton(config.model, config.data.vocab_size), config.adapter, config.seed)


def mixed_lengths(tokens: int, seed: int = 0, longest: int = 8192, shortest: int = 64) -> list[int]:
    """Draw log-uniform sequence lengths that sum to `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    left = tokens
    lengths = []
    while left:
        drawn = shortest * (longest / shortest) ** float(torch.rand((), generator=generator))
        length = min(left, int(drawn))
        lengths.append(length if left - length > 1 else left)
        left -= lengths[-1]
    return lengths


def draw_sequences(lengths: list[int], vocabulary: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]


def training_flops(model: Any, lengths: list[int], causal: bool = True) -> float:
    """Return the minimum number of floating-point operations in the forward and backward of one step.

        6 N sum(L) + 12 l H D sum(L^2) / 2

    N is the number of weights of linear layers and the head, without the embedding; L is the length of a sequence. In
    each of l layers with H query heads of size D, attention costs 4 L^2 H D in the forward and twice as much in the
    backward; a causal mask halves the cost. Recomputation is not counted.

    Args:
        model: a Hugging Face model with a config like Llama's.
    """
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    weights = sum(w.numel() for w in linear)
    attention = config.num_hidden_layers * config.num_attention_heads * size * sum(n * n for n in lengths)
    return float(6 * weights * sum(lengths) + (6 if causal else 12) * attention)
