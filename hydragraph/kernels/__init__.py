"""Kernels with references in plain PyTorch, and the Triton and numba compilers."""
