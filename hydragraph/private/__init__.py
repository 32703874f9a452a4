"""Access to PyTorch's unstable internals; all other packages use public names (`tests/private/test_door.py`)."""
