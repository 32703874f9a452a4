"""Cache of programs of library models.

A model's record and the libraries' versions determine its program, unless library code is patched (`library_code`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend import huggingface, user_cache
from hydragraph.frontend.compiled_folder.manifest import own_code, read_json, versions
from hydragraph.frontend.compiled_folder.model_record import model_record
from hydragraph.frontend.compiled_folder.program_records import program_data, program_of
from hydragraph.frontend.library_code import LibraryCode
from hydragraph.frontend.packed_inputs import Loss
from hydragraph.ir.program import Program

PROGRAMS = "programs"
MOST = 256  # files

_LOG = logging.getLogger(__name__)


def path_of(
    model: nn.Module, dtype: torch.dtype, example: Mapping[str, Tensor] | None, loss: Loss | None, blocks: str | None
) -> Path | None:
    if not _of_libraries(model, loss):
        return None
    try:
        record = model_record(model, loss, example, blocks)
    except Unsupported as error:
        _LOG.info("the program is not cached: %s", error)
        return None
    code = LibraryCode(model)
    if code.patches:
        _LOG.info("the program is not cached: %s is %r", *code.patches[0])
        return None
    key = json.dumps([record, str(dtype), versions(), own_code(), sorted(code.values)], sort_keys=True)
    return user_cache.packed_path(PROGRAMS, key)


def _of_libraries(model: nn.Module, loss: Loss | None) -> bool:
    kinds = {type(module).__module__.partition(".")[0] for module in model.modules()}
    places = (type(loss).__module__, getattr(loss, "__module__", ""))
    own = loss is None or any(place.startswith("hydragraph.") for place in places)
    return huggingface.is_library_class(model) and kinds <= {"hydragraph", "peft", "torch", "transformers"} and own


def read_program(path: Path) -> Program | None:
    return user_cache.read_packed(path, lambda content: program_of(read_json(content, path.name)))


def keep_program(path: Path, program: Program) -> None:
    user_cache.write_packed(path, lambda: program_data(program), MOST)
