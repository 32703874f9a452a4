"""Safe reader of a checkpoint's metadata, which PyTorch pickles: it runs no code that the file names.

A pickle calls whatever it names. `.metadata` names a dozen plain classes of torch.distributed.checkpoint, so only those
are allowed. Tensors are read by `torch.load(weights_only=True)`, which has its own allow-list.
"""

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

_PLAIN = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_PATHS = ("pathlib", "pathlib._local")  # the second since Python 3.13
_NAMED = frozenset({("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")})


class Reader(FileSystemReader):
    """Reads a checkpoint's directory; unpickles its metadata with `_Plain`.

    Args:
        path: the checkpoint's directory.
    """

    def __init__(self, path: Path, files: Collection[str]) -> None:
        super().__init__(path)
        self._files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata.

        Raises:
            Damaged: the file is not a metadata file, or names an object that a PyTorch checkpoint never names.
        """
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as stream:
                metadata = _Plain(stream).load()
        except OSError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise Damaged(f"{file} cannot be read as a checkpoint's metadata ({error}): use another one") from error
        if not isinstance(metadata, Metadata):
            raise Damaged(f"{file} holds a {type(metadata).__name__}, no checkpoint's metadata: use another one")
        paths = [info.relative_path for info in (metadata.storage_data or {}).values()]
        if outside := [path for path in paths if path not in self._files]:
            raise Damaged(f"{file} names {outside[0]!r}, which is not a file of this checkpoint: use another one")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a named object if it is a plain checkpoint class or a dtype."""
        if (module, name) in _NAMED or (module in _PATHS and name in ("PosixPath", "WindowsPath")):
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        named = getattr(importlib.import_module(module), name, None) if module in _PLAIN else None
        if isinstance(named, type) and (dataclasses.is_dataclass(named) or issubclass(named, Enum)):
            return cast(Any, named)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
