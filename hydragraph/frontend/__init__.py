"""Frontend: models become Programs without being changed, or Programs are read from a compiled folder.

Programs are compared with their models numerically (`check/`); `compiled_folder/` is the folder. Sequences are packed
into mini-batches. Model features that a trace would lose are rejected here by name.
"""
