"""Access to PyTorch's unstable internals; other packages use public names (`tests/private/test_door.py`)."""
