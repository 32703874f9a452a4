"""Inductor compiles for a GPU that is not there, and the process is as before afterwards."""

from __future__ import annotations

import pytest

from hydragraph.errors import Unsupported
from hydragraph.kernels.gpu_arch import ARCHS
from hydragraph.passes.compile_with_inductor import TUNED
from hydragraph.private.absent_gpu import absent_gpu
from tests.kernels.interpreter import needs_triton
from tests.private.absent import WIDTH, apart, compile_sum
from tests.thorough import first

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
    assert not compiled.available, "PyTorch says again that there is no GPU"


def test_interpreted_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(Unsupported, match="unset it"), absent_gpu(ARCHS["sm_90"], {}):
        pass
