"""The list of what graphs of a compiled folder may call."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch

import hydragraph.kernels
from hydragraph.frontend.compiled_folder.allowed_operators import ALLOWED, check_call


def overloads(name: str) -> list[Any]:
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    return [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


def test_every_operator_of_pytorch_on_the_list_exists_and_is_drawn_from_no_randomness() -> None:
    for name in ALLOWED:
        if name.startswith("aten::"):
            found = overloads(name)
            assert found, f"{name} is not an operator of this PyTorch"
            assert not any(torch.Tag.nondeterministic_seeded in op.tags for op in found), name


def test_every_operator_of_hydragraph_that_graphs_keep_is_on_it() -> None:
    for module in pkgutil.walk_packages(hydragraph.kernels.__path__, "hydragraph.kernels."):
        importlib.import_module(module.name)
    registered = {n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("hydragraph::")}
    assert "hydragraph::token_entropy" in registered
    replaced = {"hydragraph::block"} | {n for n in registered if n.startswith("hydragraph::tp_")}
    assert registered - replaced <= ALLOWED


@pytest.mark.parametrize("name", ["aten::from_file", "aten::set_", "aten::rand", "aten::dropout", "aten::bernoulli"])
def test_what_reads_files_writes_or_draws_is_not_on_it(name: str) -> None:
    assert name not in ALLOWED
    with pytest.raises(ValueError, match="not allowed in a compiled folder"):
        check_call(f"{name}.default", [], {})


@pytest.mark.parametrize(
    ("name", "given", "by_name", "why"),
    [
        ("aten::add_.Tensor", [{"node": "x"}, 1], [], "not allowed in a compiled folder"),
        ("aten::add.out", [{"node": "x"}, {"node": "x"}], ["out"], "writes into"),
        ("aten::mm.default", [{"node": "x"}], [], "without the argument mat2"),
        ("aten::mm.default", [{"node": "x"}, "y"], [], "as mat2, which must be a tensor"),
        ("aten::mm.default", [{"node": "x"}, {"node": "x"}, 1], [], "gets 3 positional arguments"),
        ("aten::mm.default", [{"node": "x"}, {"node": "x"}], ["alpha"], "with the unknown argument alpha"),
        ("aten::view.default", [{"node": "x"}, ["a"]], [], "as size, which must be List"),
        ("aten::view.default", [{"node": "x"}, {"slice": [0, 1, 2]}], [], "as size, which must be List"),
        ("aten::sum.dim_IntList", [{"node": "x"}, [1.5]], [], r"\[1.5\] as dim, which must be"),
        ("aten::full.default", [[2], None], [], "None as fill_value, which must be number"),
        ("aten::full.default", [[2], 1.0], {"dtype": "float32"}, "dtype"),
        ("aten::full.default", [[2], 1.0], {"device": {"torch": "float32"}}, "device"),
        ("aten::_reshape_alias.default", [{"node": "x"}, [99], [1]], [], "not allowed in a compiled folder"),
        ("aten::as_strided.default", [{"node": "x"}, [99], [1]], [], "not allowed in a compiled folder"),
        ("aten::mm.sideways", [{"node": "x"}, {"node": "x"}], [], "which this PyTorch does not have"),
        ("operator.add", [1], [], "gets 1 arguments instead of 2"),
        ("operator.attrgetter", ["x"], [], "not allowed in a compiled folder"),
        ("os.system", ["true"], [], "not allowed in a compiled folder"),
    ],
)
def test_a_call_that_cannot_be_made_is_refused(name: str, given: list[Any], by_name: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_call(name, given, by_name)


def test_calls_that_can_be_made_are_not() -> None:
    check_call("aten::mm.default", [{"node": "x"}, {"node": "x"}], [])
    check_call("aten::add.Tensor", [{"node": "x"}, 1e-6], ["alpha"])
    check_call("aten::view.default", [{"node": "x"}, [1, {"node": "s"}, -1]], [])
    check_call("aten::cat.default", [[{"node": "x"}, {"node": "y"}], 1], [])
    check_call("aten::index.Tensor", [{"node": "x"}, [None, {"node": "y"}]], [])
    check_call("aten::full.default", [[2], {"float": "-inf"}], {"dtype": {"torch": "float32"}, "pin_memory": False})
    check_call("aten::mul.Tensor", [{"node": "x"}, {"complex": [0.0, 1.0]}], [])
    check_call("operator.floordiv", [{"node": "x"}, 2], [])
    check_call("math.sqrt", [{"node": "x"}], [])
