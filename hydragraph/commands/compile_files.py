"""Files that `hydragraph compile` writes for people and for `hydragraph show`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hydragraph.commands.compile_ahead import CompiledStrategy, Compiler, StrategyRecord, VariantRecord
from hydragraph.commands.compile_kernels import FOLDER as CUBINS
from hydragraph.commands.compile_kernels import KERNELS, load_written
from hydragraph.commands.readable_graphs import backward_code, forward_code
from hydragraph.frontend.compiled_folder.inductor_code import FILE as CODE
from hydragraph.frontend.compiled_folder.manifest import NAME
from hydragraph.ir.program import Program, template_text
from hydragraph.ir.shared_programs_text import program_texts
from hydragraph.spec.stage_kind import StageKind
from hydragraph.version import __version__

SUMMARY = "summary.json"
_PARTS = ("graphs", "strategies")


@dataclass(frozen=True)
class Summary:
    """Contents of `summary.json`."""

    hydragraph: str
    torch: str
    model: str
    dtype: str
    layers: int
    parameters: int
    fingerprint: str
    ranks: int
    home: str
    backend: str
    device: str
    capture_seconds: float
    variants: tuple[VariantRecord, ...]
    strategies: tuple[StrategyRecord, ...]

    @classmethod
    def load(cls, folder: Path) -> Summary:
        summary: Summary = load_written(cls, folder / SUMMARY)
        return summary


def summarise(
    program: Program, compiler: Compiler, strategies: Sequence[CompiledStrategy], home: str, capture_seconds: float
) -> Summary:
    return Summary(
        hydragraph=__version__,
        torch=torch.__version__,
        model=program.model,
        dtype=str(program.dtype).removeprefix("torch."),
        layers=program.layers,
        parameters=sum(parameter.size for parameter in program.parameters.values()),
        fingerprint=program.fingerprint,
        ranks=compiler.ranks,
        home=home,
        backend=compiler.backend,
        device=str(compiler.device),
        capture_seconds=capture_seconds,
        variants=tuple(compiled.record for compiled in compiler.variants),
        strategies=tuple(compiled.record for compiled in strategies),
    )


def check_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / SUMMARY).is_file())):
        raise ValueError(
            f"--output {folder} contains other files: pass a new folder, or one that hydragraph compile wrote"
        )


def write_folder(
    folder: Path, program: Program, summary: Summary, compiler: Compiler, strategies: Sequence[CompiledStrategy]
) -> None:
    """Replace a folder's readable files; `frontend.compiled_folder.save` writes the others.

    program.txt             the strategy-independent program and its templates
    graphs/                 NAME.forward.py and NAME.backward.py of every variant
    strategies/FOLDER/      strategy.yaml, and the files of `ir.shared_programs_text`
    summary.json            `Summary`
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Delete manifest and summary first: an interrupted folder must not be read.
    for name in (NAME, CODE, SUMMARY, KERNELS):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / CUBINS, ignore_errors=True)
    for part in _PARTS:
        shutil.rmtree(folder / part, ignore_errors=True)
        (folder / part).mkdir()
    templates = (template_text(program, name) for name in program.templates)
    _write(folder / "program.txt", "\n\n\n".join([str(program), *templates]) + "\n")
    for variant in compiler.variants:
        for kind, code in (("forward", forward_code), ("backward", backward_code)):
            text = code(variant.variant, f"{_title(variant.record)}, {kind}.")
            _write(folder / "graphs" / f"{variant.record.name}.{kind}.py", text)
    for strategy in strategies:
        if strategy.programs is not None:
            _write_strategy(folder / "strategies" / strategy.record.folder, strategy)
    _write(folder / SUMMARY, json.dumps(asdict(summary), indent=1) + "\n")


def _write_strategy(folder: Path, compiled: CompiledStrategy) -> None:
    assert compiled.programs is not None
    folder.mkdir(exist_ok=True)
    compiled.programs.strategy.save(folder / "strategy.yaml")
    for name, text in program_texts(compiled.programs.programs).items():
        _write(folder / name, text)


def _title(record: VariantRecord) -> str:
    count = len(record.blocks)
    blocks = record.blocks[0] if count == 1 else f"{record.blocks[0]} and {count - 1} blocks like it"
    kind = [
        f"tp {record.tp}",
        *StageKind(record.tp, record.sequence_parallel, record.recompute, record.sums_in_pieces).marks,
    ]
    where = (
        "" if record.tp == 1 or len(record.indices) == record.tp else f" on ranks {list(record.indices)} of the stage"
    )
    return f"Template {record.template}, {blocks}{where}; {', '.join(kind)}"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
