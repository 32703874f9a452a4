"""The trained model as a directory that `transformers` loads with `from_pretrained`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hydragraph.data import tokenizer
from hydragraph.runtime.checkpoint.disk import file_errors


def export(model: Any, state: Mapping[str, Tensor], tokens: Path, directory: Path) -> None:
    """Write config, weights (safetensors) and tokenizer.

    Args:
        model: the Hugging Face model, on the CPU or without weights; it gets these.
        state: every key of its `state_dict`.
        tokens: a directory with the tokenizer.
        directory: made if missing.

    Raises:
        OSError: it cannot be written.
    """
    model.load_state_dict(dict(state), assign=True)  # which gives a model on the meta device memory, too
    model.tie_weights()
    directory.mkdir(parents=True, exist_ok=True)
    with file_errors(directory, directory):  # safetensors has errors of its own
        model.save_pretrained(str(directory))
        tokenizer.copy(tokens, directory)
