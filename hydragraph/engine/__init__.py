"""The Executable that a training script holds: the phases of a step, and what happens when ranks are lost or come.

`api` has the public functions. What one rank does alone belongs in `runtime/`, and a run's config, files and loop in
`train/`.
"""
