"""Train one PyTorch model on many uneven devices: a compiler, a runtime and a planner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hydragraph.version import __version__ as __version__

if TYPE_CHECKING:
    from hydragraph.api import RankPrograms, compile, lower
    from hydragraph.cost.profile import Profile
    from hydragraph.errors import RankFailure, Unsupported
    from hydragraph.executable import Executable, StepReport
    from hydragraph.frontend.capture import capture
    from hydragraph.kernels.adamw import AdamW
    from hydragraph.kernels.attention_backends import attention_backend
    from hydragraph.kernels.varlen_attention import varlen_attention
    from hydragraph.planner.policy import Policy
    from hydragraph.runtime.launch import launch
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.strategy import Pipeline, Stage, Strategy

# name -> module: imported when first used, so that `import hydragraph.spec` costs no torch
_WHERE = {
    "AdamW": "hydragraph.kernels.adamw",
    "Cluster": "hydragraph.spec.cluster",
    "Executable": "hydragraph.executable",
    "Pipeline": "hydragraph.spec.strategy",
    "Policy": "hydragraph.planner.policy",
    "Profile": "hydragraph.cost.profile",
    "RankFailure": "hydragraph.errors",
    "RankPrograms": "hydragraph.api",
    "Stage": "hydragraph.spec.strategy",
    "StepReport": "hydragraph.executable",
    "Strategy": "hydragraph.spec.strategy",
    "Unsupported": "hydragraph.errors",
    "attention_backend": "hydragraph.kernels.attention_backends",
    "capture": "hydragraph.frontend.capture",
    "compile": "hydragraph.api",
    "launch": "hydragraph.runtime.launch",
    "lower": "hydragraph.api",
    "varlen_attention": "hydragraph.kernels.varlen_attention",
}
__all__ = [
    "AdamW",
    "Cluster",
    "Executable",
    "Pipeline",
    "Policy",
    "Profile",
    "RankFailure",
    "RankPrograms",
    "Stage",
    "StepReport",
    "Strategy",
    "Unsupported",
    "attention_backend",
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
