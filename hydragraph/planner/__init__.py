"""Planner: choice of a strategy, and assignment of sequences to pipelines and micro-batches.

The package imports neither torch.distributed nor the runtime.
"""

from hydragraph import attributes

# Imported on first use, so that ranks that do not plan need neither numba nor scipy.
__all__, __getattr__, __dir__ = attributes(
    "hydragraph.planner",
    {
        "Choice": "hydragraph.planner.assignment.best_candidate",
        "PlannedAssignment": "hydragraph.planner.assignment.assign_mini_batch",
        "Verdict": "hydragraph.planner.assignment.best_candidate",
        "assign": "hydragraph.planner.assign_schemes",
        "compare": "hydragraph.planner.assignment.best_candidate",
        "homogeneous": "hydragraph.planner.improve_schemes",
        "propose": "hydragraph.planner.generators.hydraulis",
        "refine": "hydragraph.planner.improve_schemes",
    },
)
