"""Safe reader of a checkpoint's metadata, a pickle that could run any code."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from hydragraph.checkpoint.manifest import Damaged
from hydragraph.errors import type_text

_PLAIN = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
# Python 3.13 and later use pathlib._local
_PATHS = ("pathlib", "pathlib._local")
_NAMED = frozenset({("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")})


class CheckpointReader(FileSystemReader):
    def __init__(self, path: Path, files: Collection[str]) -> None:
        super().__init__(path)
        self._files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata; raise Damaged if they are not plain data, or name files outside the checkpoint."""
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as stream:
                metadata = _Plain(stream).load()
        except OSError:
            raise
        except Exception as error:
            # A damaged pickle may raise any error
            raise Damaged(
                f"{file} cannot be read as a checkpoint's metadata ({error}): use another checkpoint"
            ) from error
        if not isinstance(metadata, Metadata):
            raise Damaged(f"{file} holds {type_text(metadata)}, not a checkpoint's metadata: use another checkpoint")
        paths = [info.relative_path for info in (metadata.storage_data or {}).values()]
        if outside := [path for path in paths if path not in self._files]:
            raise Damaged(
                f"{file} names {outside[0]!r}, which is not a file of this checkpoint: use another checkpoint"
            )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMED or (module in _PATHS and name in ("PosixPath", "WindowsPath")):
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        named = getattr(importlib.import_module(module), name, None) if module in _PLAIN else None
        if isinstance(named, type) and (dataclasses.is_dataclass(named) or issubclass(named, Enum)):
            return cast(Any, named)
        raise pickle.UnpicklingError(f"the pickle names {module}.{name}, which could run code")
