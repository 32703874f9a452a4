"""A run's model, captured without weights or devices, for verbs that price it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hydragraph.commands.launch_process import quieten
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from torch import nn

    from hydragraph.ir.program import Program
    from hydragraph.passes.variants import Variants


def captured(config: TrainConfig) -> tuple[nn.Module, Program, Variants]:
    """Return a config's model on the meta device, its program, and its graphs as a run compiles them.

    Raises:
        Unsupported: the model cannot be captured.
        ValueError: naming the field of the config that describes no model, or one too small for the tokenizer.
    """
    import torch

    from hydragraph.frontend.capture import capture
    from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
    from hydragraph.passes.compile_with_inductor import choose_backend
    from hydragraph.passes.variants import Variants
    from hydragraph.train.data import known_vocabulary
    from hydragraph.train.model import adapted, captured_loss, check_vocabulary, skeleton

    quieten()
    known = None
    with suppress(ValueError, OSError):  # of data that are on another machine
        known = known_vocabulary(config)
    vocabulary, end_of_text = known or (config.data.vocab_size, 0)
    bare = skeleton(config.model, vocabulary, end_of_text)
    if known is not None:
        check_vocabulary(config.model, bare, vocabulary)
    model = adapted(bare, config.adapter, config.seed)
    program = capture(model, dtype=getattr(torch, config.dtype), **captured_loss(config))
    inductor = choose_backend(config.backend, torch.device(config.device or "cpu")) == "inductor"
    return model, program, Variants(program, fused_head=inductor, added=not inductor, cache=VariantCache())
