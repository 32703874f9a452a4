"""Starter config for optional data and an optional model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydragraph.data import corpus
from hydragraph.data.documents import PAIRS, PROMPTS, AlpacaRecord, Conversation, FieldNames, Format
from hydragraph.data.json_object import read_object

_BYTES_PER_TOKEN = 4
_SMALL_BYTES = 1 << 20
# Tokens per step
_FEWEST = 256


@dataclass(frozen=True)
class InspectedPaths:
    """Model and data found in the given paths.

    Attributes:
        positions: maximum sequence length of the model; 0: unknown.
        longest: upper bound of the tokens per record if records must not be cut, else 0.
        converses: whether the first record is a conversation, which needs a chat template.
    """

    model: Path | None
    data: tuple[Path, ...]
    format: Format
    fields: FieldNames
    tokens: int
    positions: int
    templated: bool
    longest: int = 0
    converses: bool = False


def look(paths: Sequence[Path]) -> InspectedPaths:
    """Inspect paths of a model and data; raise ValueError if there are several models or formats of data."""
    from hydragraph.data.tokenizer import chat_template

    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist: {_remedy(path)}")
    models = [path for path in paths if (path / "config.json").is_file()]
    if len(models) > 1:
        raise ValueError(f"{models[0]} and {models[1]} are both models: name only one")
    data = tuple(path for path in paths if path not in models)
    fields, formats = _read_as(data) if data else (FieldNames(), set[Format]())
    if data and not formats:
        corpus.refuse_other_encodings(data)
        raise ValueError(f"no text in {', '.join(map(str, data))}: name text files, .jsonl files or tables")
    if len(formats) > 1:
        raise ValueError(
            f"the data has the formats {' and '.join(sorted(formats))}: name data of one format, or use data.mixture"
        )
    size = sum(path.stat().st_size for path in corpus.files(data)) if data else 0
    model = models[0] if models else None
    return InspectedPaths(
        model,
        data,
        next(iter(formats), "text"),
        fields,
        size // _BYTES_PER_TOKEN,
        _positions(model) if model is not None else 0,
        model is not None and chat_template(model) is not None,
        _longest(corpus.files(data), size) if formats - {"text", "tokens"} else 0,
        bool(formats - {"text", "tokens"}) and _converses(data, fields),
    )


def _converses(data: Sequence[Path], fields: FieldNames) -> bool:
    first = next(corpus.documents(data, None, fields), None)
    document = None if first is None else first.document
    # An Alpaca record is also encoded without a chat template
    return isinstance(document, Conversation) and not isinstance(document, AlpacaRecord)


def _longest(files: Sequence[Path], size: int) -> int:
    if size > _SMALL_BYTES or any(path.suffix != ".jsonl" for path in files):
        return size
    return max(len(line) for path in files for line in path.read_bytes().splitlines()) // 2


def _remedy(path: Path) -> str:
    hub = len(path.parts) == 2 and not path.parent.exists() and not path.suffix[1:].isalpha()  # OWNER/NAME-0.5B
    if hub:
        return f"name a directory, or download a hub model with hf download {path} --local-dir {path.name}"
    return "name a file or folder of data, or a Hugging Face directory"


def starter(found: InspectedPaths, cuda: bool, output: str) -> str:
    """Return the config as YAML with comments; `output` is the run folder."""
    chat = found.format not in ("text", "tokens")
    # Small data gets small mini-batches, about 20 per pass.
    longest = min(found.positions or 1024, 2048 if chat else 1024) if found.model is not None else 256
    per_step = longest * (8 if found.model is not None else 16)
    if found.data:
        longest = min(longest, max(found.tokens // 20, found.longest, _FEWEST))
        per_step = max(min(per_step, found.tokens // 20), 2 * longest if found.format == "preference" else longest)
    lines = [
        "# Run hydragraph train with this file; hydragraph check estimates the memory and the time of a step.",
        "# docs/config.md lists every field.",
        *_model(found, longest),
        *_data(found, longest, per_step),
        *(_OBJECTIVE if found.format == "preference" else ()),
        "strategies: auto  # planned for the measured devices when training starts; or your own, such as 2*<tp1,pp1>",
        "# ranks: 4  # processes on all machines; default: one per GPU",
        f"epochs: {3 if chat else 1}  # passes over the data; or steps: 1000" if found.data else "steps: 100",
        *_optimizer(found),
        *(["dtype: bfloat16  # dtype of the computation; weights stay float32"] if cuda else []),
        f"device: {'cuda' if cuda else 'cpu'}",
        "evaluate_every: 50  # steps between evaluations on held-out documents; or evaluate_per_epoch: 1",
        "checkpoint_every: 100  # steps between checkpoints, for hydragraph train --resume; or checkpoint_per_epoch: 1",
        "# keep_best: true  # also keep the checkpoint with the lowest evaluation loss, and export the model from it",
        "# patience: 3  # stop after three evaluations in a row without a lower loss",
        f"output: {json.dumps(output)}",
    ]
    return "\n".join(lines) + "\n"


def _read_as(data: Sequence[Path]) -> tuple[FieldNames, set[Format]]:
    # Try usual field names; if all fail, report the default names' error.
    refusals: list[ValueError] = []
    for fields in (
        FieldNames(),
        *(FieldNames(prompt_field=prompt, format="preference") for prompt in ("prompt", *PROMPTS)),
        *(FieldNames(messages_field=messages, format="chat") for messages in ("messages", "conversations")),
        FieldNames(format="alpaca"),
        *(
            FieldNames(prompt_field=prompt, completion_field=completion, format="completion")
            for prompt, completion in PAIRS
        ),
        FieldNames(text_field="content"),
    ):
        try:
            return fields, corpus.formats(data, None, fields)
        except ValueError as error:
            refusals.append(error)
    raise refusals[0]


def _model(found: InspectedPaths, longest: int) -> list[str]:
    if found.model is not None:
        return ["model:", f"  path: {json.dumps(str(found.model))}  # all weights are trained; see adapter below"]
    return [
        "model:  # a new model with about 10 M parameters",
        "  architecture: LlamaForCausalLM  # or another causal language model of transformers",
        "  config:  # vocab_size defaults to the tokenizer's",
        "    hidden_size: 256",
        "    intermediate_size: 704",
        "    num_hidden_layers: 8",
        "    num_attention_heads: 8",
        "    num_key_value_heads: 4",
        f"    max_position_embeddings: {longest}",
    ]


_NAMED: dict[Format, tuple[str, ...]] = {
    "text": ("text_field",),
    "chat": ("messages_field",),
    "completion": ("prompt_field", "completion_field"),
    "preference": ("prompt_field",),
}


def _data(found: InspectedPaths, longest: int, per_step: int) -> list[str]:
    default = "your-data.jsonl" if found.model is not None else "python-stdlib"
    paths = [str(path) for path in found.data] or [default]
    lines = ["data:", f"  paths: {json.dumps(paths)}{_paths_comment(found)}"]
    for name in _NAMED.get(found.format, ()):
        value = getattr(found.fields, name)
        if value != getattr(FieldNames, name):
            lines.append(f"  {name}: {json.dumps(value)}")
    if found.fields.format != "auto":
        lines.append(f"  format: {found.fields.format}")
    if found.format == "chat":
        lines.append("  train_on: assistant  # or last (only the assistant's last message), or all")
    # A new tokenizer gets this template for the format "chat" by itself
    if found.converses and not found.templated and (found.model is not None or found.format != "chat"):
        lines.append("  chat_template: chatml  # the tokenizer has no chat template")
    if found.model is None:
        lines.append("  vocab_size: 4096  # of the new tokenizer, which is trained on the data")
    lines += [
        f"  max_length: {longest}  # maximum number of tokens in a sequence",
        f"  overlong: {'drop' if found.format == 'chat' else 'cut'}  # for longer documents: cut, drop or refuse",
        f"  tokens_per_step: {per_step}  # maximum number of tokens in a mini-batch, over all devices",
    ]
    if found.data or found.model is None:
        lines.append("  heldout: 0.02  # fraction of the documents, for evaluation")
    return lines


def _paths_comment(found: InspectedPaths) -> str:
    if not found.data and found.model is not None:
        return "  # your files: text, .jsonl (with text, messages, or prompt and completion), Parquet or Arrow"
    what = {
        "text": "text",
        "chat": "conversations",
        "completion": "prompts with completions",
        "alpaca": "instructions with outputs",
        "tokens": "token ids",
        "preference": "pairs of answers, one of them preferred",
    }[found.format]
    return f"  # {what}, about {max(found.tokens, 1):,} tokens" if found.data else "  # Python's standard library"


_OBJECTIVE = ["objective: {dpo: {beta: 0.1}}  # or simpo or orpo, which need no reference; see docs/preferences.md"]
_PRETRAINING = [
    "optimizer: {name: AdamW, lr: 1.0e-3, betas: [0.9, 0.95], weight_decay: 0.1}",
    "schedule: {warmup_ratio: 0.1, decay: cosine, min_lr_ratio: 0.1}",
]


def _optimizer(found: InspectedPaths) -> list[str]:
    if found.model is None:
        return _PRETRAINING
    rate, adapters = ("1.0e-6", "2e-5") if found.format == "preference" else ("1.0e-5", "2e-4")
    return [
        f"optimizer: {{name: AdamW, lr: {rate}, weight_decay: 0.0}}  # about {adapters} with adapters",
        "schedule: {warmup_ratio: 0.1, decay: cosine, min_lr_ratio: 0.1}",
        "# adapter: {lora: {r: 16, alpha: 32, targets: all-linear}}  # trains only adapters, which needs less memory",
    ]


def _positions(model: Path) -> int:
    config = read_object(model / "config.json", "name a directory that save_pretrained wrote")
    max_positions = config.get("max_position_embeddings") or config.get("n_positions") or 0
    return max_positions if isinstance(max_positions, int) else 0
