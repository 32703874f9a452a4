"""What to run next: which strategy, and which pipeline computes which sequences in which micro-batch.

No module here imports torch.distributed or the runtime; numba compiles the search when it is first used, once per
installation.
"""

from hydragraph.lazy import attributes

# Imported when first used, so that a rank that does not plan needs neither numba nor scipy.
__all__, __getattr__, __dir__ = attributes(
    "hydragraph.planner",
    {
        "Choice": "hydragraph.planner.choosing",
        "Dispatch": "hydragraph.planner.dispatching",
        "Packing": "hydragraph.planner.packing",
        "PlannedAssignment": "hydragraph.planner.assigning",
        "Verdict": "hydragraph.planner.choosing",
        "assign": "hydragraph.planner.assigning",
        "choose": "hydragraph.planner.choosing",
        "compare": "hydragraph.planner.choosing",
        "dispatch": "hydragraph.planner.dispatching",
        "homogeneous": "hydragraph.planner.refining",
        "pack": "hydragraph.planner.packing",
        "propose": "hydragraph.planner.proposing",
        "refine": "hydragraph.planner.refining",
    },
)
