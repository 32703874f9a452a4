"""Record of a model, in parts, so that errors can name the differences between two models.

    model       class, loss, list of blocks, fields of the packed batch, and tensors
    config      setting -> value, as JSON
    modules     class -> SHA-256 of the attributes of its instances
    code        Python module -> SHA-256 of the file and its classes' current methods; name of a replaced library
                function -> SHA-256 of the replacement

It ignores weights and settings for text generation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.library_code import LibraryCode
from hydragraph.frontend.model_description import Indescribable, attributes, described_function, source_digest
from hydragraph.frontend.packed_inputs import Loss, fields_of, token_cross_entropy
from hydragraph.frontend.state_readers import functions_in

ModelRecord = Mapping[str, Mapping[str, str]]

# Settings for the model's origin or text generation.
_APART = frozenset({"_name_or_path", "architectures", "bos_token_id", "eos_token_id", "transformers_version"})
_ATTRIBUTES_APART = frozenset(
    {"training", "name_or_path", "generation_config", "warnings_issued", "_is_hf_initialized", "_weight_conversions"}
)
# Transformers does not always set this setting
_DEFAULTS = frozenset({("_use_kernels", "False")})
_TENSORS = "the names, shapes or requires_grad of its tensors"
PARTS = ("model", "config", "modules", "code")


def model_record(
    model: nn.Module, loss: Loss | None = None, example: Mapping[str, Tensor] | None = None, blocks: str | None = None
) -> ModelRecord:
    tensors = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    fields = fields_of(example, tensors, type(model).__name__)
    try:
        return {
            "model": {
                "class": f"{type(model).__module__}.{type(model).__qualname__}",
                "loss": described_function(loss or token_cross_entropy),
                "blocks": blocks or "",
                "fields": str([(name, field.shape, str(field.dtype)) for name, field in fields.items()]),
                "mode": _mode(model),
                "tensors": _digest(_tensors(model)),
            },
            "config": _config(model),
            "modules": _modules(model),
            "code": _code(model),
        }
    except Indescribable as error:
        what = f"{error}, so a compiled folder cannot identify the model"
        remedy = "remove this object from the model or the loss, or train without a compiled folder"
        raise Unsupported(what, where=type(model).__name__, remedy=remedy) from None


def differences(written: ModelRecord, here: ModelRecord) -> list[str]:
    mismatches = []
    for part in PARTS:
        old = written.get(part, {})
        new = here[part]
        for name in sorted({*old, *new}, key=lambda name: ([*new].index(name) if name in new else len(new), name)):
            if old.get(name) != new.get(name):
                mismatches.append(_difference(part, name, old.get(name), new.get(name)))
    return sorted(mismatches, key=lambda difference: difference == _TENSORS)


def _difference(part: str, name: str, old: str | None, new: str | None) -> str:
    if part == "modules":
        return f"the settings of {name.rpartition('.')[2]} modules"
    if part == "code":
        return f"the code of {name}"
    if name == "tensors":
        return _TENSORS
    label = name if part == "config" else f"its {name}"
    return f"{label} is {_short(new)}, but was {_short(old)}"


def _short(value: str | None) -> str:
    text = "missing" if value is None else value or "none"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _mode(model: nn.Module) -> str:
    modes = {name: module.training for name, module in model.named_modules()}
    if len(set(modes.values())) > 1:
        return f"train in parts ({_digest(modes)})"
    return "train" if model.training else "eval"


def _tensors(model: nn.Module) -> list[tuple[Any, ...]]:
    # numbers: id of a parameter -> its number, equal under all names of a tied parameter.
    numbers: dict[int, int] = {}
    parameters = [
        (name, tuple(p.shape), p.requires_grad, numbers.setdefault(id(p), len(numbers)))
        for name, p in model.named_parameters(remove_duplicate=False)
    ]
    return [*parameters, *((name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers())]


def _config(model: nn.Module) -> Mapping[str, str]:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    settings = json.loads(config.to_json_string(use_diff=False))
    texts = {name: json.dumps(value, sort_keys=True) for name, value in sorted(settings.items()) if name not in _APART}
    return {**texts, "_attn_implementation": str(getattr(config, "_attn_implementation", ""))}


def _modules(model: nn.Module) -> Mapping[str, str]:
    digests: dict[str, Any] = {}
    for name, module in model.named_modules():
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        own = (item for item in attributes(name, module) if item not in _DEFAULTS)
        recorded_attributes = [(key, value) for key, value in own if key not in _ATTRIBUTES_APART]
        digests.setdefault(kind, hashlib.sha256()).update(repr((name, recorded_attributes)).encode())
    return {kind: digest.hexdigest() for kind, digest in sorted(digests.items())}


def _code(model: nn.Module) -> Mapping[str, str]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    by_module: dict[str, list[type]] = {}
    for kind in kinds - {object}:
        if kind.__module__.partition(".")[0] not in ("torch", "builtins", "typing"):
            by_module.setdefault(kind.__module__, []).append(kind)
    digests = {}
    for module, classes in sorted(by_module.items()):
        digest = hashlib.sha256(source_digest(classes[0]).encode())
        for kind in sorted(classes, key=lambda kind: kind.__qualname__):
            digest.update(repr((kind.__qualname__, sorted(_methods(kind)))).encode())
        digests[module] = digest.hexdigest()
    # A class's digest includes replaced methods; other patches get their own.
    methods = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    for place, value in LibraryCode(model).patches:
        if place.rpartition(".")[0] not in methods and place not in methods:
            if not isinstance(value, FunctionType) or value.__closure__:
                raise Indescribable(f"{place} is {value!r}")
            digests[place] = _digest((value.__qualname__, _instructions(value.__code__), repr(value.__defaults__)))
    return digests


def _methods(kind: type) -> list[tuple[str, str]]:
    functions = [(name, function) for name, value in vars(kind).items() for function in functions_in(value)]
    return [(n, f"{f.__module__}.{f.__qualname__} {_instructions(f.__code__)}") for n, f in functions]


def _instructions(code: CodeType) -> str:
    return _digest((code.co_code, code.co_names, [_constant(constant) for constant in code.co_consts]))


def _constant(value: object) -> str:
    if isinstance(value, frozenset):
        return repr(sorted(map(repr, value)))
    return _instructions(value) if isinstance(value, CodeType) else repr(value)
