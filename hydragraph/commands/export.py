"""`hydragraph export`: write a run's checkpoint as a Hugging Face directory."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from hydragraph.commands.options import CommonOptions, argument, flag, option, verb


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommonOptions):
    run: Path = argument("The output folder of a run.")
    to: Path = option("The directory to write; it must be new or empty.", default=MISSING)
    step: str | None = option("Export the checkpoint after this step; default: the latest.", metavar="N")
    merged: bool = flag("For a run with adapters: merge the adapters into the full model.")
    dtype: str = option("Dtype of the weights: float32, bfloat16 or float16.", default="float32")


@verb
def export_command(options: ExportOptions) -> None:
    """Write the model of a run's checkpoint, and its tokenizer, as a directory that transformers loads.

    Example: hydragraph export runs/demo --step 40 --to demo-model, then load demo-model with from_pretrained.
    """
    from hydragraph.commands.launch_process import quieten
    from hydragraph.commands.train import read_step

    step = None if options.step is None else read_step(options.step, "--step")
    dtype = options.dtype
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype {dtype!r}: use float32, bfloat16 or float16")
    if not options.run.is_dir():
        raise ValueError(f"{options.run} is not a directory: name the output folder of a run")
    import torch

    from hydragraph.train.huggingface_export import export_checkpoint
    from hydragraph.train.run_folder import RunFolder

    quieten()
    chosen = export_checkpoint(RunFolder(options.run), step, options.to, options.merged, getattr(torch, dtype))
    print(f"wrote the model after step {chosen.step} to {options.to}, in {dtype}")
