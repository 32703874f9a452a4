"""The only access to PyTorch's unstable internals: tracing, Inductor, modes, graph values, process groups, versions.

Everything else uses public names (`tests/private/test_door.py` checks it). No file here decides what hydragraph does.
"""
