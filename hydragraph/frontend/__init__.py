"""Frontend: capture of models as Programs, compiled folders, numeric checks and packed mini-batches.

A model is captured without changing it, and compared with its Program numerically (`check/`); or a Program is read from
a compiled folder (`compiled_folder/`). Sequences are packed into mini-batches.

Model features that a trace would lose are rejected here by name. Transformations of captured graphs belong in
`passes/`.
"""
