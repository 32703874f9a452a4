"""Faster import of transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock


def transformers_with_models() -> Any:
    """Import transformers and its models; read each model's folder only once."""
    import transformers
    from transformers.utils import import_utils

    read = import_utils.create_import_structure_from_path

    def of_folder(path: str | Path) -> Any:
        return read(Path(path).parent if Path(path).is_file() else path)

    with mock.patch.object(import_utils, "create_import_structure_from_path", of_folder):
        import transformers.models
    return transformers
