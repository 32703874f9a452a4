"""Train one PyTorch model on many uneven devices: a compiler, a runtime and a planner."""

from hydragraph.lazy import attributes
from hydragraph.version import __version__ as __version__

# Imported when first used, so that `import hydragraph.spec` costs no torch; type checkers read __init__.pyi.
__all__, __getattr__, __dir__ = attributes(
    "hydragraph",
    {
        "AdamW": "hydragraph.kernels.adamw",
        "Assignment": "hydragraph.spec.assignment",
        "Cluster": "hydragraph.spec.cluster",
        "Corrections": "hydragraph.cost.corrections",
        "Costs": "hydragraph.cost.costs",
        "Elastic": "hydragraph.spec.elastic",
        "Executable": "hydragraph.executable",
        "Health": "hydragraph.spec.health",
        "Home": "hydragraph.spec.home",
        "Moved": "hydragraph.migration",
        "Pieces": "hydragraph.runtime.checkpoint.pieces",
        "Pipeline": "hydragraph.spec.strategy",
        "Plan": "hydragraph.planner.uneven.planning",
        "Policy": "hydragraph.planner.policy",
        "Profile": "hydragraph.cost.profile",
        "Program": "hydragraph.ir.program",
        "RankFailure": "hydragraph.errors",
        "RankPrograms": "hydragraph.api",
        "Stage": "hydragraph.spec.strategy",
        "Stopped": "hydragraph.errors",
        "StepReport": "hydragraph.executable",
        "Strategy": "hydragraph.spec.strategy",
        "Survived": "hydragraph.survival",
        "TooFewRanks": "hydragraph.errors",
        "Unsupported": "hydragraph.errors",
        "Workload": "hydragraph.planner.workload",
        "attention_backend": "hydragraph.kernels.attention_backends",
        "capture": "hydragraph.api",
        "compare": "hydragraph.cost.compare",
        "compile": "hydragraph.api",
        "launch": "hydragraph.runtime.launch",
        "lower": "hydragraph.api",
        "plan": "hydragraph.planner.uneven.planning",
        "precompile": "hydragraph.api",
        "simulate": "hydragraph.api",
        "survive": "hydragraph.survival",
        "varlen_attention": "hydragraph.kernels.varlen_attention",
    },
)
