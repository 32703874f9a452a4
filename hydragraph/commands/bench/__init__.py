"""What `hydragraph bench` measures (kernels, a step, links) and the table that it prints.

Benchmarks that reproduce papers or guard a figure of the documentation are programs in `benchmarks/`.
"""
