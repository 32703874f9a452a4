"""Cache of captured programs in the user's cache folder, so that a later start does not trace the same model again.

Tracing a model takes seconds, and reading the result takes hundredths. A file is named by the digest of everything that
a capture depends on: the model's record, its loss and fields included, the dtype, versions, and the sources that make
graphs. It is data, and is validated like the files of a compiled folder.

Only the programs of models whose modules all come from PyTorch and transformers are kept, with hydragraph's own
losses: their versions determine what they compute, unless something is patched (`library_code`). A custom module may
also read globals, files or the environment, so it is traced at every start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend import huggingface, user_cache
from hydragraph.frontend.compiled_folder.manifest import own_code, read_json, versions
from hydragraph.frontend.compiled_folder.model_record import model_record
from hydragraph.frontend.compiled_folder.program_records import program_data, program_of
from hydragraph.frontend.compiled_folder.record_schema import Malformed
from hydragraph.frontend.library_code import LibraryCode
from hydragraph.frontend.packed_inputs import Loss
from hydragraph.ir.program import Program

PROGRAMS = "programs"  # name of the folder
MOST = 256  # files; those used longest ago are deleted
LARGEST = 1 << 28  # bytes of JSON in one file
_LIBRARIES = ("hydragraph", "torch", "transformers")

_LOG = logging.getLogger(__name__)


def path_of(
    model: nn.Module, dtype: torch.dtype, example: Mapping[str, Tensor] | None, loss: Loss | None, blocks: str | None
) -> Path | None:
    """Return the path of a model's program, which may not exist yet; None: programs of such models are not kept.

    Args:
        model, dtype, example, loss, blocks: as for `capture`.
    """
    if not _of_libraries(model, loss):
        return None
    try:
        record = model_record(model, loss, example, blocks)
    except Unsupported as error:
        _LOG.info("the program is not kept: %s", error)
        return None
    code = LibraryCode(model)
    if code.foreign:
        _LOG.info("the program is not kept: %s", code.foreign[0])
        return None
    key = json.dumps([record, str(dtype), versions(), own_code(), sorted(code.values)], sort_keys=True)
    return user_cache.folder(PROGRAMS) / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json.z"


def _of_libraries(model: nn.Module, loss: Loss | None) -> bool:
    kinds = {type(module).__module__.partition(".")[0] for module in model.modules()}
    own = loss is None or type(loss).__module__.startswith("hydragraph.") or _module_of(loss).startswith("hydragraph.")
    return huggingface.is_library_class(model) and kinds <= {*_LIBRARIES} and own


def _module_of(loss: Loss) -> str:
    return str(getattr(loss, "__module__", ""))


def read_program(path: Path) -> Program | None:
    """Return a program, or None if none can be read."""
    packed = user_cache.read(path)
    if packed is None:
        return None
    try:
        return program_of(read_json(zlib.decompressobj().decompress(packed, LARGEST), path.name))
    except (Malformed, zlib.error) as error:
        _LOG.info("%s is not used: %s", path, error)
        return None


def keep_program(path: Path, program: Program) -> None:
    """Write a program, unless its graphs cannot be represented as data."""
    try:
        content = json.dumps(program_data(program), allow_nan=False)
    except ValueError as error:
        _LOG.info("the program of %s is not kept: %s", program.model, error)
        return
    user_cache.write(path, zlib.compress(content.encode(), 3))
    user_cache.evict(PROGRAMS, MOST)
