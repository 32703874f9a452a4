"""Compiled folders of small models, and ways to damage them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import hydragraph as hg
from hydragraph.frontend.compiled_folder.manifest import NAME
from hydragraph.frontend.compiled_folder.model_record import model_record
from hydragraph.frontend.compiled_folder.save import named_variants, save
from hydragraph.ir.program import Program
from hydragraph.passes.variants import Variants
from tests.models import captured


def written(folder: Path, model: nn.Module, program: Program, *strategies: str, ranks: int | None = None) -> Variants:
    """Write a folder for some strategies, and return what it holds."""
    parsed = [hg.Strategy.parse(text, program.layers) for text in strategies]
    variants = hg.precompile(program, parsed)
    save(folder, program, named_variants(variants, parsed), model_record(model), ranks=ranks)
    return variants


@functools.cache
def _of_one_rank() -> Variants:
    program, _ = captured("llama")
    return hg.precompile(program, [hg.Strategy.parse("<[0]x2>", program.layers)])


def written_for_one_rank(folder: Path) -> None:
    """Write a folder of the shared Llama for one rank; all folders share its graphs."""
    program, model = captured("llama")
    variants = _of_one_rank()
    save(folder, program, named_variants(variants, variants.strategies), model_record(model), ranks=1)


def edit(folder: Path, file: str, change: Callable[[Any], object]) -> None:
    """Change the data in a file, and make the manifest say that this was written."""
    data = json.loads((folder / file).read_text())
    change(data)
    (folder / file).write_text(json.dumps(data))
    rehash(folder)


def rehash(folder: Path) -> None:
    """Make the manifest say that the files are what was written."""
    record = json.loads((folder / NAME).read_text())
    for path, entry in record["files"].items():
        content = (folder / path).read_bytes()
        entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    sign(folder, record)


def sign(folder: Path, record: dict[str, Any]) -> None:
    """Write a manifest's record with the hash that it must have."""
    record.pop("sha256", None)
    body = json.dumps(record, indent=1, ensure_ascii=False)
    digest = hashlib.sha256(body.encode()).hexdigest()
    (folder / NAME).write_text(body.removesuffix("\n}") + f',\n "sha256": "{digest}"\n}}\n')


def resign(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest's record, as someone would who knows how it is hashed."""
    record = json.loads((folder / NAME).read_text())
    change(record)
    sign(folder, record)
