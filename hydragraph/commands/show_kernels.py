"""`hydragraph show DIR --kernels`: print resources and minimum times of kernels."""

from __future__ import annotations

from collections.abc import Iterator

from hydragraph.commands.compile_kernels import GraphRecord, KernelsFile
from hydragraph.commands.show_folder import ShownFolder, table
from hydragraph.kernels.gpu_arch import GpuArch, arch_of
from hydragraph.report.number_text import bytes_text, seconds_text


def kernel_lines(folder: ShownFolder) -> Iterator[str]:
    file = KernelsFile.load(folder.path)
    arch = arch_of(file.arch)
    yield f"graphs for {arch.name} (not measured), with micro-batches of {file.tokens:,} tokens in one sequence:"
    rates = f"{arch.flops_per_s / 1e12:.4g} TFLOP/s and {arch.memory_bytes_per_s / 1e12:.3g} TB/s"
    yield f"  least: the minimum time at {rates}, from the datasheet of {arch.gpu}"
    yield from table([_HEAD, *(_graph_row(graph, arch) for graph in file.graphs)])
    yield "kernels, each in its first configuration (choices: number of configurations that a GPU would time):"
    yield from table([_KERNEL_HEAD, *_kernel_rows(file)], left=(0, 1))


_HEAD = ("graph", "launches", "kernels", "registers", "spilled", "shared", "bytes", "GFLOPs", "least")
_KERNEL_HEAD = ("graph", "kernel", "launches", "choices", "registers", "spilled", "shared", "bytes")


def _graph_row(graph: GraphRecord, arch: GpuArch) -> tuple[str, ...]:
    most = [
        max((getattr(kernel, name) for kernel in graph.kernels), default=0)
        for name in ("registers", "spilled_bytes", "shared_bytes")
    ]
    least = graph.least_seconds(arch.flops_per_s, arch.memory_bytes_per_s)
    return (
        *(graph.name, str(graph.launches), str(len(graph.kernels)), str(most[0])),
        *(str(most[1]), bytes_text(most[2]), bytes_text(graph.bytes)),
        *(f"{graph.flops / 1e9:.3g}", seconds_text(least) if least else "-"),
    )


def _kernel_rows(file: KernelsFile) -> Iterator[tuple[str, ...]]:
    for graph in file.graphs:
        for kernel in graph.kernels:
            numbers = (kernel.launches, kernel.configurations, kernel.registers, kernel.spilled_bytes)
            yield graph.name, kernel.name, *map(str, numbers), bytes_text(kernel.shared_bytes), bytes_text(kernel.bytes)
