"""Sequences over pipelines and micro-batches: searches, their bounds, and the choice of a strategy for one mini-batch.

The shape of the pipelines is given here. It is chosen in `planner/plan.py`.
"""
