"""`hydragraph export`: a run's checkpoint as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hydragraph.commands.options import Debug, LogLevel

EXAMPLE = (
    "Example: hydragraph export runs/demo --step 40 --to demo-model, then AutoModel...from_pretrained('demo-model')."
)


def export_command(
    run: Annotated[Path, typer.Argument(help="The output folder of a run.")],
    to: Annotated[Path, typer.Option("--to", help="The directory to write; it must be new or empty.")],
    step: Annotated[
        str | None, typer.Option(metavar="N", help="Export the checkpoint after this step; default: the latest.")
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Of a run with adapters: the whole model, with them added.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="What weights are written in: float32, bfloat16 or float16.")] = "float32",
    log_level: LogLevel = None,
    debug: Debug = False,
) -> None:
    """Write the model of a run's checkpoint, and its tokenizer, as a directory that transformers loads."""
    from hydragraph.commands.launch_process import quieten
    from hydragraph.commands.train import read_step

    number = None if step is None else read_step(step, "--step")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype {dtype!r}: use float32, bfloat16 or float16")
    if not run.is_dir():
        raise ValueError(f"{run} is not a directory: name the output folder of a run")
    import torch

    from hydragraph.train.huggingface_export import export_checkpoint
    from hydragraph.train.run_folder import RunFolder

    quieten()
    chosen = export_checkpoint(RunFolder(run), number, to, merged, getattr(torch, dtype))
    print(f"{to}: the model after step {chosen.step}, in {dtype}")
