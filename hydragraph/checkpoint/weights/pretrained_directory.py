"""Writer of a model's directory for transformers or peft."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.huggingface import is_huggingface
from hydragraph.frontend.peft_adapters import adapter_keys, adapter_names, is_peft, names_in_file
from hydragraph.frontend.repeated_blocks import meta_copy


@dataclass(frozen=True, eq=False)
class MetaModel:
    """A `PreTrainedModel`, or a peft model around one, on the meta device."""

    model: Any

    @staticmethod
    def of(model: nn.Module) -> MetaModel | None:
        return MetaModel(meta_copy(model, torch.float32)) if is_huggingface(model) else None

    @cached_property
    def fp32_keys(self) -> frozenset[str]:
        return fp32_keys(self.model)

    def keys(self, merged: bool) -> frozenset[str] | None:
        """Return the tensor keys that `write` needs; None: all keys."""
        return adapter_keys(self.model) if is_peft(self.model) and not merged else None

    def write(
        self, state: Mapping[str, Tensor], directory: Path, merged: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        """Write config and weights.

        Args:
            state: full CPU tensors of `keys`.
            dtype: dtype of floating-point tensors, except `fp32_keys`.
        """
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file: name a directory to write")
        if self.keys(merged) is not None:
            adapters = {key: t.to(dtype) if t.is_floating_point() else t for key, t in state.items()}
            self.model.save_pretrained(str(directory), state_dict=adapters)
            return
        model = copy.deepcopy(self.model)
        if is_peft(model):
            model = _merged(model, state)
        else:
            model.load_state_dict({**model.state_dict(), **state}, assign=True)
            model.tie_weights()
        if dtype != torch.float32:
            _round(model, dtype)
        model.save_pretrained(str(directory))


def published_keys(shell: MetaModel) -> frozenset[str] | None:
    """Return the tensor keys that `published_names` needs; None: all keys."""
    if not is_peft(shell.model):
        return None
    adapters = adapter_names(shell.model)
    if len(adapters) > 1:
        raise Unsupported(
            f"a peft model with several adapters ({', '.join(adapters)})",
            where="weights",
            remedy="write all adapters with save_pretrained, or keep one with model.delete_adapter",
        )
    return frozenset(names_in_file(shell.model, adapters[0]))


def published_names(shell: MetaModel | None, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the names and shapes that `save_pretrained` writes.

    Args:
        shell: the model, or None to keep all names.
        state: tensors by state-dict key; groups such as a layer's experts must be complete.
    """
    if shell is None:
        return dict(state)
    if is_peft(shell.model):
        (adapter,) = adapter_names(shell.model)
        names = names_in_file(shell.model, adapter)
        return {names[key]: tensor for key, tensor in state.items()}
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(shell.model, dict(state)))


def fp32_keys(model: nn.Module) -> frozenset[str]:
    """Return the state-dict keys that the model's classes keep or create in fp32."""
    names: set[str] = set()
    for module in model.modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            names.update(getattr(module, attribute, None) or ())
    pattern = "|".join(re.escape(name).replace(r"\*", ".*") for name in sorted(names))
    listed = (key for key in model.state_dict() if names and re.search(rf"(^|\.)({pattern})($|\.)", key))
    return frozenset((*listed, *_built_in_fp32(model)))


def _built_in_fp32(model: Any) -> Iterator[str]:
    if is_peft(model):
        return
    try:
        with torch.device("meta"):
            built = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.bfloat16)
    except Exception:
        # from_pretrained also fails
        return
    yield from (key for key, tensor in built.state_dict().items() if tensor.dtype == torch.float32)


def _round(model: nn.Module, dtype: torch.dtype) -> None:
    kept = fp32_keys(model)
    for key, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and key not in kept:
            tensor.data = tensor.data.to(dtype)


def _merged(model: Any, state: Mapping[str, Tensor]) -> Any:
    """Return the base model with active adapters merged in; a head that then differs from tied embeddings is untied."""
    # Merging changes weights in place, so tied weights need copies.
    model.load_state_dict({key: tensor.clone() for key, tensor in state.items()}, assign=True)
    base = model.get_base_model()
    # tied: state-dict key -> key of the weight that it shares
    tied: dict[str, str] = dict(getattr(base, "all_tied_weights_keys", None) or {})
    configs = (base.config, base.config.get_text_config())
    before = [config.tie_word_embeddings for config in configs]
    try:
        base = model.merge_and_unload()
    except RuntimeError as error:
        raise Unsupported(
            f"peft cannot merge these adapters ({error})",
            where="save_pretrained",
            remedy="omit 'merged', and load the adapters with peft.PeftModel.from_pretrained",
        ) from error
    weights = dict(base.named_parameters(remove_duplicate=False))
    apart = {k: source for k, source in tied.items() if not torch.equal(weights[k], weights[source])}
    if not apart:
        for config, value in zip(configs, before, strict=True):
            config.tie_word_embeddings = value
        base.all_tied_weights_keys = tied
        base.tie_weights()
        return base
    ends = {id(module.weight) for module in (base.get_input_embeddings(), base.get_output_embeddings()) if module}
    others = [key for key, source in apart.items() if not {id(weights[key]), id(weights[source])} <= ends]
    if others:
        raise Unsupported(
            f"an adapter changes only one of two tied weights, {others[0]} and {apart[others[0]]}",
            where="save_pretrained",
            remedy="omit 'merged', and load the adapters with peft.PeftModel.from_pretrained",
        )
    for config in configs:
        config.tie_word_embeddings = False
    base._tied_weights_keys = None
    base.all_tied_weights_keys = dict[str, str]()
    return base


def check(shell: MetaModel | None, merged: bool) -> MetaModel:
    if shell is None:
        raise Unsupported(
            "a model that is not from transformers",
            where="save_pretrained",
            remedy="write the tensors of full_state_dict() yourself, with torch.save or safetensors",
        )
    if merged and not is_peft(shell.model):
        raise Unsupported("merged=True without adapters", where="save_pretrained", remedy="omit merged")
    return shell
