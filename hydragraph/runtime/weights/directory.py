"""Write a trained model as a directory that transformers or peft reads: rank 0 does, with what all ranks hold."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.adapters import adapter_keys, is_peft
from hydragraph.frontend.blocks import meta_copy
from hydragraph.frontend.huggingface import is_huggingface


@dataclass(frozen=True, eq=False)
class Shell:
    """A Hugging Face model without weights, which knows what belongs into a directory beside them.

    Attributes:
        model: a `PreTrainedModel` on the meta device, or a peft model around one.
    """

    model: Any

    @staticmethod
    def of(model: nn.Module) -> Shell | None:
        """Copy a model without its weights; None where transformers would not know how to load it."""
        return Shell(meta_copy(model, torch.float32)) if is_huggingface(model) else None

    def keys(self, merged: bool) -> frozenset[str] | None:
        """Return the keys of the state dict that `write` needs; None: all of them."""
        return adapter_keys(self.model) if is_peft(self.model) and not merged else None

    def write(self, state: Mapping[str, Tensor], directory: Path, merged: bool) -> None:
        """Write config and weights.

        Args:
            state: full CPU tensors by their keys in the model's state dict: those that `keys` names.
            directory: where to write; it is made if missing.
            merged: of a peft model, write the base model with its active adapters added to its weights.
        """
        if self.keys(merged) is not None:
            self.model.save_pretrained(str(directory), state_dict=dict(state))
            return
        model = copy.deepcopy(self.model)
        model.load_state_dict(dict(state), assign=True)
        if is_peft(model):
            model = model.merge_and_unload()
        model.tie_weights()
        model.save_pretrained(str(directory))


def check(shell: Shell | None, merged: bool) -> Shell:
    """Return the shell, if what is asked for can be written.

    Raises:
        Unsupported: it is no Hugging Face model, or there is nothing to merge.
    """
    if shell is None:
        raise Unsupported(
            "a model that is none of transformers'",
            where="save_pretrained",
            remedy="write the tensors of full_state_dict() yourself, with torch.save or safetensors",
        )
    if merged and not is_peft(shell.model):
        raise Unsupported("merged=True without adapters", where="save_pretrained", remedy="leave merged out")
    return shell
