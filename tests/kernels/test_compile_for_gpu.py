"""Every shipped kernel configuration compiles for GPUs that this machine does not have, and fits them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.kernels.compiler import Report, compile_all
from tests.kernels.interpreter import needs_triton
from tests.thorough import first

# Bytes of shared memory that one block of threads may have on the GPUs that launch these variants: 227 KB on sm_90.
# Code for sm_80 also runs on sm_86 and sm_89, which have 99 KB (CUDA C programming guide, "Compute Capabilities").
SHARED_BYTES = {90: 232_448, 80: 101_376}


@pytest.fixture(scope="module", params=first(["sm_90"], ["sm_90", "sm_90 every", "sm_80 every"]))
def built(request: pytest.FixtureRequest) -> Iterator[tuple[int, list[Report]]]:
    # A process of its own: Triton decides when it is imported whether it interprets.
    capability = int(request.param.split()[0].removeprefix("sm_"))
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"), _compiling) as process:
        yield capability, process.submit(compile_all, capability, request.param.endswith("every")).result()


def _compiling() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


@needs_triton
def test_no_shipped_configuration_spills_registers(built: tuple[int, list[Report]]) -> None:
    _, reports = built
    assert len(reports) > 10
    assert {r.name: r.spilled_bytes for r in reports if r.spilled_bytes} == {}


@needs_triton
def test_all_fit_the_shared_memory(built: tuple[int, list[Report]]) -> None:
    capability, reports = built
    limit = SHARED_BYTES[capability]
    assert {r.name: r.shared_bytes for r in reports if r.shared_bytes > limit} == {}


@needs_triton
def test_what_streams_through_memory_does_so_16_bytes_at_a_time(built: tuple[int, list[Report]]) -> None:
    _, reports = built
    # Dropout spends its time on random words, not on memory.
    streaming = [r for r in reports if not r.name.startswith(("attention", "dropout"))]
    assert {r.name.split()[0] for r in streaming} == {"slice_copy", "adamw", "linear_cross_entropy"}
    assert [r.name for r in streaming if not r.wide("ld")] == []
    # The reduction of logits writes three numbers per token.
    assert [r.name for r in streaming if not r.wide("st") and "_reduce" not in r.name] == []


@needs_triton
def test_attention_multiplies_on_tensor_cores(built: tuple[int, list[Report]]) -> None:
    _, reports = built
    products = [r for r in reports if r.name.startswith("attention") and "_prepare" not in r.name]
    assert products
    others = {r.name.split(" ", 2)[2] for r in products if not r.tensor_core}
    # The three tf32 products of these kernels would not fit into registers.
    assert all(name.startswith("fp32 D256") for name in others)
