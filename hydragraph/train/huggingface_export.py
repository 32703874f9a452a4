"""Export of a trained model for transformers' `from_pretrained`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydragraph.checkpoint.disk_errors import file_errors
from hydragraph.checkpoint.standalone_reader import read_weights
from hydragraph.checkpoint.weights.pretrained_directory import MetaModel
from hydragraph.checkpoint.weights.pretrained_directory import check as check_shell
from hydragraph.data import tokenizer
from hydragraph.data.chat import DocumentEncoder
from hydragraph.data.template import ChatTemplate
from hydragraph.data.token_file import vocabulary_of
from hydragraph.engine.compiled_model import tensor_names
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.frontend.peft_adapters import is_peft
from hydragraph.train.config import TrainConfig
from hydragraph.train.model import adapted, skeleton
from hydragraph.train.run_folder import Checkpoint, RunFolder


def export(model: Any, state: Mapping[str, Tensor], tokens: Path, directory: Path) -> None:
    # `assign` also works on the meta device
    model.load_state_dict(dict(state), assign=True)
    # tie_weights fails if adapters replace a tied module
    if not is_peft(model):
        model.tie_weights()
    directory.mkdir(parents=True, exist_ok=True)
    with file_errors(directory, directory):
        model.save_pretrained(str(directory))
        tokenizer.copy(tokens, directory)
        _stop_after_answers(directory)


def export_checkpoint(
    folder: RunFolder, step: int | None, directory: Path, merged: bool = False, dtype: torch.dtype = torch.float32
) -> Checkpoint:
    """Export a checkpoint's model and tokenizer; return the checkpoint.

    Args:
        dtype: dtype of weights, except those that the model keeps in float32.

    Raises:
        ValueError: the checkpoint is missing or damaged, or the directory is not empty.
    """
    if not folder.config.is_file():
        raise ValueError(f"{folder.path} has no {folder.config.name}, so it is not a run: pass a run's output folder")
    chosen = folder.chosen(step)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"--to {directory} is not empty: name an empty or new directory")
    if not (folder.tokenizer / "tokenizer.json").is_file():
        raise ValueError(f"{folder.tokenizer} holds no tokenizer.json: resume the run, which writes it again")
    write_model(folder, chosen.path, directory, merged, dtype)
    return chosen


def write_model(
    folder: RunFolder, checkpoint: Path, directory: Path, merged: bool = False, dtype: torch.dtype = torch.float32
) -> None:
    """Replace a directory's contents by a checkpoint's model and tokenizer."""
    config = TrainConfig.load(folder.config)
    encoder = tokenizer.load(folder.tokenizer)
    end = tokenizer.end_id(encoder, folder.tokenizer)
    model = adapted(skeleton(config.model, vocabulary_of(encoder), end), config.adapter, config.seed)
    shell = check_shell(MetaModel.of(model), merged)
    names, tensors = tensor_names(model), read_weights(checkpoint)
    # Older versions did not save buffers
    if not tensors.keys() >= set(names.values()):
        tensors = {**initial_buffers(model), **tensors}
    # state: exported key -> tensor. names: exported key -> name in the checkpoint.
    kept = shell.keys(merged)
    state = {key: tensors[source] for key, source in names.items() if kept is None or key in kept}
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with file_errors(directory, directory):
        shell.write(state, directory, merged, dtype)
        tokenizer.copy(folder.tokenizer, directory)
        _stop_after_answers(directory)


def _stop_after_answers(directory: Path) -> None:
    """Make `generate` also stop at the chat template's end-of-answer token."""
    path = directory / "generation_config.json"
    template = tokenizer.chat_template(directory)
    if template is None or not path.is_file():
        return
    encoder = tokenizer.load(directory)
    chat = ChatTemplate(template, tokenizer.special_tokens(directory))
    end = DocumentEncoder(encoder, tokenizer.end_id(encoder, directory), chat).turn_end()
    settings = json.loads(path.read_text(encoding="utf-8"))
    ends = settings.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    if end is not None and end not in ends:
        path.write_text(json.dumps({**settings, "eos_token_id": [*ends, end]}, indent=2) + "\n", encoding="utf-8")
