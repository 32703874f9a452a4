"""The model of a run."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydragraph.frontend.packed_inputs import token_cross_entropy
from hydragraph.private.transformers_models import transformers_with_models
from hydragraph.train.config import AdapterConfig, LoraConfig, ModelConfig, TrainConfig
from hydragraph.train.field_checks import similar
from hydragraph.train.preference_objective import WEIGHTS, weighted_logprobs

# Dropout rates in model configs, except those of classification and summary heads.
_DROPOUT = re.compile(r"^(?!summary|classifier).*(?<!layer)drop")
_IDENTITY = frozenset({"model_type", "architectures", "auto_map", "transformers_version", "dtype"})
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def captured_loss(config: TrainConfig) -> dict[str, Any]:
    if config.objective is not None:
        return {"loss": weighted_logprobs, "example": {WEIGHTS: torch.ones(1, 8)}}
    loss = partial(token_cross_entropy, label_smoothing=config.label_smoothing) if config.label_smoothing else None
    return {"loss": loss, "example": None}


def adapted(model: nn.Module, adapter: AdapterConfig | None, seed: int) -> nn.Module:
    """Add adapters to a model, with equal initial weights in every process.

    Raises:
        ValueError: a target does not exist, or peft rejects a setting.
    """
    if adapter is None:
        return model
    try:
        import peft
    except ImportError as error:
        raise ImportError("adapter.lora needs peft: pip install 'hydragraph[lora]'") from error
    lora = adapter.lora
    targets = list(lora.targets) if isinstance(lora.targets, tuple) else lora.targets
    # To peft, a text other than "all-linear" is a pattern for whole names
    if any(name.rpartition(".")[2] == targets for name, _ in model.named_modules()):
        targets = [str(targets)]
    _check_targets(model, lora)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_dropout=lora.dropout,
        lora_alpha=lora.alpha,  # pyrefly: ignore[bad-argument-type]  # peft accepts floats
        target_modules=targets,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        modules_to_save=list(lora.modules_to_save) if lora.modules_to_save else None,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft_model: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        linear = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ValueError(
            f"adapter.lora.targets is {targets}: {error}; set it to some of {linear}, or to 'all-linear'"
        ) from error
    return peft_model


def _check_targets(model: nn.Module, lora: LoraConfig) -> None:
    """Raise ValueError for missing targets, which peft may ignore."""
    names = [name for name, _ in model.named_modules()]
    for field, asked in (("targets", lora.targets), ("modules_to_save", lora.modules_to_save)):
        for target in asked if isinstance(asked, tuple) else ():
            if not any(name == target or name.endswith(f".{target}") for name in names):
                layer_names = sorted({name.rpartition(".")[2] for name in names if name and not name[-1].isdigit()})
                hint = similar(target, layer_names, f"set it to some of {layer_names}")
                raise ValueError(f"adapter.lora.{field}: no layer of the model is called {target!r}: {hint}")


def build_model(config: ModelConfig, vocabulary: int, end_of_text: int, seed: int) -> nn.Module:
    """Build the model with fp32 weights that are equal in every process.

    Args:
        vocabulary: exclusive upper bound of token ids, and default of `vocab_size`.
        end_of_text: default of `eos_token_id`.
        seed: seed of new weights; global generators do not change.

    Raises:
        ValueError: transformers rejects the class or a setting, or the vocabulary is too small.
    """
    if config.directory is not None:
        model = _read(config, vocabulary, end_of_text)
    else:
        settings = model_config(config, vocabulary, end_of_text)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _model_class(str(config.architecture))(settings).float()
    check_vocabulary(config, model, vocabulary)
    return _with_dropout(model, config)


def _with_dropout(model: nn.Module, config: ModelConfig) -> nn.Module:
    if not config.dropout:
        return model.eval()
    return model.train() if dropout_rates(model) else model


def dropout_rates(model: Any) -> dict[str, float]:
    """Return a config's positive dropout rates, or else the largest `nn.Dropout` rate."""
    settings = model.config.to_dict() if hasattr(model, "config") else {}
    rates = {n: r for n, r in settings.items() if _DROPOUT.search(n) and type(r) is float and r > 0}
    modules = (m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout) and "lora_dropout" not in name)
    largest = max(modules, default=0.0)
    return rates if rates or not largest else {"nn.Dropout": largest}


def skeleton(config: ModelConfig, vocabulary: int, end_of_text: int = 0) -> nn.Module:
    """Build the model on the meta device."""
    with torch.device("meta"):
        if config.architecture is not None:
            settings = model_config(config, vocabulary, end_of_text)
            try:
                model: Any = _model_class(config.architecture)(settings)
            except (RuntimeError, TypeError, ValueError, OverflowError, AttributeError, KeyError) as error:
                # Later lines locate C++ code
                first = str(error).partition("\n")[0]
                raise ValueError(
                    f"model.config: {config.architecture} cannot be built with these settings and a vocabulary of "
                    f"{vocabulary}: {type(error).__name__}: {first}"
                ) from error
        else:
            settings = _changed_config(config)
            settings.dtype = torch.float32
            kind: Any = transformers_with_models().AutoModelForCausalLM
            with _read_by_transformers(config):
                model = kind.from_config(settings, trust_remote_code=config.trust_remote_code)
            # from_pretrained also returns models in eval mode
            model = model.eval()
    if config.directory is not None and Path(config.directory, "generation_config.json").is_file():
        from transformers import GenerationConfig

        with _read_by_transformers(config):
            model.generation_config = GenerationConfig.from_pretrained(config.directory)
    return _with_dropout(model.float(), config)


def check_vocabulary(config: ModelConfig, model: Any, vocabulary: int) -> None:
    size = getattr(model.config, "vocab_size", None)
    if isinstance(size, int) and size < vocabulary:
        where, way = "model.config.vocab_size", f"set it to at least {vocabulary}"
        if config.architecture is None:
            where = f"{config.directory_field} {config.directory}: vocab_size"
            way = (
                "set data.tokenizer to the model's own tokenizer, or enlarge the model in Python with "
                f"resize_token_embeddings({vocabulary}) and save_pretrained"
            )
        raise ValueError(f"{where} is {size}, but the tokenizer's ids need {vocabulary}: {way}")


def model_config(config: ModelConfig, vocabulary: int, end_of_text: int) -> Any:
    settings = dict(config.config or {})
    architecture = _model_class(str(config.architecture))
    kind = architecture.config_class
    _check_names(kind, settings, architecture)
    # A config class's defaults may be ids of ordinary tokens.
    defaults = {
        "vocab_size": vocabulary,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
    }
    with _refused_by(kind):
        return kind(**{**defaults, **settings})


def _read(config: ModelConfig, vocabulary: int, end_of_text: int) -> nn.Module:
    kind: Any = transformers_with_models().AutoModelForCausalLM
    if config.architecture is not None:
        kind = _model_class(config.architecture)
        settings = model_config(config, vocabulary, end_of_text)
    else:
        settings = _changed_config(config) if config.config else None
    with _read_by_transformers(config):
        read, loaded = kind.from_pretrained(
            directory_of(config),
            config=settings,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=bool(config.config),
        )
    model: nn.Module = read
    # transformers silently initializes missing tensors and skips unexpected ones.
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")
    other = sorted({str(key) for kind in kinds for key in loaded[kind]})
    if config.path is not None and config.config and other:
        raise ValueError(
            f"model.config: with {dict(config.config)}, tensors differ from those in model.path {config.path} "
            f"({other[0]} and {len(other) - 1} others): change only settings that keep the names and shapes of tensors"
        )
    return model


def _changed_config(config: ModelConfig) -> Any:
    kind: Any = transformers_with_models().AutoConfig
    with _read_by_transformers(config):
        settings = kind.from_pretrained(directory_of(config), trust_remote_code=config.trust_remote_code)
    if not config.config:
        return settings
    kind = type(settings)
    original = settings.to_dict()
    # aliases: other name of a setting -> its name in the config (hidden_size -> n_embd).
    aliases = getattr(kind, "attribute_map", {})
    changes = {aliases.get(name, name): value for name, value in config.config.items()}
    _check_known(changes, original, aliases, kind.__name__)
    # {rope_parameters: {rope_theta: 1e6}} keeps the other rotary settings.
    merged = {n: {**original[n], **v} if isinstance(v, Mapping) and original[n] else v for n, v in changes.items()}
    with _refused_by(kind):
        return kind.from_dict({**original, **merged})


@contextmanager
def _refused_by(kind: type[Any]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"model.config: {kind.__name__} rejects these settings: {type(error).__name__}: {said}"
        ) from error


def _check_known(changes: Mapping[str, Any], given: Mapping[str, Any], aliases: Iterable[str], label: str) -> None:
    for name in changes:
        if name in _IDENTITY:
            raise ValueError(f"model.config: {name} identifies the model and cannot be changed: leave it out")
        if name not in given:
            hint = similar(name, sorted({*given, *aliases} - _IDENTITY), "leave it out")
            raise ValueError(f"model.config: the {label} in model.path has no setting {name!r}: {hint}")


@contextmanager
def _read_by_transformers(config: ModelConfig) -> Iterator[None]:
    directory_of(config)
    try:
        yield
    except Exception as error:
        where = f"{config.directory_field} {config.directory}"
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{where}: the model needs its own Python code (auto_map in config.json), which is not run by default: "
                "use a model class of transformers, or review the code and set 'model.trust_remote_code: true'"
            ) from error
        if config.trust_remote_code:
            # The model's own code may have failed
            raise
        said = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(
            f"{where}: transformers cannot read it ({said}): name a complete directory that save_pretrained wrote"
        ) from error


def directory_of(config: ModelConfig) -> str:
    path = str(config.directory)
    if (Path(path) / "config.json").is_file():
        return path
    field = config.directory_field
    if not Path(path).is_dir() and _HUB_NAME.fullmatch(path):
        raise ValueError(
            f"{field} {path}: the directory does not exist; if this is a model on the Hugging Face Hub, download it "
            f"(hf download {path} --local-dir {Path(path).name}) and name its directory"
        )
    what = "holds no config.json" if Path(path).is_dir() else "is not a directory"
    raise ValueError(f"{field} {path} {what}: name a directory that save_pretrained wrote")


def _model_class(name: str) -> Any:
    transformers = transformers_with_models()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = getattr(transformers, name, None)
    if isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel):
        return architecture
    if name.startswith("Auto") and hasattr(transformers, name):
        raise ValueError(
            f"model.architecture: {name} takes the class from a model directory: set model.path to that directory, "
            "or give a class such as LlamaForCausalLM"
        )
    close = get_close_matches(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), n=1)
    hint = f"did you mean {close[0]}?" if close else "use a class such as LlamaForCausalLM"
    raise ValueError(f"model.architecture: transformers has no model class {name!r}: {hint}")


def _check_names(kind: type[Any], settings: Mapping[str, Any], architecture: type[Any]) -> None:
    if not is_dataclass(kind):
        return
    # Config classes accept any setting; a misspelled one would have no effect.
    read = re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", inspect.getsource(sys.modules[architecture.__module__]))
    names = (
        set(read) | {field.name for field in fields(kind)} | set(getattr(kind, "attribute_map", {})) | {"rope_theta"}
    )
    for name in settings:
        if name not in names:
            hint = similar(name, names, "leave it out")
            raise ValueError(f"model.config: {kind.__name__} has no field {name!r}: {hint}")
