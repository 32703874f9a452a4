"""Inductor compiles for a GPU that is not there, and the process is as before afterwards."""

from __future__ import annotations

import pytest

from hydragraph.errors import Unsupported
from hydragraph.kernels.gpu_arch import ARCHS
from hydragraph.passes.compile_with_inductor import TUNED
from hydragraph.private.absent_gpu import absent_gpu
from tests.kernels.interpreter import needs_triton
from tests.private.absent import WIDTH, apart, compile_sum, find_sum, save_sum
from tests.thorough import first, thorough

ELF = b"\x7fELF"


@needs_triton
@pytest.mark.parametrize("arch", first(["sm_90"], sorted(ARCHS)))
def test_a_graph_is_compiled_to_machine_code(arch: str) -> None:
    compiled = apart(compile_sum, arch)
    assert compiled.launched == ["extern_kernels.mm", "triton_poi_fused_0", "extern_kernels.mm"]
    [kernel] = compiled.kernels
    assert kernel.cubin.startswith(ELF)
    assert compiled.used[0].registers > 0
    assert compiled.used[0].stack_bytes == 0
    assert kernel.bytes == 2 * TUNED * WIDTH * 2, "it reads and writes a bf16 tensor in place"
    assert not compiled.available, "PyTorch must report no GPU again afterwards"


@thorough
@needs_triton
def test_another_gpu_of_the_architecture_finds_the_code_and_one_of_another_does_not() -> None:
    content = apart(save_sum, "sm_90")
    assert apart(find_sum, "sm_90", "NVIDIA H200", content) == (1, 0)
    assert apart(find_sum, "sm_80", "NVIDIA H200", content) == (0, 1)


def test_interpreted_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(Unsupported, match="unset TRITON_INTERPRET"), absent_gpu(ARCHS["sm_90"], {}):
        pass
