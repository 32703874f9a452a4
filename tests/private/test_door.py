"""Only `hydragraph.private` touches what PyTorch does not promise to keep."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "hydragraph"

# Parts of PyTorch whose names have no underscore and yet are called private or experimental.
EXPERIMENTAL = ("functorch", "torch.fx.experimental")
# Attributes of public objects that are private: of operators, storages, modules, symbolic sizes.
ATTRIBUTES = frozenset(
    {
        "_schema",
        "_overloadname",
        "_opoverload",
        "_cdata",
        "_modules",
        "_parameters",
        "_buffers",
        "_version",
        "free_symbols",
    }
)


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield what a file names of private PyTorch: imports, chains of attributes from `torch`, and known attributes."""
    modules = {"torch": "torch"}  # name in the file -> what of PyTorch it is
    nodes = [*ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_torch(alias.name):
                    yield from [alias.name] if _is_private(alias.name) else []
                    modules[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.module is not None and _is_torch(node.module):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from [name] if _is_private(name) else []
                modules[alias.asname or alias.name] = name
    for node in nodes:
        if isinstance(node, ast.Attribute):
            chain = _chain(node)
            if chain is not None and chain[0] in modules:
                name = ".".join([modules[chain[0]], *chain[1:]])
                yield from [name] if _is_private(name) else []
            elif node.attr in ATTRIBUTES and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield node.attr


def _chain(node: ast.expr) -> list[str] | None:
    """Return the names of `a.b.c`; None where it does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else None


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "functorch")


def _is_private(name: str) -> bool:
    """Say whether a dotted name is private; what lies under `torch.ops` is an operator, whatever its name."""
    if name.startswith("torch.ops."):
        return False
    parts = name.split(".")
    return any(p.startswith("_") and not p.startswith("__") for p in parts) or any(
        name == part or name.startswith(part + ".") for part in EXPERIMENTAL
    )


def uses() -> dict[str, set[str]]:
    """Return file, from the package's folder -> what it names of private PyTorch; without the door itself."""
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items() if not name.startswith("private/")}
    # A file without any of these words names nothing of PyTorch, and parsing takes long.
    read = {name: text for name, text in texts.items() if any(word in text for word in ("torch", *ATTRIBUTES))}
    named = {name: set(private_names(ast.parse(text))) for name, text in read.items()}
    return {name: used for name, used in sorted(named.items()) if used}


def test_only_one_folder_touches_private_pytorch() -> None:
    assert uses() == {}, "call a function of hydragraph/private instead"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\ntorch._ops.OpOverload", {"torch._ops.OpOverload", "torch._ops"}),
        (
            "import torch.utils._pytree as pytree\npytree.tree_flatten(1)",
            {"torch.utils._pytree", "torch.utils._pytree.tree_flatten"},
        ),
        ("from torch._guards import detect_fake_mode", {"torch._guards.detect_fake_mode"}),
        ("from torch.fx.experimental.proxy_tensor import make_fx", {"torch.fx.experimental.proxy_tensor.make_fx"}),
        ("import torch\naten = torch.ops.aten\naten._to_copy.default\ntorch.ops.aten._softmax", set()),
        ("from torch import fx\nfx.Graph()\nself._schema\nnode.target._schema", {"_schema"}),
        ("import torch\ntorch.__version__\nself._torch", set()),
    ],
)
def test_private_names_are_noticed(text: str, expected: set[str]) -> None:
    assert set(private_names(ast.parse(text))) == expected
