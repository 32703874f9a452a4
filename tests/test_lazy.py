"""Packages export exactly the names that their stubs declare to type checkers."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest


@pytest.mark.parametrize("package", ["hydragraph", "hydragraph.planner"])
def test_every_name_comes_from_where_the_stub_says(package: str) -> None:
    module = import_module(package)
    stub = ast.parse(Path(module.__file__ or "").with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    said = {alias.name: node.module for node in imports for alias in node.names}
    assert sorted(set(said) - {"__version__"}) == module.__all__
    for name, source in said.items():
        assert getattr(module, name) is getattr(import_module(str(source)), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import hydragraph

    with pytest.raises(AttributeError, match="module 'hydragraph' has no attribute 'compil'"):
        hydragraph.compil  # noqa: B018


def test_a_rank_that_neither_traces_nor_plans_imports_no_compiler_and_no_solver() -> None:
    """Nor does one that reads a compiled folder, whose sizes become symbols: PyTorch would look up who asked."""
    code = """
import sys
import hydragraph.engine.api
print(sys.modules.keys() & {"torch._dynamo", "numba", "scipy", "triton"})
import hydragraph.frontend.compiled_folder.load, hydragraph.engine.executable
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from hydragraph.private.tracing import new_symbol
size = new_symbol(FakeTensorMode(shape_env=ShapeEnv()), 0, 64)
compilers = {"functorch.compile", "torch._functorch.aot_autograd", "torch.export._trace"}
print(size.node.hint, sys.modules.keys() & compilers)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["set()", "64 set()"]
