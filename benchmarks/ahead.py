"""What compiling ahead of time saves: each row in fresh processes, the median of three, against its target.

    python benchmarks/ahead.py                          print the table
    python benchmarks/ahead.py --only traced-7b loaded-7b
    python benchmarks/ahead.py --against f88f0bd --only traced-7b compile-64
                                                        run each row there and here in turn, and print the ratio: of
                                                        machines that differ it is what their records have in common

Rows, each a function that is run in a process of its own and returns what it took (`ROWS`):

    traced-7b, traced-70b   capture a model and lower it: every template's graphs for rank 0 of tp 1, 2, 4 and 8
    loaded-7b, loaded-70b   the same graphs from a compiled folder: read, compared with the manifest and with the model,
                            checked, and built; the folder is written before the clock starts

    example                 README's example on 4 ranks, from `import hydragraph` to its result; torch, transformers and
                            the class of the model are imported before the clock starts
    example-folder          the same from a compiled folder
    many                    32 ranks, 8 layers of 64, three kinds of pipelines: from the launch to the third step's end
    compile-64              `hydragraph compile` of 7B for 64 ranks and 2 strategies: CPU seconds, without the imports
    compile-1024            the same of 110B dimensions for 1,024 ranks and 3 strategies, with peak memory and the bytes
                            of the folder; once, and without the check of captured graphs by numbers (compile.py has it)

The models of the first rows have the dimensions of Llama 7B and 70B on the meta device, so no weight exists; imports,
and making the model, are not counted. The tables show CPU seconds next to the wall clock because a busy machine
stretches only the latter. In rows with ranks, CPU seconds sum all ranks and their launcher, without the imports of its
fork server.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEGREES = (1, 2, 4, 8)
RUNS = 3
HIDDEN_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
SIZES_7B = {**HIDDEN_7B, "vocab_size": 32000, "num_hidden_layers": 32}
HIDDEN_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
SIZES_70B = {**HIDDEN_70B, "vocab_size": 128256, "num_hidden_layers": 80}


@dataclass(frozen=True)
class SmallRun:
    """A small Llama of 8 layers, the strategies it is trained under, and the lengths of its mini-batch."""

    sizes: dict[str, int]
    strategies: tuple[str, ...]
    lengths: tuple[int, ...]


EXAMPLE = SmallRun(
    {"hidden_size": 128, "intermediate_size": 352, "num_key_value_heads": 4},
    ("<[0,1]x5,[2]x3> + <[3]x8>", "<tp1,pp4>"),
    (90, 17, 33, 200),
)
MANY = SmallRun(
    {"hidden_size": 64, "intermediate_size": 176, "num_key_value_heads": 8},
    ("2*<tp4,pp2> + <tp2,pp4> + 4*<tp1,pp2>",),
    tuple(range(10, 74)),
)


@dataclass(frozen=True)
class Compiled:
    """A model's dimensions, the ranks and strategies that it is compiled for, and micro-batches of each pipeline."""

    hidden: int
    width: int
    heads: int
    kv_heads: int
    vocabulary: int
    layers: int
    ranks: int
    strategies: tuple[str, ...]
    micro_batches: int


LLAMA_7B = Compiled(
    4096, 11008, 32, 32, 32000, 32, 64, ("<tp8,pp2> + <tp4,pp4> + 4*<tp2,pp4>", "16*<tp4,pp1>"), micro_batches=2
)
# The dimensions of Qwen1.5 110B.
LARGE_110B = Compiled(
    8192,
    49152,
    64,
    8,
    152064,
    80,
    1024,
    ("16*<tp8,pp8>", "8*<tp8,pp8> + 16*<tp4,pp8>", "<tp8,pp40> + 22*<tp8,pp4>"),
    micro_batches=8,
)


@dataclass(frozen=True)
class Measured:
    """One run: wall clock and CPU seconds of what is measured, its process's peak memory and the bytes it wrote."""

    seconds: float
    cpu_s: float
    peak_bytes: float = 0.0
    folder_bytes: float = 0.0


@dataclass(frozen=True)
class Row:
    """A row of the table: what is measured, its targets, and what measures it once.

    Attributes:
        seconds: of the wall clock, or of the CPU where `of_cpu`.
        peak_bytes, folder_bytes: 0: no target.
        runs: at most so many.
        before: what f88f0bd took where the targets were set; 0: it has no such row, or it was not measured alone.
    """

    title: str
    seconds: float
    run: Callable[[], Measured]
    of_cpu: bool = False
    peak_bytes: float = 0.0
    folder_bytes: float = 0.0
    runs: int = RUNS
    before: float = 0.0

    def reached(self, found: Measured) -> bool:
        """Say whether a measurement meets every target."""
        seconds = found.cpu_s if self.of_cpu else found.seconds
        peak = not self.peak_bytes or found.peak_bytes <= self.peak_bytes
        folder = not self.folder_bytes or found.folder_bytes <= self.folder_bytes
        return seconds <= self.seconds and peak and folder


def measure(action: Callable[[], object]) -> Measured:
    """Run an action once."""
    before, cpu = time.perf_counter(), time.process_time()
    action()
    return Measured(time.perf_counter() - before, time.process_time() - cpu)


def traced(sizes: dict[str, int]) -> Measured:
    """Capture a model and lower it for rank 0 of each degree."""
    from hydragraph.frontend.capture import capture
    from hydragraph.passes.variants import Variants

    model = _llama(sizes)
    return measure(lambda: _variants(Variants(capture(model), added=True)))


def loaded(sizes: dict[str, int]) -> Measured:
    """Start from a folder that has the graphs of rank 0 of each degree."""
    from hydragraph.frontend.capture import capture
    from hydragraph.frontend.compiled_folder.load import load
    from hydragraph.frontend.compiled_folder.manifest import own_code
    from hydragraph.frontend.compiled_folder.model_record import model_record
    from hydragraph.frontend.compiled_folder.save import NamedVariant, save
    from hydragraph.passes import variants as kept
    from hydragraph.passes.variants import Variants

    model = _llama(sizes)
    with tempfile.TemporaryDirectory() as folder:
        variants = Variants(capture(model), added=True)
        named = [
            NamedVariant(f"{block.name}.tp{part.tp}", (variants.spec(block, part).key,), (block.name,), "", variant)
            for block, part, variant in _variants(variants)
        ]
        save(Path(folder), variants.program, named, model_record(model))
        # Forget everything that this process has compiled or read before.
        kept._shared.clear()
        own_code.cache_clear()

        def action() -> None:
            compiled = load(folder, model_record(model))
            read = list(_variants(Variants(compiled.program, added=True, library=compiled)))
            assert len(read) == len(named)
            assert not kept.pass_seconds(read[-1][2])

        return measure(action)


def example(folder: str | None = None) -> Measured:
    """Run README's example; from a compiled folder if one is given."""
    import torch
    from transformers import LlamaForCausalLM

    del torch, LlamaForCausalLM  # imported, as a script has them before it launches anything
    return _on_ranks(4, EXAMPLE, 2, folder)


def example_from_folder() -> Measured:
    """Run README's example from a folder that is written before the clock starts, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-W", "ignore", __file__, "--write", folder], check=True, capture_output=True)
        return example(folder)


def write_example(folder: str) -> None:
    """Write the compiled folder of README's example."""
    from hydragraph.frontend.capture import capture
    from hydragraph.frontend.compiled_folder.model_record import model_record
    from hydragraph.frontend.compiled_folder.save import named_variants, save
    from hydragraph.passes.variants import Variants

    model = _small(EXAMPLE)
    variants = Variants(capture(model), added=True)
    save(Path(folder), variants.program, named_variants(variants, _strategies(EXAMPLE)), model_record(model))


def many() -> Measured:
    """Start 32 ranks and train three steps."""
    return _on_ranks(32, MANY, 3, None)


def compiled(case: Compiled) -> Measured:
    """Run `hydragraph compile` in this process; torch and transformers are imported before the clock starts."""
    import torch  # noqa: F401
    import transformers  # noqa: F401
    import yaml
    from typer.testing import CliRunner

    from hydragraph import cli
    from hydragraph.train.config import TrainConfig

    config = {
        "hidden_size": case.hidden,
        "intermediate_size": case.width,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "num_hidden_layers": case.layers,
        "vocab_size": case.vocabulary,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = {
            "model": {"architecture": "LlamaForCausalLM", "config": config},
            "data": {"paths": ["python-stdlib"]},
            "dtype": "bfloat16",
            **({"check": "off"} if "check" in TrainConfig.__dataclass_fields__ else {}),  # older commits have no checks
            "ranks": case.ranks,
            "steps": 1,
            "strategies": list(case.strategies),
            "output": str(folder / "run"),
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(run))
        out = folder / "compiled"
        arguments = ["compile", str(folder / "config.yaml"), "--output", str(out)]
        results: list[Any] = []

        def action() -> None:
            results.append(CliRunner().invoke(cli.app, [*arguments, "--micro-batches", str(case.micro_batches)]))

        found = measure(action)
        if results[0].exit_code:
            raise SystemExit(results[0].output)
        size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return Measured(found.seconds, found.cpu_s, peak, float(size))


def _on_ranks(ranks: int, kind: SmallRun, steps: int, folder: str | None) -> Measured:
    used: list[float] = []

    def action() -> None:
        import hydragraph as hg

        used.extend(hg.launch(train, ranks, kind, steps, folder))

    found = measure(action)
    return Measured(found.seconds, found.cpu_s + sum(used))


def train(kind: SmallRun, steps: int, folder: str | None) -> float:
    """Train on one rank, a strategy after the other; return its CPU seconds."""
    import torch

    import hydragraph as hg

    torch.manual_seed(0)
    strategies = _strategies(kind)
    exe = hg.compile(
        _small(kind),
        strategies,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4),
        **({} if folder is None else {"compiled": folder}),  # which older commits do not know
    )
    data = [torch.randint(0, 512, (n,)) for n in kind.lengths]
    for step in range(steps):
        exe.step(data, strategy=strategies[-1] if step else None)
    return time.process_time()


def _strategies(kind: SmallRun) -> list[Any]:
    import hydragraph as hg

    return [hg.Strategy.parse(text, layers=8) for text in kind.strategies]


def _small(kind: SmallRun) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=8, num_attention_heads=8, **kind.sizes))


def _variants(variants: Any) -> list[tuple[Any, Any, Any]]:
    """Return (block, part, variant) of every template for rank 0 of each degree."""
    blocks = {block.template: block for block in variants.program.blocks}.values()
    parts: list[Any]
    try:
        from hydragraph.spec.stage_kind import StageKind, StagePart

        parts = [StagePart(StageKind(tp)) for tp in DEGREES]
    except ModuleNotFoundError:  # the names of older commits
        shard = importlib.import_module("hydragraph.passes.shard")
        parts = [shard.Degree(tp) for tp in DEGREES]
    return [(block, part, variants.get(block, part)) for block in blocks for part in parts]


def _llama(sizes: dict[str, int]) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes))


ROWS = {
    "traced-7b": Row("capture + lowering, 7B, tp 1 2 4 8", 3.0, lambda: traced(SIZES_7B), before=4.4),
    "traced-70b": Row("capture + lowering, 70B, tp 1 2 4 8", 3.0, lambda: traced(SIZES_70B), before=3.7),
    "loaded-7b": Row("loaded from a folder, 7B, tp 1 2 4 8", 0.3, lambda: loaded(SIZES_7B)),
    "loaded-70b": Row("loaded from a folder, 70B, tp 1 2 4 8", 0.3, lambda: loaded(SIZES_70B)),
    "example": Row("README's example, 4 ranks, beyond imports", 4.0, example),
    "example-folder": Row("the same, from a folder", 1.5, example_from_folder),
    "many": Row("32 ranks, three kinds of pipelines, to the third step", 25.0, many, before=90.0),
    "compile-64": Row("compile, 7B, 64 ranks, 2 strategies", 6.0, lambda: compiled(LLAMA_7B), of_cpu=True, before=10.9),
    "compile-1024": Row(
        "compile, 110B, 1,024 ranks, 3 strategies",
        60.0,
        lambda: compiled(LARGE_110B),
        of_cpu=True,
        before=95.0,
        peak_bytes=2e9,
        folder_bytes=20e6,
        runs=1,
    ),
}


def run_alone(name: str, root: Path = ROOT) -> Measured:
    """Measure a row in a process of its own, with the hydragraph of a checkout."""
    command = [sys.executable, "-W", "ignore", __file__, "--row", name]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    # The interpreters that it starts look in the current folder first, and are to find the same checkout there.
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=root)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def beside(names: list[str], runs: int, commit: str) -> Iterator[str]:
    """Yield a table of another commit beside this one: both run in turn, and the least CPU seconds of each count."""
    yield f"CPU seconds, least of {runs}{'':<31}{commit[:10]:>12}{'here':>10}{'ratio':>8}{'target':>9}"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(root), commit], check=True)
        try:
            for name in names:
                row = ROWS[name]
                try:
                    pairs = [(run_alone(name, root), run_alone(name)) for _ in range(min(runs, row.runs))]
                except subprocess.CalledProcessError as error:
                    said = (error.stderr.strip().splitlines() or ["nothing was said"])[-1]
                    yield f"{row.title:<56}did not run in both: {said:.120}"
                    continue
                then, now = (min(found.cpu_s for found in side) for side in zip(*pairs, strict=True))
                target = f"{row.seconds / row.before:.2f}" if row.before else ""
                yield f"{row.title:<56}{then:>10.2f} s{now:>8.2f} s{now / then:>8.2f}{target:>9}"
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)


def lines(names: list[str], runs: int) -> Iterator[str]:
    """Yield the table."""
    yield f"{'':<56}{'wall':>10}{'CPU':>10}{'target':>14}"
    for name in names:
        row = ROWS[name]
        found = sorted((run_alone(name) for _ in range(min(runs, row.runs))), key=lambda f: f.seconds)
        median = found[len(found) // 2]
        target = f"{row.seconds:.2f} s{' CPU' if row.of_cpu else ''}"
        met = "  met" if row.reached(median) else "  MISSED"
        yield f"{row.title:<56}{median.seconds:>8.2f} s{median.cpu_s:>8.2f} s{target:>14}{met}"
        if row.peak_bytes:
            yield f"{'':<56}peak {median.peak_bytes / 1e9:.2f} GB of {row.peak_bytes / 1e9:.0f}, " + (
                f"folder {median.folder_bytes / 1e6:.1f} MB of {row.folder_bytes / 1e6:.0f}"
            )


def main() -> None:
    """Print the table, or measure one row (`--row`, used for the fresh processes)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--row", choices=ROWS, help="measure this row once and print it as JSON")
    parser.add_argument("--only", choices=ROWS, nargs="+", default=list(ROWS), help="the rows of the table")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--against", metavar="COMMIT", help="run each row there too, in turn, and print the ratio")
    parser.add_argument("--write", help="write the compiled folder of README's example there")
    chosen = parser.parse_args()
    if chosen.write:
        write_example(chosen.write)
        return
    if chosen.row:
        print(json.dumps(asdict(ROWS[chosen.row].run())))
        return
    table = beside(chosen.only, chosen.runs, chosen.against) if chosen.against else lines(chosen.only, chosen.runs)
    for line in table:
        print(line, flush=True)


if __name__ == "__main__":
    main()
