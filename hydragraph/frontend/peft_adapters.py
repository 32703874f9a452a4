"""Models with `peft` adapters."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hydragraph.errors import Unsupported

_TRIED = ("LORA", "IA3")  # tested peft methods
# Untested settings of LoraConfig that change results or the location of weights.
_UNTRIED = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config"),
    *("monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"),
)
_LORA = re.compile(r"\.lora_(?:embedding_)?([AB])\.")


def is_peft(model: nn.Module) -> bool:
    """Return whether a model is a peft wrapper, without importing peft."""
    return any(c.__module__.startswith("peft.") for c in type(model).__mro__) and hasattr(model, "peft_config")


def base_model(model: nn.Module) -> nn.Module:
    peft_model: Any = model
    base: nn.Module = peft_model.get_base_model() if is_peft(model) else model
    return base


@dataclass(frozen=True)
class Adapters:
    configs: Mapping[str, Any]
    active: str | list[str]

    @classmethod
    def of(cls, model: nn.Module) -> Adapters | None:
        peft_model: Any = model
        return cls(copy.deepcopy(peft_model.peft_config), peft_model.active_adapter) if is_peft(model) else None

    def on(self, base: nn.Module) -> nn.Module:
        from peft import get_peft_model

        (first, config), *others = copy.deepcopy(dict(self.configs)).items()
        model: Any = get_peft_model(base, config, adapter_name=first)
        for name, other in others:
            model.add_adapter(name, other)
        model.set_adapter(self.active)
        adapted: nn.Module = model
        return adapted


def refuse_untried(model: nn.Module) -> None:
    configs: Any = getattr(model, "peft_config", {}) if is_peft(model) else {}
    for name, config in configs.items():
        where = f"peft adapter {name!r}"
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in _TRIED:
            remedy = "use peft.LoraConfig or peft.IA3Config"
            raise Unsupported(f"the peft method {kind} is not supported", where=where, remedy=remedy)
        for option in _UNTRIED:
            if getattr(config, option, None):
                remedy = f"remove {option} from its LoraConfig"
                raise Unsupported(f"LoRA with {option} is not supported", where=where, remedy=remedy)


def switchable_parameters(model: nn.Module | None) -> list[str]:
    """Return the names of LoRA's B parameters; zeros there disable the adapters.

    Raises:
        Unsupported: the model has no adapters, or trains parameters other than LoRA's.
    """
    if model is None or not is_peft(model):
        remedy = "compile the reference model as a second executable, and use it for scoring"
        raise Unsupported("the model has no adapters", where="adapter_off", remedy=remedy)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    others = [name for name in trained if not _LORA.search(name)]
    if others:
        what = f"training also changes {others[0]}, which is not one of LoRA's matrices A and B"
        remedy = "compile the base model as a second executable, and use it for scoring"
        raise Unsupported(what, where="adapter_off", remedy=remedy)
    return [name for name, _ in model.named_parameters() if (match := _LORA.search(name)) and match[1] == "B"]


def adapter_keys(model: nn.Module) -> frozenset[str]:
    return frozenset(key for adapter in adapter_names(model) for key in names_in_file(model, adapter))


def names_in_file(model: nn.Module, adapter: str) -> dict[str, str]:
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    keys = {id(tensor): key for key, tensor in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept: dict[str, Any] = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    return {keys[id(tensor)]: name for name, tensor in kept.items()}


def adapter_names(model: nn.Module) -> Sequence[str]:
    peft_model: Any = model
    return list(peft_model.peft_config)
