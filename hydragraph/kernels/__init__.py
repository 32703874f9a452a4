"""Kernels, each with a reference in plain PyTorch, and the Triton and numba compilers."""
