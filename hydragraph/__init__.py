"""Train one PyTorch model on many uneven devices: a compiler, a runtime and a planner."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from hydragraph.version import __version__ as __version__


def attributes(
    package: str, where: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` (PEP 562) of a package that imports names on first use."""

    def find(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(where[name]), name)
        # The next access finds the attribute without this function.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*where, *(n for n in vars(sys.modules[package]) if n.startswith("__"))})

    return sorted(where), find, names


# Names are imported on first use: `import hydragraph.spec` does not import torch. Type checkers
# read __init__.pyi.
__all__, __getattr__, __dir__ = attributes(
    "hydragraph",
    {
        "AdamW": "hydragraph.kernels.adamw",
        "Assignment": "hydragraph.spec.assignment",
        "Cluster": "hydragraph.spec.cluster",
        "Corrections": "hydragraph.cost.corrections",
        "Costs": "hydragraph.cost.costs",
        "Elastic": "hydragraph.spec.elastic",
        "Executable": "hydragraph.engine.executable",
        "Health": "hydragraph.spec.health",
        "Home": "hydragraph.spec.home",
        "Moved": "hydragraph.engine.state_transfer",
        "Pieces": "hydragraph.checkpoint.state_pieces",
        "Pipeline": "hydragraph.spec.pipeline",
        "Plan": "hydragraph.planner.plan",
        "Policy": "hydragraph.planner.policy",
        "Profile": "hydragraph.cost.measured_profile",
        "Program": "hydragraph.ir.program",
        "RankFailure": "hydragraph.errors",
        "RankPrograms": "hydragraph.engine.api",
        "Stage": "hydragraph.spec.pipeline",
        "Stopped": "hydragraph.errors",
        "StepReport": "hydragraph.engine.step_report",
        "Strategy": "hydragraph.spec.strategy",
        "Survived": "hydragraph.engine.recovery",
        "TooFewRanks": "hydragraph.errors",
        "Unsupported": "hydragraph.errors",
        "Workload": "hydragraph.spec.training_workload",
        "attention_backend": "hydragraph.kernels.attention_backends",
        "capture": "hydragraph.engine.api",
        "compare": "hydragraph.report.measured_beside_predicted",
        "compile": "hydragraph.engine.api",
        "launch": "hydragraph.cluster.launch",
        "lower": "hydragraph.engine.api",
        "plan": "hydragraph.planner.plan",
        "precompile": "hydragraph.engine.api",
        "simulate": "hydragraph.engine.api",
        "survive": "hydragraph.engine.recovery",
        "token_logprobs": "hydragraph.frontend.packed_inputs",
        "varlen_attention": "hydragraph.kernels.varlen_attention",
    },
)
