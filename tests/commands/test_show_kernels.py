"""`hydragraph show DIR --kernels`: the table of a folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hydragraph.commands.compile_kernels import KernelsFile
from hydragraph.commands.show_kernels import kernel_lines
from hydragraph.private.absent_gpu import BuiltKernel
from tests.commands.test_compile_kernels import a_graph


def test_a_graph_and_its_kernels_are_listed(tmp_path: Path) -> None:
    file = KernelsFile("sm_90", 2048, (a_graph("kernels/f.5ace2a28.cubin"),))
    file.save(tmp_path, [BuiltKernel(b"machine code", 16, 2, 10_000)])
    text = "\n".join(kernel_lines(cast(Any, SimpleNamespace(path=tmp_path))))
    lines = text.splitlines()
    assert lines[3].split() == ["head.tp1.forward", "5", "1", "40", "0", "16", "B", "31", "kB", "5", "5.06", "us"]
    assert lines[-1].split() == ["head.tp1.forward", "f", "3", "2", "40", "0", "16", "B", "10", "kB"]
    assert "not measured" in text


def test_a_folder_for_this_machine_says_how_to_compile_for_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--arch sm_90"):
        list(kernel_lines(cast(Any, SimpleNamespace(path=tmp_path))))
