"""Models and sequence lengths of benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
    # Llama 3.2 1B, with a smaller vocabulary
    "1b": LlamaShape(2048, 8192, 16, 32, 8, 32000),
    # Llama 2 7B
    "7b": LlamaShape(4096, 11008, 32, 32, 32, 32000),
}


def meta_model(text: str) -> nn.Module:
    """Return a model without weights: one of SHAPES, or the model of a run's YAML file."""
    if text in SHAPES:
        return SHAPES[text].build("meta")
    if not Path(text).is_file():
        raise ValueError(f"--model {text}: name one of {', '.join(SHAPES)}, or a run's YAML file")
    from hydragraph.commands import captured_model
    from hydragraph.train.config import TrainConfig

    return captured_model.meta_model(TrainConfig.load(text))


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
