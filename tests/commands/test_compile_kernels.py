"""`hydragraph compile --arch`: kernels for a GPU that is not there, from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hydragraph.commands.compile_kernels import GraphRecord, KernelRecord, KernelsFile
from hydragraph.frontend.compiled_folder.load import load
from hydragraph.frontend.compiled_folder.manifest import GPU, Refused, read_manifest
from hydragraph.kernels.gpu_arch import ARCHS
from hydragraph.private.absent_gpu import BuiltKernel
from tests.commands.tiny import run, write
from tests.kernels.interpreter import needs_triton
from tests.thorough import thorough

H100 = ARCHS["sm_90"]


def a_graph(cubin: str = "kernels/f.00000000.cubin") -> GraphRecord:
    kernel = KernelRecord("f", cubin, 3, 2, 40, 0, 16, 10_000)
    return GraphRecord("head.tp1.forward", (kernel,), 2, 5e9, 1_000)


def test_a_graph_takes_at_least_the_longer_of_its_operations_and_its_bytes() -> None:
    graph = a_graph()
    assert (graph.launches, graph.bytes) == (5, 31_000)
    assert graph.least_seconds(1e9, 1e9) == 5.0
    assert graph.least_seconds(1e15, 1e3) == 31.0


def test_the_file_reads_back_with_the_machine_code_that_it_names(tmp_path: Path) -> None:
    built = BuiltKernel(b"machine code", 16, 2, 10_000)
    name = "kernels/f.5ace2a28.cubin"
    file = KernelsFile("sm_90", 2048, (a_graph(name),))
    file.save(tmp_path, [built])
    assert KernelsFile.load(tmp_path) == file
    assert (tmp_path / name).read_bytes() == built.cubin


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--arch", "sm_90", "--device", "cpu"),
            "--arch sm_90 compiles GPU code with Inductor: also pass --device cuda",
        ),
        (("--arch", "sm_90", "--device", "cuda", "--backend", "eager"), "--backend inductor"),
        (("--arch", "sm_50", "--device", "cuda"), "--arch sm_50: use sm_80, sm_90, sm_100"),
    ],
)
def test_what_an_architecture_does_not_go_with_is_refused(
    tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    result = run("compile", write(tmp_path), "--output", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


@thorough
@needs_triton
@pytest.mark.parametrize("strategy", ["<tp1,pp1>", "<[0,1]x2sr>"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_the_command_line_compiles_a_folder(tmp_path: Path, strategy: str, architecture: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = {"architecture": architecture, "config": {**sizes, "num_key_value_heads": 2, "head_dim": 16}}
    config = write(tmp_path, model=model, dtype="bfloat16", ranks=2, strategies=[strategy])
    out = tmp_path / "out"
    options = ["--device", "cuda", "--arch", "sm_90", "--trust", "--output", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "hydragraph", "compile", str(config), *options]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    file = KernelsFile.load(out)
    names = [graph.name for graph in file.graphs]
    assert [name for name in names if name.startswith("layer")][:2] == [
        f"layer.0.{names[0].split('.')[1]}.{direction}" for direction in ("forward", "backward")
    ]
    for kernel in (kernel for graph in file.graphs for kernel in graph.kernels):
        assert (out / kernel.cubin).read_bytes().startswith(b"\x7fELF")
        assert kernel.spilled_bytes == 0
        assert kernel.shared_bytes <= H100.shared_bytes
        assert kernel.bytes > 0
    layer = next(graph for graph in file.graphs if graph.name.endswith(".forward") and "layer" in graph.name)
    assert layer.kernels
    assert layer.flops > 0
    assert (out / "inductor.bin").exists()
    assert read_manifest(out).versions[GPU] == "sm_90"
    with pytest.raises(Refused, match="the GPU architecture sm_90, but this machine has none"):
        load(out)
    shown = run("show", out, "--kernels")
    assert all(name in shown.stdout for name in names)
