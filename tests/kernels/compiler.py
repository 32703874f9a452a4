"""Compile kernels for GPUs that this machine does not have, and read what the binaries need."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import chain

from hydragraph.kernels.cubin import usage
from hydragraph.kernels.triton_jit import KernelVariant


@dataclass(frozen=True)
class Report:
    """Resources of one compiled kernel.

    Attributes:
        name: of the variant.
        registers: per thread.
        spilled_bytes: of a thread's stack; any is a register spill, as the kernels have no arrays.
        shared_bytes: per block of threads.
        ptx: the text.
        tensor_core: instructions that multiply matrices.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str
    tensor_core: int

    def wide(self, operation: str) -> int:
        """Count accesses of 16 bytes, for `operation` "ld" or "st"."""
        return len(re.findall(rf"\b{operation}\.global\S*\.(?:v4\.[bufs]32|v2\.[bufs]64)", self.ptx))


# One or two variants of each kernel: what training in bfloat16 launches.
FEW = (
    "fp32->bf16",
    "add sums",
    "adamw",
    "adamw copy",
    "_reduce bf16",
    "_differentiate bf16",
    "dropout fp32",
    "_prepare bf16",
    "bf16 D128",
)


def compile_all(capability: int, every: bool) -> list[Report]:
    """Compile what is shipped for one compute capability (90 is sm_90); the process must not interpret kernels.

    Args:
        every: all variants, instead of those in FEW.
    """
    from hydragraph.kernels import adamw, dropout, linear_cross_entropy, slice_copy, triton_attention

    assert "TRITON_INTERPRET" not in os.environ
    variants = chain(
        slice_copy.variants(),
        adamw.variants(),
        linear_cross_entropy.variants(),
        dropout.variants(),
        triton_attention.variants(divmod(capability, 10)),
    )
    return [compile_one(variant, capability) for variant in variants if every or variant.name.endswith(FEW)]


def compile_one(variant: KernelVariant, capability: int) -> Report:
    """Compile one variant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    compiled = variant.kernel.compiled
    names = compiled.arg_names
    assert set(names) == set(variant.signature) | set(variant.constants), variant.name
    pointers = [name for name, kind in variant.signature.items() if kind.startswith("*")]
    source = ASTSource(
        fn=compiled,
        signature={n: variant.signature.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in variant.constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in (*pointers, *variant.aligned)},
    )
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(variant.options))
    used = usage(built.asm["cubin"])
    ptx = built.asm["ptx"]
    products = len(re.findall(r"\b(?:wgmma|mma)\.\S*sync", ptx))
    return Report(variant.name, used.registers, used.stack_bytes, built.metadata.shared, ptx, products)
