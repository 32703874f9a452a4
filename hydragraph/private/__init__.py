"""Access to PyTorch's unstable internals: tracing, Inductor, modes, graph values, process groups, versions.

All other packages use public names (`tests/private/test_door.py` checks it).
"""
