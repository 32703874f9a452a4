"""Kernels, one per file, each with a reference in plain PyTorch; the choice of attention backend; and the Triton and
numba compilers.

This package is independent of graphs, programs and ranks.
"""
