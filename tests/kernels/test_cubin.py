"""Reading of registers and stack from what `cuobjdump` prints."""

from __future__ import annotations

import subprocess

import pytest

from hydragraph.kernels import cubin
from hydragraph.kernels.cubin import ThreadResources, usage


def test_registers_and_stack_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " Function f:\n  REG:44 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
    printed = subprocess.CompletedProcess([], 0, stdout=text)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: printed)
    monkeypatch.setattr(cubin, "_cuobjdump", lambda: "cuobjdump")
    assert usage(b"machine code") == ThreadResources(registers=44, stack_bytes=16)
