"""The Executable that a training script holds: the phases of a step, and recovery when ranks are lost or join.

`api` has the public functions. Work of a single rank belongs in `runtime/`, and a run's config, files and loop in
`train/`.
"""
