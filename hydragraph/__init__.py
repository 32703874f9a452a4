"""Train one PyTorch model on many uneven devices: a compiler, a runtime and a planner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydragraph.api import Executable, RankPrograms, StepReport, compile, lower
    from hydragraph.cost.profile import Profile
    from hydragraph.errors import RankFailure, Unsupported
    from hydragraph.frontend.capture import capture
    from hydragraph.kernels.varlen_attention import varlen_attention
    from hydragraph.runtime.launch import launch
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.strategy import Pipeline, Stage, Strategy

__version__ = "0.1.0"

# name -> module: imported when first used, so that `import hydragraph.spec` costs no torch
_WHERE = {
    "Cluster": "hydragraph.spec.cluster",
    "Executable": "hydragraph.api",
    "Pipeline": "hydragraph.spec.strategy",
    "Profile": "hydragraph.cost.profile",
    "RankFailure": "hydragraph.errors",
    "RankPrograms": "hydragraph.api",
    "Stage": "hydragraph.spec.strategy",
    "StepReport": "hydragraph.api",
    "Strategy": "hydragraph.spec.strategy",
    "Unsupported": "hydragraph.errors",
    "capture": "hydragraph.frontend.capture",
    "compile": "hydragraph.api",
    "launch": "hydragraph.runtime.launch",
    "lower": "hydragraph.api",
    "varlen_attention": "hydragraph.kernels.varlen_attention",
}
__all__ = [
    "Cluster",
    "Executable",
    "Pipeline",
    "Profile",
    "RankFailure",
    "RankPrograms",
    "Stage",
    "StepReport",
    "Strategy",
    "Unsupported",
    "capture",
    "compile",
    "launch",
    "lower",
    "varlen_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hydragraph' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value
