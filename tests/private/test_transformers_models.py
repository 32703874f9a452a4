"""Folders of transformers' models are read once."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import transformers
from transformers.utils import import_utils
from hydragraph.private.transformers_models import transformers_with_models

read = import_utils.create_import_structure_from_path
before = read.cache_info().misses
assert "transformers.models" not in __import__("sys").modules
models = transformers_with_models().models
print(before > 100, read.cache_info().misses - before, import_utils.create_import_structure_from_path is read)
print("LlamaConfig" in dir(models.llama))
"""


def test_folders_of_models_are_read_once() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "True 0 True\nTrue\n"
