"""Frontend: a model becomes a Program, or a Program is read from a compiled folder.

Model features that a trace would lose are rejected by name.
"""
