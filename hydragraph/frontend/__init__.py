"""Frontend: capture a model as a Program without changing it, compare the two numerically (`check/`), or read a Program
from a compiled folder (`compiled_folder/`); and pack sequences into mini-batches.

Model features that a trace would lose are rejected here by name. Transformations of captured graphs belong in
`passes/`.
"""
