"""Kernels, one per file, each with a reference in plain PyTorch, and the Triton and numba compilers.

It also chooses the attention backend. This package is independent of graphs, programs and ranks.
"""
