"""The measurements of `hydragraph bench` (kernels, a step, links) and the tables that it prints.

Benchmarks that reproduce papers or guard a figure of the documentation are programs in `benchmarks/`.
"""
