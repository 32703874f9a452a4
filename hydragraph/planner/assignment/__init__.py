"""Assignment of sequences to pipelines and micro-batches: searches, bounds, and the strategy for one mini-batch.

The shape of the pipelines is given here. It is chosen in `planner/plan.py`.
"""
